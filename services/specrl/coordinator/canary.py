"""The canary: after an update, a few short rollouts of every replica are re-scored by the trainer.

    committed -> rollouts of this version -> the trainer's scores -> agrees: trusted
                                                                  -> beyond the bound: started over (below), asked again
                                                                  -> beyond it again: SamplerDisagrees ends the run

Checksums prove what arrived, not what an engine computes with it; and the mismatch of a training step is over tokens of
the trainer's own version, of which there are none in steady state with maxPolicyLag >= 1. So the loop asks here after
every transfer, while the trainer still stands at the version that was sent, at any lag.

A rollout that a replica finishes between its commit and the verdict is held by its line (`RolloutStage`); when the
verdict is bad the replica starts over: its line ends, what it held is asked again, and nothing of it was stored.

Waits: a replica's rollouts for `canary.timeoutS`, since they may queue behind running ones, or until the replica is
gone; the scores for `weights.timeoutS`, or until the trainer is gone. Neither a lost replica nor a late one disagrees.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from enum import StrEnum

import structlog

from specrl.coordinator.agreement import Comparison, Verdict, bound_of, compare, judge
from specrl.coordinator.parts import Parts
from specrl.coordinator.registry import Replica, Trainer
from specrl.coordinator.rollouts import seed_of, side_requests, training_sampling
from specrl.coordinator.sync import TrainerLost
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
"""In a row: one or two are rollouts that happened to be long, more of them leave a replica unwatched."""

SEATS_SHARE = 8
"""At most one in so many of a replica's seats is kept free for a canary while the trainer trains."""

log = structlog.get_logger(__name__)


class Outcome(StrEnum):
    """How one replica's canary ended; the label of the metric that counts them."""

    AGREED = "agreed"
    DISAGREED = "disagreed"
    SKIPPED = "skipped"
    LOST = "lost"


