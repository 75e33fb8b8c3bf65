"""Files of an installation, and the error for missing engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl import installation, machine
from specrl.errors import RunInvalid
from specrl.installation import EXAMPLES, REQUIREMENTS, require_driver, require_engines


def test_a_checkout_has_the_files_that_commands_read() -> None:
    assert (EXAMPLES / "demo" / "make_policy.py").is_file()
    assert list((EXAMPLES / "plan").glob("*.yaml"))
    assert (REQUIREMENTS / "cpu.lock").is_file()


def test_every_missing_engine_is_named_with_the_remedy() -> None:
    require_engines("json")
    with pytest.raises(RunInvalid, match=r"got no nothing_a, no nothing_b in .*`specrl engines` prints"):
        require_engines("nothing_a", "json", "nothing_b")


DRIVER = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  {}  Release Build\n"


@pytest.mark.parametrize(
    ("version", "gpus", "is_refused"),
    [("570.158.01", ("0",), True), ("580.95.05", ("0",), False), ("570.158.01", (), False), (None, ("0",), False)],
)
def test_an_old_driver_is_refused_before_a_model_is_loaded(
    version: str | None, gpus: tuple[str, ...], is_refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The docs asked for 570, on which no package of the images runs. Pods said so only when torch failed."""
    file = tmp_path / "version"
    if version is not None:
        file.write_text(DRIVER.format(version))
    monkeypatch.setattr(machine, "DRIVER_FILE", file)
    monkeypatch.setattr(installation, "visible_gpus", lambda: gpus)
    if is_refused:
        with pytest.raises(
            RunInvalid, match=r"must be 580 or newer for CUDA 13, .* got 570\.158\.01; install"
        ) as error:
            require_driver()
        assert error.value.exit_code == 2
    else:
        require_driver()
