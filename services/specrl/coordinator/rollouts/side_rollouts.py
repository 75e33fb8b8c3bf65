"""Rollouts that belong to no training step: of validations, canaries and the initialisation of a drafter.

They bypass the scheduler and are spread over the serving replicas. No step trains them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from specrl.coordinator.context import RunContext
from specrl.coordinator.members.registry import Replica, abort_when_gone
from specrl.coordinator.members.replica_session import FinishedRollout, ReplicaSession
from specrl.coordinator.rollouts.pipeline import end_rollout_span
from specrl.errors import EngineFailed, PeerUnavailable
from specrl.records import GradedRollout, Prompt, Reward, Rollout, RolloutRequest, Sampling
from specrl.rpc.clients import GenerateOptions
from specrl.telemetry.spans import VERIFIERS, OpenSpan, SpanName


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

    keep: called with each rollout when it finishes. Rollouts of a lost replica are sampled on another one. Raises
    PeerUnavailable when no replica is left.
    """
    registry = context.registry

    def open_span(replica: Replica, request: RolloutRequest) -> OpenSpan:
        return context.spans.recorder.begin_span(SpanName.ROLLOUT, replica.replica_id, rollout=request.rollout_id)

    # Each round spreads the unfinished requests over the replicas. A second round follows if a replica is lost.
    finished: dict[str, FinishedRollout] = {}
    while len(finished) < len(requests):
        serving = registry.serving_replicas()
        if not serving:
            raise PeerUnavailable("no replica is serving; retry when one has registered")
        open_requests = [item for item in requests if item[0].rollout_id not in finished]

        async def sample_share(replica: Replica, share: list[tuple[RolloutRequest, Prompt]]) -> None:
            spans = {request.rollout_id: open_span(replica, request) for request, _ in share}
            traced = [
                (replace(request, traceparent=spans[request.rollout_id].traceparent), prompt)
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
                        finished[ended.rollout.rollout_id] = ended
                        end_rollout_span(spans[ended.rollout.rollout_id], ended)
                        if keep is not None:
                            await keep(ended.rollout)
            except (PeerUnavailable, EngineFailed) as error:
                lost_by = type(error).__name__
                registry.note_call_failure(replica, error)
            finally:
                for span in spans.values():  # spans of finished rollouts have ended; ending them again does nothing
                    span.end(lost_by)

        asked = serving[: len(open_requests)]  # a call without requests is refused
        await asyncio.gather(*(sample_share(r, open_requests[place :: len(asked)]) for place, r in enumerate(asked)))

    return [finished[request.rollout_id] for request, _ in requests]


async def sample_and_grade(
    context: RunContext, requests: Sequence[tuple[RolloutRequest, Prompt]]
) -> list[GradedRollout]:
    """Sample these requests as `sample_rollouts` does, then grade them. A rollout has no reward if its tool failed."""

    async def grade_rollout(ended: FinishedRollout, prompt: Prompt) -> GradedRollout:
        if ended.failure:
            return GradedRollout(ended.rollout, Reward(None, ended.failure))
        with context.spans.recorder.begin_span(SpanName.REWARD, VERIFIERS, rollout=ended.rollout.rollout_id):
            return GradedRollout(ended.rollout, await context.grader.grade(prompt, ended.rollout.text))

    finished = await sample_rollouts(context, requests)
    return await asyncio.gather(
        *(grade_rollout(ended, prompt) for ended, (_, prompt) in zip(finished, requests, strict=True))
    )
