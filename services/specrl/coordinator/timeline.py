"""Who did what when, for the live page: finished spans, in a memory that does not grow with the run.

Two kinds of work are drawn in two ways. Of what there is little - a step's stages, the weights that a replica takes -
each span is kept, the newest BARS_KEPT. Of what there is much - rollouts, verdicts - only how many were under way at
each moment is kept, per lane, in cells of equal width. When the cells do not reach back any more as far as STEPS_SEEN
steps, two and two become one, so that a run of seconds and one of weeks are seen equally well.

What is still under way is asked of the Recorder when somebody looks. A restarted coordinator begins an empty timeline;
the numbers of its steps are kept (curves.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from specrl.coordinator.report import Report
from specrl.telemetry.spans import COORDINATOR, TRAINER, VERIFIERS, OpenSpan, Recorder, Span, SpanName

CELLS = 8192
"""Per lane: 32 KB. With at most LANES_KEPT lanes 8 MB."""
FIRST_CELL_S = 0.02
STEPS_SEEN = 20
LANES_KEPT = 256
"""Replicas come and go under new names; of more than so many, those silent for longest are forgotten."""
BARS_KEPT = 20_000
"""A step of 64 replicas has about 140."""
STEPS_KEPT = 2000
MOST_BARS = 8000
"""In one answer: 300 KB."""

CROWDED = frozenset({SpanName.ROLLOUT, SpanName.REWARD})
DRAWN = {
    SpanName.START: COORDINATOR,
    SpanName.COLLECT: TRAINER,  # it is the trainer that stands still
    SpanName.LOGPROB: TRAINER,
    SpanName.TRAIN: TRAINER,
    SpanName.REPLAY: TRAINER,
    SpanName.CHECKPOINT: TRAINER,
    SpanName.WRITE: TRAINER,
    SpanName.EXPORT: TRAINER,
    SpanName.SYNC: COORDINATOR,
    SpanName.CANARY: COORDINATOR,
    SpanName.VALIDATION: COORDINATOR,
    SpanName.DRAFTER: COORDINATOR,
    SpanName.RECEIVE: None,
    SpanName.COMMIT: None,
}
"""Spans that are kept one by one, with the lane that they are drawn in; None: their own."""


class StepSpan(Report):
    """From the end of the step before to its own; unix seconds."""

    step: int
    began_s: float
    ended_s: float | None
    """Null for the step that is under way."""


class TimelineReport(Report):
    """A stretch of time, `began_s` to `ended_s`, unix seconds."""

    began_s: float
    ended_s: float
    steps: list[StepSpan]
    lanes: list[str]
    """trainer, coordinator, verifiers, and the replicas by name."""
    names: list[str]
    bars: list[tuple[int, int, int, int, int, bool]]
    """Lane and name by place in the lists above, step (0: of none), begin and end in milliseconds after `began_s`, and
    whether it is under way still."""
    busy: dict[str, list[float]]
    """By lane: how much was under way, in points of equal width from `began_s` to `ended_s`."""


@dataclass
class _Bar:
    lane: str
    name: SpanName
    step: int
    began_s: float
    ended_s: float


class _Busy:
    """How much was under way in a lane: seconds of work per cell, in a ring of CELLS cells."""

    def __init__(self) -> None:
        self.cells = np.zeros(CELLS, dtype=np.float32)
        self.newest = 0
        """Number of the newest cell, counted from 1970."""

    def add(self, began: float, ended: float) -> None:
        """Work from `began` to `ended`, in cells."""
        last = int(ended)
        if last > self.newest:
            self._clear(max(self.newest + 1, last - CELLS + 1), last + 1)
            self.newest = last
        first = max(int(began), self.newest - CELLS + 1)
        if first <= last:
            shares = np.ones(last - first + 1, dtype=np.float32)
            shares[0] -= max(0.0, began - first)
            shares[-1] -= last + 1 - ended
            self.cells[np.arange(first, last + 1) % CELLS] += shares

    def _clear(self, first: int, end: int) -> None:
        self.cells[np.arange(first, end) % CELLS] = 0

    def coarsen(self) -> None:
        """Two and two cells become one."""
        numbers = np.arange(self.newest - CELLS + 1, self.newest + 1)
        values = self.cells[numbers % CELLS]
        self.cells = np.zeros_like(self.cells)
        np.add.at(self.cells, (numbers // 2) % CELLS, values / 2)
        self.newest //= 2

    def between(self, first: int, end: int) -> np.ndarray:
        """Values of the cells `first` to `end` - 1 [N], 0 where nothing is known."""
        numbers = np.arange(first, end)
        is_known = (numbers > self.newest - CELLS) & (numbers <= self.newest)
        return np.where(is_known, self.cells[numbers % CELLS], 0)


class Timeline:
    """A sink of spans. recorder: knows what is under way."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._cell_s = FIRST_CELL_S
        self._bars: deque[_Bar] = deque(maxlen=BARS_KEPT)
        self._busy: dict[str, _Busy] = {}
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=STEPS_KEPT)

    def ask(self, recorder: Recorder) -> None:
        """Show what is under way there, too."""
        self._recorder = recorder

    def __call__(self, span: Span) -> None:
        """Take in a finished span."""
        if span.name in CROWDED:
            busy = self._busy.pop(span.lane, None) or _Busy()
            self._busy[span.lane] = busy  # the lane heard of last comes last
            busy.add(span.began_s / self._cell_s, span.ended_s / self._cell_s)
            if len(self._busy) > LANES_KEPT:
                del self._busy[next(iter(self._busy))]
        elif span.name is SpanName.STEP and span.step is not None:
            self._steps.append((span.step, span.began_s, span.ended_s))
            self._fit()
        elif span.name in DRAWN:
            lane = DRAWN[span.name] or span.lane
            self._bars.append(_Bar(lane, span.name, span.step or 0, span.began_s, span.ended_s))

    def _fit(self) -> None:
        """Coarsen the cells until they reach back over the last STEPS_SEEN steps."""
        seen = list(self._steps)[-STEPS_SEEN:]
        while seen[-1][2] - seen[0][1] > self._cell_s * CELLS:
            self._cell_s *= 2
            for busy in self._busy.values():
                busy.coarsen()

    def report(self, until: int | None, steps: int, points: int) -> TimelineReport:
        """The `steps` steps up to `until`; None: up to now."""
        now_s = self._recorder.now() if self._recorder is not None else 0.0
        shown = [step for step in self._steps if until is None or step[0] <= until][-steps:]
        is_live = until is None or (bool(self._steps) and until > self._steps[-1][0])
        under_way = self._under_way(now_s) if is_live else []
        began_s = shown[0][1] if shown else min((bar.began_s for bar, _ in under_way), default=now_s)
        ended_s = now_s if is_live else shown[-1][2] if shown else began_s
        bars = [(bar, False) for bar in self._bars if bar.ended_s >= began_s and bar.began_s <= ended_s]
        found = (bars + under_way)[-MOST_BARS:]
        busy = self._busy_between(began_s, ended_s, points, is_live)
        lanes = _in_order({*busy, *(bar.lane for bar, _ in found)})
        names = list(DRAWN)
        lane_at = {lane: place for place, lane in enumerate(lanes)}
        name_at = {name: place for place, name in enumerate(names)}
        spans = [StepSpan(step=step, began_s=began, ended_s=ended) for step, began, ended in shown]
        spans += self._present_step() if is_live else []
        return TimelineReport(
            began_s=began_s,
            ended_s=ended_s,
            steps=spans,
            lanes=lanes,
            names=[name.value for name in names],
            bars=[
                (
                    lane_at[bar.lane],
                    name_at[bar.name],
                    bar.step,
                    round(1000 * (bar.began_s - began_s)),
                    round(1000 * (bar.ended_s - began_s)),
                    is_open,
                )
                for bar, is_open in found
            ],
            busy=busy,
        )

    def _open(self, names: Iterable[SpanName]) -> Iterator[OpenSpan]:
        if self._recorder is not None:
            wanted = frozenset(names)
            yield from (span for span in self._recorder.open.values() if span.name in wanted)

    def _under_way(self, now_s: float) -> list[tuple[_Bar, bool]]:
        found = self._open(DRAWN)
        return [
            (_Bar(DRAWN[it.name] or it.lane, it.name, it.context.step or 0, it.began_s, now_s), True) for it in found
        ]

    def _present_step(self) -> list[StepSpan]:
        found = [span for span in self._open([SpanName.STEP]) if span.context.step is not None]
        return [StepSpan(step=span.context.step or 0, began_s=span.began_s, ended_s=None) for span in found]

    def _busy_between(self, began_s: float, ended_s: float, points: int, is_live: bool) -> dict[str, list[float]]:
        """Mean number under way in each of `points` parts of the time, by lane; lanes without work are left out."""
        first = int(began_s / self._cell_s)
        count = max(1, int(ended_s / self._cell_s) + 1 - first)
        points = min(points, count)
        edges = first + np.arange(points + 1) * count // points
        cells = {lane: busy.between(first, first + count) for lane, busy in self._busy.items()}
        begun: dict[str, list[int]] = {}
        for span in self._open(CROWDED) if is_live else ():
            begun.setdefault(span.lane, []).append(min(max(0, int(span.began_s / self._cell_s) - first), count - 1))
        for lane, places in begun.items():
            cells[lane] = cells.get(lane, 0) + np.bincount(places, minlength=count).cumsum()
        shown = {}
        for lane, values in cells.items():
            means = np.add.reduceat(values, edges[:-1] - first) / np.diff(edges)
            if means.any():
                shown[lane] = np.round(means.astype(float), 2).tolist()
        return shown


def _in_order(lanes: Iterable[str]) -> list[str]:
    """The trainer, the coordinator and the verifiers first; then the replicas by name and number."""
    first = [lane for lane in (TRAINER, COORDINATOR, VERIFIERS) if lane in lanes]
    replicas = sorted({*lanes} - {*first}, key=lambda lane: (lane.rstrip("0123456789"), len(lane), lane))
    return first + replicas
