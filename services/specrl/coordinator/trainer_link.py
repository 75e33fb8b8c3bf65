"""The coordinator's hold on the trainer: waits for one, brings it up to date, repeats what a lost one had not finished.

    ABSENT --registers--> RECOVERING --replay of stored batches--> READY <-> TRAINING
    any --call fails, a rank is lost, or heartbeats stop--> ABSENT

A trainer that comes back stands at its newest checkpoint. The steps after it are replayed from the batches in the
store: the same batches in the same order give the same weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from specrl.coordinator.registry import Registry, Trainer, while_there
from specrl.coordinator.store_link import StoreLink
from specrl.errors import DeadlineExceeded, PeerUnavailable, RunInvalid
from specrl.records import Batch, TrainerStatus, TrainMetrics, wire
from specrl.telemetry import metrics
from specrl.telemetry.spans import SILENT, TRAINER, Recorder, SpanName

STEP_DEADLINE_S = 3600.0
"""A step that takes longer is taken for hung; heartbeats notice a dead trainer long before."""


log = structlog.get_logger(__name__)


class TrainerLink:
    """Calls to the trainer that survive the trainer."""

    def __init__(self, run: str, registry: Registry, store: StoreLink, recorder: Recorder = SILENT) -> None:
        self._run, self._registry, self._store = run, registry, store
        self._recorder = recorder
        self._prepared: str | None = None
        self.state = "absent"
        self.recoveries = 0

    async def ready(self) -> Trainer:
        """The live trainer, standing at the last step that the store calls trained. Waits for one to register."""
        while True:
            trainer = await self._present()
            if trainer.peer.incarnation == self._prepared:
                return trainer
            try:
                await self._bring_up_to_date(trainer)
                self._prepared, self.state = trainer.peer.incarnation, "ready"
                return trainer
            except (PeerUnavailable, DeadlineExceeded) as error:
                self._lost(trainer, error)

    async def status(self) -> TrainerStatus:
        """The trainer's own view of itself."""
        return await self.call(lambda trainer: trainer.client.status())

    async def found(self) -> TrainerStatus:
        """Where the trainer stands that is there first, whatever the store says."""
        while True:
            trainer = await self._present()
            try:
                async with while_there(trainer):
                    return await trainer.client.status()
            except (PeerUnavailable, DeadlineExceeded) as error:
                self._lost(trainer, error)

    async def train(self, batch: Batch) -> TrainMetrics:
        """Train the batch's step, on another incarnation of the trainer if need be."""
        with self._recorder.begin(SpanName.TRAIN_STEP, TRAINER, rollouts=len(batch.rollouts)) as span:
            metrics = await self.call(lambda trainer: trainer.client.train_step(batch, STEP_DEADLINE_S), "training")
            span.note(tokens=metrics.tokens)
            span.end_in((SpanName.LOGPROB, metrics.logprob_seconds), (SpanName.TRAIN, metrics.train_seconds))
            return metrics

    async def call[T](self, work: Callable[[Trainer], Awaitable[T]], state: str = "ready") -> T:
        """Run `work` on a trainer that is up to date; once more from the start whenever the trainer is lost."""
        while True:
            trainer = await self.ready()
            self.state = state
            try:
                async with while_there(trainer):
                    return await work(trainer)
            except (PeerUnavailable, DeadlineExceeded) as error:
                self._lost(trainer, error)
            finally:
                self.state = "ready" if self.state == state else self.state

    async def _present(self) -> Trainer:
        while self._registry.trainer is None:
            self.state = "absent"
            self._registry.changed.clear()
            await self._registry.changed.wait()
        return self._registry.trainer

    async def _bring_up_to_date(self, trainer: Trainer) -> None:
        """Replay what the trainer lost. Raises RunInvalid when it stands where the store's steps cannot lead."""
        self.state = "recovering"
        trained = self._store.trained()
        step = (await trainer.client.status()).step
        if self._prepared is not None or step != trained:
            self.recoveries += 1
            metrics.TRAINER_RECOVERIES.labels(self._run).inc()
            log.info("trainer_recovery_begun", step=step, trained=trained)
        if step > trained + 1:
            raise RunInvalid(
                f"the trainer must stand at the store's step {trained} or one after it, got step={step}; "
                "its checkpoints belong to another run: start in a new run directory"
            )
        for replayed in range(step + 1, trained + 1):
            batch = await stored_batch(self._store, replayed)
            if batch is None:
                raise RunInvalid(
                    f"the trainer must stand at a step whose successors are stored, got step={step} but no batch of "
                    f"step {replayed}; restore the checkpoint that was removed"
                )
            with self._recorder.begin(SpanName.REPLAY, TRAINER, replayed=replayed):
                await trainer.client.train_step(batch, STEP_DEADLINE_S)
            log.info("step_replayed", step=replayed)

    def _lost(self, trainer: Trainer, error: Exception) -> None:
        if self._registry.trainer is trainer:
            self._registry.lose_trainer(str(error))
        self.state = "absent"


async def stored_batch(store: StoreLink, step: int) -> Batch | None:
    """What step `step` trains or trained on, whole, while it is kept."""
    data = await store.batch(step)
    return None if data is None else wire.batch_from_stored(data, await store.batch_rollouts(step))
