"""The canary: checks after an update that each replica samples from the new weights.

Each replica samples a few short rollouts, and the trainer scores the same tokens:

    committed -> canary rollouts -> the trainer's scores -> within the bound: the replica is trusted
                                                         -> beyond it: the weights are sent again, second canary
                                                         -> beyond it again: SamplerDisagrees ends the run

A rollout with tokens or experts that the policy does not have comes from another model. The trainer cannot score it, so
its replica disagrees without a comparison.

Checksums are not enough: they show that the weights arrived, not what the engine computes with them. Nor is the
mismatch that the trainer measures in each step. It covers only tokens of the trainer's own version, and with
maxPolicyLag >= 1 a batch usually has none. The loop runs the canary right after a transfer, while the trainer still has
the version that was sent.

Invariant: no rollout is stored before the canary of its replica's version has ended, agreed or skipped. Until then the
pipeline holds the replica's finished rollouts. If the canary disagrees, the replica's record is replaced
(`Registry.replace_record`), and the held rollouts are sampled again.

Waits: `canary.timeoutS` for a replica's rollouts, which may queue behind running ones, or until the replica is lost.
`weights.timeoutS` for the scores, or until the trainer is lost. A replica that is late or lost counts as skipped or
lost, not as disagreeing. A replica whose rollouts are all malformed, such as with NaN, is skipped, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace

import structlog

from specrl.coordinator.context import RunContext
from specrl.coordinator.members.agreement import (
    LogprobComparison,
    choose_bound,
    compare_logprobs,
)
from specrl.coordinator.members.registry import Replica, Trainer, abort_when_gone
from specrl.coordinator.members.weight_transports import TrainerLost
from specrl.coordinator.rollouts.sampling import derive_seed, make_training_sampling
from specrl.coordinator.rollouts.side_rollouts import make_side_requests
from specrl.coordinator.run_events import CanariesFinished, CanaryEnded, CanaryOutcome
from specrl.errors import (
    DeadlineExceeded,
    PeerUnavailable,
    RecordInvalid,
    SamplerDisagrees,
    SpecrlError,
    TrainerFailed,
)
from specrl.records import Rollout, RolloutRequest, Sampling, TrainRollout
from specrl.telemetry.spans import COORDINATOR, SpanName

SKIPS_BEFORE_WARNING = 3
"""Skips in a row before a warning. One or two may come from long rollouts; with more, the replica goes unchecked."""

SEATS_SHARE = 8
"""At most one eighth of a replica's seats is reserved for a canary while the trainer trains."""

log = structlog.get_logger(__name__)


