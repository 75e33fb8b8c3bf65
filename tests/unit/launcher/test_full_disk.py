"""A run whose folder is on a full disk is not resumed, and its launcher ends with what to do, not with a traceback."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from tests.run_files import a_model_folder, a_run

from specrl.errors import RunInvalid
from specrl.launcher import launch, run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.terminal.view import PlainView
from specrl.spec import parse_spec


def fill_disk(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Leave no room for the file `name`."""
    replace = Path.replace

    def refuse(scratch: Path, target: Path) -> Path:
        if target.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        return replace(scratch, target)

    monkeypatch.setattr(Path, "replace", refuse)


@pytest.mark.parametrize("name", ["run.yaml", "token"])
def test_resuming_on_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    a_model_folder(tmp_path / "model")
    directory = run_directory.create_run(tmp_path / "runs", parse_spec(a_run(tmp_path)))
    before = directory.run_file.read_bytes()
    fill_disk(monkeypatch, name)
    overrides = ("generation.kvCacheMib=300",) if name == "run.yaml" else ()
    with pytest.raises(RunInvalid, match=rf"must take the files of the run, got .*No space left.*{name}.*; make room"):
        launch.resume_run(directory, overrides, PlainView(Console()))
    assert directory.run_file.read_bytes() == before
    assert not directory.has_launcher()


def test_a_run_without_a_lock_file_on_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.lock_file.mkdir()  # as with a read-only file system, it cannot be opened for writing, also by root
    with pytest.raises(RunInvalid, match=r"must take the files of the run, got .*lock'; make room"), directory.lock():
        pass


@pytest.mark.parametrize(("module", "name", "number"), [(fcntl, "flock", errno.ENOLCK), (os, "utime", errno.EPERM)])
def test_a_lock_that_the_file_system_refuses_is_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, number: int
) -> None:
    """Only the opening of the lock file was covered. On NFS the lock itself can fail."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    directory = RunDirectory(tmp_path)
    monkeypatch.setattr(module, name, refuse)
    expected = rf"must take the files of the run, got .*{os.strerror(number)}; .* then give the command again"
    with pytest.raises(RunInvalid, match=expected), directory.lock():
        pass


def test_a_run_whose_lock_cannot_be_tested_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`specrl status` of a run on NFS without locks ended with a traceback."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    directory = RunDirectory(tmp_path)
    assert not directory.has_launcher()
    directory.lock_file.touch()
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunInvalid, match=r"must be on a file system with locks, got .*; copy it to another disk"):
        directory.has_launcher()


def test_errors_of_those_who_hold_the_lock_are_their_own(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), RunDirectory(tmp_path).lock():
        (tmp_path / "none").read_text()


def test_an_outcome_that_cannot_be_written_does_not_hide_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory(tmp_path)
    outcome = launch.RunOutcome(launch.RunEnd.FAILED, "trainer crashed")
    launch.write_outcome(directory, outcome, PlainView(Console()))
    assert '"trainer crashed"' in directory.outcome_file.read_text()
    assert not capsys.readouterr().out
    fill_disk(monkeypatch, "outcome.json")
    launch.write_outcome(directory, outcome, PlainView(Console()))
    said = capsys.readouterr().out
    assert "outcome.json was not written ([Errno 28] No space left on device" in said
    assert "make room" in said
