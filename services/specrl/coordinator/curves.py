"""The numbers of every step, in little memory, and what of them fits on a screen.

A run of 10,000 steps is 10,000 reports of 1.4 KB: too much for a page to ask for again and again. Here each step is a
row of 4-byte numbers, and a question is answered with at most so many points, each the mean of consecutive steps.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from pydantic import Field

from specrl.coordinator.report import Report, StageSeconds, StepReport

STAGES = tuple(StageSeconds.model_fields)
NUMBERS = (
    "reward",
    "no_answer_share",
    "verifier_error_share",
    "ungraded_share",
    "validation_reward",
    "validation_low",
    "validation_high",
    "policy_lag_mean",
    "policy_lag_max",
    "acceptance_length",
    "draft_length",
    "speculation_gain",
    "mean_length",
    "effective_sample_size",
    "mismatch_kl",
    "drafter_loss",
)
POSITIONS = 8
"""Positions of a draft whose acceptance is drawn; longer drafts are rare, and their tails near zero."""
MOST_POINTS = 2000
LARGEST = ("policy_lag_max",)
"""Of these a point is the largest of its steps, not their mean."""

_COLUMNS = (*STAGES, *NUMBERS, *(f"accepted_{position + 1}" for position in range(POSITIONS)))


class CurvesReport(Report):
    """Steps first to last in points of `stride` steps each; null where a number is not known."""

    steps: list[int]
    """Last step of each point."""
    stride: int = Field(ge=1)
    stages: dict[str, list[float | None]]
    """Mean seconds per step, by stage."""
    numbers: dict[str, list[float | None]]
    """By name as in a step's report; acceptance by position as accepted_1, accepted_2 and so on."""


class Curves:
    """Rows of consecutive steps [S, C], missing ones as NaN."""

    def __init__(self, reports: Iterable[StepReport] = ()) -> None:
        self._rows_SC = np.full((1024, len(_COLUMNS)), np.nan, dtype=np.float32)
        self._last = 0
        for report in reports:
            self.add(report)

    def add(self, report: StepReport) -> None:
        """Keep a step, or replace it."""
        while report.step > len(self._rows_SC):
            self._rows_SC = np.concatenate([self._rows_SC, np.full_like(self._rows_SC, np.nan)])
        accepted = [*report.accepted_per_position[:POSITIONS]]
        accepted += [np.nan] * (POSITIONS - len(accepted))
        numbers = [getattr(report, name) for name in NUMBERS]
        row = [*(getattr(report.stages, name) for name in STAGES), *(np.nan if n is None else n for n in numbers)]
        self._rows_SC[report.step - 1] = [*row, *accepted]
        self._last = max(self._last, report.step)

    def report(self, first: int, last: int | None, points: int) -> CurvesReport:
        """Steps `first` to `last` (None: the newest) in at most `points` points."""
        last = self._last if last is None else min(last, self._last)
        count = max(0, last - first + 1)
        stride = max(1, -(-count // points))
        ends = list(range(first + stride - 1, last, stride)) + ([last] if count else [])
        columns = self._points(first, last, len(ends), stride)
        accepted = {n: v for n, v in columns.items() if n.startswith("accepted_") and any(x is not None for x in v)}
        return CurvesReport(
            steps=ends,
            stride=stride,
            stages={name: columns[name] for name in STAGES},
            numbers={name: columns[name] for name in NUMBERS} | accepted,
        )

    def _points(self, first: int, last: int, points: int, stride: int) -> dict[str, list[float | None]]:
        """By column, what is drawn for each `stride` steps from `first` on."""
        rows_SC = np.full((points * stride, len(_COLUMNS)), np.nan, dtype=np.float32)
        rows_SC[: max(0, last - first + 1)] = self._rows_SC[first - 1 : max(first - 1, last)]
        rows_PSC = rows_SC.reshape(points, stride, len(_COLUMNS))
        is_known_PSC = ~np.isnan(rows_PSC)
        counts_PC = is_known_PSC.sum(axis=1)
        values_PC = np.where(is_known_PSC, rows_PSC, 0).sum(axis=1) / np.maximum(counts_PC, 1)
        for name in LARGEST:
            column = _COLUMNS.index(name)
            values_PC[:, column] = np.where(is_known_PSC, rows_PSC, -np.inf)[:, :, column].max(axis=1)
        drawn_PC = _rounded(values_PC).astype(object)
        drawn_PC[counts_PC == 0] = None
        return {name: drawn_PC[:, column].tolist() for column, name in enumerate(_COLUMNS)}


def _rounded(values: np.ndarray) -> np.ndarray:
    """To four digits, which are what is sent."""
    is_exact = (values == 0) | ~np.isfinite(values)
    place = 10.0 ** (3 - np.floor(np.log10(np.abs(np.where(is_exact, 1.0, values)))))
    return np.where(is_exact, values, np.round(values * place) / place)
