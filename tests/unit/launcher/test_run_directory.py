"""Run folders: their names, their locks, and that they appear complete."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from rich.console import Console
from tests.run_files import a_model_folder, a_run, a_run_file

from specrl.errors import RunInvalid, SpecInvalid
from specrl.launcher import launch, run_directory
from specrl.launcher.launch import describe_start
from specrl.launcher.terminal.view import PlainView
from specrl.spec import RunSpec, load_spec, parse_spec


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    return parse_spec(a_run(tmp_path))


def test_runs_are_numbered_from_one(tmp_path: Path, spec: RunSpec) -> None:
    names = [run_directory.create_run(tmp_path / "runs", spec).name for _ in range(3)]
    assert names == ["tiny-1", "tiny-2", "tiny-3"]


def test_the_next_number_follows_the_largest_one_of_the_same_name(tmp_path: Path, spec: RunSpec) -> None:
    for name in ("tiny-7", "tiny-drafter-12", "tiny-x", "other-20"):
        (tmp_path / name).mkdir()
    assert run_directory.create_run(tmp_path, spec).name == "tiny-8"


def test_a_number_taken_at_the_last_moment_is_skipped(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run_directory.create_run(tmp_path, spec)
    monkeypatch.setattr(run_directory, "_used_numbers", lambda runs, name: iter(()))
    assert run_directory.create_run(tmp_path, spec).name == "tiny-2"
    assert load_spec(first.run_file).name == "tiny"


def test_new_run_holds_its_run_file(tmp_path: Path, spec: RunSpec) -> None:
    directory = run_directory.create_run(tmp_path, spec)
    assert load_spec(directory.run_file) == spec
    assert directory.logs_folder.is_dir()


def test_a_run_appears_only_after_it_was_filled(tmp_path: Path, spec: RunSpec) -> None:
    found: list[list[Path]] = []

    def fill(folder: Path) -> None:
        (folder / "more").touch()
        found.append(list(tmp_path.glob("[!.]*")))

    assert (run_directory.create_run(tmp_path, spec, fill).path / "more").exists()
    assert found == [[]]


def test_interrupted_creation_leaves_nothing(tmp_path: Path, spec: RunSpec) -> None:
    """Ctrl-C while a checkpoint was copied left a run without it, and `--resume` began at step 1."""

    def interrupt(_: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_directory.create_run(tmp_path, spec, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_failed_creation_leaves_nothing(tmp_path: Path, spec: RunSpec) -> None:
    def fail(_: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(RunInvalid, match="must take the files of a new run, got disk full; make room"):
        run_directory.create_run(tmp_path, spec, fail)
    assert list(tmp_path.iterdir()) == []


KILLED_WHILE_IT_COPIES = """
import os, signal, sys
from pathlib import Path
from specrl.launcher.run_directory import create_run
from specrl.spec import load_spec

def fill(folder):
    (folder / "checkpoints/.step-000003.tmp").mkdir(parents=True)
    (folder / "checkpoints/.step-000003.tmp/weights").write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)

create_run(Path(sys.argv[1]), load_spec(Path(sys.argv[2])), fill)
"""


def leave_unfinished(folder: Path, runs: Path) -> Path:
    """Have a process killed that fills a new run. Returns the hidden folder that it leaves."""
    command = [sys.executable, "-c", KILLED_WHILE_IT_COPIES, str(runs), str(a_run_file(folder))]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    (left,) = runs.glob(".new-*")
    assert (left / "checkpoints/.step-000003.tmp/weights").exists()
    return left


def test_what_a_killed_launch_has_left_is_deleted_but_no_run_and_no_folder_of_a_living_one(
    tmp_path: Path, spec: RunSpec
) -> None:
    """A killed launch left a hidden folder for ever, which could hold a whole checkpoint."""
    runs = tmp_path / "runs"
    left = leave_unfinished(tmp_path, runs)
    begun = runs / ".new-begun"  # another launch is about to lock it
    begun.mkdir()

    def fill(folder: Path) -> None:
        run_directory.delete_unfinished(runs)
        assert folder.exists()

    directory = run_directory.create_run(runs, spec, fill)
    assert not left.exists()
    assert begun.exists()
    run_directory.delete_unfinished(runs)
    assert directory.run_file.exists()
    with directory.lock():
        pass


def test_the_lock_of_an_unfinished_run_is_deleted_last(
    tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process killed after it had deleted the lock left a folder that no later one deleted."""
    left = leave_unfinished(tmp_path, tmp_path / "runs")
    unlink = Path.unlink

    def end_at_lock(path: Path, missing_ok: bool = False) -> None:
        if path.name == "lock":
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", end_at_lock)
        with pytest.raises(KeyboardInterrupt):
            run_directory.delete_unfinished(left.parent)
    assert [path.name for path in left.iterdir()] == ["lock"]
    run_directory.delete_unfinished(left.parent)
    assert not left.exists()


