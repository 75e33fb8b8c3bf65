"""Folds the run's events into everything that is shown of it.

    events ──► status, metrics, calibration.json, status.json, curves, samples,
               metrics.jsonl, validations.jsonl, rollouts.jsonl

The loop publishes the events. The live page, the sinks, the RLJob's status and Prometheus read the results. Nothing in
the run reads them, so a run without an observer trains the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from specrl.coordinator.context import RunContext
from specrl.coordinator.loop import Loop
from specrl.coordinator.observe.calibration_file import CalibrationFile
from specrl.coordinator.observe.curves import StepCurves
from specrl.coordinator.observe.event_log import EventLog
from specrl.coordinator.observe.exposure import RECENT_STEPS, DemandMeter, Exposure, measure_exposure
from specrl.coordinator.observe.prometheus import RunMetrics
from specrl.coordinator.observe.report_files import ReportFiles
from specrl.coordinator.observe.run_status import RunStatus
from specrl.coordinator.observe.samples import RolloutFile, RolloutSamples
from specrl.coordinator.observe.timeline import Timeline
from specrl.coordinator.run_events import (
    PhaseEntered,
    RolloutGraded,
    RunEvent,
    RunFinished,
    StepReported,
    StepServed,
    VersionServed,
    VersionValidated,
)
from specrl.formats.reports import StatusReport, StepReport, ValidationReport
from specrl.records import NO_DRAFTER
from specrl.rewards.verifier import SandboxChoice


class RunObserver:
    """Everything that is shown of one run. curves, events, samples and timeline are read by the page alone."""

    def __init__(
        self,
        context: RunContext,
        loop: Loop,
        replicas_wanted: int | None = None,
        events: EventLog | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Continue the run's files where a previous coordinator left them, and subscribe to the run's events.

        replicas_wanted: how many replicas the launcher keeps; None in a cluster.
        """
        self._context = context
        self._loop = loop
        # The last step whose report is complete. The ledger may be one step ahead: it has a step's first report as soon
        # as the step is trained, before its version is served.
        self._published = context.ledger.last_trained_step
        self._files = ReportFiles(context.directory)
        # Write the lines that a previous coordinator committed to the store but not to the files.
        self._files.append_steps(self.read_reports(after=self._files.last_step))
        self._files.append_validations(self.read_validations())
        reports = self._read_all_reports()
        self._recent = deque(reports, maxlen=RECENT_STEPS)
        self._status = RunStatus(context, loop, reports, replicas_wanted)
        self._metrics = RunMetrics(context.spec)
        self._demand = DemandMeter()
        self._calibration = CalibrationFile(context.spec, context.directory)
        self.curves = StepCurves(reports, context.spec.rewards.names, context.spec.prompts.source_names)
        self.events = events or EventLog()
        telemetry = context.spec.telemetry
        self.samples = RolloutSamples(context.spec.rewards, telemetry.rollouts_shown)
        self._rollouts = RolloutFile(context.directory, context.spec.rewards, telemetry.rollouts)
        self.timeline = timeline or Timeline()
        context.events.subscribe(self.handle_event)

    def handle_event(self, event: RunEvent) -> None:
        """Fold in an event. Called on the event loop, in the order of publication."""
        self._status.handle_event(event)
        self._metrics.handle_event(event)
        match event:
            case PhaseEntered():
                self._files.write_status(self.build_status())
            case RolloutGraded(prompt, graded):
                self.samples.offer_rollout(prompt, graded)
            case VersionServed(version):
                drafters = [replica.drafter_version for replica in self._context.registry.serving_replicas()]
                oldest = min(drafters, default=NO_DRAFTER)
                if oldest != NO_DRAFTER:
                    self._metrics.set_drafter_lag(version - oldest)
            case StepServed(report, _, groups, busy_cores):
                registry = self._context.registry
                self._demand.add_step(report, len(registry.serving_replicas()))
                if self._demand.demand is not None:
                    self._metrics.set_demand(self._demand.demand)
                replicas = sum(replica.status is not None for replica in registry.replicas.values())
                self._calibration.add_step(report, groups, registry.step_costs(), replicas, busy_cores)
                self._rollouts.append_step(report.step, groups)
            case StepReported(report):
                self._published = report.step
                self.curves.add_report(report)
                self._recent.append(report)
                self._files.append_steps(self.read_reports(after=self._files.last_step))
                self._files.write_status(self.build_status())
            case VersionValidated():
                self._files.append_validations(self.read_validations())
            case RunFinished(policy, drafter, checkpoint):
                reports = self._read_all_reports()
                self._status.summarise_steps(reports, self.read_validations(), (policy, drafter, checkpoint))

    def set_problem_counts(self, skipped: int, repeated: int) -> None:
        """Set how many problems of the source were skipped, and how many it contains more than once."""
        self._status.problems = {"problemsSkipped": skipped, "problemsRepeated": repeated}

    def set_notices(self, notices: Sequence[str]) -> None:
        """Set what a user should know of the run from its start."""
        self._status.notices = list(notices)

    def set_sandboxes(self, sandboxes: Sequence[SandboxChoice]) -> None:
        """Set which isolation programs run in. A weaker one than the strongest is a notice, too."""
        self._status.isolations = {choice.path: choice.isolation.value for choice in sandboxes}
        self._status.notices += filter(None, (choice.describe_notice() for choice in sandboxes))

    # -- reads ---------------------------------------------------------------------------------------------------

    def build_status(self) -> StatusReport:
        """Return the run's present status, and set the gauges to the same values."""
        occupancy = self._loop.scheduler.measure_occupancy()
        status = self._status.build_report(occupancy)
        self._metrics.show_status(status, occupancy, self._context.controls.minimum_replicas)
        return status

    def read_reports(self, after: int = 0) -> list[StepReport]:
        """Return the complete reports of steps > `after` that the store keeps."""
        return [report for report in self._context.ledger.read_reports(after) if report.step <= self._published]

    def read_report_page(self, after: int, limit: int) -> list[StepReport]:
        """Return the first `limit` complete reports of steps > `after`.

        The store has the newest, metrics.jsonl all others.
        """
        kept = [step for step in self._context.ledger.list_reported_steps(after) if step <= self._published]
        # From `first` on the store has every step; those before it are read from the file.
        first = kept[0] if kept else self._published + 1
        older = self._files.read_page(after, first, limit) if after + 1 < first else []
        newer = self._context.ledger.read_reports(max(after, first - 1), min(limit - len(older), len(kept)))
        return older + newer

    def measure_recent_exposure(self) -> Exposure:
        """Return the exposed generation of the last RECENT_STEPS steps."""
        return measure_exposure([*self._recent], self._context.spec, len(self._context.registry.serving_replicas()))

    def list_recent_reports(self) -> Sequence[StepReport]:
        """Return the newest complete reports, ascending; at most RECENT_STEPS."""
        return [*self._recent]

    def read_validations(self) -> Sequence[ValidationReport]:
        """Return the first validation and the newest ones."""
        return self._context.ledger.facts.validations

    def _read_all_reports(self) -> list[StepReport]:
        """Return the reports of all steps; those that the store no longer keeps come from metrics.jsonl."""
        kept = self.read_reports()
        return (self._files.read_before(kept[0].step) if kept else []) + kept
