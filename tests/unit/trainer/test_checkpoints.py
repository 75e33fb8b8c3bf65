"""Which checkpoints count."""

from pathlib import Path

from specrl.trainer import checkpoints


def a_checkpoint(run: Path, step: int, *, is_complete: bool = True) -> Path:
    path = checkpoints.directory(run, step)
    path.mkdir(parents=True)
    if is_complete:
        (path / checkpoints.STATE).write_text("{}")
    checkpoints.metrics_file(run, step).write_bytes(b"")
    return path


def test_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None


def test_newest_is_by_step_and_complete(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 9)
    expected = a_checkpoint(tmp_path, 1_000_000)
    a_checkpoint(tmp_path, 2_000_000, is_complete=False)
    checkpoints.temporary(checkpoints.directory(tmp_path, 3_000_000)).mkdir()
    assert checkpoints.newest(tmp_path) == expected


def test_prune_keeps_the_newest_and_removes_half_written_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        a_checkpoint(tmp_path, step)
    checkpoints.temporary(checkpoints.directory(tmp_path, 4)).mkdir()
    checkpoints.prune(tmp_path, keep=2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-000002", "step-000002.metrics.pb", "step-000003", "step-000003.metrics.pb"]
