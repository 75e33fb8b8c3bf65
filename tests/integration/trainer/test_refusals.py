"""Input that the backend rejects before it computes anything. Messages name the wrong number and a remedy."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests.integration.trainer.runs import a_spec
from tests.live_tensors import LiveTensors
from tests.tiny_models import Shape, make_policy

from specrl.errors import CheckpointInvalid, MemoryTooSmall, SpecInvalid, TrainerFailed
from specrl.models import read_served_models
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.memory.estimate import estimate_rank_memory


def test_model_that_does_not_fit_into_memory(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    one = MegatronBackend(a_spec(policy))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    with pytest.raises(MemoryTooSmall, match="GiB"):
        one.load_model(None)
    one.close()


def test_policy_that_is_incomplete_on_this_node(policy: Path, tmp_path: Path) -> None:
    """It was an AssertionError, which names nothing and restarts the trainer for ever."""
    from specrl.trainer.megatron_backend import MegatronBackend

    folder = Path(shutil.copytree(policy, tmp_path / "policy"))
    (folder / "model.safetensors").unlink()
    one = MegatronBackend(a_spec(folder))
    with pytest.raises(SpecInvalid, match=r"model\.path must have its weights as safetensors, got none in"):
        one.load_model(None)
    one.close()


def test_tensor_parallel_size_that_does_not_divide_the_heads(policy: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    with pytest.raises(SpecInvalid, match="num_attention_heads=4"):
        MegatronBackend(a_spec(policy, tensor=3))


def test_experts_that_cannot_be_dealt_out(tmp_path: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    mixture = make_policy(tmp_path, shape=Shape(family="qwen3_moe"))
    with pytest.raises(SpecInvalid, match="num_experts=4"):
        MegatronBackend(a_spec(mixture, data=3, expert=3))


def test_number_of_processes_that_is_not_the_run_files(policy: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    with pytest.raises(TrainerFailed, match="2 ranks"):
        MegatronBackend(a_spec(policy, data=2))


def test_checkpoint_that_is_cut_or_of_another_model_is_named_with_its_numbers(policy: Path, tmp_path: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    one = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    one.load_model(None)
    path = checkpoints.step_directory(tmp_path, 0)
    one.save_checkpoint(path).result()
    one.close()
    wider = make_policy(tmp_path / "wider", shape=Shape(layers=2, hidden=96, heads=4, groups=2))
    other = MegatronBackend(a_spec(wider, speculation={"none": {}}))
    with pytest.raises(CheckpointInvalid, match=r"must have shape \(264, 96\), got \(265, 64\).*another model"):
        other.load_model(path)
    other.close()
    (shard,) = path.rglob("model-*.safetensors")
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.truncate(size - 100)
    one = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    with pytest.raises(CheckpointInvalid, match=rf"{shard.name} has {size - 100} bytes instead of {size}; delete"):
        one.load_model(path)
    one.close()


def test_falling_back_to_an_older_checkpoint_needs_the_memory_of_one_model(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models of the refused checkpoint stayed in memory, so one of more than half of it ended as MemoryTooSmall."""
    from specrl.trainer.megatron_backend import MegatronBackend

    oldest, other, damaged = (checkpoints.step_directory(tmp_path, step) for step in (1, 2, 3))
    without_drafter = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    without_drafter.load_model(None)
    without_drafter.save_checkpoint(other).result()
    without_drafter.close()
    spec = a_spec(policy)
    needed = estimate_rank_memory(spec, read_served_models(spec)).most
    with LiveTensors() as live:
        one = MegatronBackend(spec)
        one.load_model(None)
        held = live.now
        for path in (oldest, damaged):
            one.save_checkpoint(path).result()
        next(damaged.rglob("model-*.safetensors")).write_bytes(b"cut")
        limit = needed + held / 2
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=limit - live.now))
        assert checkpoints.load_newest(tmp_path, one.load_model) == oldest
    one.close()
