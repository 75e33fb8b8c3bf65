"""The checkpoint mirror, on fsspec's file system in memory, and on an S3 server if `make s3` installed one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from tests.checkpoint_sums import write_checksums
from tests.run_files import a_run
from tests.stand_ins.s3 import ENDPOINT, serve_s3

from specrl.errors import CheckpointInvalid, RunInvalid, StoreFailed
from specrl.records.run_file import RecordedRun, record_run
from specrl.spec import parse_spec
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.checkpointing.mirror import CheckpointMirror

PLACE = "bucket/runs/a"
A_RUN = record_run(parse_spec(a_run(Path("/"))))


@pytest.fixture(scope="module")
def s3_variables() -> Iterator[dict[str, str]]:
    """Variables of clients of moto's server."""
    with serve_s3() as variables:
        yield variables


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """URLs of an empty mirror on each file system. Credentials come from the environment, as in docs/checkpoints.md."""
    if request.param == "memory":
        yield f"memory://{PLACE}"
        files = fsspec.filesystem("memory")
        files.store.clear()
        files.pseudo_dirs[:] = [""]
        return
    variables = request.getfixturevalue("s3_variables")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = dict(fsspec.config.conf)
    fsspec.config.set_conf_env(settings, variables)
    monkeypatch.setattr(fsspec.config, "conf", settings)
    files = fsspec.filesystem("s3", skip_instance_cache=True, endpoint_url=variables[ENDPOINT])
    files.mkdir("bucket")
    yield f"s3://{PLACE}"
    files.rm("bucket", recursive=True)


@pytest.fixture
def bucket(url: str) -> fsspec.AbstractFileSystem:
    """The file system that the mirror uses."""
    return fsspec.core.url_to_fs(url)[0]


@pytest.fixture
def mirror(url: str) -> CheckpointMirror:
    return CheckpointMirror(url, A_RUN)


def a_checkpoint(run: Path, step: int, content: str = "weights") -> Path:
    folder = checkpoints.step_directory(run, step)
    (folder / "policy" / "weights").mkdir(parents=True)
    (folder / "policy" / "weights" / "model.safetensors").write_text(f"{content} of step {step}")
    (folder / checkpoints.STATE).write_text("{}")
    write_checksums(folder)
    checkpoints.metrics_file(run, step).write_text(f"answer {step}")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_restore_fetches_the_newest_checkpoint_and_its_reply(
    mirror: CheckpointMirror, url: str, tmp_path: Path
) -> None:
    for step in (1, 2):
        a_checkpoint(tmp_path / "lost", step)
        mirror.upload_step(tmp_path / "lost", step)
    assert mirror.list_steps() == [1, 2]
    restored = CheckpointMirror(url, A_RUN).restore_newest(tmp_path / "new")
    assert restored == checkpoints.find_newest(tmp_path / "new")
    assert restored is not None
    assert files_of(restored) == files_of(checkpoints.step_directory(tmp_path / "lost", 2))
    assert checkpoints.metrics_file(tmp_path / "new", 2).read_text() == "answer 2"
    assert [path.name for path in (tmp_path / "new" / "checkpoints").glob(".*")] == []


def test_restore_from_an_empty_mirror_returns_none(mirror: CheckpointMirror, tmp_path: Path) -> None:
    assert mirror.list_steps() == []
    assert mirror.restore_newest(tmp_path) is None


@pytest.mark.parametrize("sent", range(4))
def test_interrupted_upload_keeps_the_previous_checkpoint(
    mirror: CheckpointMirror,
    bucket: fsspec.AbstractFileSystem,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sent: int,
) -> None:
    """The upload breaks after the reply, the weights, the state or the checksums. Step 2 is never complete."""
    for step in (1, 2):
        a_checkpoint(tmp_path / "run", step)
    mirror.upload_step(tmp_path / "run", 1)
    put = bucket.put_file
    count = 0

    def breaks(source: str, target: str) -> None:
        nonlocal count
        if count == sent:
            raise ConnectionResetError("the network is gone")
        count += 1
        put(source, target)

    monkeypatch.setattr(mirror._files, "put_file", breaks)
    with pytest.raises(
        StoreFailed, match=rf"store a checkpoint at checkpoint\.mirror {mirror.url}: .*the network is gone"
    ):
        mirror.upload_step(tmp_path / "run", 2)
    assert mirror.list_steps() == [1]
    monkeypatch.undo()
    mirror.upload_step(tmp_path / "run", 2)
    assert mirror.list_steps() == [1, 2]


def test_restore_skips_a_damaged_checkpoint(
    mirror: CheckpointMirror, bucket: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    for step in (1, 2):
        a_checkpoint(tmp_path / "run", step)
        mirror.upload_step(tmp_path / "run", step)
    bucket.pipe_file(f"{PLACE}/step-000002/policy/weights/model.safetensors", b"cut")
    restored = mirror.restore_newest(tmp_path / "new")
    assert restored is not None
    assert restored.name == "step-000001"
    bucket.rm_file(f"{PLACE}/step-000001/policy/weights/model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"step-000002.*has 3 bytes instead of 17"):
        mirror.restore_newest(tmp_path / "newer")
    assert checkpoints.find_newest(tmp_path / "newer") is None, "never begin anew beside checkpoints that are lost"


def test_prune_keeps_the_newest_checkpoints_and_milestones(mirror: CheckpointMirror, tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        a_checkpoint(tmp_path, step)
        mirror.upload_step(tmp_path, step)
    mirror.delete_superseded(checkpoints.Keeping(1, 4))
    assert mirror.list_steps() == [4, 8]


def test_mirror_of_another_run_is_neither_read_nor_overwritten(
    mirror: CheckpointMirror, url: str, tmp_path: Path
) -> None:
    a_checkpoint(tmp_path, 1)
    mirror.upload_step(tmp_path, 1)
    other = CheckpointMirror(url, record_run(parse_spec(a_run(Path("/elsewhere")))))
    for work in (
        other.list_steps,
        lambda: other.upload_step(tmp_path, 1),
        lambda: other.restore_newest(tmp_path / "new"),
    ):
        with pytest.raises(RunInvalid, match="use a separate URL for each run"):
            work()
    assert mirror.list_steps() == [1]


def test_a_mirror_belongs_to_the_same_run_in_a_version_with_other_fields_and_defaults(
    mirror: CheckpointMirror, url: str, tmp_path: Path
) -> None:
    """A run that was resumed by a newer version was refused: its mirror was that of another run file."""
    a_checkpoint(tmp_path, 1)
    older = {name: section for name, section in A_RUN.run_file.items() if name != "canary"}
    newer = A_RUN.run_file | {"newSection": {"mode": "Off"}}
    for recorded in (older, newer):
        CheckpointMirror(f"{url}/{len(recorded)}", RecordedRun(recorded, A_RUN.given)).upload_step(tmp_path, 1)
        assert CheckpointMirror(f"{url}/{len(recorded)}", A_RUN).list_steps() == [1]
    given = A_RUN.given | {"newSection": {"mode": "On"}}
    CheckpointMirror(f"{url}/given", RecordedRun(newer, given)).upload_step(tmp_path, 1)
    with pytest.raises(RunInvalid, match="another run file"):
        CheckpointMirror(f"{url}/given", A_RUN).list_steps()


def test_file_system_that_is_not_installed_is_named() -> None:
    with pytest.raises(RunInvalid, match=r"nowhere://a.*install the extra"):
        CheckpointMirror("nowhere://a", A_RUN)
