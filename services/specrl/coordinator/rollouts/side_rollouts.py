"""Rollouts that belong to no training step: of validations, canaries and the initialisation of a drafter.

They bypass the scheduler and are spread over the serving replicas. No step trains them.

In validations and in the initialisation of a drafter, a malformed rollout is sampled again with another seed, and given
up after MAX_ATTEMPTS, as in a training step. A canary leaves it out, or its replica disagrees (see canary.py).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from specrl.coordinator.context import RunContext
from specrl.coordinator.members.registry import Replica, abort_when_gone
from specrl.coordinator.members.replica_session import FinishedRollout, ReplicaSession
from specrl.coordinator.rollouts.pipeline import end_rollout_span
from specrl.coordinator.rollouts.sampling import derive_seed
from specrl.coordinator.schedule.scheduler import MAX_ATTEMPTS
from specrl.errors import PeerUnavailable, RecordInvalid, SpecrlError, StoreFailed, StoreInvalid, ToolFailed
from specrl.records import GradedRollout, Prompt, Reward, Rollout, RolloutRequest, Sampling
from specrl.rpc.clients import GenerateOptions
from specrl.telemetry.spans import VERIFIERS, OpenSpan, SpanName

log = structlog.get_logger(__name__)


def make_side_requests(
    kind: str, prompts: Sequence[Prompt], samples: int, sampling: Callable[[int, int], Sampling]
) -> list[tuple[RolloutRequest, Prompt]]:
    """Make `samples` requests for each prompt. Returns them with their prompts.

    kind: prefix of the rollout ids. sampling: returns the parameters for (index of the prompt, index of the sample).
    """
    return [
        (
            RolloutRequest(
                rollout_id=f"{kind}-{place:06d}-{sample}",
                group_id=f"{kind}-{place:06d}",
                sample_index=sample,
                prompt_token_ids=prompt.token_ids,
                sampling=sampling(place, sample),
            ),
            prompt,
        )
        for place, prompt in enumerate(prompts)
        for sample in range(samples)
    ]


async def sample_rollouts(
    context: RunContext,
    requests: Sequence[tuple[RolloutRequest, Prompt]],
    keep: Callable[[Rollout], Awaitable[None]] | None = None,
) -> list[FinishedRollout]:
    """Sample these requests on the serving replicas. Returns the rollouts in request order.

    keep: called with each well-formed rollout when it finishes. A rollout that is malformed MAX_ATTEMPTS times is
    returned with a failure. Rollouts of a lost replica are sampled on another one. Raises PeerUnavailable when no
    replica is left.
    """
    registry = context.registry
    asked_for = {request.rollout_id: request for request, _ in requests}
    refusals: Counter[str] = Counter()  # by rollout id
    finished: dict[str, FinishedRollout] = {}

    def open_span(replica: Replica, request: RolloutRequest) -> OpenSpan:
        return context.spans.recorder.begin_span(SpanName.ROLLOUT, replica.replica_id, rollout=request.rollout_id)

    async def take_rollout(replica: Replica, ended: FinishedRollout) -> None:
        request = asked_for[ended.rollout.rollout_id]
        try:
            context.check_rollout(ended.rollout, len(request.prompt_token_ids), request.sampling.max_tokens)
        except RecordInvalid as error:
            log.error(
                "side_rollout_poisoned", rollout=request.rollout_id, replica=replica.replica_id, reason=str(error)
            )
            context.count_outcome("poisoned", 1)
            refusals[request.rollout_id] += 1
            if refusals[request.rollout_id] >= MAX_ATTEMPTS:
                finished[request.rollout_id] = FinishedRollout(ended.rollout, f"malformed: {error}")
            return
        finished[request.rollout_id] = ended
        if keep is not None:
            await keep(ended.rollout)

    # Each round spreads the unfinished requests over the replicas. Another round follows if a replica is lost, or if a
    # rollout is malformed.
    while len(finished) < len(requests):
        serving = registry.serving_replicas()
        if not serving:
            raise PeerUnavailable("no replica is serving; retry when one has registered")
        open_requests = [item for item in requests if item[0].rollout_id not in finished]

        async def sample_share(replica: Replica, share: list[tuple[RolloutRequest, Prompt]]) -> None:
            spans = {request.rollout_id: open_span(replica, request) for request, _ in share}
            traced = [
                (
                    replace(
                        request,
                        sampling=_choose_seed(request.sampling, refusals[request.rollout_id]),
                        traceparent=spans[request.rollout_id].traceparent,
                    ),
                    prompt,
                )
                for request, prompt in share
            ]
            lost_by = "unanswered"
            try:
                session = ReplicaSession(context.turns, replica.client.open_call())
                # Any version is accepted here. A validation checks the versions of its tokens itself.
                session.begin_rollouts(traced, GenerateOptions(admit_together=True, min_policy_version=0))
                session.close_requests()
                async with abort_when_gone(replica), aclosing(session.receive_finished()) as arrivals:
                    async for ended in arrivals:
                        end_rollout_span(spans[ended.rollout.rollout_id], ended)
                        await take_rollout(replica, ended)
            except (ToolFailed, StoreFailed, StoreInvalid):  # not the replica's fault: of the tool pool, or of `keep`
                raise
            except SpecrlError as error:
                lost_by = type(error).__name__
                registry.note_call_failure(replica, error)
            finally:
                for span in spans.values():  # spans of finished rollouts have ended; ending them again does nothing
                    span.end(lost_by)

        asked = serving[: len(open_requests)]  # a call without requests is refused
        await asyncio.gather(*(sample_share(r, open_requests[place :: len(asked)]) for place, r in enumerate(asked)))

    return [finished[request.rollout_id] for request, _ in requests]


def _choose_seed(sampling: Sampling, refusals: int) -> Sampling:
    """Return the parameters of the next attempt: the same seed would give a refused rollout again."""
    if not refusals or sampling.seed is None:
        return sampling
    return replace(sampling, seed=derive_seed(sampling.seed, refusals))


async def sample_and_grade(
    context: RunContext, requests: Sequence[tuple[RolloutRequest, Prompt]]
) -> list[GradedRollout]:
    """Sample these requests as `sample_rollouts` does, then grade them.

    A rollout has no reward if its tool failed, or if it was malformed in every attempt.
    """

    async def grade_rollout(ended: FinishedRollout, prompt: Prompt) -> GradedRollout:
        if ended.failure:
            return GradedRollout(ended.rollout, Reward(None, ended.failure))
        with context.spans.recorder.begin_span(SpanName.REWARD, VERIFIERS, rollout=ended.rollout.rollout_id):
            return GradedRollout(ended.rollout, await context.grader.grade(prompt, ended.rollout.text))

    finished = await sample_rollouts(context, requests)
    return await asyncio.gather(
        *(grade_rollout(ended, prompt) for ended, (_, prompt) in zip(finished, requests, strict=True))
    )
