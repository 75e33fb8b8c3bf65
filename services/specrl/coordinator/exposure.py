"""The number that people run this system to make small, where it comes from, and what to do about it.

Exposed generation is the wall time in which the trainer could train but has no batch. Its causes are those of
`specrl_coordinator_exposed_generation_seconds_total`: `buffer_wait`, too few rollouts are finished, and `sync_drain`,
replicas that have joined are given weights meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.coordinator.exported import CAUSES
from specrl.coordinator.report import Report, StageSeconds, StepReport
from specrl.spec import RunSpec

RECENT_STEPS = 10
HIDDEN_SHARE = 0.05
"""Below, another replica would bring less than the noise between two steps."""
DULL_ACCEPTANCE = 1.3
"""Tokens per verification below which drafts hardly pay on any engine that was measured (docs/decisions/0005)."""


class Exposure(Report):
    """Means over the last `steps` steps."""

    steps: int
    share: float
    """Of the steps' wall time that the trainer waited for rollouts, 0 to 1."""
    step_seconds: float
    seconds: dict[str, float]
    """Per step, by cause: buffer_wait, sync_drain; their sum is stages.generation."""
    stages: StageSeconds
    """Seconds per step."""
    advice: str
    """What makes it smaller, in a sentence."""


def exposure(reports: Sequence[StepReport], spec: RunSpec, replicas: int) -> Exposure:
    """Sum up the last steps. reports: ascending; replicas: how many serve."""
    recent = reports[-RECENT_STEPS:]
    names = tuple(StageSeconds.model_fields)
    count = max(len(recent), 1)
    stages = StageSeconds(**{name: sum(getattr(r.stages, name) for r in recent) / count for name in names})
    share = stages.generation / stages.total if stages.total else 0.0
    return Exposure(
        steps=len(recent),
        share=share,
        step_seconds=stages.total,
        seconds={cause: sum(r.exposed_by_cause.get(cause, 0.0) for r in recent) / count for cause in CAUSES},
        stages=stages,
        advice=_advice(recent, stages, spec, replicas) if recent else "No step is trained yet.",
    )


def _advice(recent: Sequence[StepReport], stages: StageSeconds, spec: RunSpec, replicas: int) -> str:
    """The first remedy that fits, cheapest first."""
    share = stages.generation / stages.total if stages.total else 0.0
    if stages.validation > stages.generation and stages.validation > HIDDEN_SHARE * stages.total:
        return (
            "Steps wait for validations more than for rollouts: validate less often (validation.everySteps) or fewer "
            "problems (validation.limit)."
        )
    if share < HIDDEN_SHARE:
        return "Generation is hidden behind training; nothing needs to be done."
    if spec.schedule.max_policy_lag == 0:
        return (
            "Training waits for every rollout of its step, since schedule.maxPolicyLag is 0; with 1, generation goes "
            "on behind training."
        )
    lengths = [r.acceptance_length for r in recent if r.acceptance_length is not None]
    if lengths and sum(lengths) / len(lengths) < DULL_ACCEPTANCE:
        return (
            f"A verification yields {sum(lengths) / len(lengths):.2f} tokens, which hardly pays for the drafts: train "
            "the drafter longer (trainer.drafter) or choose another mechanism (generation.speculation)."
        )
    # While it is the bottleneck generation takes the whole step, and training the rest of it.
    enough = math.ceil(replicas / (1 - share)) if share < 1 else 2 * replicas
    drained = sum(r.exposed_by_cause.get("sync_drain", 0.0) for r in recent)
    if drained > sum(r.exposed_generation for r in recent) / 2:
        return (
            "The trainer waits while replicas that have just joined are given weights: find out why they come and go "
            "(the events below), or let them join less often."
        )
    if replicas == 0:
        return "No replica serves at the moment; the events below say why."
    return (
        f"Generation is the bottleneck: about {max(enough, replicas + 1)} replicas instead of {replicas} would hide it "
        "(kubectl scale, or specrl scale). If replicas stand idle at the end of each step below, order: Windowed lets "
        "steps pass stragglers."
    )
