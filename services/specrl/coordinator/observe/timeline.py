"""Keeps finished spans for the live page's timeline, in bounded memory.

Rare work, such as the parts of a step or a replica's weight update, is kept span by span: the newest BARS_KEPT spans.
Frequent work, rollouts and verdicts, is kept only as a load curve per lane: how much was in progress, in cells of equal
width. When the cells no longer span the last STEPS_SEEN steps and the present one, each pair of cells is merged into
one. So runs with steps of seconds and of hours are both shown in full.

A report may span more than the cells: the steps of a resumed run may be days apart. Its load curves are computed from
the cells that there are, so its cost depends on CELLS and on the requested points, not on the time that it spans.

Open spans are read from the Recorder when a page asks. The bars of the last STEPS_SEEN steps are in a file, so that a
resumed run shows them; load curves are not. Each step appends one line to it, and every STEPS_SEEN steps the file is
written anew without the older ones. The numbers of all steps are in curves.py.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog

from specrl.coordinator.observe.report_files import ShownFileWrites
from specrl.files import parse_object, read_text, write_text
from specrl.formats.reports import ReportModel
from specrl.telemetry import metrics
from specrl.telemetry.spans import COORDINATOR, TRAINER, VERIFIERS, OpenSpan, Recorder, Span, SpanName

CELLS = 8192
"""Cells per lane, of 4 bytes: 32 KB, and with LANES_KEPT lanes 8 MB."""
FIRST_CELL_S = 0.02  # width of a cell at first; it only ever doubles
STEPS_SEEN = 20
LANES_KEPT = 256
"""Replicas join under new names, so lanes accumulate. Beyond this number the least recently used lane is dropped."""
BARS_KEPT = 20_000
"""A step with 64 replicas has about 140 bars."""
STEPS_KEPT = 2000
MAX_BARS = 8000
"""Most bars in one answer: 300 KB."""

MAX_FILE_BYTES = 64 << 20
"""Largest file that is read. STEPS_SEEN steps with 1,000 replicas take 5 MB."""

log = structlog.get_logger(__name__)

FREQUENT_SPANS = frozenset({SpanName.ROLLOUT, SpanName.REWARD})  # frequent: kept as a load curve
DRAWN_SPANS = {
    SpanName.START: COORDINATOR,
    SpanName.COLLECT: TRAINER,  # the coordinator records it, but it is the trainer that is idle
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
"""Spans that are kept one by one, with the lane that they are drawn in. None: the span's own lane."""


class StepSpan(ReportModel):
    """The time of one step, from the end of the previous one; unix seconds."""

    step: int
    began_s: float
    ended_s: float | None
    """Null for the present step."""


class TimelineReport(ReportModel):
    """The timeline between `began_s` and `ended_s`, in unix seconds."""

    began_s: float
    ended_s: float
    steps: list[StepSpan]
    lanes: list[str]
    """trainer, coordinator, verifiers, then the replicas by name."""
    names: list[str]
    """Names of the spans that `bars` may refer to."""
    bars: list[tuple[int, int, int, int, int, bool]]
    """(lane, name, step, begin, end, is open). Lane and name are indexes into the lists above; step is 0 for a span
    outside steps; begin and end are in milliseconds after `began_s`. A tuple, because an answer has thousands."""
    busy: dict[str, list[float]]
    """By lane: the mean number of spans in progress, in intervals of equal width from `began_s` to `ended_s`."""


@dataclass
class _SpanBar:
    """One drawn span. Unix seconds; step 0 for a span outside steps."""

    lane: str
    name: SpanName
    step: int
    began_s: float
    ended_s: float


class StoredStep(ReportModel):
    """A finished step, a line of the file: its time in unix seconds, and the drawn spans that ended in it."""

    step: int
    began_s: float
    ended_s: float
    bars: list[_SpanBar]


