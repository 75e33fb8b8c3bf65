"""A checkpoint on disk: float32 weights and moments by Hugging Face names, the drafter, random state, step.

    writing   ranks gather one tensor at a time, rank 0 writes it into `.step-000010.tmp`; one rename gives it its name
    reading   every rank cuts its own shards out of whole tensors, so any layout reads what any other wrote

A process that dies while writing leaves a name that is never looked at. Megatron's own dist_checkpointing was tried and
left: it starts a manager process at every save, which outlives a killed trainer, and forks beside gRPC's threads.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specrl.drafting.online import DrafterTrainer
from specrl.errors import CheckpointInvalid, StoreFailed
from specrl.files import SMALL_BYTES, read_object
from specrl.trainer import checksums
from specrl.trainer.checkpoints import DRAFTER, POLICY, STATE, temporary
from specrl.trainer.hf_folder import SHARD_BYTES, write_weights
from specrl.trainer.megatron_backend.groups import Groups
from specrl.trainer.megatron_backend.policy import Policy

RANDOM = "random.safetensors"


@dataclass(frozen=True)
class State:
    """What is not a tensor."""

    step: int
    is_drafter_initialised: bool
    has_drafter: bool


def save(target: Path, policy: Policy, drafter: DrafterTrainer | None, state: State, groups: Groups) -> None:
    """Write `target`, whole or not at all. A collective. Raises StoreFailed, at rank 0 alone, when the disk refuses."""
    kinds = policy.state()
    try:
        if groups.rank == 0:
            _write(target, kinds, drafter, state)
    except (OSError, SafetensorError) as error:  # what safetensors writes fails with its own error
        shutil.rmtree(temporary(target), ignore_errors=True)  # a full disk is full of it, too
        raise StoreFailed(f"a checkpoint must be written to {target}, got {error}; make room on the disk") from error
    finally:
        if groups.data_rank == 0:  # these share tensors with rank 0 and gather to the end, whatever becomes of writing
            for tensors in kinds.values():
                for _ in tensors:
                    pass


def _write(
    target: Path, kinds: dict[str, Iterator[tuple[str, torch.Tensor]]], drafter: DrafterTrainer | None, state: State
) -> None:
    scratch = temporary(target)
    shutil.rmtree(scratch, ignore_errors=True)
    for kind, tensors in kinds.items():
        (scratch / POLICY / kind).mkdir(parents=True)
        write_weights(scratch / POLICY / kind, tensors, SHARD_BYTES)
    if drafter is not None:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state().items()}, scratch / DRAFTER
        )
    save_file({"cpu": torch.get_rng_state()}, scratch / RANDOM)
    (scratch / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    checksums.write(scratch, checksums.of_folder(scratch))
    for path in (*scratch.rglob("*"), scratch):
        _sync(path)
    before = target.with_name(f".{target.name}.before.tmp")  # a name that `prune` clears away
    if target.exists():  # written before, by a step that is now replayed
        target.rename(before)
    scratch.rename(target)
    _sync(target.parent)
    shutil.rmtree(before, ignore_errors=True)


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_state(source: Path) -> State:
    """Raises CheckpointInvalid for a folder that is no complete checkpoint."""
    try:
        state = State(**read_object(source / STATE, SMALL_BYTES))
        if [type(value) for value in astuple(state)] != [int, bool, bool] or state.step < 0:
            raise ValueError(f"got {state}")
        return state
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointInvalid(
            f"a checkpoint must be complete, got {source}: {error}; delete it and the one before it is used"
        ) from error


def _check_files(source: Path, groups: Groups) -> None:
    """Compare every file with its checksum, each rank a share. Raises CheckpointInvalid at all ranks alike."""
    expected = sorted(checksums.read(source).items())
    mine = range(groups.rank, len(expected), groups.world_size)
    damaged = next((place for place in mine if checksums.damage(source, *expected[place])), len(expected))
    first = torch.tensor(damaged, device=groups.device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    if first < len(expected):
        name, item = expected[int(first)]
        reason = checksums.damage(source, name, item) or f"{name} cannot be read by another rank as it was written"
        raise CheckpointInvalid(
            f"a checkpoint must be as it was written, got {source}: {reason}; delete it and the one before it is used"
        )


def load(source: Path, policy: Policy, drafter: DrafterTrainer | None, groups: Groups) -> State:
    """Fill policy, optimizer and drafter. A collective.

    Raises CheckpointInvalid when a file is not as it was written, or does not fit.
    """
    state = read_state(source)
    _check_files(source, groups)
    if state.has_drafter != (drafter is not None):
        raise CheckpointInvalid(
            f"a checkpoint must be of the same run, got {'a' if state.has_drafter else 'no'} drafter in {source}; "
            "keep generation.speculation as it was, or start another run"
        )
    try:
        policy.load_state(source / POLICY, state.step)
        if drafter is not None:
            drafter.load_state(load_file(source / DRAFTER))
        torch.set_rng_state(load_file(source / RANDOM)["cpu"])
    except (OSError, KeyError, ValueError, RuntimeError, TypeError, SafetensorError) as error:
        raise CheckpointInvalid(
            f"the checkpoint must fit model.path, got {source}: {error}; resume with the model it was made of"
        ) from error
    return state
