"""Validation: mean reward and pass@k on held-out problems, all under one policy version.

Invariant: every token comes from that version. The loop publishes no other version during a validation, and the
versions of all tokens are checked.

An answer without a reward counts as 0. If it were left out, a policy would look better the more answers it gives on
which the verifier fails.

Called by the loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import structlog

from specrl.coordinator.context import RunContext
from specrl.coordinator.rollouts.learnable import find_reward_fault
from specrl.coordinator.rollouts.sampling import derive_seed
from specrl.coordinator.rollouts.side_rollouts import make_side_requests, sample_and_grade
from specrl.errors import VersionConflict
from specrl.formats.reasons import ReasonCounts, format_reasons
from specrl.formats.reports import ValidationReport
from specrl.formats.statistics.mean_reward import student_interval
from specrl.formats.statistics.pass_rates import estimate_pass_rates
from specrl.records import Prompt, Reward, RolloutRequest, Sampling
from specrl.rewards.verifier_set import average_named_rewards
from specrl.spec import RunSpec
from specrl.spec.data import ValidationSampling
from specrl.telemetry.spans import COORDINATOR, SpanName

log = structlog.get_logger(__name__)


def is_validation_due(spec: RunSpec, policy_version: int) -> bool:
    """Whether to validate this version: version 0, every validation.everySteps versions, and the last one."""
    if spec.validation is None:
        return False
    return policy_version % spec.validation.every_steps == 0 or policy_version == spec.schedule.steps


@dataclass(frozen=True)
class ValidationPart:
    """The requests of one source: `samples` of its first problem, then of the second, and so on."""

    source: str
    samples: int
    requests: Sequence[tuple[RolloutRequest, Prompt]]


def plan_validation(spec: RunSpec, prompts: Sequence[Prompt], policy_version: int) -> list[ValidationPart]:
    """Make the requests of a validation, by source. prompts: of all sources; each names its own."""
    assert spec.validation is not None, "the loop asks is_validation_due first"
    training = spec.generation.sampling
    parts: list[ValidationPart] = []
    for given in spec.validation.all_sets:
        # A single source has the ids and seeds that it would have in a list of its own.
        place = () if spec.validation.source is not None else (given.name,)

        def make_sampling(
            index: int, sample: int, own: ValidationSampling = given.sampling, place: Sequence[str] = place
        ) -> Sampling:
            return Sampling(
                max_tokens=own.max_tokens or training.max_tokens,
                temperature=float(own.temperature),
                top_p=float(training.top_p),
                top_k=training.top_k,
                # The same seeds for every version, so that two validations differ by their policies alone.
                seed=derive_seed(spec.schedule.seed, "validation", *place, index, sample),
                stop=training.stop,
            )

        kind = "-".join((f"validation-{policy_version}", *place))
        samples = given.sampling.samples_per_prompt
        asked = [prompt for prompt in prompts if prompt.source == given.name]
        parts.append(ValidationPart(given.name, samples, make_side_requests(kind, asked, samples, make_sampling)))
    return parts


async def validate_version(context: RunContext, policy_version: int) -> ValidationReport:
    """Sample and grade answers to every validation prompt under `policy_version`.

    Raises VersionConflict when a token comes from another version, and PeerUnavailable when no replica is left.
    """
    began = time.monotonic()
    parts = plan_validation(context.spec, context.validation_prompts, policy_version)
    requests = [request for part in parts for request in part.requests]
    with context.spans.recorder.begin_span(SpanName.VALIDATION, COORDINATOR, policy_version=policy_version):
        graded = await sample_and_grade(context, requests)
    for item in graded:
        # An answer without a reward may be malformed, and then its versions mean nothing.
        if item.reward.value is not None and {span.policy_version for span in item.rollout.versions} != {
            policy_version
        }:
            raise VersionConflict(
                f"validation must sample from policy version {policy_version} alone, got {item.rollout.versions}; "
                "this is a bug"
            )
    report = summarise_parts(parts, [item.reward for item in graded], policy_version)
    if report.failures:
        log.error(
            "validation_answers_failed",
            policy_version=policy_version,
            failed=report.failed_count,
            answers=report.answers,
            reasons=format_reasons(report.failures),
        )
    return report.model_copy(update={"seconds": time.monotonic() - began})


def summarise_parts(
    parts: Sequence[ValidationPart], rewards: Sequence[Reward], policy_version: int
) -> ValidationReport:
    """Build the report of a validation, with one for each source if there are several. rewards: in request order.

    In the report of the whole, every problem counts the same, however many answers it has.
    """
    remaining = iter(rewards)
    by_source = {part.source: _split_by_problem(list(islice(remaining, len(part.requests))), part) for part in parts}
    whole = summarise_problems([problem for problems in by_source.values() for problem in problems], policy_version)
    if len(parts) == 1:
        return whole
    sources = {name: summarise_problems(problems, policy_version) for name, problems in by_source.items() if problems}
    return whole.model_copy(update={"sources": sources})


def _split_by_problem(rewards: Sequence[Reward], part: ValidationPart) -> list[Sequence[Reward]]:
    return [rewards[place : place + part.samples] for place in range(0, len(rewards), part.samples)]


def summarise_problems(problems: Sequence[Sequence[Reward]], policy_version: int) -> ValidationReport:
    """Build the report of problems, each with the rewards of its answers.

    Intervals are at 95 %, over problems: for rewards of 0 and 1 that of pass@1, otherwise that of the mean reward.
    """
    rewards = [reward for answers in problems for reward in answers]
    by_problem = [[reward.value or 0.0 for reward in answers] for answers in problems]
    means = [sum(answers) / len(answers) for answers in by_problem]
    is_right_or_wrong = all(value in (0.0, 1.0) for answers in by_problem for value in answers)
    counts = [(len(answers), int(sum(answers))) for answers in by_problem]
    rates = estimate_pass_rates(counts) if is_right_or_wrong else []
    ends = (rates[0].low, rates[0].high) if rates else student_interval(means)
    return ValidationReport(
        policy_version=policy_version,
        reward=sum(means) / max(len(means), 1),
        reward_low=ends[0] if ends is not None else None,
        reward_high=ends[1] if ends is not None else None,
        rewards=average_named_rewards(rewards),
        problems=len(by_problem),
        answers=len(rewards),
        seconds=0.0,
        pass_at=rates,
        ungraded=sum(reward.value is None for reward in rewards),
        failures=ReasonCounts(fault for reward in rewards if (fault := find_reward_fault(reward))).by_reason,
    )
