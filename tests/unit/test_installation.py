"""Files of an installation, and the error for missing engines."""

from __future__ import annotations

import runpy

import pytest

from specrl.errors import RunInvalid
from specrl.installation import EXAMPLES, REQUIREMENTS, require_engines


def test_a_checkout_has_the_files_that_commands_read() -> None:
    assert (EXAMPLES / "demo" / "make_policy.py").is_file()
    assert list((EXAMPLES / "plan").glob("*.yaml"))
    assert (REQUIREMENTS / "cpu.lock").is_file()


@pytest.mark.parametrize("has_calculator", [False, True])
def test_the_tiny_policies_are_trained_by_run_files_that_exist(has_calculator: bool) -> None:
    wanted = runpy.run_path(str(EXAMPLES / "demo" / "make_policy.py"))["Wanted"]
    assert wanted(1, 0, 1, 1, 1, 0, "wheels", has_calculator).run_file.is_file()


def test_every_missing_engine_is_named_with_the_remedy() -> None:
    require_engines("json")
    with pytest.raises(RunInvalid, match=r"got no nothing_a, no nothing_b in .*`specrl engines` prints"):
        require_engines("nothing_a", "json", "nothing_b")
