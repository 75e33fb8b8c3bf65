"""Calls the trainer, and recovers it after a failure. Used by the loop and by the drafter's initialisation.

    ABSENT --registers--> REGISTERED --first call--> RECOVERING --replay of stored batches--> READY <-> TRAINING
    any --call fails, a rank is lost, or heartbeats stop--> ABSENT

A restarted trainer starts at its newest checkpoint. The steps after it are replayed from the batches in the store: the
same batches in the same order give the same weights.

While the trainer is absent, every call waits until one registers. The wait has no limit; `Registry.changed` wakes it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from specrl.coordinator.ledger.ledger import Ledger
from specrl.coordinator.members.registry import Registry, Trainer, abort_when_gone
from specrl.errors import DeadlineExceeded, PeerUnavailable, RunInvalid
from specrl.records import Batch, TrainerStatus, TrainMetrics
from specrl.telemetry import metrics
from specrl.telemetry.spans import SILENT_RECORDER, TRAINER, Recorder, SpanName

STEP_DEADLINE_S = 3600.0
"""Deadline of one training step. Only for a trainer that hangs: heartbeats detect a dead one much earlier."""

CHECKPOINT_DEADLINE_S = 900.0
"""Deadline of one checkpoint or export call. Heartbeats detect a dead trainer much earlier."""

log = structlog.get_logger(__name__)


class TrainerLink:
    """Calls the trainer, and repeats a call when the trainer is lost.

    recoveries: how often a trainer was recovered, in this process.
    """

    def __init__(self, run: str, registry: Registry, ledger: Ledger, recorder: Recorder = SILENT_RECORDER) -> None:
        self._run = run
        self._registry = registry
        self._ledger = ledger
        self._recorder = recorder
        self._prepared: str | None = None  # incarnation of the trainer that was recovered last
        self._state = "registered"  # of the trainer that is there
        self.recoveries = 0

    @property
    def state(self) -> str:
        """Tell what the trainer does: absent, registered (not used yet), recovering, ready or training."""
        return "absent" if self._registry.trainer is None else self._state

    async def wait_until_ready(self) -> Trainer:
        """Return the trainer once it is at the last step that the store has as trained, or one step after it."""
        while True:
            trainer = await self._wait_for_trainer()
            if trainer.peer.incarnation == self._prepared:
                return trainer
            try:
                async with abort_when_gone(trainer):
                    await self._replay_lost_steps(trainer)
                self._prepared = trainer.peer.incarnation
                self._state = "ready"
                return trainer
            except (PeerUnavailable, DeadlineExceeded) as error:
                self._note_loss(trainer, error)

    async def fetch_status(self) -> TrainerStatus:
        """Fetch the status of the recovered trainer."""
        return await self.call_with_recovery(lambda trainer: trainer.client.get_status())

    async def fetch_unrecovered_status(self) -> TrainerStatus:
        """Fetch the status of the first trainer that registers, without recovering it. Used when the store is empty."""
        while True:
            trainer = await self._wait_for_trainer()
            try:
                async with abort_when_gone(trainer):
                    return await trainer.client.get_status()
            except (PeerUnavailable, DeadlineExceeded) as error:
                self._note_loss(trainer, error)

    async def train_batch(self, batch: Batch) -> TrainMetrics:
        """Train the step of this batch. If the trainer is lost, the next one recovers and trains it."""
        with self._recorder.begin_span(SpanName.TRAIN_STEP, TRAINER, rollouts=len(batch.rollouts)) as span:
            metrics = await self.call_with_recovery(
                lambda trainer: trainer.client.train_step(batch, STEP_DEADLINE_S), "training"
            )
            span.add_attributes(tokens=metrics.tokens)
            span.end_with_parts((SpanName.LOGPROB, metrics.logprob_seconds), (SpanName.TRAIN, metrics.train_seconds))
            return metrics

    async def call_with_recovery[T](self, work: Callable[[Trainer], Awaitable[T]], state: str = "ready") -> T:
        """Run `work` on the recovered trainer. Whenever the trainer is lost, recover the next one and run it again.

        So `work` must be idempotent. `state` is shown meanwhile.
        """
        while True:
            trainer = await self.wait_until_ready()
            self._state = state
            try:
                async with abort_when_gone(trainer):
                    return await work(trainer)
            # Only the loss of the trainer is retried. Other errors would come again with the same request.
            except (PeerUnavailable, DeadlineExceeded) as error:
                self._note_loss(trainer, error)
            finally:
                self._state = "ready" if self._state == state else self._state  # unless `_note_loss` has set it

    async def _wait_for_trainer(self) -> Trainer:
        while self._registry.trainer is None:
            self._registry.changed.clear()
            await self._registry.changed.wait()
        return self._registry.trainer

    async def _replay_lost_steps(self, trainer: Trainer) -> None:
        """Replay the steps that the trainer has lost.

        Raises RunInvalid if the trainer is more than one step ahead of the store, or if a batch that it needs is no
        longer stored.
        """
        self._state = "recovering"
        trained = self._ledger.last_trained_step
        step = (await trainer.client.get_status()).step
        if self._prepared is not None or step != trained:
            self.recoveries += 1
            metrics.TRAINER_RECOVERIES.labels(self._run).inc()
            log.info("trainer_recovery_begun", step=step, trained=trained)
        # One step ahead is normal: the coordinator died after the trainer finished a step and before it was recorded.
        if step > trained + 1:
            raise RunInvalid(
                f"the trainer's step must be {trained}, as in the store, or one more, got step={step}; "
                "its checkpoints belong to another run: start in a new run directory"
            )
        for replayed in range(step + 1, trained + 1):
            batch = await self._ledger.read_batch(replayed)
            if batch is None:
                raise RunInvalid(
                    f"the batch of step {replayed} must be stored, to replay it on a trainer at step {step}, got none; "
                    "restore the newer checkpoint that was removed"
                )
            with self._recorder.begin_span(SpanName.REPLAY, TRAINER, replayed=replayed):
                await trainer.client.train_step(batch, STEP_DEADLINE_S)
            log.info("step_replayed", step=replayed)

    def _note_loss(self, trainer: Trainer, error: Exception) -> None:
        if self._registry.trainer is trainer:
            self._registry.lose_trainer(str(error))
        self._state = "registered"
