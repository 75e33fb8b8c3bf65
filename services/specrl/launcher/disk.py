"""Estimates how much disk the checkpoints and the export of a run need, before it starts.

P: trained parameters of the policy, D: those of the drafter, b: bytes of the policy's dtype.

    checkpoint   12 (P + D): float32 weights and Adam's two moments. With LoRA the policy's part is small, so P is 0
    export       b times the policy's parameters, and 4 D

It is a lower bound: logs, rollouts and the store are not counted. So a run that is refused would fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specrl.drafting.registry import find_kind
from specrl.errors import SpecInvalid, SpecProblem
from specrl.hub.fetching import measure_free_bytes
from specrl.launcher.memory import estimate_snapshot_bytes, format_gib
from specrl.models import RunModels
from specrl.records.weights import ITEM_BYTES
from specrl.spec import RunSpec


@dataclass(frozen=True)
class DiskNeed:
    """Sizes of the files that a run writes to its folder. checkpoints: most that are there at once."""

    checkpoint_bytes: int
    checkpoints: int
    export_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.checkpoints * self.checkpoint_bytes + self.export_bytes


def estimate_disk(spec: RunSpec, models: RunModels, existing: int = 0) -> DiskNeed:
    """Estimate what the run will write, by the module's formula.

    models: with a policy that could be read. existing: checkpoints that are there already.
    """
    policy = models.policy
    assert policy is not None
    drafter = find_kind(spec)
    trained = drafter.count_parameters(spec, models) if drafter is not None else 0
    parameters = policy.num_parameters
    asked = spec.checkpoint
    written = math.ceil(spec.schedule.steps / asked.every_steps)
    milestones = spec.schedule.steps // asked.milestone_every_steps if asked.milestone_every_steps else 0
    # A new one is whole before the oldest is deleted.
    kept = min(written, asked.keep + 1 + asked.keep_best + milestones)
    item_bytes = ITEM_BYTES[spec.model.dtype.value]
    checkpoint = estimate_snapshot_bytes(spec, parameters, trained)
    return DiskNeed(checkpoint, max(kept - existing, 1), item_bytes * parameters + 4 * trained)


def check_disk(need: DiskNeed, folder: Path, free_bytes: Callable[[Path], int] = measure_free_bytes) -> None:
    """Raise SpecInvalid if the disk is too small for the run. folder: of the run, or of all runs."""
    free = free_bytes(folder)
    if free < need.total_bytes:
        rule = (
            f"must be on a disk with {format_gib(need.total_bytes)} free ({need.checkpoints} x "
            f"{format_gib(need.checkpoint_bytes)} of checkpoints, {format_gib(need.export_bytes)} for the export), "
            f"got {format_gib(free)} for {folder}"
        )
        remedy = "free some, name another folder, or lower checkpoint.keep"
        raise SpecInvalid((SpecProblem("--runs", rule, remedy),))
