"""The run's durable transactions. The loop and the actions write through this class only.

    rollout graded -> keep_rollout          next step fixed     -> fix_batch        prompt given up -> fail_prompt
    step trained   -> commit_step           report complete     -> complete_report
    version served -> prove_version         checkpoint complete -> complete_checkpoint

Each transaction is durable when it returns. A coordinator that is killed between two of them resumes from the last one.
Steps are idempotent by their number. Facts and reports are read from memory; all other reads query the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import structlog
from pydantic import Field, ValidationError

from specrl.coordinator.ledger.contract import REPORTS_KEPT, StoredRollout
from specrl.coordinator.ledger.run_inputs import RunInputs
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.errors import StoreInvalid
from specrl.formats.reports import BestVersion, DrafterInitReport, ReportModel, StepReport, ValidationReport
from specrl.records import Batch, wire

VALIDATIONS_KEPT = REPORTS_KEPT  # the same bound on memory

log = structlog.get_logger(__name__)


class DurableFacts(ReportModel):
    """The run's facts, beside its rollouts, batches and reports. The store keeps each under its field's alias."""

    drafter_start: DrafterInitReport | None = None
    """How the drafter was initialised. Set once the checkpoint that contains it is complete."""
    failed_prompts: dict[str, str] = Field(default_factory=dict)
    """Why each prompt was given up, by group id, until the report of its step is complete. That report then names it,
    so this does not grow with the run."""
    validations: tuple[ValidationReport, ...] = ()
    """The first validation, and the newest VALIDATIONS_KEPT - 1."""
    best_version: BestVersion | None = None
    """The best validated version that has a checkpoint, with checkpoint.keepBest; None without one."""
    is_paused: bool = Field(default=False, alias="paused")
    """Whether a user has paused the run."""
    checkpoints: tuple[int, int] = (0, 0)
    """Steps of the last two complete checkpoints, the older first; 0 for none."""
    inputs: RunInputs | None = None
    """What the run is made from, as its last start found it. Null before the first start."""
    proved_version: int | None = None
    """Newest policy version that every replica has served and that passed its canary, if one was due."""

    def collect_failed_prompts(self, reports: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        """Return why each prompt was given up, by group id. The facts have those of untrained steps.

        reports: the stored reports, which have those of trained steps.
        """
        settled = {group: reason for report in reports for group, reason in report.get("failed", {}).items()}
        return self.failed_prompts | settled

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> DurableFacts:
        """Parse the stored facts. Raises StoreInvalid when a value does not fit its field."""
        try:
            return cls.model_validate(stored)
        except ValidationError as error:
            raise StoreInvalid(
                f"the store's facts must be valid, got {error.error_count()} invalid values, the first in "
                f"{'.'.join(map(str, error.errors()[0]['loc']))}; restore the store from a copy"
            ) from error

    def find_validation(self, version: int) -> ValidationReport | None:
        """Return the validation of a policy version; None when there is none or it is no longer kept."""
        return next((report for report in self.validations if report.policy_version == version), None)


class Ledger:
    """One run's durable state. While the store is unreachable, writes and store reads wait until it returns.

    facts: the facts as they are stored now.
    """

    def __init__(self, store: StoreLink) -> None:
        """Raises StoreInvalid when a stored fact does not fit its field."""
        self._store = store
        self._pausing = asyncio.Lock()
        facts = DurableFacts.from_stored(store.cached_facts())
        # `complete_report` writes the report first, then this fact. A coordinator that was killed in between left
        # prompts in the fact that a report already names.
        settled = {group for report in store.cached_reports() for group in report.get("failed", ())}
        open_ones = {group: reason for group, reason in facts.failed_prompts.items() if group not in settled}
        self.facts = facts.model_copy(update={"failed_prompts": open_ones})

    # -- read from memory ----------------------------------------------------------------------------------------

    @property
    def last_trained_step(self) -> int:
        """The last trained step; 0 before the first."""
        return self._store.last_trained_step()

    @property
    def outage_reason(self) -> str:
        """Why the store is unreachable; empty while it is reachable."""
        return self._store.outage_reason

    @property
    def retry_count(self) -> int:
        """Number of reads and writes that failed and were retried since the coordinator started."""
        return self._store.retry_count

    def read_reports(self, after: int = 0, limit: int = REPORTS_KEPT) -> list[StepReport]:
        """Return the first `limit` reports of steps > `after`, ascending, as far back as REPORTS_KEPT steps."""
        return [StepReport.model_validate(report) for report in self._store.cached_reports(after)[:limit]]

    def list_reported_steps(self, after: int = 0) -> list[int]:
        """List the steps > `after` whose reports are kept, ascending."""
        return [int(report["step"]) for report in self._store.cached_reports(after)]

    def stop_retrying(self) -> None:
        """Stop retrying: from now on a failed operation raises StoreFailed."""
        self._store.stop_retrying()

    # -- read from the store -------------------------------------------------------------------------------------

    async def is_empty(self) -> bool:
        """Whether no step is trained and no batch is fixed."""
        return not self.last_trained_step and await self._store.read_batch(1) is None

    async def read_rollouts(self) -> list[StoredRollout]:
        """Read the graded rollouts that are not trained, in stream order."""
        return await self._store.read_rollouts()

    async def is_batch_fixed(self, step: int) -> bool:
        """Whether the step's batch is stored."""
        return await self._store.read_batch(step) is not None

    async def read_batch(self, step: int) -> Batch | None:
        """Read the batch of step `step` with its rollouts; None when it is not kept."""
        data = await self._store.read_batch(step)
        return None if data is None else wire.batch_from_stored(data, await self._store.read_batch_rollouts(step))

    # -- transactions --------------------------------------------------------------------------------------------

    async def keep_rollout(self, rollout: StoredRollout) -> None:
        """Store a graded rollout."""
        await self._store.put_rollout(rollout)

    async def fix_batch(self, batch: Batch, indexes: Sequence[int]) -> Batch:
        """Fix what a step trains on, before the batch is sent to the trainer.

        Returns the batch that is stored. It differs from `batch` when an earlier call fixed another one.
        indexes: positions of the step's groups whose rollouts are in the batch.
        """
        if await self._store.put_batch(batch.step, wire.batch_to_outline(batch), indexes):
            return batch
        fixed = await self.read_batch(batch.step)
        assert fixed is not None, "put_batch has stored one, now or before a restart"
        return fixed

    async def fail_prompt(self, group: str, reason: str) -> None:
        """Record a prompt as given up, with the reason."""
        await self._set_facts(failed_prompts=self.facts.failed_prompts | {group: reason})

    async def commit_step(self, report: StepReport) -> None:
        """Record a step as trained, with the report so far, and delete its rollouts that no batch names."""
        await self._store.finish_step(report.step, report.model_dump(by_alias=True))

    async def complete_report(self, report: StepReport) -> None:
        """Replace a trained step's report with the complete one, and drop the failed prompts that it names."""
        # The report first: a prompt that is in both after a crash is dropped at the next start (see `__init__`).
        await self._store.set_report(report.step, report.model_dump(by_alias=True))
        failed = self.facts.failed_prompts
        open_ones = {group: reason for group, reason in failed.items() if group not in report.failed}
        if open_ones != failed:
            await self._set_facts(failed_prompts=open_ones)

    async def record_validation(self, report: ValidationReport, best: BestVersion | None) -> None:
        """Store a validation, and the best version after it. Above VALIDATIONS_KEPT only first and newest stay."""
        first = self.facts.validations[:1]
        newer = self.facts.validations[1:]
        await self._set_facts(validations=(*first, *newer[2 - VALIDATIONS_KEPT :], report), best_version=best)

    async def record_inputs(self, inputs: RunInputs) -> None:
        """Record what this start of the run is made from."""
        if inputs != self.facts.inputs:
            await self._set_facts(inputs=inputs)

    async def record_drafter(self, report: DrafterInitReport) -> None:
        """Record that the drafter is initialised. Call it once the checkpoint that contains it is complete."""
        await self._set_facts(drafter_start=report)

    async def prove_version(self, version: int) -> None:
        """Record that every replica serves `version` and that its canary, if one was due, passed."""
        await self._set_facts(proved_version=version)

    async def set_paused(self, is_paused: bool) -> None:
        """Pause or resume the run. Idempotent."""
        # One at a time: the fact in memory is the old one until an earlier request is durable.
        async with self._pausing:
            if is_paused != self.facts.is_paused:
                await self._set_facts(is_paused=is_paused)
                log.info("run_paused" if is_paused else "run_resumed", step=self.last_trained_step)

    async def complete_checkpoint(self, step: int, *, keeps_older: bool) -> None:
        """Record that the checkpoint of `step` is complete, and delete batches that no trainer will replay.

        keeps_older: the previous checkpoint is kept. The batches since it are then kept, too: a trainer that cannot
        read the newest checkpoint replays from the previous one.
        """
        log.info("checkpoint_completed", step=step)
        before = self.facts.checkpoints
        # A step may be recorded twice: a clean stop checkpoints a step that a periodic checkpoint already has.
        last = (before[1], step) if step > before[1] else before
        if last != before:
            await self._set_facts(checkpoints=last)
        await self._store.forget_batches(last[0] if keeps_older else step)

    async def begin_after(self, step: int) -> None:
        """Start an empty ledger after the step of a checkpoint."""
        await self._set_facts(checkpoints=(step, step))
        await self._store.begin_after(step)

    async def _set_facts(self, **changes: Any) -> None:
        """Change facts by field name. Memory changes only after the store has acknowledged the write."""
        changed = self.facts.model_copy(update=changes).model_dump(by_alias=True, include=set(changes))
        for name, value in changed.items():
            await self._store.set_fact(name, value)
        # Copy `self.facts` again, not the value from before the await: a checkpoint or a request to pause may have
        # changed other facts meanwhile.
        self.facts = self.facts.model_copy(update=changes)
