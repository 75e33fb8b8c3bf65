"""Copies of checkpoints on fsspec's file system in memory, and on a server that speaks S3 where `make s3` put one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import fsspec
import pytest
from tests.requirements import S3

from specrl.errors import CheckpointInvalid, RunInvalid, StoreFailed
from specrl.trainer import checkpoints, checksums
from specrl.trainer.mirror import Mirror

PLACE = "bucket/runs/a"


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    """URL of moto's server."""
    S3.require()
    moto = import_module("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of an empty place, on each file system; as docs/checkpoints.md says, credentials come from the environment."""
    if request.param == "memory":
        yield f"memory://{PLACE}"
        files = fsspec.filesystem("memory")
        files.store.clear()
        files.pseudo_dirs[:] = [""]
        return
    address = request.getfixturevalue("s3_server")
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    settings = dict(fsspec.config.conf)
    fsspec.config.set_conf_env(settings, {"FSSPEC_S3_ENDPOINT_URL": address})
    monkeypatch.setattr(fsspec.config, "conf", settings)
    files = fsspec.filesystem("s3", skip_instance_cache=True, endpoint_url=address)
    files.mkdir("bucket")
    yield f"s3://{PLACE}"
    files.rm("bucket", recursive=True)


@pytest.fixture
def bucket(url: str) -> fsspec.AbstractFileSystem:
    """The file system that the mirror uses."""
    return fsspec.core.url_to_fs(url)[0]


@pytest.fixture
def mirror(url: str) -> Mirror:
    return Mirror(url, "digest")


def a_checkpoint(run: Path, step: int, content: str = "weights") -> Path:
    folder = checkpoints.directory(run, step)
    (folder / "policy" / "weights").mkdir(parents=True)
    (folder / "policy" / "weights" / "model.safetensors").write_text(f"{content} of step {step}")
    (folder / checkpoints.STATE).write_text("{}")
    checksums.write(folder, checksums.of_folder(folder))
    checkpoints.metrics_file(run, step).write_text(f"answer {step}")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_newest_copy_comes_back_as_it_was_with_its_answer(mirror: Mirror, url: str, tmp_path: Path) -> None:
    for step in (1, 2):
        a_checkpoint(tmp_path / "lost", step)
        mirror.upload(tmp_path / "lost", step)
    assert mirror.steps() == [1, 2]
    restored = Mirror(url, "digest").restore(tmp_path / "new")
    assert restored == checkpoints.newest(tmp_path / "new")
    assert restored is not None
    assert files_of(restored) == files_of(checkpoints.directory(tmp_path / "lost", 2))
    assert checkpoints.metrics_file(tmp_path / "new", 2).read_text() == "answer 2"
    assert [path.name for path in (tmp_path / "new" / "checkpoints").glob(".*")] == []


def test_empty_mirror_gives_nothing_back(mirror: Mirror, tmp_path: Path) -> None:
    assert mirror.steps() == []
    assert mirror.restore(tmp_path) is None


@pytest.mark.parametrize("sent", range(4))
def test_upload_that_breaks_at_any_file_leaves_the_copy_before(
    mirror: Mirror, bucket: fsspec.AbstractFileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """The answer, the weights, the state, the checksums: after any of them nothing of step 2 is complete."""
    for step in (1, 2):
        a_checkpoint(tmp_path / "run", step)
    mirror.upload(tmp_path / "run", 1)
    put, count = bucket.put_file, 0

    def breaks(source: str, target: str) -> None:
        nonlocal count
        if count == sent:
            raise ConnectionResetError("the network is gone")
        count += 1
        put(source, target)

    monkeypatch.setattr(mirror._files, "put_file", breaks)
    with pytest.raises(StoreFailed, match=f"must take a checkpoint, got {mirror.url}.*the network is gone"):
        mirror.upload(tmp_path / "run", 2)
    assert mirror.steps() == [1]
    monkeypatch.undo()
    mirror.upload(tmp_path / "run", 2)
    assert mirror.steps() == [1, 2]


def test_damaged_copy_is_passed_over_for_the_one_before(
    mirror: Mirror, bucket: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    for step in (1, 2):
        a_checkpoint(tmp_path / "run", step)
        mirror.upload(tmp_path / "run", step)
    bucket.pipe_file(f"{PLACE}/step-000002/policy/weights/model.safetensors", b"cut")
    restored = mirror.restore(tmp_path / "new")
    assert restored is not None
    assert restored.name == "step-000001"
    bucket.rm_file(f"{PLACE}/step-000001/policy/weights/model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"step-000002.*must have 17 bytes, got 3"):
        mirror.restore(tmp_path / "newer")
    assert checkpoints.newest(tmp_path / "newer") is None, "never begin anew beside checkpoints that are lost"


def test_prune_keeps_newest_and_milestones_there(mirror: Mirror, tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        a_checkpoint(tmp_path, step)
        mirror.upload(tmp_path, step)
    mirror.prune(1, 4)
    assert mirror.steps() == [4, 8]


def test_checkpoints_of_another_run_are_neither_taken_nor_overwritten(mirror: Mirror, url: str, tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 1)
    mirror.upload(tmp_path, 1)
    other = Mirror(url, "another digest")
    for work in (other.steps, lambda: other.upload(tmp_path, 1), lambda: other.restore(tmp_path / "new")):
        with pytest.raises(RunInvalid, match="a place of its own for each run"):
            work()
    assert mirror.steps() == [1]


def test_file_system_that_is_not_installed_is_named() -> None:
    with pytest.raises(RunInvalid, match=r"nowhere://a.*pip install"):
        Mirror("nowhere://a", "digest")
