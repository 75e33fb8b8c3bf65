"""Measures exposed generation over the last steps, by cause, and suggests how to reduce it. Shown by the live page.

`DemandMeter` measures how many replicas would reduce it, for autoscalers.

Exposed generation is the wall time in which the trainer is idle because it has no batch. Reducing it is what this
system is for. Its causes are those of `specrl_coordinator_exposed_generation_seconds_total`: bufferWait (too few
rollouts are sampled), syncDrain (replicas that joined are receiving weights) and grading (verifiers grade the last
ones).

Beside it are generation under way, and the part of it that is hidden because the trainer did not wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from specrl.formats.reports import CAUSES, PhaseSeconds, ReportModel, StepReport
from specrl.spec import RunSpec

RECENT_STEPS = 10  # over which the figures are averaged
HIDDEN_SHARE = 0.05
"""Share of a step below which another replica would gain less than the noise between two steps."""
DEMAND_WINDOW_S = 900.0
DEMAND_STEPS = 4
"""Time, and fewest steps, over which demand is averaged. Lengths of rollouts differ from step to step, so single steps
would add and remove replicas by chance. The second bound is for steps that are longer than a part of the first."""
DULL_ACCEPTANCE = 1.3
"""Tokens per verification below which drafting gained little on every measured engine (docs/decisions/0005)."""


class Exposure(ReportModel):
    """Exposed generation, as means over the last `steps` steps."""

    steps: int
    share: float
    """Share of the steps' wall time in which the trainer waited for rollouts, 0 to 1."""
    step_seconds: float
    """Wall seconds of a step."""
    seconds: dict[str, float]
    """Exposed seconds per step, by cause: bufferWait, syncDrain and grading. Their sum is phases.generation."""
    generation_under_way: float
    """Seconds per step in which at least one rollout was in flight."""
    hidden_generation: float
    """Seconds per step of `generation_under_way` in which the trainer did not wait for rollouts."""
    phases: PhaseSeconds
    """Seconds per step."""
    advice: str
    """Advice on how to reduce it, in a sentence."""


def measure_exposure(reports: Sequence[StepReport], spec: RunSpec, replicas: int) -> Exposure:
    """Average the last RECENT_STEPS steps. reports: ascending. replicas: how many serve."""
    recent = reports[-RECENT_STEPS:]
    count = max(len(recent), 1)
    sums = {name: sum(getattr(report.phases, name) for report in recent) for name in PhaseSeconds.model_fields}
    phases = PhaseSeconds(**{name: total / count for name, total in sums.items()})
    return Exposure(
        steps=len(recent),
        share=phases.exposed_share,
        step_seconds=phases.wall_seconds,
        seconds={cause: sum(r.exposed_by_cause.get(cause, 0.0) for r in recent) / count for cause in CAUSES},
        generation_under_way=sum(report.generation_under_way for report in recent) / count,
        hidden_generation=sum(report.hidden_generation for report in recent) / count,
        phases=phases,
        advice=_choose_advice(recent, phases, spec, replicas) if recent else "No step is trained yet.",
    )


def _choose_advice(recent: Sequence[StepReport], phases: PhaseSeconds, spec: RunSpec, replicas: int) -> str:
    """Return the first remedy that applies, the cheapest first."""
    share = phases.exposed_share
    if phases.validation > phases.generation and phases.validation > HIDDEN_SHARE * phases.wall_seconds:
        return (
            "Steps wait for validations longer than for rollouts. Validate less often (validation.everySteps) or on "
            "fewer problems (validation.limit)."
        )
    if share < HIDDEN_SHARE:
        return "Generation is hidden behind training. Nothing needs to be done."
    exposed = sum(report.exposed_generation for report in recent)
    if sum(report.exposed_by_cause.get("grading", 0.0) for report in recent) > exposed / 2:
        return (
            "The trainer waits for verifiers, not for generation. Make the verifier faster, lower rewardPool.timeoutS "
            "if some of its calls hang, or raise rewardPool.workers."
        )
    if spec.schedule.max_policy_lag == 0:
        return "Generation and training take turns, because schedule.maxPolicyLag is 0. With 1 they overlap."
    lengths = [r.acceptance_length for r in recent if r.acceptance_length is not None]
    if lengths and fmean(lengths) < DULL_ACCEPTANCE:
        return (
            f"A verification yields {fmean(lengths):.2f} tokens, which hardly pays for drafting. Train "
            "the drafter longer (trainer.drafter) or choose another mechanism (generation.speculation)."
        )
    # Generation, the bottleneck, lasts the whole step; training takes 1 - share of it. Generation scales with the
    # replicas, so it takes as long as training with replicas / (1 - share) of them.
    enough = math.ceil(replicas / (1 - share)) if share < 1 else 2 * replicas
    drained = sum(r.exposed_by_cause.get("syncDrain", 0.0) for r in recent)
    if drained > exposed / 2:
        return (
            "The trainer waits while replicas that have just joined receive weights. The events below show why "
            "replicas join and leave; make them do so less often."
        )
    if replicas == 0:
        return "No replica is serving. The events below show why."
    return (
        f"Generation is the bottleneck. About {max(enough, replicas + 1)} replicas instead of {replicas} would hide it "
        "(kubectl scale, or specrl scale). If the timeline below shows idle replicas at the end of each step, a larger "
        "schedule.maxPolicyLag keeps them busy."
    )


@dataclass(frozen=True)
class _ServedStep:
    """Seconds of one step, and the replicas that served at its end."""

    wall_s: float
    exposed_s: float
    under_way_s: float
    replicas: int


class DemandMeter:
    """Measures generation's demand: the replicas with which it is under way just as long as the trainer works.

        demand = sum(replicas x generation under way) / sum(wall time - exposed generation)

    Generation takes about T_g(n) = c / n seconds a step on n replicas, and the trainer T_t, which is all phases but
    `generation`. Then demand is c / T_t, whatever n is. So an autoscaler that follows it has no feedback: it does not
    overshoot while new replicas start, however long that or a step takes. Where the longest rollout dominates,
    T_g = a + c / n, demand grows with n, and n -> ceil(demand(n)) is a monotone map, which has no cycles.

    Let s be the share of exposed generation in a step. If generation and training overlap, T_g is then T_t / (1 - s).
    If they take turns (maxPolicyLag 0), it is T_t s / (1 - s). The operator's autoscaler divides demand by that ratio
    (`children/autoscaler.py`).
    """

    def __init__(self) -> None:
        self._steps: deque[_ServedStep] = deque()

    def add_step(self, report: StepReport, replicas: int) -> None:
        """Add the newest step. replicas: how many serve at its end."""
        phases = report.phases
        self._steps.append(_ServedStep(phases.wall_seconds, phases.generation, report.generation_under_way, replicas))
        while (
            len(self._steps) > DEMAND_STEPS
            and sum(step.wall_s for step in self._steps) - self._steps[0].wall_s >= DEMAND_WINDOW_S
        ):
            self._steps.popleft()

    @property
    def demand(self) -> float | None:
        """The demand, in replicas. None before the first step, and if the trainer took no time."""
        trainer_s = sum(step.wall_s - step.exposed_s for step in self._steps)
        if trainer_s <= 0:
            return None
        return sum(step.replicas * step.under_way_s for step in self._steps) / trainer_s
