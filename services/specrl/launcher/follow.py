"""Shows what a coordinator reports as it goes on: a row for every step and validation, and the status of now."""

from __future__ import annotations

from specrl.coordinator.report import Status
from specrl.launcher.reports import CoordinatorReports
from specrl.launcher.view import View

HISTORY_STEPS = 5
"""Of a run that is under way, shown before its new ones."""


class Follower:
    """What of a run has been shown in a view. history: how many of the steps before are shown first."""

    def __init__(self, reports: CoordinatorReports, view: View, history: int = HISTORY_STEPS) -> None:
        self._reports, self._view, self._history = reports, view, history
        self._shown_step: int | None = None
        self._shown_versions: set[int] = set()

    def turn(self) -> Status | None:
        """Show what is new; returns the status, None while the coordinator does not answer."""
        status = self._reports.status()
        if status is not None:
            self._draw_rows(status)
        self._view.show(status)
        return status

    def _draw_rows(self, status: Status) -> None:
        """Rows for what is new. A validation gets its own row unless its step's row has shown it."""
        if self._shown_step is None:
            self._shown_step = max(0, status.step - self._history)
            self._shown_versions |= {report.policy_version for report in self._reports.validations() if status.step}
        for report in self._reports.steps(self._shown_step) if status.step > self._shown_step else []:
            self._view.step(report)
            self._shown_step = report.step
            if report.validation_accuracy is not None:
                self._shown_versions.add(report.policy_version)
        for validation in self._reports.validations():
            if validation.policy_version not in self._shown_versions and validation.policy_version <= self._shown_step:
                self._shown_versions.add(validation.policy_version)
                self._view.validation(validation)
