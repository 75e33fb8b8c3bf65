"""The real program with two ranks: on a full disk, and with a damaged checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fork_server import ForkServer
from tests.integration.trainer.conftest import VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.integration.trainer.test_trainer_process import START_S, Trainer
from tests.small_disk import mount_small_disk

from specrl.errors import StoreFailed
from specrl.rpc.clients import TrainerClient
from specrl.spec import dump_spec
from specrl.trainer.checkpointing import checkpoints


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system for the run's folder."""
    with mount_small_disk(tmp_path / "run", "64m") as disk:
        yield disk


def fill(disk: Path) -> Path:
    """Fill a file system. Returns the file that does it."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(1 << 16))
            except OSError:
                return filler


async def test_full_disk_keeps_the_last_checkpoint_and_the_trainer(
    ranks: ForkServer, policy: Path, tmp_path: Path, small_disk: Path
) -> None:
    """Then the disk has space again. Then the newest checkpoint is truncated, and the one before it is loaded."""
    (tmp_path / "run.yaml").write_text(dump_spec(a_spec(policy, data=2)))
    first = Trainer(ranks, tmp_path, "first")
    try:
        async with TrainerClient(first.address()) as client:
            await client.train_step(a_batch(1, VOCAB), START_S)
            await client.save_checkpoint(1, START_S)
            await client.train_step(a_batch(2, VOCAB), START_S)
            filler = fill(small_disk)
            with pytest.raises(StoreFailed, match="free space on its disk"):
                await client.save_checkpoint(2, START_S)
            assert [step for step, _ in checkpoints.list_complete(small_disk)] == [1]
            assert not list((small_disk / "checkpoints").glob(".step-*.tmp")), "unfinished files must be deleted"
            assert (await client.train_step(a_batch(3, VOCAB), START_S)).tokens > 0, "the ranks must still agree"
            filler.unlink()
            await client.save_checkpoint(3, START_S)
            assert [step for step, _ in checkpoints.list_complete(small_disk)] == [1, 3]
    finally:
        first.kill()
    for file in (small_disk / "checkpoints" / "step-000003").rglob("model-*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    second = Trainer(ranks, tmp_path, "second")
    try:
        async with TrainerClient(second.address()) as client:
            assert (await client.get_status()).step == 1, second.log()
            assert (await client.train_step(a_batch(2, VOCAB), START_S)).tokens > 0
        assert "checkpoint_passed_over" in second.log()
        assert [step for step, _ in checkpoints.list_complete(small_disk)] == [1]
        assert (small_disk / "checkpoints" / "unreadable-step-000003").is_dir()
    finally:
        second.kill()
