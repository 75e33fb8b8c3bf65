"""A checkpoint on disk: Megatron's sharded policy and optimizer, the replicated drafter, random state, step.

    writing   all ranks write into `.step-000010.tmp`; rank 0 adds drafter and state; then one rename gives it its name
    reading   any tensor and data parallel layout; Megatron cuts the shards anew

A process that dies while writing leaves a name that is never looked at.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from specrl.drafting.online import DrafterTrainer
from specrl.errors import CheckpointInvalid, StoreFailed
from specrl.trainer.checkpoints import STATE, temporary
from specrl.trainer.megatron_backend.groups import Groups
from specrl.trainer.megatron_backend.policy import Policy

DRAFTER = "drafter.safetensors"
POLICY = "policy"
RANDOM = "random.safetensors"


@dataclass(frozen=True)
class State:
    """What is not a tensor. model_path says what the weights are of; it is not read again."""

    step: int
    is_drafter_initialised: bool
    has_drafter: bool


def save(target: Path, policy: Policy, drafter: DrafterTrainer | None, state: State, groups: Groups) -> None:
    """Write `target`. A collective. Raises StoreFailed when the disk refuses."""
    scratch = temporary(target)
    if groups.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        (scratch / POLICY).mkdir(parents=True)
    dist.barrier()
    try:
        dist_checkpointing.save(_sharded(policy, is_loading=False), str(scratch / POLICY))
        if groups.rank == 0:
            _write_rest(scratch, drafter, state)
            if target.exists():  # written before, by a step that is now replayed
                shutil.rmtree(target)
            scratch.rename(target)
            _sync(target.parent)
    except OSError as error:
        raise StoreFailed(f"a checkpoint must be written to {target}, got {error}; make room on the disk") from error
    dist.barrier()


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
        found = dist_checkpointing.load(_sharded(policy, is_loading=True), str(source / POLICY))
        policy.model.load_state_dict(found["model"])
        policy.optimizer.load_state_dict(found["optimizer"])
        if drafter is not None:
            drafter.load_state(load_file(source / DRAFTER))
        torch.set_rng_state(load_file(source / RANDOM)["cpu"])
    except (OSError, RuntimeError, ValueError, KeyError, dist_checkpointing.core.CheckpointingException) as error:
        raise CheckpointInvalid(
            f"the checkpoint must fit model.path, got {source}: {error}; resume with the model it was made of"
        ) from error
    return state


def _sharded(policy: Policy, is_loading: bool) -> dict[str, Any]:
    """Megatron's description of which part of which tensor this rank holds."""
    model = policy.model.sharded_state_dict()
    return {"model": model, "optimizer": policy.optimizer.sharded_state_dict(model, is_loading=is_loading)}
