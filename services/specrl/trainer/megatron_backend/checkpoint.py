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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specrl.drafting.online import DrafterTrainer
from specrl.errors import CheckpointInvalid, StoreFailed
from specrl.trainer.checkpoints import STATE, temporary
from specrl.trainer.megatron_backend.export import SHARD_BYTES, write_weights
from specrl.trainer.megatron_backend.groups import Groups
from specrl.trainer.megatron_backend.policy import Policy

DRAFTER = "drafter.safetensors"
POLICY = "policy"
RANDOM = "random.safetensors"


@dataclass(frozen=True)
class State:
    """What is not a tensor."""

    step: int
    is_drafter_initialised: bool
    has_drafter: bool


def save(target: Path, policy: Policy, drafter: DrafterTrainer | None, state: State, groups: Groups) -> None:
    """Write `target`. A collective. Raises StoreFailed when the disk refuses."""
    scratch = temporary(target)
    if groups.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    dist.barrier()
    try:
        for kind, tensors in policy.state().items():
            _write_kind(scratch / POLICY / kind, tensors, groups)
        if groups.rank == 0:
            _write_rest(scratch, drafter, state)
            if target.exists():  # written before, by a step that is now replayed
                shutil.rmtree(target)
            scratch.rename(target)
            _sync(target.parent)
    except OSError as error:
        raise StoreFailed(f"a checkpoint must be written to {target}, got {error}; make room on the disk") from error
    dist.barrier()


def _write_kind(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], groups: Groups) -> None:
    """One set of tensors. Ranks that share them with rank 0 gather to the end, whatever becomes of the writing."""
    try:
        if groups.rank == 0:
            folder.mkdir(parents=True)
            write_weights(folder, tensors, SHARD_BYTES)
    finally:
        if groups.data_rank == 0:
            for _ in tensors:
                pass


def _write_rest(scratch: Path, drafter: DrafterTrainer | None, state: State) -> None:
    if drafter is not None:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state().items()}
        save_file(tensors, scratch / DRAFTER)
    save_file({"cpu": torch.get_rng_state()}, scratch / RANDOM)
    (scratch / STATE).write_text(json.dumps(asdict(state)), encoding="utf-8")
    for path in scratch.rglob("*"):
        if path.is_file():
            _sync(path)


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
        return State(**json.loads((source / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointInvalid(
            f"a checkpoint must be complete, got {source}: {error}; delete it and the one before it is used"
        ) from error


def load(source: Path, policy: Policy, drafter: DrafterTrainer | None) -> State:
    """Fill policy, optimizer and drafter. A collective. Raises CheckpointInvalid when they do not fit."""
    state = read_state(source)
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
    except (OSError, KeyError, SafetensorError) as error:
        raise CheckpointInvalid(
            f"the checkpoint must fit model.path, got {source}: {error}; resume with the model it was made of"
        ) from error
    return state
