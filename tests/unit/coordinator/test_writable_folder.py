"""A claim into which the coordinator's user cannot write is named at the start."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest

from specrl.coordinator import preflight
from specrl.errors import RunInvalid


def fail_with(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every attempt to create a file fail. The tests may run as root, whom no permissions stop."""

    def refuse(**_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(preflight, "TemporaryFile", refuse)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_folder_that_is_closed_to_the_user_is_refused_with_uid_and_path(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared file system fsGroup is not applied, and the run failed later with a traceback."""
    fail_with(code, monkeypatch)
    named = f"{tmp_path} must be writable by uid {os.getuid()} and gid {os.getgid()}, got {os.strerror(code)}"
    with pytest.raises(RunInvalid, match=re.escape(named)):
        preflight.check_writable(tmp_path)


def test_a_full_disk_is_no_matter_of_rights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_with(errno.ENOSPC, monkeypatch)
    preflight.check_writable(tmp_path)


def test_a_writable_folder_is_left_as_it_was(tmp_path: Path) -> None:
    preflight.check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
