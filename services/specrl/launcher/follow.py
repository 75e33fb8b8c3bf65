"""Shows what a coordinator reports as it goes on: a row for every step and validation, and the status of now."""

from __future__ import annotations

from specrl.coordinator.report import Status
from specrl.launcher.reports import CoordinatorReports
from specrl.launcher.rows import step_notices
from specrl.launcher.view import View

HISTORY_STEPS = 5
"""Of a run that is under way, shown before its new ones."""


class Follower:
    """What of a run has been shown in a view. history: how many of the steps before are shown first."""

    def __init__(self, reports: CoordinatorReports, view: View, history: int = HISTORY_STEPS) -> None:
        self._reports, self._view, self._history = reports, view, history
        self._shown_step: int | None = None
        self._shown_versions: set[int] = set()
        self._shown_failures: set[str] = set()

    def turn(self) -> Status | None:
        """Show what is new; returns the status, None while the coordinator does not answer."""
        status = self._reports.status()
        if status is not None:
            self._tell_failures(status)
            self._draw_rows(status)
        self._view.show(status)
        return status

    def _tell_failures(self, status: Status) -> None:
        """Say once of each reason that verdicts fail for it, as soon as the first has."""
        for reason in status.verdict_failures:
            if reason not in self._shown_failures:
                self._shown_failures.add(reason)
                self._view.message(f"grading failed: {reason} (said once for each reason)")

    def _draw_rows(self, status: Status) -> None:
        """Rows for what is new. A validation gets its own row unless its step's row has shown all of it."""
        if self._shown_step is None:
            self._shown_step = max(0, status.step - self._history)
            self._shown_versions |= {report.policy_version for report in self._reports.validations() if status.step}
        in_rows: set[int] = set()
        for report in self._reports.steps(self._shown_step) if status.step > self._shown_step else []:
            self._view.step(report)
            self._shown_step = report.step
            for notice in step_notices(report):
                self._view.message(notice)
            if report.validation_reward is not None:
                in_rows.add(report.policy_version)
        for validation in self._reports.validations():
            version = validation.policy_version
            if version not in self._shown_versions and version <= self._shown_step:
                self._shown_versions.add(version)
                if validation.failed or version not in in_rows:
                    self._view.validation(validation)