class CanaryRunner:
    """Runs canaries, and returns the replicas to which the weights must be sent again. Called by the loop alone."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._spec = context.spec
        self._registry = context.registry
        self._prompts = context.prompts
        self._tally = context.tally
        self._events = context.events
        self._recorder = context.spans.recorder
        self._bound = choose_bound(context.spec.canary, context.spec.model.dtype)

    @property
    def seats_to_reserve(self) -> int:
        """Seats per replica to reserve for a canary, so that it need not wait until a running rollout ends."""
        if not self._spec.canary.every_steps:
            return 0
        return min(self._spec.canary.rollouts_per_replica, self._spec.generation.max_live_rollouts // SEATS_SHARE)

    def is_due_at(self, policy_version: int, *, has_joined: bool = False) -> bool:
        """Whether a replica is checked at this version. has_joined: it was not serving before the update."""
        every = self._spec.canary.every_steps
        return every > 0 and (has_joined or policy_version % every == 0)

    async def check_replicas(
        self, trainer: Trainer, replicas: Sequence[Replica], policy_version: int, *, is_repeated: bool = False
    ) -> list[Replica]:
        """Check replicas that have committed `policy_version`. Trust those that agree, are late or are lost.

        Returns the replicas that disagree. is_repeated: the weights have been sent twice already, so the first replica
        that disagrees raises SamplerDisagrees. Raises TrainerLost.
        """
        if not replicas:
            return []
        began = time.monotonic()
        with self._recorder.begin_span(SpanName.CANARY, COORDINATOR, policy_version=policy_version):
            # Exclude the canary's drafts from the acceptance of the step: its prompts and lengths differ.
            await self._registry.fetch_statuses()
            before = self._registry.sum_speculation_counters()
            samples = await asyncio.gather(*(self._sample_replica(it, policy_version, is_repeated) for it in replicas))
            await self._registry.fetch_statuses()
            self._tally.exclude_counters(self._registry.sum_speculation_counters().minus(before))

            # One call scores the rollouts of all replicas. The trainer refuses it if one does not fit the policy.
            misfits = [self._find_misfit(sample) for sample in samples]
            scored = [[] if misfit else sample for sample, misfit in zip(samples, misfits, strict=True)]
            scores = await self._score_rollouts(trainer, [item for sample in scored for item in sample])
            disagreeing = []
            for replica, sample, misfit in zip(replicas, scored, misfits, strict=True):
                if misfit:
                    self._note_misfit(replica, misfit, policy_version, is_repeated)
                    disagreeing.append(replica)
                elif sample:
                    comparison = compare_logprobs(policy_version, sample, [scores.pop(0) for _ in sample])
                    if not self._judge_replica(replica, comparison, policy_version, is_repeated):
                        disagreeing.append(replica)
        # Replicas without a result are trusted, too: a busy replica must not stop the run.
        for replica in replicas:
            if replica not in disagreeing:
                self._registry.trust_version(replica, policy_version)
        took_s = time.monotonic() - began
        self._tally.add_canary_seconds(took_s)
        self._events.publish(CanariesFinished(took_s))
        return disagreeing

    def _judge_replica(
        self, replica: Replica, comparison: LogprobComparison, policy_version: int, is_repeated: bool
    ) -> bool:
        """Record one comparison. Returns False if the weights must be sent again.

        Raises SamplerDisagrees if they have been sent twice already.
        """
        has_agreed = comparison.is_within(self._bound)
        replica.canary = comparison
        replica.canary_skips = 0
        self._tally.add_canary(comparison)
        self._events.publish(CanaryEnded(CanaryOutcome.AGREED if has_agreed else CanaryOutcome.DISAGREED, comparison))
        facts = {
            "replica": replica.replica_id,
            "policy_version": policy_version,
            "mean_abs": comparison.mean_abs,
            "max_abs": comparison.max_abs,
            "tokens": comparison.tokens,
        }
        if has_agreed:
            log.info("canary_agreed", **facts)
            return True
        log.error("sampler_disagreed", **facts, other_versions=sorted(comparison.other_versions), repeated=is_repeated)
        if is_repeated:
            versions = f" and tokens of versions {sorted(comparison.other_versions)}" * bool(comparison.other_versions)
            raise SamplerDisagrees(
                f"log-probabilities of {replica.replica_id} at policy version {policy_version} must be within "
                f"{self._bound.mean_abs:g} nats of the trainer's on average and {self._bound.max_abs:g} at any token, "
                f"got {comparison.mean_abs:.3g} and {comparison.max_abs:.3g} over {comparison.tokens} tokens{versions} "
                "although the weights arrived twice; this engine does not compute what the trainer does: change its "
                "version or the model, or raise canary.maxMeanAbs and canary.maxAbs if the difference is rounding"
            )
        return False

    def _find_misfit(self, sample: Sequence[TrainRollout]) -> str:
        """Return why a replica's canary rollouts do not fit the policy; empty if all of them do."""
        try:
            for item in sample:
                self._context.check_policy(item.rollout, len(item.prompt_token_ids))
        except RecordInvalid as error:
            return str(error)
        return ""

    def _note_misfit(self, replica: Replica, reason: str, policy_version: int, is_repeated: bool) -> None:
        """Note that a replica's rollouts come from another model.

        Raises SamplerDisagrees if the weights have been sent twice already.
        """
        replica.canary_skips = 0
        self._events.publish(CanaryEnded(CanaryOutcome.DISAGREED))
        log.error(
            "sampler_disagreed",
            replica=replica.replica_id,
            policy_version=policy_version,
            reason=reason,
            repeated=is_repeated,
        )
        if is_repeated:
            raise SamplerDisagrees(
                f"{replica.replica_id} sampled from another model in its canary of policy version {policy_version}, "
                f"although the weights arrived twice: {reason}"
            )

    async def _sample_replica(self, replica: Replica, policy_version: int, is_repeated: bool) -> list[TrainRollout]:
        """Sample one replica's canary rollouts. Returns those that are well-formed; none if it is lost or late."""
        requests = self._make_requests(replica, policy_version, is_repeated)
        try:
            async with asyncio.timeout(self._spec.canary.timeout_s), abort_when_gone(replica):
                found = await self._receive_answers(replica, requests, policy_version)
        except TimeoutError:
            self._note_skip(replica, policy_version, is_repeated, "it did not answer in time")
            return []
        except SpecrlError as error:
            self._registry.note_call_failure(replica, error)
            self._events.publish(CanaryEnded(CanaryOutcome.LOST))
            return []
        if not found:
            self._note_skip(replica, policy_version, is_repeated, "every rollout was malformed")
        return [
            TrainRollout(request.prompt_token_ids, found[request.rollout_id], 0.0)  # scored, not trained
            for request in requests
            if request.rollout_id in found
        ]

    async def _receive_answers(
        self, replica: Replica, requests: Sequence[RolloutRequest], policy_version: int
    ) -> dict[str, Rollout]:
        """Receive the canary rollouts that are well-formed, by rollout id."""
        found = {}
        # Admitting them together stops the engine for a moment. Only a run that must repeat bit by bit needs it.
        is_synchronous = self._spec.schedule.max_policy_lag == 0
        async with aclosing(replica.client.generate_rollouts(requests, is_synchronous, policy_version)) as stream:
            async for rollout in stream:
                try:
                    rollout.check(self._max_tokens)
                    if self._spec.generation.sampling.is_truncated:
                        rollout.check_recorded_sets()
                except RecordInvalid as error:
                    log.error("canary_poisoned", replica=replica.replica_id, reason=str(error))
                else:
                    found[rollout.rollout_id] = rollout
        return found

    @property
    def _max_tokens(self) -> int:
        return min(self._spec.canary.max_tokens, self._spec.generation.sampling.max_tokens)

    def _make_requests(self, replica: Replica, policy_version: int, is_repeated: bool) -> list[RolloutRequest]:
        """Make the requests of one replica's canary.

        Prompts differ by version; seeds also by replica and repetition. So an unlikely token with a large rounding
        error does not come up again in the second canary, while wrong weights show again.
        """
        count = self._spec.canary.rollouts_per_replica
        run_seed = self._spec.schedule.seed
        name = f"canary-{policy_version}-{replica.replica_id}-{int(is_repeated)}"

        def make_sampling(place: int, _sample: int) -> Sampling:
            seed = derive_seed(run_seed, "canary", policy_version, replica.replica_id, is_repeated, place)
            return replace(make_training_sampling(self._spec, seed), max_tokens=self._max_tokens)

        prompts = [self._prompts.prompt(policy_version * count + place) for place in range(count)]
        return [request for request, _ in make_side_requests(name, prompts, 1, make_sampling)]

    def _note_skip(self, replica: Replica, policy_version: int, is_repeated: bool, reason: str) -> None:
        """Note that a replica could not be checked. It is trusted all the same, unless it disagreed just before.

        In that case it becomes STALE and must register again.
        """
        replica.canary_skips += 1
        self._events.publish(CanaryEnded(CanaryOutcome.SKIPPED))
        (log.warning if replica.canary_skips >= SKIPS_BEFORE_WARNING else log.info)(
            "canary_skipped",
            replica=replica.replica_id,
            policy_version=policy_version,
            in_a_row=replica.canary_skips,
            reason=reason,
        )
        if is_repeated:
            self._registry.note_call_failure(
                replica,
                DeadlineExceeded(
                    f"no result of the second canary of {replica.replica_id}: {reason}; it has to register again"
                ),
            )

    async def _score_rollouts(self, trainer: Trainer, rollouts: Sequence[TrainRollout]) -> list[list[float]]:
        """Return the trainer's log-probabilities of each rollout's sampled tokens, in nats. Raises TrainerLost."""
        if not rollouts:
            return []
        try:
            async with abort_when_gone(trainer):
                return await trainer.client.score_rollouts(rollouts, float(self._spec.weights.timeout_s))
        except (PeerUnavailable, DeadlineExceeded, TrainerFailed) as error:
            raise TrainerLost(str(error)) from error
