"""Shows a coordinator's reports while the run is active: a row per step and validation, and the present status.

Called by `launcher.local_run` and `specrl status -w`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence

from specrl.formats.reports import StatusReport, ValidationReport
from specrl.launcher.coordinator_client import CoordinatorReports
from specrl.launcher.terminal.rows import step_notices
from specrl.launcher.terminal.view import View

# Steps of an active run that are shown before its new ones.
DEFAULT_HISTORY_STEPS = 5

# Steps whose mean duration the remaining time is estimated from.
ESTIMATED_STEPS = 10


class RunFollower:
    """Shows each report of a run once. history: how many of the steps before now are shown first."""

    def __init__(self, reports: CoordinatorReports, view: View, history: int = DEFAULT_HISTORY_STEPS) -> None:
        self._reports = reports
        self._view = view
        self._history = history
        self._shown_step: int | None = None
        self._durations: deque[float] = deque(maxlen=ESTIMATED_STEPS)  # seconds of the last steps
        self._shown_versions: set[int] = set()
        self._shown_failures: set[str] = set()
        self._resting: set[str] = set()  # replicas that have switched their drafter off
        self._shown_given_up: set[str] = set()
        self._shown_warnings: list[str] = []  # those of the last status

    def show_updates(self) -> StatusReport | None:
        """Show everything new. Returns the status, or None while the coordinator does not answer."""
        status = self._reports.fetch_status()
        if status is not None:
            self._show_failure_reasons(status)
            self._show_given_up(status)
            self._show_rows(status)
            self._show_warnings(status)
            self._show_drafting(status)
        self._view.show_status(status)
        return status

    def _show_failure_reasons(self, status: StatusReport) -> None:
        """Show each reason for which verdicts fail once, as soon as the first verdict has failed for it."""
        for reason in status.verdict_failures:
            if reason not in self._shown_failures:
                self._shown_failures.add(reason)
                self._view.show_message(f"grading failed: {reason} (each reason is shown once)")

    def _show_given_up(self, status: StatusReport) -> None:
        """Show once why a replica is given up."""
        for replica, reason in status.replicas_given_up.items():
            if replica not in self._shown_given_up:
                self._shown_given_up.add(replica)
                self._view.show_message(f"{replica} is given up: {reason}")

    def _show_warnings(self, status: StatusReport) -> None:
        """Show each warning once. One that was gone meanwhile is shown again."""
        for warning in status.warnings:
            if warning not in self._shown_warnings:
                self._view.show_message(f"warning: {warning}")
        self._shown_warnings = status.warnings

    def _show_drafting(self, status: StatusReport) -> None:
        """Show when a replica switches its drafter off or on: the rows of such steps have no acceptance length."""
        for replica in status.replicas:
            if replica.drafting == "off" and replica.id not in self._resting:
                self._resting.add(replica.id)
                self._view.show_message(
                    f"{replica.id} has switched drafting off, which would not pay now; draftLength: Fixed keeps it on"
                )
            elif replica.drafting == "drafting" and replica.id in self._resting:
                self._resting.discard(replica.id)
                self._view.show_message(f"{replica.id} has switched drafting on again")

    def _estimate_remaining(self, step: int, steps: int) -> float | None:
        """Estimate the seconds from the end of `step` to the end of the run's last step. None without a duration."""
        mean_s = sum(self._durations) / len(self._durations)
        return mean_s * max(0, steps - step) or None

    def _show_rows(self, status: StatusReport) -> None:
        """Show rows for new steps and validations.

        A validation gets its own row only when its step's row does not show all of it.
        """
        if self._shown_step is None:
            # The first status. Validations so far count as shown, unless no step is trained yet: then the validation
            # of the initial policy is news.
            self._shown_step = max(0, status.step - self._history)
            if status.step:
                self._shown_versions |= {report.policy_version for report in self._reports.fetch_validations()}
        in_rows: set[int] = set()
        reports = self._reports.fetch_steps(self._shown_step) if status.step > self._shown_step else []
        validations = self._reports.fetch_validations()  # after the steps, so that it has all that their rows show
        for report in reports:
            # The validation of the initial policy may have ended during the first step.
            self._show_validations([it for it in validations if it.policy_version < report.step], in_rows)
            self._durations.append(report.phases.wall_seconds)
            self._view.show_step(report, self._estimate_remaining(report.step, status.steps))
            self._shown_step = report.step
            for notice in step_notices(report):
                self._view.show_message(notice)
            if report.validation_reward is not None:
                in_rows.add(report.policy_version)
        # Not before the row of the step that produced the version.
        self._show_validations([it for it in validations if it.policy_version <= self._shown_step], in_rows)

    def _show_validations(self, validations: Sequence[ValidationReport], in_rows: Container[int]) -> None:
        """Show validations that are new. in_rows: versions whose step's row has the result, unless it has parts."""
        for validation in validations:
            version = validation.policy_version
            if version not in self._shown_versions:
                self._shown_versions.add(version)
                if validation.failed_count or validation.sources or version not in in_rows:
                    self._view.show_validation(validation)
