"""The main loop of a run. Read this file first, then `schedule/scheduler.py`.

    wait for the trainer and the replicas; if the store is empty, resume from the trainer's checkpoint
    publish version 0; initialise the drafter on the policy's own rollouts; publish again
    for each step s:
        generation      wait until the P groups of step s are finished; rollouts/pipeline.py produces them meanwhile
        data            assemble the batch and store it
        logprob, train  one call to the trainer, idempotent by s
        prepare         publish version s of policy and drafter to every replica, and check it with the canary
        checkpoint      every checkpoint.everySteps; the trainer writes it while it trains the next steps
        validation      every validation.everySteps, under exactly one policy version
    export the model

Crash safety: everything is durable before anything depends on it. A rollout is stored when it is graded, a batch
before it is sent, and a step before its version is published. Wherever a coordinator was killed, the next one calls
`Loop.run` and continues from the store. While the store is unreachable, every access to it waits and retries
(`ledger/store_link.py`).

Policy lag: with maxPolicyLag 0, no rollout starts between the collection of a step and the end of its publication and
validation (`close_gate`, `open_gate`). With maxPolicyLag >= 1 the gate stays open, and the scheduler alone bounds the
lag.

User requests: users may pause the run or request a checkpoint. The loop handles requests while it waits for rollouts,
and once more before it trains (`_handle_user_requests`).

A step in which no rollout has a valid reward ends the run with an error, after a checkpoint (`learnable.py`). Of that
step only the rollouts are stored, so a run that is resumed with a repaired verifier tries it again.

`main.py` runs one Loop per process. The loop publishes events (`run_events.py`) and never reads an observer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import structlog

from specrl.batching import assemble_batch
from specrl.coordinator.context import RunContext
from specrl.coordinator.ledger.continuation import place_of_checkpoint, resume_from_checkpoint
from specrl.coordinator.members.refusals import RefusalCounter
from specrl.coordinator.members.registry import Replica, Trainer, abort_when_gone
from specrl.coordinator.members.replica_states import COMMITTED, ReplicaState
from specrl.coordinator.members.trainer_link import CHECKPOINT_DEADLINE_S, TrainerLink
from specrl.coordinator.members.weight_transports import TrainerLost, WeightTransfer
from specrl.coordinator.members.weight_update import WeightUpdater
from specrl.coordinator.reports import TrainedStep, build_trained_report, describe_lap
from specrl.coordinator.rollouts import drafter_init
from specrl.coordinator.rollouts.canary import CanaryRunner
from specrl.coordinator.rollouts.learnable import check_learnable
from specrl.coordinator.rollouts.pipeline import RolloutPipeline
from specrl.coordinator.rollouts.validation import is_validation_due, validate_version
from specrl.coordinator.run_events import (
    CheckpointFailed,
    RunFinished,
    StepReported,
    StepServed,
    VerdictFailed,
    VersionServed,
    VersionValidated,
)
from specrl.coordinator.schedule.scheduler import Scheduler, ScheduleShape, StepChoice
from specrl.coordinator.stopwatch import Stopwatch
from specrl.errors import (
    CollectiveFailed,
    DeadlineExceeded,
    NothingGraded,
    PeerUnavailable,
    ReplicasRefused,
    SpecrlError,
    StoreFailed,
    VersionConflict,
)
from specrl.formats.best_version import choose_better
from specrl.formats.reports import Phase, StepReport, ValidationReport
from specrl.records import Batch, GradedRollout, Group, StreamPlace
from specrl.telemetry.spans import COORDINATOR, TRAINER, SpanName

GATHERING_PATIENCE_S = 300.0
"""Longest wait of a run for all of its replicas. After that it starts with those that have registered, at least one."""

log = structlog.get_logger(__name__)


class Loop:
    """Drives one run from the state in its ledger to its end.

    context, scheduler, rollouts, trainer: public, so that observers can read them.
    """

    def __init__(self, context: RunContext, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: measures the steps, in seconds."""
        spec = context.spec
        schedule = spec.schedule
        shape = ScheduleShape(schedule.steps, schedule.prompts_per_step, schedule.group_size, schedule.max_policy_lag)
        self.context = context
        self._spec = spec
        self._registry = context.registry
        self._ledger = context.ledger
        self._phase = context.phase
        self._tally = context.tally
        self._events = context.events
        self._spans = context.spans
        self._recorder = context.spans.recorder
        self.scheduler: Scheduler[GradedRollout] = Scheduler(shape, context.ledger.last_trained_step)
        self._clock = clock
        self._stopwatch = Stopwatch(clock)
        self.rollouts = RolloutPipeline(context, self.scheduler, self._stopwatch)
        self.trainer = TrainerLink(spec.name, context.registry, context.ledger, self._recorder)
        self._weights = WeightUpdater(spec, context.registry, self._recorder)
        self._trainer_refusals = RefusalCounter()  # of all its processes: a new one refuses alike
        self._canary = CanaryRunner(context)
        self._validation: asyncio.Task[ValidationReport] | None = None
        self._is_committed = asyncio.Event()  # not set while a step is trained that the store does not have as trained
        self._is_committed.set()
        self._unreported: StepReport | None = None  # report of the last step while its version is validated
        self._checkpointing: asyncio.Task[None] | None = None  # waits for the checkpoint that the trainer writes
        context.controls.watch_changes(self.rollouts.wake_dispatcher)  # the end of a pause lets rollouts start

    @property
    def _is_synchronous(self) -> bool:
        return self._spec.schedule.max_policy_lag == 0

    async def run(self) -> None:
        """Train until the last step, then export. May be cancelled at any await: the store can then be resumed.

        Raises NothingGraded when a step has no valid reward, and ReplicasRefused when no replica takes the weights.
        Raises other errors that no retry can repair, such as
        SamplerDisagrees, VersionConflict and StoreInvalid.
        """
        await self._resume_from_checkpoint()
        await self.rollouts.restore_rollouts()  # before the dispatcher starts, so that nothing stored is sampled again
        # Generation runs in the background from here on. Its gate is closed until the first version is served.
        rollouts = asyncio.create_task(self.rollouts.run(), name="rollouts")
        try:
            await self._wait_for_members()
            with self._spans.open_start_span(self.scheduler.trained):
                await self._publish_first_version()

            self._stopwatch.end_lap()  # the first step is not charged for the start
            while self.scheduler.trained < self._spec.schedule.steps:
                with self._spans.trace_step(self.scheduler.trained + 1):
                    await self._run_step(self.scheduler.trained + 1)

            await self._finish_validation()
            with self._spans.open_finish_span(self.scheduler.trained):
                await self._finish_run()
        except (NothingGraded, ReplicasRefused):
            # Save what was trained so far, then end the run. It can be resumed once its user has repaired the cause.
            with suppress(SpecrlError):  # a failing checkpoint must not hide why the run ends
                await self._finish_checkpoint()
                await self._finish_validation()
                if self._ledger.last_trained_step:
                    await self.checkpoint_if_idle()
            raise
        finally:
            # The trainer may still write a checkpoint. If it completes, the trainer starts from it after a restart.
            rollouts.cancel()
            for task in (self._validation, self._checkpointing):
                if task is not None:
                    task.cancel()
            await asyncio.gather(rollouts, return_exceptions=True)
            self._spans.end_open_prompts()

    @property
    def _replicas_awaited(self) -> int:
        """Replicas that a start waits for: those of the run file, or fewer after `kubectl scale`. Others join later."""
        return min(self._spec.generation.replicas, self.context.controls.spec.generation.replicas)

    @property
    def is_training_step(self) -> bool:
        """Whether the trainer works on a step that the store does not have as trained yet."""
        return not self._is_committed.is_set()

    async def wait_for_commit(self) -> None:
        """Wait until the step that is being trained is committed, or its trainer is lost.

        STEP_DEADLINE_S bounds the wait: after it, a trainer that hangs counts as lost.
        """
        trainer = self._registry.trainer
        if trainer is None:
            return
        waiting = [asyncio.ensure_future(event.wait()) for event in (self._is_committed, trainer.gone)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()

    async def checkpoint_if_idle(self) -> None:
        """Checkpoint the last trained step if the trainer is idle. Called when the run is stopped or cannot learn."""
        # Calls the trainer directly: `trainer.call_with_recovery` would wait for a lost trainer to come back.
        trainer = self._registry.trainer
        if self.trainer.state == "ready" and trainer is not None:
            # The ledger's step: the scheduler settles a step only once the validation before it has ended.
            step = self._ledger.last_trained_step
            place = place_of_checkpoint(step, self._spec, self.context.prompts)
            async with abort_when_gone(trainer):
                await self._call_save(trainer, step, place)
            await self._record_checkpoint(step)

    # -- before the first step -----------------------------------------------------------------------------------

    async def _resume_from_checkpoint(self) -> None:
        """If the ledger is empty, continue from the trainer's checkpoint, if it has one.

        Only then it waits for the trainer to register. The wait has no limit.
        """
        if not await self._ledger.is_empty():
            return
        self._phase.update(Phase.WAITING, "waiting for the trainer, which may have a checkpoint", 0, 1)
        status = await self.trainer.fetch_unrecovered_status()
        trained = await resume_from_checkpoint(self._ledger, status, self._spec, self.context.prompts)
        if trained:
            self.scheduler.begin_after(trained)

    async def _wait_for_members(self) -> None:
        """Wait for the trainer and all replicas; after GATHERING_PATIENCE_S, for the trainer and at least one replica.

        Replicas that the launcher starts no more are not waited for. A registration wakes it. The time-out of 5 s lets
        it notice that the patience is over.
        """
        deadline = time.monotonic() + GATHERING_PATIENCE_S
        while True:
            count = len(self._registry.replicas)
            wanted = max(1, self._replicas_awaited - len(self.list_given_up_replicas()))
            has_trainer = self._registry.trainer is not None
            self.rollouts.wake_dispatcher()  # a replica that registers may hold rollouts from before a restart
            missing = [] if has_trainer else ["the trainer"]
            if count < wanted:
                missing.append(self._describe_missing_replicas(wanted))
            detail = f"waiting for {' and '.join(missing)}" if missing else "all members are there"
            self._phase.update(Phase.WAITING, detail, count + has_trainer, wanted + 1)
            is_patient = time.monotonic() < deadline
            if has_trainer and count >= (wanted if is_patient else 1):
                return
            self._registry.changed.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._registry.changed.wait(), 5.0)

    def _describe_missing_replicas(self, wanted: int) -> str:
        """Count the replicas that have not registered, and name the first of them.

        Ids end with the replica's number, as in gen-1. Their beginning is known once one has registered.
        """
        registered = self._registry.replicas
        found = f"{wanted - len(registered)} of {wanted} replicas"
        beginnings = {replica_id.rpartition("-")[0] for replica_id in registered}
        if len(beginnings) != 1:
            return found
        beginning = beginnings.pop()
        expected = [f"{beginning}-{number}" for number in range(self._replicas_awaited)]
        there = {*registered, *self.list_given_up_replicas()}
        missing = [replica_id for replica_id in expected if replica_id not in there]
        return f"{found} ({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''})"

    async def _publish_first_version(self) -> None:
        """Publish the version of the last trained step, initialise the drafter if needed, validate, open the gate."""
        status = await self.trainer.fetch_status()
        needs_drafter = drafter_init.is_initialisation_due(self._spec, status, self._ledger)
        transfer = await self._publish_version()
        if needs_drafter:
            await self._initialise_drafter()
            transfer = await self._publish_version()  # the same policy version, now with the trained drafter
        self._tally.discard_counts()
        self._phase.update(Phase.TRAINING, "training")

        # If the coordinator died after the trainer finished a step and before the step was recorded, the trainer is one
        # step ahead. Replicas then serve that newer version, and its own step validates it.
        version = self.scheduler.trained
        is_current = transfer.policy_version == version
        self.context.controls.hold_checkpoint_requests(not is_current)  # until the trainer's step is committed
        is_validated = self._ledger.facts.find_validation(version) is not None
        if is_current and is_validation_due(self._spec, version) and not is_validated:
            self._begin_validation(version)
            if self._is_synchronous:
                await self._finish_validation()
        self.rollouts.open_gate()

    async def _initialise_drafter(self) -> None:
        """Train the new drafter on the policy's answers to the run's own prompts, then checkpoint it."""
        with self._recorder.begin_span(SpanName.DRAFTER, COORDINATOR):
            report = await drafter_init.initialise_drafter(self.context, self.trainer, self._wait_for_replica)
        # The checkpoint comes first: the ledger may only record a drafter that a restarted trainer still has.
        await self._write_checkpoint(self.scheduler.trained)
        await self._ledger.record_drafter(report)

    async def _wait_for_replica(self) -> None:
        """Wait until a replica joins, and send it the current version. The wait has no limit."""
        await self._wait_for_joiner()
        await self._update_joiners()

    # -- one step ------------------------------------------------------------------------------------------------

    async def _run_step(self, step: int) -> None:
        # Generation and data: wait for the step's groups and store the batch.
        batch, groups = await self._prepare_batch(step)
        await self._handle_user_requests()  # the last place where a pause stops this step

        # Train. Meanwhile replicas refill every free seat, so the canary's seats must be reserved before.
        self.rollouts.reserve_seats(self._canary.seats_to_reserve if self._canary.is_due_at(step) else 0)
        self._is_committed.clear()
        with self._stopwatch.charge_to("train"):
            metrics = await self.trainer.train_batch(batch)
        self._stopwatch.split_phase("train", {"logprob": metrics.logprob_seconds, "train": metrics.train_seconds})

        # Commit. From here on a restarted coordinator takes the step as trained. The report is completed below.
        trained = TrainedStep(batch, groups, metrics)
        sources = self._spec.prompts.source_names
        report = build_trained_report(trained, self._stopwatch.read_lap(), self._select_failures(trained), sources)
        await self._ledger.commit_step(report)
        self._is_committed.set()
        self.context.controls.hold_checkpoint_requests(False)

        # A validation needs one policy version from start to end, so it must finish before the next is published.
        # After the commit: a run that is stopped while it waits here saves the step.
        with self._stopwatch.charge_to("validation"):
            await self._finish_validation()
        self.rollouts.settle_step(step, sum(len(group.rollouts) for group in groups))

        # Publish version `step` to every replica.
        with self._stopwatch.charge_to("prepare"):
            transfer = await self._publish_version()
        self.rollouts.reserve_seats(0)

        # Checkpoint in the background. `_finish_run` writes that of the last step.
        if step % self._spec.checkpoint.every_steps == 0 and step < self._spec.schedule.steps:
            await self._begin_checkpoint(step)

        # Validate the new version: beside the next step's rollouts, or before them if the run is synchronous.
        if is_validation_due(self._spec, step):
            self._begin_validation(step)
            if self._is_synchronous:
                with self._stopwatch.charge_to("validation"):
                    await self._finish_validation()

        await self._complete_report(report, transfer, trained)
        self.rollouts.open_gate()

    def _select_failures(self, step: TrainedStep) -> dict[str, str]:
        """Reasons of the prompts that this step gives up, by group id."""
        trained = {group.prompt.position for group in step.groups}
        untrained = [self.scheduler.shape.group_id_at(p) for p in step.batch.positions if p not in trained]
        failed = self._ledger.facts.failed_prompts
        return {group: failed[group] for group in untrained if group in failed}

    async def _complete_report(self, report: StepReport, transfer: WeightTransfer, step: TrainedStep) -> None:
        """Complete the report of a step whose version is served.

        While a validation of that version runs, the report is kept in `_unreported`. `_finish_validation` adds the
        validation reward and publishes it.
        """
        cores = self._stopwatch.busy_cores("generation"), self._stopwatch.busy_cores("train")
        lap = self._stopwatch.end_lap()  # resets the busy cores, which are therefore read first
        report = report.model_copy(
            update={
                **describe_lap(lap),
                "weight_sync": transfer.seconds,
                "checksum": transfer.digest,
                "drafter_version": transfer.drafter_version,
                **self._tally.take_report_fields(lap, self.rollouts.counters["ungraded"]),
            }
        )
        report = report.with_validation(self._ledger.facts.find_validation(report.policy_version))
        await self._ledger.complete_report(report)
        self._events.publish(StepServed(report, step.batch.policy_lags, step.groups, cores))
        if self._validation is not None:
            self._unreported = report
        else:
            self._events.publish(StepReported(report))

    async def _prepare_batch(self, step: int) -> tuple[Batch, list[Group]]:
        """Wait for the groups of a step, assemble the batch and store it.

        Returns the batch and all graded groups, including those that the batch leaves out. If a batch of this step was
        stored before a restart, that one is returned.
        """
        choice = await self._collect_groups()
        check_learnable(choice)
        if self._is_synchronous:
            self.rollouts.close_gate()  # until this step's version is served and validated
        shape = self.scheduler.shape
        groups = [
            Group(
                group_id=shape.group_id_at(position),
                prompt=self.context.prompts.prompt(position),
                target_step=step,
                rollouts=tuple(item.rollout for item in items),
                rewards=tuple(item.reward for item in items),
            )
            for position, items in choice.groups
        ]
        # Reasons are stored before the batch: after a restart the step must be chosen with the same failures.
        for position, reason in choice.failures:
            await self._ledger.fail_prompt(shape.group_id_at(position), reason)
        batch = assemble_batch(step, groups, self._spec, failed=[position for position, _ in choice.failures])
        trained = {item.rollout.group_id for item in batch.rollouts}
        indexes = [shape.index_of(position) for position, _ in choice.groups if shape.group_id_at(position) in trained]
        return await self._ledger.fix_batch(batch, indexes), groups

    async def _collect_groups(self) -> StepChoice[GradedRollout]:
        """Wait for the next step's groups. Meanwhile handle user requests and give weights to replicas that join."""
        while True:
            with self._stopwatch.charge_to("generation"), self._recorder.begin_span(SpanName.COLLECT, COORDINATOR):
                choice = await self._collect_until_request()
                if choice is not None:
                    group_id_at = self.scheduler.shape.group_id_at
                    self._spans.end_prompts([group_id_at(position) for position, _ in choice.groups])
                    self._spans.end_prompts([group_id_at(position) for position, _ in choice.failures], "failed")
                    return choice
            await self._handle_user_requests()

    async def _collect_until_request(self) -> StepChoice[GradedRollout] | None:
        """Wait for the next step's groups; return None when a user request arrives first.

        Three events wake it: the groups are finished, a replica joins or the last one is given up, a user requests
        something. The wait has no limit of its own: lost replicas and hanging verifiers have time-outs, after which
        their rollouts are sampled again.
        """
        while True:
            collecting = asyncio.ensure_future(self.rollouts.collect_step())
            joined = asyncio.ensure_future(self._wait_for_joiner())
            asked = asyncio.ensure_future(self.context.controls.asked.wait())
            try:
                await asyncio.wait({collecting, joined, asked}, return_when=asyncio.FIRST_COMPLETED)
                if collecting.done():
                    return collecting.result()
                if asked.done():
                    return None
                joined.result()  # raises when no replica is left
            finally:
                for waiting in (collecting, joined, asked):
                    waiting.cancel()
            # The trainer is idle here, so it can send weights to the replicas that have joined.
            began = self._clock()
            await self._update_joiners()
            self._tally.add_catching_up_seconds(self._clock() - began)

    async def _handle_user_requests(self) -> None:
        """Write a requested checkpoint, and wait while the run is paused. Called only while no step is trained.

        A pause has no limit; `Controls` wakes the loop with every change.
        """
        controls = self.context.controls
        while controls.asked.is_set():
            if controls.take_checkpoint_request():
                await self._begin_checkpoint(self.scheduler.trained)
                if self._checkpointing is None:  # it could not even begin
                    controls.end_checkpoint_request()
                else:
                    self._checkpointing.add_done_callback(lambda _: controls.end_checkpoint_request())
            else:
                with self._stopwatch.exclude_time():
                    await controls.wait_for_change()

    async def _wait_for_joiner(self) -> None:
        while not self._weights.joining_replicas():
            self._check_any_replica_left()
            self._registry.changed.clear()
            await self._registry.changed.wait()
            self.rollouts.wake_dispatcher()  # the dispatcher does not wait on the registry itself

    async def _update_joiners(self) -> None:
        """Send the current version to the replicas that are JOINING. The other replicas continue to generate.

        If the trainer is lost meanwhile, the replicas stay JOINING and the next call tries again.
        """
        try:
            trainer = await self.trainer.wait_until_ready()
            await self._update_replicas(trainer, self._weights.joining_replicas())
        except TrainerLost as error:
            self._note_trainer_loss(error)
        self.rollouts.wake_dispatcher()

    async def _publish_version(self) -> WeightTransfer:
        """Send the trainer's version to every live replica, and record that all of them serve it.

        If the trainer is lost, it starts again with the trainer's next incarnation, whenever that registers.
        """
        while True:
            trainer = await self.trainer.wait_until_ready()
            try:
                transfer = await self._update_replicas(trainer, self._registry.updatable_replicas())
            except TrainerLost as error:
                self._note_trainer_loss(error)
                continue
            await self._ledger.prove_version(transfer.policy_version)
            self._events.publish(VersionServed(transfer.policy_version))
            self.rollouts.wake_dispatcher()
            return transfer

    def _note_trainer_loss(self, error: TrainerLost) -> None:
        """Note that the trainer was lost in an update. Raises its own error if it refuses again and again."""
        cause = error.__cause__
        if cause is not None and self._trainer_refusals.count_refusal("trainer", cause):
            raise cause
        self._registry.lose_trainer(str(error))

    def list_given_up_replicas(self) -> Mapping[str, str]:
        """Return why replicas are given up, by id. Shown in the status."""
        return self._weights.list_given_up()

    def _check_any_replica_left(self) -> None:
        self._weights.check_any_left(self.context.controls.spec.generation.replicas)

    async def _update_replicas(self, trainer: Trainer, replicas: Sequence[Replica]) -> WeightTransfer:
        """Send the trainer's version to `replicas`, then check with the canary that they sample from it.

        A replica that fails the canary receives the weights a second time. Raises SamplerDisagrees if it fails again.
        Raises TrainerLost; the replicas that no canary has checked are then JOINING.
        """
        # Read before the update, which changes the states: a replica that joins is checked at every version.
        joining = {replica.replica_id for replica in replicas if replica.state is ReplicaState.JOINING}
        updated = list(replicas)
        try:
            transfer = await self._weights.publish_to_replicas(trainer, updated)
            self._trainer_refusals.forget_refusals("trainer")
            self._check_any_replica_left()
            version = transfer.policy_version

            # The canary checks only some versions. Replicas that it does not check now are trusted.
            due = []
            for replica in _select_committed(updated):
                if self._canary.is_due_at(version, has_joined=replica.replica_id in joining):
                    due.append(replica)
                else:
                    self._registry.trust_version(replica, version)
            disagreeing = await self._canary.check_replicas(trainer, due, version)

            # A second load repairs an engine that missed the first. One that disagrees twice cannot be repaired.
            if disagreeing:
                updated = [
                    self._registry.replace_record(replica) for replica in disagreeing if not replica.gone.is_set()
                ]
                await self._weights.publish_to_replicas(trainer, updated)
                await self._canary.check_replicas(trainer, _select_committed(updated), version, is_repeated=True)
            return transfer
        except TrainerLost as error:
            # These have committed, but no canary has checked them. Without a trainer none can, so they start again.
            for replica in _select_committed(updated):
                if not replica.is_trusted:
                    self._registry.return_to_joining(replica, str(error))
            raise

    async def _write_checkpoint(self, step: int) -> str:
        """Have the trainer write a checkpoint, wait for it, and return its folder.

        Raises StoreFailed when the trainer cannot write it.
        """
        with self._recorder.begin_span(SpanName.CHECKPOINT, TRAINER):
            place = self._current_place()
            path = await self.trainer.call_with_recovery(lambda trainer: self._call_save(trainer, step, place))
        await self._record_checkpoint(step)
        return path

    async def _begin_checkpoint(self, step: int) -> None:
        """Have the trainer write a checkpoint in the background. First waits until the previous one has ended.

        The step is charged for that wait and for the snapshot, not for the writing.
        """
        with self._stopwatch.charge_to("checkpoint"):
            await self._finish_checkpoint()

            place = self._current_place()  # taken now: the stream moves on while the checkpoint is written

            async def begin_writing(trainer: Trainer) -> Trainer:
                await self._call_save(trainer, step, place, in_background=True)
                return trainer

            try:
                with self._recorder.begin_span(SpanName.CHECKPOINT, TRAINER):
                    trainer = await self.trainer.call_with_recovery(begin_writing)
            except StoreFailed as error:
                self._fail_checkpoint(error)
                return
        self._checkpointing = asyncio.create_task(self._wait_for_checkpoint(trainer, step), name=f"checkpoint-{step}")

    async def _wait_for_checkpoint(self, trainer: Trainer, step: int) -> None:
        """Wait until a background checkpoint is durable, then record it.

        If it fails, the previous checkpoint stays valid, and so do the stored batches that lead from it to here.
        """
        try:
            with self._recorder.begin_span(SpanName.WRITE, TRAINER):
                async with abort_when_gone(trainer):
                    # The same call without in_background waits for the write under way; it does not start another.
                    await self._call_save(trainer, step)
        except StoreFailed as error:
            self._fail_checkpoint(error)
        except (PeerUnavailable, DeadlineExceeded, CollectiveFailed, VersionConflict) as error:
            # The trainer was lost with it. Not retried: the next checkpoint replaces it.
            log.warning("checkpoint_lost", step=step, reason=str(error))
        else:
            await self._record_checkpoint(step)

    async def _call_save(
        self, trainer: Trainer, step: int, place: StreamPlace | None = None, *, in_background: bool = False
    ) -> str:
        """Have the trainer save a checkpoint, and keep the one whose version had the best validation."""
        best = self._ledger.facts.best_version
        best_step = best.policy_version if best is not None else 0
        return await trainer.client.save_checkpoint(
            step, CHECKPOINT_DEADLINE_S, place, in_background=in_background, best_step=best_step
        )

    def _current_place(self) -> StreamPlace:
        """Position in the prompt stream after the last trained step. Stored in the checkpoint, for another store."""
        return place_of_checkpoint(self.scheduler.trained, self._spec, self.context.prompts)

    async def _record_checkpoint(self, step: int) -> None:
        """Record a complete checkpoint. With checkpoint.keep > 1 the batches since the one before stay stored."""
        await self._ledger.complete_checkpoint(step, keeps_older=self._spec.checkpoint.keep > 1)

    def _fail_checkpoint(self, error: StoreFailed) -> None:
        """Report that a checkpoint could not be written. The run continues with the previous one."""
        log.error("checkpoint_failed", reason=str(error))
        self._events.publish(CheckpointFailed(str(error)))

    async def _finish_checkpoint(self) -> None:
        """Wait for the background checkpoint, if there is one. CHECKPOINT_DEADLINE_S bounds the wait."""
        task = self._checkpointing
        self._checkpointing = None
        if task is not None:
            await task

    # -- validation ----------------------------------------------------------------------------------------------

    def _begin_validation(self, version: int) -> None:
        work = validate_version(self.context, version)
        self._validation = asyncio.create_task(work, name=f"validation-{version}")

    async def _finish_validation(self) -> None:
        """Wait for the running validation and publish the report that waits for it.

        A validation that lost all replicas is dropped: the step's report then has no validation reward.
        """
        task = self._validation
        self._validation = None
        if task is None:
            return
        problems = len(self.context.validation_prompts)
        self._phase.update(Phase.TRAINING, f"validating the policy on {problems} problems")  # it may take minutes
        try:
            report = await task
        except PeerUnavailable as error:
            log.warning("validation_lost", reason=str(error))
        else:
            for reason, count in report.failures.items():
                self._events.publish(VerdictFailed(reason, count))
            best = choose_better(self._ledger.facts.best_version, report, self._spec)
            await self._ledger.record_validation(report, best)
            self._events.publish(VersionValidated(report))
        self._phase.update(Phase.TRAINING, "training")
        unreported = self._unreported
        self._unreported = None
        if unreported is not None:
            unreported = unreported.with_validation(self._ledger.facts.find_validation(unreported.policy_version))
            await self._ledger.complete_report(unreported)
            self._events.publish(StepReported(unreported))

    # -- the end -------------------------------------------------------------------------------------------------

    async def _finish_run(self) -> None:
        """Write the last checkpoint, export policy and drafter as Hugging Face folders, announce the end.

        A run without steps exports its drafter alone: its policy is the one that it was given.
        """
        step = self.scheduler.trained
        await self._finish_checkpoint()
        self._phase.update(Phase.TRAINING, "writing the last checkpoint and the Hugging Face export")
        checkpoint = await self._write_checkpoint(step)
        target = str(self.context.directory / "export")
        with self._recorder.begin_span(SpanName.EXPORT, TRAINER):
            policy, drafter = await self.trainer.call_with_recovery(
                lambda trainer: trainer.client.export_model(target, CHECKPOINT_DEADLINE_S, drafter_only=step == 0)
            )
        self._events.publish(RunFinished(policy, drafter, checkpoint))
        self._phase.update(Phase.FINISHED, "finished")


def _select_committed(replicas: Sequence[Replica]) -> list[Replica]:
    """Replicas that have committed the version that was sent to them."""
    return [replica for replica in replicas if replica.state in COMMITTED]
