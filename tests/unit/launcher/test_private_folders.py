"""What a local run writes is for its owner alone, whatever the umask; what an older run left open is closed."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.run_files import a_run

from specrl import files
from specrl.errors import RunInvalid, SpecrlError
from specrl.launcher import launch, run_directory
from specrl.launcher.processes.supervisor import Program, Rank, Supervisor
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.terminal.view import PlainView
from specrl.rewards.checks.reference_cache import ReferenceCache
from specrl.rpc import run_token
from specrl.spec import parse_spec
from specrl.spec.data import ExactVerifier, RewardPool, Rewards

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """As users have it who share everything with their group."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """Permissions of a folder and all below it."""
    return {str(it.relative_to(folder)): stat.S_IMODE(it.stat().st_mode) for it in (folder, *folder.rglob("*"))}


def opened(folder: Path) -> dict[str, int]:
    """Those that others may use."""
    return {name: mode for name, mode in modes(folder).items() if mode & 0o077}


def test_a_run_s_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It was 0755 with files of 0644, although prompts are private."""
    directory = run_directory.create_run(tmp_path, parse_spec(a_run(tmp_path)))
    assert opened(directory.path) == {}
    assert modes(directory.path)["."] == 0o700
    directory.write_run_file(parse_spec(a_run(tmp_path)))  # when it is scaled


def test_what_the_processes_of_a_run_write_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    script = f"import pathlib; it = pathlib.Path({str(folder)!r}); (it / 'new').mkdir(); (it / 'new/file').touch()"
    rank = Rank((sys.executable, "-c", script), os.environ, folder / "logs/it.log")
    deadline = time.monotonic() + PATIENCE_S
    with files.private_umask(), Supervisor([Program("it", lambda: [rank], ends_run=True)]) as supervisor:
        while supervisor.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert {"new", "new/file", "logs/it.log"} <= modes(folder).keys()
    assert opened(folder) == {}


def test_a_process_is_private_also_without_the_launcher_s_umask(tmp_path: Path) -> None:
    script = f"import os; open({str(tmp_path / 'mask')!r}, 'w').write(str(os.umask(0)))"
    rank = Rank((sys.executable, "-c", script), os.environ, tmp_path / "it.log")
    deadline = time.monotonic() + PATIENCE_S
    with Supervisor([Program("it", lambda: [rank], ends_run=True)]) as supervisor:
        while supervisor.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert int((tmp_path / "mask").read_text()) == 0o077


def test_the_umask_is_restored() -> None:
    with files.private_umask():
        pass
    assert os.umask(0) == 0


def test_a_run_of_an_older_version_is_closed_and_the_user_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "old-1"
    (folder / "checkpoints/step-1").mkdir(parents=True)
    (folder / "store.db").touch()
    outside = tmp_path / "outside"
    outside.touch()
    (folder / "link").symlink_to(outside)
    said = RunDirectory(folder).make_private()
    assert said == f"made 4 files and folders of {folder} private, as they are in new runs"
    (folder / "link").unlink()
    assert opened(folder) == {}
    assert stat.S_IMODE(outside.stat().st_mode) == 0o666, "a link leads out of the run"
    assert RunDirectory(folder).make_private() == ""


def test_a_run_is_closed_before_it_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_directory.create_run(tmp_path, parse_spec(a_run(tmp_path)))
    directory.path.chmod(0o755)
    with pytest.raises(SpecrlError):  # its model is not there
        launch.resume_run(directory, (), PlainView(Console()))
    assert opened(directory.path) == {}
    assert "private" in capsys.readouterr().out


def test_the_token_is_for_its_owner_alone_and_one_that_others_have_read_is_replaced(tmp_path: Path) -> None:
    token = run_token.write_token(tmp_path)
    file = tmp_path / run_token.TOKEN_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run_token.ensure_token(tmp_path) == token
    file.chmod(0o644)
    assert run_token.ensure_token(tmp_path) != token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_run_with_files_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    (tmp_path / "store.db").touch()
    monkeypatch.setattr(Path, "chmod", refuse)
    with pytest.raises(RunInvalid, match="must belong to the user who resumes it"):
        RunDirectory(tmp_path).make_private()


def test_cached_reasons_quote_references_and_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a file that an older version has left open."""
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path / "cache"))
    cache = ReferenceCache(Rewards(exact=ExactVerifier()), RewardPool())
    cache.add_refusals({"a": ""})
    (file,) = (tmp_path / "cache/references").iterdir()
    for path in (file, file.parent):
        path.chmod(0o777)
    cache.add_refusals({"b": "no number in: my prompt"})
    assert opened(tmp_path / "cache/references") == {}


def test_a_run_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder cannot be looked into, which was a traceback."""

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(RunInvalid, match="must be a run of this user"):
        run_directory.find_run("theirs-1", tmp_path)