class Canary:
    """Asks replicas, compares, and says who must be sent the weights again. Called by the loop alone."""

    def __init__(self, parts: Parts) -> None:
        self._spec, self._registry = parts.spec, parts.registry
        self._prompts, self._board = parts.prompts, parts.board
        self._recorder = parts.spans.recorder
        self._bound = bound_of(parts.spec.canary, parts.spec.model.dtype)

    @property
    def seats(self) -> int:
        """Seats of a replica to keep free before a canary, so that it need not wait for a rollout to end."""
        if not self._spec.canary.every_steps:
            return 0
        return min(self._spec.canary.rollouts_per_replica, self._spec.generation.max_live_rollouts // SEATS_SHARE)

    def is_due(self, policy_version: int, *, has_joined: bool = False) -> bool:
        """Whether a replica is asked about this version; has_joined: it has served none before."""
        every = self._spec.canary.every_steps
        return every > 0 and (has_joined or policy_version % every == 0)

    async def prove(
        self, trainer: Trainer, replicas: Sequence[Replica], policy_version: int, *, is_repeated: bool = False
    ) -> list[Replica]:
        """Ask replicas that have committed `policy_version`; trust those that agree, or that cannot be asked now.

        Returns those to which the weights must be sent again. With is_repeated they have been: the first one that
        disagrees raises SamplerDisagrees. Raises TrainerLost.
        """
        if not replicas:
            return []
        with self._recorder.begin(SpanName.CANARY, COORDINATOR, policy_version=policy_version):
            return await self._prove(trainer, replicas, policy_version, is_repeated)

    async def _prove(
        self, trainer: Trainer, replicas: Sequence[Replica], policy_version: int, is_repeated: bool
    ) -> list[Replica]:
        began = time.monotonic()
        await self._registry.refresh()
        before = self._registry.speculation()
        samples = await asyncio.gather(*(self._sample(replica, policy_version, is_repeated) for replica in replicas))
        await self._registry.refresh()
        self._board.leave_out(self._registry.speculation().minus(before))
        asked = [(replica, sample) for replica, sample in zip(replicas, samples, strict=True) if sample]
        scores = await self._score(trainer, [item for _, sample in asked for item in sample])
        doubtful = []
        for replica, sample in asked:
            comparison = compare(policy_version, sample, [scores.pop(0) for _ in sample])
            if not self._agrees(replica, comparison, policy_version, is_repeated):
                doubtful.append(replica)
        for replica in replicas:
            if replica not in doubtful:
                self._registry.trust(replica, policy_version)
        self._board.canary_took(time.monotonic() - began)
        return doubtful

    def _agrees(self, replica: Replica, comparison: Comparison, policy_version: int, is_repeated: bool) -> bool:
        """Note one comparison. False when the weights must be sent again; raises SamplerDisagrees when they were."""
        verdict = judge(comparison, self._bound, is_repeated=is_repeated)
        outcome = Outcome.AGREED if verdict is Verdict.AGREES else Outcome.DISAGREED
        replica.canary, replica.canary_skips = comparison, 0
        self._board.canary_compared(comparison)
        self._board.canary_ended(outcome)
        facts = {
            "replica": replica.replica_id,
            "policy_version": policy_version,
            "mean_abs": comparison.mean_abs,
            "max_abs": comparison.max_abs,
            "tokens": comparison.tokens,
        }
        if verdict is Verdict.AGREES:
            log.info("canary_agreed", **facts)
            return True
        log.error("sampler_disagreed", **facts, other_versions=sorted(comparison.other_versions), repeated=is_repeated)
        if verdict is Verdict.END:
            versions = f" and tokens of versions {sorted(comparison.other_versions)}" * bool(comparison.other_versions)
            raise SamplerDisagrees(
                f"{replica.replica_id} must sample from policy version {policy_version} as the trainer has it, within "
                f"{self._bound.mean_abs:g} nats on average and {self._bound.max_abs:g} at any token, got "
                f"{comparison.mean_abs:.3g} and {comparison.max_abs:.3g} over {comparison.tokens} tokens{versions}, "
                "after the weights were sent twice and arrived; this engine must not be trained on: change its version "
                "or the model, or raise canary.maxMeanAbs and canary.maxAbs if the difference is known to be rounding"
            )
        return False

    async def _sample(self, replica: Replica, policy_version: int, is_repeated: bool) -> list[TrainRollout]:
        """One replica's canary rollouts, as many as may be compared; none when it is lost or late."""
        requests = self._requests(replica, policy_version, is_repeated)
        answering = asyncio.ensure_future(self._answers(replica, requests, policy_version))
        gone = asyncio.ensure_future(replica.gone.wait())
        try:
            await asyncio.wait(
                {answering, gone}, timeout=self._spec.canary.timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if answering.done():
                found = answering.result()
                if found:
                    return [
                        TrainRollout(request.prompt_token_ids, found[request.rollout_id], 0.0)
                        for request in requests
                        if request.rollout_id in found
                    ]
                self._skipped(replica, policy_version, is_repeated, "every rollout was poisoned")
            elif gone.done():
                self._board.canary_ended(Outcome.LOST)
            else:
                self._skipped(replica, policy_version, is_repeated, "it did not answer in time")
        except SpecrlError as error:
            self._registry.fail(replica, error)
            self._board.canary_ended(Outcome.LOST)
        finally:
            gone.cancel()
            answering.cancel()
            await asyncio.gather(gone, answering, return_exceptions=True)
        return []

    async def _answers(
        self, replica: Replica, requests: Sequence[RolloutRequest], policy_version: int
    ) -> dict[str, Rollout]:
        """The rollouts that keep a rollout's own rules, by name. Admitted together only where runs repeat bit by bit:
        it halts the engine for a moment."""
        found = {}
        is_synchronous = self._spec.schedule.max_policy_lag == 0
        async with aclosing(replica.client.generate(requests, is_synchronous, policy_version)) as stream:
            async for rollout in stream:
                try:
                    rollout.check(self._max_tokens)
                except RecordInvalid as error:
                    log.error("canary_poisoned", replica=replica.replica_id, reason=str(error))
                else:
                    found[rollout.rollout_id] = rollout
        return found

    @property
    def _max_tokens(self) -> int:
        return min(self._spec.canary.max_tokens, self._spec.generation.sampling.max_tokens)

    def _requests(self, replica: Replica, policy_version: int, is_repeated: bool) -> list[RolloutRequest]:
        """Other prompts at every version, other seeds at every replica and when repeated: then a single token that was
        unlucky does not come again, and a wrong policy does."""
        count = self._spec.canary.rollouts_per_replica
        name = f"canary-{policy_version}-{replica.replica_id}-{int(is_repeated)}"

        def sampling(place: int, _sample: int) -> Sampling:
            seed = seed_of(self._spec.schedule.seed, "canary", policy_version, replica.replica_id, is_repeated, place)
            return replace(training_sampling(self._spec, seed), max_tokens=self._max_tokens)

        prompts = [self._prompts.prompt(policy_version * count + place) for place in range(count)]
        return [request for request, _ in side_requests(name, prompts, 1, sampling)]

    def _skipped(self, replica: Replica, policy_version: int, is_repeated: bool, reason: str) -> None:
        """Let it pass, unless it disagreed just before: then it serves again only after it has joined anew."""
        replica.canary_skips += 1
        self._board.canary_ended(Outcome.SKIPPED)
        say = log.warning if replica.canary_skips >= SKIPS_BEFORE_WARNING else log.info
        say(
            "canary_skipped",
            replica=replica.replica_id,
            policy_version=policy_version,
            in_a_row=replica.canary_skips,
            reason=reason,
        )
        if is_repeated:
            self._registry.fail(
                replica,
                DeadlineExceeded(
                    f"{replica.replica_id} must answer the repeated canary, got none ({reason}); it joins anew"
                ),
            )

    async def _score(self, trainer: Trainer, rollouts: Sequence[TrainRollout]) -> list[list[float]]:
        """The trainer's log-probabilities of each rollout. Raises TrainerLost."""
        if not rollouts:
            return []
        scoring = asyncio.ensure_future(trainer.client.score(rollouts, float(self._spec.weights.timeout_s)))
        gone = asyncio.ensure_future(trainer.gone.wait())
        try:
            await asyncio.wait({scoring, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise TrainerLost("the trainer must stay, got lost while it scored the canary; it is asked again")
            return scoring.result()
        except (PeerUnavailable, DeadlineExceeded, TrainerFailed) as error:
            raise TrainerLost(str(error)) from error
        finally:
            gone.cancel()
            scoring.cancel()
            await asyncio.gather(gone, scoring, return_exceptions=True)
