"""Accuracy and pass@k on held-out problems, all of it under one policy version.

The version is pinned because the loop publishes no other while a validation is under way; that every token really came
from it is checked, not assumed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from specrl.coordinator.parts import Parts
from specrl.coordinator.pass_rates import pass_rates
from specrl.coordinator.report import ValidationReport
from specrl.coordinator.rollouts import sample_and_grade, seed_of, side_requests
from specrl.errors import VersionConflict
from specrl.records import Sampling
from specrl.spec import RunSpec
from specrl.telemetry.spans import COORDINATOR, SpanName

log = structlog.get_logger(__name__)


def is_due(spec: RunSpec, policy_version: int) -> bool:
    """Before the first step, every so many steps, and after the last."""
    if spec.validation is None:
        return False
    return policy_version % spec.validation.every_steps == 0 or policy_version == spec.schedule.steps


async def validate(parts: Parts, policy_version: int) -> ValidationReport:
    """Answer and grade every validation prompt under `policy_version`.

    Raises VersionConflict when a token came from another version, PeerUnavailable when no replica is left.
    """
    spec, prompts = parts.spec, parts.validation_prompts
    validation = spec.validation
    assert validation is not None, "the loop asks is_due first"
    began = time.monotonic()

    def sampling(place: int, sample: int) -> Sampling:
        return Sampling(
            max_tokens=spec.generation.sampling.max_tokens,
            temperature=float(validation.sampling.temperature),
            seed=seed_of(spec.schedule.seed, "validation", place, sample),
            stop=spec.generation.sampling.stop,
        )

    samples = validation.sampling.samples_per_prompt
    requests = side_requests(f"validation-{policy_version}", prompts, samples, sampling)
    with parts.spans.recorder.begin(SpanName.VALIDATION, COORDINATOR, policy_version=policy_version):
        graded = await sample_and_grade(parts, parts.grader, requests)
    for item in graded:
        if {span.policy_version for span in item.rollout.versions} != {policy_version}:
            raise VersionConflict(
                f"validation must run under one policy version, got {item.rollout.versions} for {policy_version}"
            )
    values = [item.reward.value for item in graded if item.reward.value is not None]
    ungraded = len(graded) - len(values)
    if ungraded:
        log.error("validation_ungraded", policy_version=policy_version, ungraded=ungraded)
    return ValidationReport(
        policy_version=policy_version,
        accuracy=sum(values) / max(len(values), 1),
        problems=len(prompts),
        seconds=time.monotonic() - began,
        pass_at=pass_rates(_counts([item.reward.value for item in graded], samples)),
        ungraded=ungraded,
    )


def _counts(rewards: Sequence[float | None], samples: int) -> list[tuple[int, int]]:
    """Of each problem, whose answers stand together: graded ones, and those of them that are right."""
    known = [[it for it in rewards[i : i + samples] if it is not None] for i in range(0, len(rewards), samples)]
    return [(len(values), sum(value >= 1 for value in values)) for values in known]
