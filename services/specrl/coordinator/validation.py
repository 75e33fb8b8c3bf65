"""Mean reward and pass@k on held-out problems, all of it under one policy version.

The version is pinned because the loop publishes no other while a validation is under way; that every token really came
from it is checked, not assumed.

Every answer counts. One that has no reward counts as 0: were it left out, a policy would look the better the more
answers it gives that no verifier copes with.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from specrl.coordinator.learnable import fault_of
from specrl.coordinator.mean_reward import mean_interval
from specrl.coordinator.parts import Parts
from specrl.coordinator.pass_rates import pass_rates
from specrl.coordinator.reasons import Reasons, reasons_in_words
from specrl.coordinator.report import ValidationReport
from specrl.coordinator.rollouts import sample_and_grade, seed_of, side_requests
from specrl.errors import VersionConflict
from specrl.records import Reward, Sampling
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
    report = summarise_rewards([item.reward for item in graded], samples, policy_version)
    if report.failures:
        log.error(
            "validation_answers_failed",
            policy_version=policy_version,
            failed=report.failed,
            answers=report.answers,
            reasons=reasons_in_words(report.failures),
        )
    return report.model_copy(update={"seconds": time.monotonic() - began})


def summarise_rewards(rewards: Sequence[Reward], samples: int, policy_version: int) -> ValidationReport:
    """Report a validation's rewards. rewards: `samples` of each problem, which stand together."""
    values = [reward.value or 0.0 for reward in rewards]
    by_problem = [values[place : place + samples] for place in range(0, len(values), samples)]
    is_right_or_wrong = all(value in (0.0, 1.0) for value in values)
    rates = pass_rates([(samples, int(sum(answers))) for answers in by_problem]) if is_right_or_wrong else []
    ends = (rates[0].low, rates[0].high) if rates else mean_interval([sum(it) / samples for it in by_problem])
    return ValidationReport(
        policy_version=policy_version,
        reward=sum(values) / max(len(values), 1),
        reward_low=ends[0] if ends is not None else None,
        reward_high=ends[1] if ends is not None else None,
        problems=len(by_problem),
        answers=len(values),
        seconds=0.0,
        pass_at=rates,
        ungraded=sum(reward.value is None for reward in rewards),
        failures=Reasons(fault for reward in rewards if (fault := fault_of(reward))).counts,
    )
