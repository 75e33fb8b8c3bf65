"""An answer cannot read the token of its run, and is graded under the umask of a run. In both isolations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.rewards.test_hostile_answers import RIGHT, SUM, a_verifier
from tests.requirements import SANDBOX
from tests.small_process import HostedVerifier, SmallProcess

from specrl.errors import SpecInvalid
from specrl.files import private_umask
from specrl.rpc import run_token
from specrl.spec.data import Isolation


@pytest.fixture(scope="module")
def process() -> Iterator[SmallProcess]:
    """The process that grades, with the umask of the coordinator of a local run."""
    with private_umask():
        found = SmallProcess()
    yield found
    found.close()


@pytest.mark.parametrize("isolation", list(Isolation))
def test_an_answer_cannot_read_the_run_s_token(isolation: Isolation, process: SmallProcess, tmp_path: Path) -> None:
    """With it an answer could act on the run. It is right only if every way to the file is closed."""
    try:
        verifier = HostedVerifier(a_verifier(isolation), process)
        verifier.prepare_worker()
    except SpecInvalid as error:
        SANDBOX.skip(f"{isolation}: {error}")
    token = run_token.write_token(tmp_path)
    ways = [str(tmp_path / run_token.TOKEN_FILE), f"/proc/{os.getpid()}/root{tmp_path}/{run_token.TOKEN_FILE}"]
    attack = f"""
import os
for way in {ways!r}:
    try:
        print(open(way).read())
    except OSError:
        pass
for name, value in os.environ.items():
    if "token" in name.lower() or {token!r} in value:
        print(name)
"""
    assert verifier.grade(SUM, attack + RIGHT, {}).reward == 1.0