def test_a_run_is_not_deleted_through_a_link(tmp_path: Path, spec: RunSpec) -> None:
    directory = run_directory.create_run(tmp_path, spec)
    (tmp_path / ".new-best").symlink_to(directory.path)
    before = sorted(directory.path.iterdir())
    run_directory.delete_unfinished(tmp_path)
    assert sorted(directory.path.iterdir()) == before


@pytest.mark.parametrize("is_fetched", [False, True])
def test_a_start_deletes_what_a_killed_one_has_left_before_the_disk_is_found_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_fetched: bool
) -> None:
    """is_fetched: the model is one on the hub, for which preflight itself finds the disk full."""
    runs = tmp_path / "runs"
    left = leave_unfinished(tmp_path, runs)
    spec = load_spec(tmp_path / "run.yaml")
    if is_fetched:
        commit = a_listed_model(tmp_path / "hub", monkeypatch)
        model = spec.model.model_copy(update={"path": "team/tiny", "revision": commit})
        spec = spec.model_copy(update={"model": model})
    else:
        a_model_folder(tmp_path / "model")
    usage = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(SpecInvalid, match="must fit on the disk of" if is_fetched else "must be on a disk with"):
        launch.start_run(spec, runs, PlainView(Console()))
    assert not left.exists()


def a_listed_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a cache of the hub with all of team/tiny but its weights. Returns the commit."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    commit = "ab" * 20
    folder = a_model_folder(cache / "models--team--tiny/snapshots" / commit)
    listing = cache / "models--team--tiny/specrl" / f"{commit}.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps({"commit": commit, "sizes": {it.name: it.stat().st_size for it in folder.iterdir()}}))
    (folder / "model.safetensors").unlink()
    return commit


def test_runs_folder_that_is_a_file_is_refused(tmp_path: Path, spec: RunSpec) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunInvalid, match="the folder for runs must be writable"):
        run_directory.create_run(tmp_path / "runs", spec)


def test_a_second_launcher_is_refused_while_the_first_holds_the_lock(tmp_path: Path, spec: RunSpec) -> None:
    directory = run_directory.create_run(tmp_path, spec)
    with directory.lock():
        assert directory.has_launcher()
        with pytest.raises(RunInvalid, match="another launcher is running"), directory.lock():
            pass
    assert not directory.has_launcher()
    with directory.lock():
        pass


def test_testing_the_lock_does_not_block_a_launcher(tmp_path: Path, spec: RunSpec) -> None:
    directory = run_directory.create_run(tmp_path, spec)
    assert not directory.has_launcher()
    with directory.lock():
        assert directory.has_launcher()


def test_run_is_found_by_name_and_by_path(tmp_path: Path, spec: RunSpec) -> None:
    directory = run_directory.create_run(tmp_path, spec)
    assert run_directory.find_run("tiny-1", tmp_path) == directory
    assert run_directory.find_run(str(directory.path), Path("elsewhere")) == directory


def test_an_unknown_run_is_refused_with_the_known_runs(tmp_path: Path, spec: RunSpec) -> None:
    run_directory.create_run(tmp_path, spec)
    with pytest.raises(RunInvalid, match="got tiny-9; runs there: tiny-1"):
        run_directory.find_run("tiny-9", tmp_path)


def test_the_newest_run_is_the_one_locked_last(tmp_path: Path, spec: RunSpec) -> None:
    first, second = (run_directory.create_run(tmp_path, spec) for _ in range(2))
    os.utime(first.lock_file, (1, 1))
    os.utime(second.lock_file, (2, 2))
    assert run_directory.find_run(None, tmp_path) == second
    with first.lock():
        pass
    assert run_directory.find_run(None, tmp_path) == first


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunInvalid, match="must be a folder with a run"):
        run_directory.find_run(None, tmp_path)


@pytest.mark.parametrize("place", ["/step-000003", "/mine/step-000003"])
def test_a_checkpoint_near_the_root_is_described_by_its_path(place: str) -> None:
    """A checkpoint in the root ended the launcher with an IndexError, and one below it had no name."""
    start = f"starting from the checkpoint of step 3 of {place}; the next step is 4"
    assert describe_start(Path(place), 3) == start
