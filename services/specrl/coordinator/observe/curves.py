"""Keeps the numbers of every step in compact form, and downsamples them for the charts of the live page.

A run of 10,000 steps has 10,000 reports of 1.4 KB, too much for a page to fetch repeatedly. Here a step is one row of
4-byte numbers. A query returns at most a given number of points, each the mean of consecutive steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from pydantic import Field

from specrl.formats.reports import PhaseSeconds, ReportModel, StepReport
from specrl.telemetry.training_figures import FIGURES

PHASES = tuple(PhaseSeconds.model_fields)
DRAWN_FIGURES = {name: figure for name, figure in FIGURES.items() if figure.is_drawn}
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
    "drafter_loss",
    *DRAWN_FIGURES,
)
POSITIONS = 8
"""Positions of a draft whose acceptance is drawn. Longer drafts are rare, and their later positions near zero."""
MAX_POINTS = 2000  # of one answer: more than a screen has pixels for
LARGEST = ("policy_lag_max",)
"""Numbers of which a point shows the largest over its steps, not the mean."""

_COLUMNS = (*PHASES, *NUMBERS, *(f"accepted_{position + 1}" for position in range(POSITIONS)))
"""The columns of every run. Those of named rewards and of sources follow."""


class CurvesReport(ReportModel):
    """Curves over consecutive steps, one point per `stride` steps. A number that is unknown is null."""

    steps: list[int]
    """The last step of each point."""
    stride: int = Field(ge=1)
    phases: dict[str, list[float | None]]
    """Mean seconds per step, by phase."""
    numbers: dict[str, list[float | None]]
    """Named as in a step's report. Acceptance by position is accepted_1, accepted_2, ..."""
    rewards: dict[str, list[float | None]] = Field(default_factory=dict)
    """Mean of each reward by name, before weighting; empty if the run has one reward."""
    validation_rewards: dict[str, list[float | None]] = Field(default_factory=dict)
    """The same for validated versions."""
    source_rewards: dict[str, list[float | None]] = Field(default_factory=dict)
    """Mean reward of each training source, by its name; empty if the run has one."""
    figures: dict[str, str] = Field(default_factory=dict)
    """Meaning and unit of each of `numbers` that is a figure of training."""


class StepCurves:
    """The numbers of all steps.

    Shape suffixes: S steps, C columns (_COLUMNS, then two for each named reward and one for each source), P points. NaN
    marks a missing number.
    """

    def __init__(
        self, reports: Iterable[StepReport] = (), reward_names: Sequence[str] = (), source_names: Sequence[str] = ()
    ) -> None:
        """reward_names: of the run's rewards, and source_names: of its training sources; each empty if it has one."""
        self._rewards = tuple(reward_names)
        self._sources = tuple(source_names)
        # Row s is step s + 1. The array doubles when it is full.
        width = len(_COLUMNS) + 2 * len(self._rewards) + len(self._sources)
        self._rows_SC = np.full((1024, width), np.nan, dtype=np.float32)
        self._last = 0
        for report in reports:
            self.add_report(report)

    def add_report(self, report: StepReport) -> None:
        """Add a step, or replace it."""
        while report.step > len(self._rows_SC):
            self._rows_SC = np.concatenate([self._rows_SC, np.full_like(self._rows_SC, np.nan)])
        accepted = [*report.accepted_per_position[:POSITIONS]]
        accepted += [np.nan] * (POSITIONS - len(accepted))
        numbers = [getattr(report, name) for name in NUMBERS]
        row = [*(getattr(report.phases, name) for name in PHASES), *(np.nan if n is None else n for n in numbers)]
        rewards = [report.rewards.get(name, np.nan) for name in self._rewards]
        validated = [report.validation_rewards.get(name, np.nan) for name in self._rewards]
        sources = [report.sources[name].reward if name in report.sources else np.nan for name in self._sources]
        self._rows_SC[report.step - 1] = [*row, *accepted, *rewards, *validated, *sources]
        self._last = max(self._last, report.step)

    def downsample_steps(self, first: int, last: int | None, points: int) -> CurvesReport:
        """Return the curves of steps `first` to `last` (None: the newest) in at most `points` points."""
        last = self._last if last is None else min(last, self._last)
        count = max(0, last - first + 1)
        stride = max(1, -(-count // points))  # rounded up; the last point may have fewer steps
        ends = list(range(first + stride - 1, last, stride)) + ([last] if count else [])
        reduced = self._reduce_columns(first, last, len(ends), stride)
        columns = dict(zip(_COLUMNS, reduced, strict=False))
        named = reduced[len(_COLUMNS) :]
        accepted = {n: v for n, v in columns.items() if n.startswith("accepted_") and any(x is not None for x in v)}
        return CurvesReport(
            steps=ends,
            stride=stride,
            phases={name: columns[name] for name in PHASES},
            numbers={name: columns[name] for name in NUMBERS} | accepted,
            rewards=dict(zip(self._rewards, named, strict=False)),
            validation_rewards=dict(zip(self._rewards, named[len(self._rewards) :], strict=False)),
            source_rewards=dict(zip(self._sources, named[2 * len(self._rewards) :], strict=True)),
            figures={name: f"{figure.help} Unit: {figure.unit}." for name, figure in DRAWN_FIGURES.items()},
        )

    def _reduce_columns(self, first: int, last: int, points: int, stride: int) -> list[list[float | None]]:
        """Reduce each column to `points` values, each over `stride` steps from `first` on."""
        width = self._rows_SC.shape[1]
        rows_SC = np.full((points * stride, width), np.nan, dtype=np.float32)
        rows_SC[: max(0, last - first + 1)] = self._rows_SC[first - 1 : max(first - 1, last)]
        rows_PSC = rows_SC.reshape(points, stride, width)
        is_known_PSC = ~np.isnan(rows_PSC)
        counts_PC = is_known_PSC.sum(axis=1)
        values_PC = np.where(is_known_PSC, rows_PSC, 0).sum(axis=1) / np.maximum(counts_PC, 1)
        for name in LARGEST:
            column = _COLUMNS.index(name)
            values_PC[:, column] = np.where(is_known_PSC, rows_PSC, -np.inf)[:, :, column].max(axis=1)
        drawn_PC = _round_values(values_PC).astype(object)
        drawn_PC[counts_PC == 0] = None
        return [drawn_PC[:, column].tolist() for column in range(width)]


def _round_values(values: np.ndarray) -> np.ndarray:
    """Round to four significant digits, which keeps the JSON small."""
    is_exact = (values == 0) | ~np.isfinite(values)
    place = 10.0 ** (3 - np.floor(np.log10(np.abs(np.where(is_exact, 1.0, values)))))
    return np.where(is_exact, values, np.round(values * place) / place)
