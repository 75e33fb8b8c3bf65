"""The story of a run. Read this first.

    wait for trainer and replicas; a store that knows nothing takes up where the trainer's checkpoint stands
    publish version 0; initialise the drafter on the policy's own rollouts; publish again
    for each step s:
        generation   wait until P groups can be chosen for step s            (rollouts.py fills them all the while)
        data         assemble the batch, make it durable
        logprob+train   one call to the trainer, idempotent by s
        prepare      publish version s of policy and drafter to every replica, and have the canary prove it
        validation   now and then, under exactly one version
        checkpoint   now and then: a snapshot, which the trainer writes while the next steps are trained
    export, summarise

A step without a verdict to learn from ends the run with the reason, after a checkpoint (learnable.py). Nothing of that
step is durable then but its rollouts, so a run that is resumed with a repaired verifier tries it again.

Everything is durable before it is acted on: rollouts when graded, a batch before it is sent, a step before its version
is published. So a coordinator that is killed anywhere starts this function again and goes on where the store ends;
while the store is away, every `await` of it waits (store_link.py).

People may pause the run, or ask for a checkpoint: that is looked at while a step is collected, and once more before it
is trained (`_do_as_asked`).

With maxPolicyLag 0 the gate is closed from the moment a step is collected until its version serves and validates;
with more it never closes, and what bounds the lag is the scheduler: what may start, and what a step must take.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

import structlog

from specrl.batching import assemble
from specrl.coordinator import drafter_start
from specrl.coordinator.board import CHECKPOINTS, TrainedStep
from specrl.coordinator.canary import Canary
from specrl.coordinator.continuation import place_of, take_up
from specrl.coordinator.learnable import check_learnable
from specrl.coordinator.order import deadlines
from specrl.coordinator.parts import Parts
from specrl.coordinator.registry import Replica, Trainer, while_there
from specrl.coordinator.replica_states import COMMITTED, ReplicaState
from specrl.coordinator.report import Phase, ValidationReport
from specrl.coordinator.rollouts import PROVED_VERSION, RolloutStage, sample_and_grade
from specrl.coordinator.scheduler import Choice, Scheduler, Shape
from specrl.coordinator.stages import Stopwatch
from specrl.coordinator.sync import TrainerLost, Transfer, WeightSync
from specrl.coordinator.trainer_link import TrainerLink, stored_batch
from specrl.coordinator.validation import is_due, validate
from specrl.errors import (
    CollectiveFailed,
    DeadlineExceeded,
    NothingGraded,
    PeerUnavailable,
    SpecrlError,
    StoreFailed,
    VersionConflict,
)
from specrl.records import Batch, GradedRollout, Group, Rollout, StreamPlace, wire
from specrl.telemetry.spans import COORDINATOR, TRAINER, SpanName

GATHERING_PATIENCE_S = 300.0
"""How long a run waits for all of its replicas before it starts with those that are there."""

CHECKPOINT_DEADLINE_S = 900.0

log = structlog.get_logger(__name__)


class Loop:
    """One run, from its store to its end."""

    def __init__(self, parts: Parts) -> None:
        spec, schedule = parts.spec, parts.spec.schedule
        shape = Shape(schedule.steps, schedule.prompts_per_step, schedule.group_size, schedule.max_policy_lag)
        self._parts, self._spec = parts, spec
        self._registry, self._store, self._board = parts.registry, parts.store, parts.board
        self._spans, self._recorder = parts.spans, parts.spans.recorder
        self._scheduler: Scheduler[GradedRollout] = Scheduler(
            shape, deadlines(schedule.order), parts.board.progress(shape.prompts_per_step)
        )
        self._stage = RolloutStage(parts, self._scheduler)
        self._link = TrainerLink(spec.name, parts.registry, parts.store, self._recorder)
        self._sync = WeightSync(spec, parts.registry, self._recorder)
        self._canary = Canary(parts)
        self._watch = Stopwatch(time.monotonic)
        self._validation: asyncio.Task[ValidationReport] | None = None
        self._checkpointing: asyncio.Task[None] | None = None
        parts.board.watch(self._scheduler, self._stage, self._link)
        parts.controls.watch(self._stage.wake)

    @property
    def _is_synchronous(self) -> bool:
        return self._spec.schedule.max_policy_lag == 0

    async def run(self) -> None:
        """Run to the end. Cancelling it at any await leaves a store that resumes. Raises what cannot be survived."""
        progress = await take_up(self._parts, self._link)
        if progress.step > self._scheduler.trained:
            self._scheduler.begin_after(progress)
        await self._stage.restore()
        stage = asyncio.create_task(self._stage.run(), name="rollouts")
        try:
            await self._gather()
            with self._spans.start(self._scheduler.trained):
                await self._start_version()
            self._watch.lap()
            while self._scheduler.trained < self._spec.schedule.steps:
                with self._spans.step(self._scheduler.trained + 1):
                    await self._step(self._scheduler.trained + 1)
            await self._finish_validation()
            with self._spans.finish(self._scheduler.trained):
                await self._finish()
        except NothingGraded:
            with suppress(SpecrlError):  # the reason why the run ends is the one to show
                await self._finish_checkpoint()
                await self._finish_validation()
                if self._scheduler.trained:
                    await self.save()
            raise
        finally:
            stage.cancel()
            for task in (self._validation, self._checkpointing):
                if task is not None:
                    task.cancel()
            await asyncio.gather(stage, return_exceptions=True)
            self._spans.close()

    async def save(self) -> None:
        """Checkpoint the present step if the trainer is at rest; for a clean stop, and a run that cannot learn."""
        if self._link.state == "ready" and self._registry.trainer is not None:
            step = self._scheduler.trained
            await self._registry.trainer.client.save_checkpoint(step, CHECKPOINT_DEADLINE_S, self._place())
            await self._checkpointed(step)

    # -- before the first step -----------------------------------------------------------------------------------

    async def _gather(self) -> None:
        """Wait for the trainer, and for every replica or long enough for at least one."""
        wanted = self._spec.generation.replicas
        deadline = time.monotonic() + GATHERING_PATIENCE_S
        while True:
            count = len(self._registry.replicas)
            has_trainer = self._registry.trainer is not None
            self._stage.wake()  # who has registered may hold rollouts
            self._board.say(Phase.WAITING, "waiting for the trainer and the replicas", count + has_trainer, wanted + 1)
            is_patient = time.monotonic() < deadline
            if has_trainer and count >= (wanted if is_patient else 1):
                return
            self._registry.changed.clear()
            try:
                await asyncio.wait_for(self._registry.changed.wait(), 5.0)
            except TimeoutError:
                continue

    async def _start_version(self) -> None:
        """Every replica serves the trained step's version; the drafter is initialised if it never was; validate."""
        status = await self._link.status()
        needs_drafter = drafter_start.is_due(self._spec, status, self._store)
        transfer = await self._publish()
        if needs_drafter:
            await self._initialise_drafter()
            transfer = await self._publish()
        self._board.begin_training()
        # A coordinator that died between a step and its record finds the trainer one step ahead; that step validates.
        version = self._scheduler.trained
        is_current = transfer.policy_version == version
        if is_current and is_due(self._spec, version) and not self._board.is_validated(version):
            self._begin_validation(version)
            if self._is_synchronous:
                await self._finish_validation()
        self._stage.open_gate()

    async def _initialise_drafter(self) -> None:
        """Train the fresh drafter on the policy's own answers to the run's own prompts, then checkpoint it."""
        report = await drafter_start.initialise(self._parts, self._link, self._answers)
        await self._checkpoint(self._scheduler.trained)
        await self._board.drafter_initialised(report)

    async def _answers(self, requests: drafter_start.Requests, keep: drafter_start.Keep) -> None:
        """Have them answered by whoever serves, each kept when finished; by who joins next when all are lost."""
        missing = {request.rollout_id: (request, prompt) for request, prompt in requests}

        async def take(rollout: Rollout) -> None:
            await keep(rollout)
            missing.pop(rollout.rollout_id, None)

        while missing:
            try:
                await sample_and_grade(self._parts, None, list(missing.values()), take)
            except PeerUnavailable:
                await self._wait_for_joiner()
                await self._catch_up()

    # -- one step ------------------------------------------------------------------------------------------------

    async def _step(self, step: int) -> None:
        choice, batch, groups = await self._batch(step)
        await self._do_as_asked()
        self._stage.spare_seats(self._canary.seats if self._canary.is_due(step) else 0)
        with self._watch.stage("train"):
            metrics = await self._link.train(batch)
        self._watch.split("train", {"logprob": metrics.logprob_seconds, "train": metrics.train_seconds})
        with self._watch.stage("validation"):
            await self._finish_validation()
        shape = self._scheduler.shape
        overtaken = [(shape.own_step(position), shape.index(position)) for position in choice.overtaken]
        trained = TrainedStep(batch, groups, metrics, choice.progress, overtaken)
        await self._board.step_trained(trained, self._watch.so_far())
        self._stage.settled(step, sum(len(items) for _, items in choice.groups))
        with self._watch.stage("prepare"):
            transfer = await self._publish()
        self._stage.spare_seats(0)
        if step % self._spec.checkpoint.every_steps == 0 and step < self._spec.schedule.steps:
            await self._begin_checkpoint(step)
        if is_due(self._spec, step):
            self._begin_validation(step)
            if self._is_synchronous:
                with self._watch.stage("validation"):
                    await self._finish_validation()
        is_validating = self._validation is not None
        cores = self._watch.busy_cores("generation"), self._watch.busy_cores("train")
        await self._board.step_served(trained, transfer, self._watch.lap(), cores, is_validating=is_validating)
        self._stage.open_gate()

    async def _batch(self, step: int) -> tuple[Choice[GradedRollout], Batch, list[Group]]:
        """Collect step `step` and fix what it trains on. A batch that was fixed before a restart is taken as it was."""
        choice = await self._collect(step)
        check_learnable(choice)
        if self._is_synchronous:
            self._stage.close_gate()
        shape = self._scheduler.shape
        groups = [
            Group(
                group_id=shape.group_id(position),
                prompt=self._parts.prompts.prompt(position),
                target_step=step,
                rollouts=tuple(item.rollout for item in items),
                rewards=tuple(item.reward for item in items),
            )
            for position, items in choice.groups
        ]
        for position, reason in choice.failures:
            await self._board.prompt_failed(shape.group_id(position), reason)
        batch = assemble(step, groups, self._spec, failed=[position for position, _ in choice.failures])
        trained = {item.rollout.group_id for item in batch.rollouts}
        prompts = [
            (shape.own_step(position), shape.index(position))
            for position, _ in choice.groups
            if shape.group_id(position) in trained
        ]
        if not await self._store.put_batch(step, wire.batch_outline(batch), prompts):
            fixed = await stored_batch(self._store, step)
            assert fixed is not None, "it was put just before, or before a restart"
            batch = fixed
        return choice, batch, groups

    async def _collect(self, step: int) -> Choice[GradedRollout]:
        """Wait for the next step's groups; meanwhile, the trainer being idle, do what people ask and joiners need."""
        while True:
            with self._watch.stage("generation"), self._recorder.begin(SpanName.COLLECT, COORDINATOR) as collecting:
                choice = await self._collected()
                if choice is not None:
                    self._spans.chosen(step, *self._taken(choice), collecting)
                    return choice
            await self._do_as_asked()

    def _taken(self, choice: Choice[GradedRollout]) -> tuple[list[str], list[str]]:
        """Names of the groups that a step takes, and of those that failed."""
        name = self._scheduler.shape.group_id
        return [name(position) for position, _ in choice.groups], [name(position) for position, _ in choice.failures]

    async def _collected(self) -> Choice[GradedRollout] | None:
        """The next step's groups; None when people ask for something before they are there."""
        while True:
            collecting = asyncio.ensure_future(self._stage.collect())
            joined = asyncio.ensure_future(self._wait_for_joiner())
            asked = asyncio.ensure_future(self._parts.controls.asked.wait())
            try:
                await asyncio.wait({collecting, joined, asked}, return_when=asyncio.FIRST_COMPLETED)
                if collecting.done():
                    return collecting.result()
                if asked.done():
                    return None
            finally:
                for waiting in (collecting, joined, asked):
                    waiting.cancel()
            began = time.monotonic()
            await self._catch_up()
            self._board.caught_up(time.monotonic() - began)

    async def _do_as_asked(self) -> None:
        """Between two steps: write the checkpoint that was asked for, and stand still while the run is paused."""
        controls = self._parts.controls
        while controls.asked.is_set():
            if controls.takes_checkpoint():
                await self._begin_checkpoint(self._scheduler.trained)
            else:
                with self._watch.left_out():
                    await controls.moved()

    async def _wait_for_joiner(self) -> None:
        while not self._registry.joining():
            self._registry.changed.clear()
            await self._registry.changed.wait()
            self._stage.wake()

    async def _catch_up(self) -> None:
        """Bring the replicas that have just joined to the present version; the others go on generating."""
        try:
            trainer = await self._link.ready()
            await self._bring(trainer, self._registry.joining())
        except TrainerLost as error:
            self._registry.lose_trainer(str(error))
        self._stage.wake()

    async def _publish(self) -> Transfer:
        """Bring every live replica to the trainer's version, on another incarnation of the trainer if need be."""
        while True:
            trainer = await self._link.ready()
            try:
                transfer = await self._bring(trainer, self._registry.to_update())
            except TrainerLost as error:
                self._registry.lose_trainer(str(error))
                continue
            await self._store.set_fact(PROVED_VERSION, transfer.policy_version)
            self._board.version_served(transfer)
            self._stage.wake()
            return transfer

    async def _bring(self, trainer: Trainer, replicas: Sequence[Replica]) -> Transfer:
        """Bring `replicas` to the trainer's version and have the canary prove it; one that disagrees is sent it twice.

        Raises TrainerLost, when those that are not proved are JOINING again; SamplerDisagrees when a replica disagrees
        all the same.
        """
        joining = {replica.replica_id for replica in replicas if replica.state is ReplicaState.JOINING}
        brought = list(replicas)
        try:
            transfer = await self._sync.publish(trainer, brought)
            version = transfer.policy_version
            due = []
            for replica in _committed(brought):
                if self._canary.is_due(version, has_joined=replica.replica_id in joining):
                    due.append(replica)
                else:
                    self._registry.trust(replica, version)
            doubtful = await self._canary.prove(trainer, due, version)
            if doubtful:
                brought = [self._registry.start_over(replica) for replica in doubtful if not replica.gone.is_set()]
                await self._sync.publish(trainer, brought)
                await self._canary.prove(trainer, _committed(brought), version, is_repeated=True)
            return transfer
        except TrainerLost as error:
            for replica in _committed(brought):
                if not replica.is_trusted:
                    self._registry.put_back(replica, str(error))
            raise

    async def _checkpoint(self, step: int) -> str:
        """Have the trainer write one, and wait for it; returns its folder. Raises StoreFailed when its disk refuses."""
        with self._recorder.begin(SpanName.CHECKPOINT, TRAINER):
            place = self._place()
            path, _ = await self._link.call(
                lambda trainer: trainer.client.save_checkpoint(step, CHECKPOINT_DEADLINE_S, place)
            )
        await self._checkpointed(step)
        return path

    async def _begin_checkpoint(self, step: int) -> None:
        """Have the trainer write one while training goes on, once the one before is complete or has failed."""
        with self._watch.stage("checkpoint"):
            await self._finish_checkpoint()

            place = self._place()

            async def begin(trainer: Trainer) -> Trainer:
                await trainer.client.save_checkpoint(step, CHECKPOINT_DEADLINE_S, place, in_background=True)
                return trainer

            try:
                with self._recorder.begin(SpanName.CHECKPOINT, TRAINER):
                    trainer = await self._link.call(begin)
            except StoreFailed as error:
                self._board.checkpoint_failed(str(error))
                return
        self._checkpointing = asyncio.create_task(self._complete_checkpoint(trainer, step), name=f"checkpoint-{step}")

    async def _complete_checkpoint(self, trainer: Trainer, step: int) -> None:
        """Count a checkpoint once it is durable. When it fails the last one stays, and so do the batches since."""
        try:
            with self._recorder.begin(SpanName.WRITE, TRAINER):
                async with while_there(trainer):
                    await trainer.client.save_checkpoint(step, CHECKPOINT_DEADLINE_S)
        except StoreFailed as error:
            self._board.checkpoint_failed(str(error))
        except (PeerUnavailable, DeadlineExceeded, CollectiveFailed, VersionConflict) as error:
            log.warning("checkpoint_lost", step=step, reason=str(error))  # with its trainer; the next one will do
        else:
            await self._checkpointed(step)

    def _place(self) -> StreamPlace:
        """Where the data stand with the present step."""
        return place_of(self._scheduler.progress, self._parts.prompts)

    async def _finish_checkpoint(self) -> None:
        """Wait for the checkpoint under way."""
        task, self._checkpointing = self._checkpointing, None
        if task is not None:
            await task

    async def _checkpointed(self, step: int) -> None:
        """A checkpoint is complete: forget what no trainer will replay.

        Batches since the one before it stay, where that one does (checkpoint.keep): if the newest cannot be read, the
        trainer goes back to it.
        """
        log.info("checkpoint_completed", step=step)
        before = self._store.fact(CHECKPOINTS) or [0, 0]
        last = [before[1], step] if step > before[1] else before
        if last != before:
            await self._store.set_fact(CHECKPOINTS, last)
        await self._store.forget_batches(last[0] if self._spec.checkpoint.keep > 1 else step)

    # -- validation ----------------------------------------------------------------------------------------------

    def _begin_validation(self, version: int) -> None:
        work = validate(self._parts, version)
        self._validation = asyncio.create_task(work, name=f"validation-{version}")

    async def _finish_validation(self) -> None:
        """Wait for the validation under way. One that lost all of its replicas is reported as missing."""
        task, self._validation = self._validation, None
        if task is None:
            return
        try:
            await self._board.validated(await task)
        except PeerUnavailable as error:
            log.warning("validation_lost", reason=str(error))
            await self._board.validated(None)

    # -- the end -------------------------------------------------------------------------------------------------

    async def _finish(self) -> None:
        """Checkpoint, export as Hugging Face folders, summarise."""
        step = self._scheduler.trained
        await self._finish_checkpoint()
        self._board.say(Phase.TRAINING, "writing the last checkpoint and the Hugging Face export")
        checkpoint = await self._checkpoint(step)
        target = str(self._parts.directory / "export")
        with self._recorder.begin(SpanName.EXPORT, TRAINER):
            policy, drafter = await self._link.call(
                lambda trainer: trainer.client.export_model(target, CHECKPOINT_DEADLINE_S)
            )
        self._board.finish(policy, drafter, checkpoint)


def _committed(replicas: Sequence[Replica]) -> list[Replica]:
    """Those that have committed the version that was sent to them."""
    return [replica for replica in replicas if replica.state in COMMITTED]
