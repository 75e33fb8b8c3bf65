"""SIGTERM ends the first process of a container also while it imports. The kernel would drop the signal."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.requirements import NAMESPACES

ROOT = Path(__file__).resolve().parents[2]
ROLES = (
    "services/specrl/coordinator",
    "services/specrl/generation",
    "services/specrl/trainer",
    "operators/specrl_operator",
)


def end_first_process(imports: str) -> int | None:
    """Send SIGTERM to a Python that is process 1 of its namespace. Returns its exit code, or None if it goes on."""
    program = f"import time{imports}\nprint('imports', flush=True)\ntime.sleep(3600)"
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "imports\n":
            NAMESPACES.skip(process.communicate()[1])
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="utf-8").split()
        os.kill(int(first), signal.SIGTERM)
        return process.wait(60 if imports else 1)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.communicate()


def test_sigterm_ends_the_first_process_of_a_container() -> None:
    """A deleted RLJob's coordinator that had not finished its imports stayed for 90 s, until it was killed."""
    assert end_first_process(", specrl.exit_on_sigterm") == 128 + signal.SIGTERM
    assert end_first_process("") is None, "without the module the kernel drops the signal"


@pytest.mark.parametrize("role", ROLES)
def test_each_role_imports_it_first(role: str) -> None:
    """It was imported after asyncio and structlog, which take ten times as long as the interpreter's own start."""
    tree = ast.parse((ROOT / role / "main.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports[:2]] == [
        "from __future__ import annotations",
        "import specrl.exit_on_sigterm",
    ]