class _LaneLoad:
    """The load curve of one lane: work per cell, in units of a cell's width, in a ring buffer of CELLS cells."""

    def __init__(self) -> None:
        self.cells = np.zeros(CELLS, dtype=np.float32)
        self.newest = 0
        """Number of the newest cell. Cell 0 begins in 1970; cell n is stored at n % CELLS."""

    def add_span(self, began: float, ended: float) -> None:
        """Add a span. began, ended: unix time divided by the cell's width."""
        last = int(ended)
        if last > self.newest:
            # The ring moves on: cells that leave it are reused, so set them to 0 first.
            self.cells[np.arange(max(self.newest + 1, last - CELLS + 1), last + 1) % CELLS] = 0
            self.newest = last
        first = max(int(began), self.newest - CELLS + 1)
        if first <= last:
            # Each cell gets the share of its width that the span covers; only the outer two may be partial.
            shares = np.ones(last - first + 1, dtype=np.float32)
            shares[0] -= max(0.0, began - first)
            shares[-1] -= last + 1 - ended
            self.cells[np.arange(first, last + 1) % CELLS] += shares

    def merge_cells(self) -> None:
        """Double the width of the cells: merge cells 2n and 2n + 1 into cell n."""
        numbers = np.arange(self.newest - CELLS + 1, self.newest + 1)
        values = self.cells[numbers % CELLS]
        self.cells = np.zeros_like(self.cells)
        np.add.at(self.cells, (numbers // 2) % CELLS, values / 2)
        self.newest //= 2

    def sum_cells(self, edges: np.ndarray) -> np.ndarray:
        """Sum the cells of each interval. edges: cell numbers, ascending, [P + 1]. Returns [P]."""
        # Only the cells in the ring are read, however many lie between the edges.
        numbers = np.arange(max(int(edges[0]), self.newest - CELLS + 1), min(int(edges[-1]), self.newest + 1))
        places = np.searchsorted(edges, numbers, side="right") - 1
        return np.bincount(places, self.cells[numbers % CELLS], minlength=len(edges) - 1)


class Timeline:
    """Keeps finished spans (a span sink), and reports stretches of the timeline."""

    def __init__(self, file: Path | None = None) -> None:
        """file: where the last steps are kept for a resumed run. None: no file.

        Lines that are damaged are skipped. A file that cannot be read is not written until it can be. It is shown only,
        so it is not synced.
        """
        self._file = file
        # Lines of the file. It counts as full at first, and is written anew: its last line may be truncated.
        self._lines = 2 * STEPS_SEEN
        self._is_restored = False
        self._writes = ShownFileWrites()
        self._stored: deque[StoredStep] = deque(maxlen=STEPS_SEEN)
        self._recorder: Recorder | None = None
        self._cell_s = FIRST_CELL_S
        self._bars: deque[_SpanBar] = deque(maxlen=BARS_KEPT)
        self._busy: dict[str, _LaneLoad] = {}
        self._first_load_s: float | None = None  # unix time of the first frequent span of this process
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=STEPS_KEPT)
        if file is not None:
            with suppress(OSError):  # `_write_newest_step` tries again
                self._restore_steps(file)

    def _restore_steps(self, file: Path) -> None:
        """Put the steps of earlier coordinators of this run before those of this one.

        Raises OSError if there is a file that cannot be read.
        """
        earlier = _read_steps(file)[-STEPS_SEEN:]
        self._stored = deque([*earlier, *self._stored], maxlen=STEPS_SEEN)
        times = [(step.step, step.began_s, step.ended_s) for step in earlier]
        self._steps = deque([*times, *self._steps], maxlen=STEPS_KEPT)
        bars = [bar for step in earlier for bar in step.bars]
        self._bars = deque([*bars, *self._bars], maxlen=BARS_KEPT)
        self._is_restored = True

    def _store_step(self, step: int, began_s: float, ended_s: float) -> None:
        if self._file is None:
            return
        bars = [bar for bar in self._bars if bar.ended_s > began_s]
        self._stored.append(StoredStep(step=step, began_s=began_s, ended_s=ended_s, bars=bars))
        self._writes.try_write(self._file.name, self._write_newest_step)

    def _write_newest_step(self) -> None:
        assert self._file is not None
        if not self._is_restored:
            self._restore_steps(self._file)
        if self._lines < 2 * STEPS_SEEN:
            # After an error the file is written anew: a part of the line may be in it.
            before = self._lines
            self._lines = 2 * STEPS_SEEN
            with self._file.open("a", encoding="utf-8") as file:
                file.write(self._stored[-1].model_dump_json(by_alias=True) + "\n")
            self._lines = before + 1
        else:
            write_text(self._file, "".join(f"{step.model_dump_json(by_alias=True)}\n" for step in self._stored))
            self._lines = len(self._stored)

    def set_recorder(self, recorder: Recorder) -> None:
        """Set the recorder whose open spans are shown, too."""
        self._recorder = recorder

    def __call__(self, span: Span) -> None:
        """Add a finished span."""
        if span.name in FREQUENT_SPANS:
            self._fit_cells(span)
            # Reinserted, so that the dictionary's first lane is the least recently used one.
            busy = self._busy.pop(span.lane, None) or _LaneLoad()
            self._busy[span.lane] = busy
            busy.add_span(span.began_s / self._cell_s, span.ended_s / self._cell_s)
            if len(self._busy) > LANES_KEPT:
                del self._busy[next(iter(self._busy))]
        elif span.name is SpanName.STEP and span.step is not None:
            self._steps.append((span.step, span.began_s, span.ended_s))
            self._store_step(span.step, span.began_s, span.ended_s)
        elif span.name in DRAWN_SPANS:
            lane = DRAWN_SPANS[span.name] or span.lane
            self._bars.append(_SpanBar(lane, span.name, span.step or 0, span.began_s, span.ended_s))

    def _fit_cells(self, newest: Span) -> None:
        """Coarsen all cells until they span the load of the last STEPS_SEEN steps, and of the present one.

        newest: the frequent span that is added next.
        """
        if self._first_load_s is None:
            self._first_load_s = newest.began_s
        seen_s = self._steps[-STEPS_SEEN][1] if len(self._steps) >= STEPS_SEEN else 0.0
        # The time before the first load needs no cells: a resumed run has steps from before a gap of any length.
        began_s = max(self._first_load_s, seen_s)
        while newest.ended_s - began_s > self._cell_s * CELLS:
            self._cell_s *= 2
            for busy in self._busy.values():
                busy.merge_cells()

    def build_report(self, until: int | None, steps: int, points: int) -> TimelineReport:
        """Report the `steps` steps up to step `until`, or up to now if it is None.

        points: intervals of the load curves.
        """
        now_s = self._recorder.now() if self._recorder is not None else 0.0
        shown = [step for step in self._steps if until is None or step[0] <= until][-steps:]
        # Open spans and the present step are shown only if the stretch reaches up to now.
        is_live = until is None or (bool(self._steps) and until > self._steps[-1][0])
        under_way = self._list_open_bars(now_s) if is_live else []
        began_s = shown[0][1] if shown else min((bar.began_s for bar, _ in under_way), default=now_s)
        ended_s = now_s if is_live else shown[-1][2] if shown else began_s
        bars = [(bar, False) for bar in self._bars if bar.ended_s >= began_s and bar.began_s <= ended_s]
        found = (bars + under_way)[-MAX_BARS:]
        busy = self._measure_load(began_s, ended_s, points, is_live)
        lanes = _sort_lanes({*busy, *(bar.lane for bar, _ in found)})
        names = list(DRAWN_SPANS)
        lane_at = {lane: place for place, lane in enumerate(lanes)}
        name_at = {name: place for place, name in enumerate(names)}
        spans = [StepSpan(step=step, began_s=began, ended_s=ended) for step, began, ended in shown]
        spans += self._list_present_step() if is_live else []
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

    def _find_open_spans(self, names: Iterable[SpanName]) -> Iterator[OpenSpan]:
        if self._recorder is not None:
            wanted = frozenset(names)
            yield from (span for span in self._recorder.open.values() if span.name in wanted)

    def _list_open_bars(self, now_s: float) -> list[tuple[_SpanBar, bool]]:
        found = self._find_open_spans(DRAWN_SPANS)
        return [
            (_SpanBar(DRAWN_SPANS[it.name] or it.lane, it.name, it.context.step or 0, it.began_s, now_s), True)
            for it in found
        ]

    def _list_present_step(self) -> list[StepSpan]:
        found = [span for span in self._find_open_spans([SpanName.STEP]) if span.context.step is not None]
        return [StepSpan(step=span.context.step or 0, began_s=span.began_s, ended_s=None) for span in found]

    def _measure_load(self, began_s: float, ended_s: float, points: int, is_live: bool) -> dict[str, list[float]]:
        """Compute the mean number of spans in progress in each of `points` intervals, by lane, without idle lanes."""
        first = int(began_s / self._cell_s)
        count = max(1, int(ended_s / self._cell_s) + 1 - first)
        points = min(points, count)
        edges = first + np.arange(points + 1) * count // points
        # Finished spans are in the cells already.
        sums = {lane: busy.sum_cells(edges) for lane, busy in self._busy.items()}
        # An open span counts from its beginning to the end.
        begun: dict[str, list[int]] = {}
        for span in self._find_open_spans(FREQUENT_SPANS) if is_live else ():
            begun.setdefault(span.lane, []).append(min(max(0, int(span.began_s / self._cell_s) - first), count - 1))
        for lane, places in begun.items():
            # Up to an edge, the spans that have begun before it cover (edge - place) cells each.
            sorted_places = np.sort(places)
            begun_before = np.searchsorted(sorted_places, edges - first)
            covered = begun_before * (edges - first) - np.append(0, sorted_places.cumsum())[begun_before]
            sums[lane] = sums.get(lane, 0) + np.diff(covered)
        shown = {}
        for lane, summed in sums.items():
            means = summed / np.diff(edges)
            if means.any():
                shown[lane] = np.round(means.astype(float), 2).tolist()
        return shown


def _read_steps(file: Path) -> list[StoredStep]:
    """Read a timeline's file, without damaged lines; none if it is missing or too large.

    Raises OSError if it cannot be read.
    """
    found: list[StoredStep] = []

    def note_damage(error: OSError | ValueError) -> None:
        metrics.FILES_SKIPPED.labels("timeline").inc()
        log.warning("timeline_not_read", path=str(file), reason=str(error))

    try:
        lines = read_text(file, MAX_FILE_BYTES).splitlines()
    except FileNotFoundError:
        return found
    except (OSError, ValueError) as error:
        # ValueError: not UTF-8. EFBIG: larger than any timeline, and it stays so until it is replaced.
        if isinstance(error, OSError) and error.errno != errno.EFBIG:
            raise
        note_damage(error)
        return found
    for line in lines:
        try:
            found.append(StoredStep.model_validate(parse_object(line)))
        except ValueError as error:  # also pydantic's
            note_damage(error)
    return found


def _sort_lanes(lanes: Iterable[str]) -> list[str]:
    """Sort lanes: trainer, coordinator and verifiers, then the replicas by name and number (gen-2 before gen-10)."""
    first = [lane for lane in (TRAINER, COORDINATOR, VERIFIERS) if lane in lanes]
    replicas = sorted({*lanes} - {*first}, key=lambda lane: (lane.rstrip("0123456789"), len(lane), lane))
    return first + replicas
