"""vLLM's child processes do not outlive the replica."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PARENT = """
import multiprocessing, time

def child(queue):
    from specrl.generation.vllm_backend.plugin import _die_with_parent
    _die_with_parent()
    queue.put(multiprocessing.current_process().pid)
    time.sleep(600)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    context.Process(target=child, args=(queue,)).start()
    print(queue.get(), flush=True)
    time.sleep(600)
"""


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        deadline = time.monotonic() + 60
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_process_without_a_parent_is_not_watched() -> None:
    code = "from specrl.generation.vllm_backend.plugin import _die_with_parent as f; import threading; f(); "
    code += "assert threading.active_count() == 1"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
