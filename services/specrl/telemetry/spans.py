"""Records spans: named, timed pieces of a run's work, each with its parent. Finished spans go to sinks.

    Recorder.begin_span --> OpenSpan --end--> Span --> every sink

Work inside `with recorder.begin_span(...)` becomes a child of that span. This works across processes: `rpc/clients.py`
sends the present span as W3C `traceparent`, and `rpc/server.py` continues from it. The present span is a context
variable, so each task of the event loop has its own. No other state is global.

A recorder without sinks makes no spans; `begin_span` then costs one function call. Attributes are only numbers and
names. Prompts and completions never become attributes, nor do error messages, which may quote them.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Self

COORDINATOR = "coordinator"
TRAINER = "trainer"
VERIFIERS = "verifiers"
"""Lanes, which group spans for display. Each replica has its own lane, named by its id."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.ASCII)
"""https://www.w3.org/TR/trace-context/#traceparent-header. Fields that later versions append are ignored."""


class SpanName(StrEnum):
    """Kinds of work, each with its lane."""

    START = "start"
    """Coordinator: everything before the first step, also after a restart."""
    STEP = "step"
    """Coordinator: one step, from the end of the previous one. Its length is the step's wall time."""
    COLLECT = "collect"
    """Coordinator: the trainer waits for groups. This is exposed generation."""
    PROMPT = "prompt"
    """Coordinator: one prompt's group, from the start of its first rollout until a step selects it."""
    ROLLOUT = "rollout"
    """A replica: one rollout, from its dispatch until the coordinator has it."""
    REWARD = "reward"
    """Verifiers: one verdict, including the wait for a worker."""
    TRAIN_STEP = "train_step"
    """Trainer: the call that computes log-probabilities and trains, including transport and retries."""
    LOGPROB = "logprob"
    """Trainer: log-probabilities, in seconds that the trainer reports."""
    TRAIN = "train"
    """Trainer: training, in seconds that the trainer reports."""
    REPLAY = "replay"
    """Trainer: a restarted trainer replays the steps since its checkpoint."""
    SYNC = "sync"
    """Coordinator: sending one policy version to replicas, without the canary."""
    BROADCAST = "broadcast"
    """Trainer: broadcasting the weights, or writing them to files."""
    RECEIVE = "receive"
    """A replica: receiving weights while it goes on generating."""
    COMMIT = "commit"
    """A replica: the call that switches it to the version. The next four are its parts."""
    VERIFY = "verify"
    PAUSE = "pause"
    LOAD = "load"
    RESUME = "resume"
    CANARY = "canary"
    """Coordinator: short rollouts of updated replicas, scored by the trainer."""
    VALIDATION = "validation"
    """Coordinator: the validation of one policy version."""
    CHECKPOINT = "checkpoint"
    """Trainer: blocked by a snapshot, or by the previous checkpoint that is still being written."""
    WRITE = "write"
    """Trainer: writing a checkpoint while the next steps train."""
    DRAFTER = "drafter"
    """Coordinator: initialising the drafter."""
    FINISH = "finish"
    """Coordinator: everything after the last step."""
    EXPORT = "export"
    """Trainer: exporting policy and drafter as Hugging Face folders."""
    CALL = "call"
    """A peer, in its own process: answering a call. The attribute `METHOD` names it."""
    GENERATE = "generate"
    """A replica, in its own process: one turn of a rollout, from arrival to end. The next three are its parts, if the
    engine reports them."""
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


METHOD = "method"
"""Attribute with the called method, for example `specrl.api.v1.TrainerService/TrainParts`."""

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SpanContext:
    """The identity of a span.

    trace_id: 128 bits. span_id: 64 bits. Neither is 0. step: the step that the trace belongs to; known only in the
    coordinator, None in other processes.
    """

    trace_id: int
    span_id: int
    step: int | None = None

    @property
    def traceparent(self) -> str:
        """The W3C Trace Context header, with the flag `sampled`: the exporter of each process samples by trace id."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @classmethod
    def parse_traceparent(cls, text: str) -> SpanContext | None:
        """Parse a traceparent. Returns None for an invalid one: a peer's header must never fail a call."""
        found = _TRACEPARENT.fullmatch(text)
        # Version ff is forbidden, and version 00 must not have further fields.
        if found is None or text.startswith("ff") or (text.startswith("00") and found[3]):
            return None
        trace_id = int(found[1], 16)
        span_id = int(found[2], 16)
        return cls(trace_id, span_id) if trace_id and span_id else None


@dataclass(frozen=True)
class Span:
    """A finished span.

    began_s, ended_s: unix seconds, from the same monotonic clock. parent: None for the root of a trace.
    error: class of the exception that ended it; empty without one.
    """

    name: SpanName
    lane: str
    began_s: float
    ended_s: float
    attributes: Mapping[str, Value]
    context: SpanContext
    parent: SpanContext | None = None
    error: str = ""

    @property
    def step(self) -> int | None:
        """The step that its trace belongs to; None where that is unknown."""
        return self.context.step


SpanSink = Callable[[Span], None]
"""Receives finished spans, on the event loop. It must neither block nor raise."""

# A task inherits the value at its creation, so work that is started inside a span stays below it.
_present: ContextVar[SpanContext | None] = ContextVar("present_span", default=None)


def present_span() -> SpanContext | None:
    """Return the span in which the current task works; it may be a caller's span in another process."""
    return _present.get()


def continue_trace(traceparent: str) -> None:
    """Make the caller's span the current task's present span. An invalid traceparent changes nothing."""
    context = SpanContext.parse_traceparent(traceparent)
    if context is not None:
        _present.set(context)


class UnixClock:
    """A clock in unix seconds that never goes back: the wall clock at its creation, plus monotonic time since."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


class Recorder:
    """Makes spans and passes finished ones to its sinks. Each process has one, which is passed to all that needs it."""

    def __init__(self, *sinks: SpanSink, clock: Callable[[], float] | None = None) -> None:
        self._sinks = sinks
        self.open: dict[int, OpenSpan] = {}
        """Open spans by span id, for the live page's timeline."""
        self.now = clock if clock is not None else UnixClock()

    @property
    def has_sinks(self) -> bool:
        """Whether there is any sink."""
        return bool(self._sinks)

    def begin_root(self, name: SpanName, lane: str, context: SpanContext) -> OpenSpan:
        """Begin the root span of a trace under the given ids."""
        return OpenSpan(self, name, lane, context, None) if self._sinks else NO_SPAN

    def begin_span(self, name: SpanName, lane: str, parent: SpanContext | None = None, **attributes: Value) -> OpenSpan:
        """Begin a child of `parent`, or of the present span. Without either, return NO_SPAN: it is no part of a run."""
        above = parent if parent is not None else _present.get()
        if not self._sinks or above is None:
            return NO_SPAN
        # W3C forbids a span id of 0.
        context = SpanContext(above.trace_id, random.getrandbits(64) or 1, above.step)
        return OpenSpan(self, name, lane, context, above, attributes)

    def record_parts(
        self, parts: Sequence[tuple[SpanName, float]], lane: str, parent: SpanContext, within_s: tuple[float, float]
    ) -> None:
        """Record spans for parts of which only the duration is known.

        parts: (name, seconds) in order. They are placed one after the other, so that the last ends with `within_s`
        (begin, end), and are cut at its begin.
        """
        earliest_s, ended_s = within_s
        for name, seconds in reversed(parts):
            part = self.begin_span(name, lane, parent)
            part.began_s = max(earliest_s, ended_s - seconds)
            part.end_at(ended_s)
            ended_s = part.began_s

    def emit_span(self, span: Span) -> None:
        """Pass a finished span to every sink."""
        self.open.pop(span.context.span_id, None)
        for sink in self._sinks:
            sink(span)


@dataclass(eq=False, slots=True)  # compared by identity; slots, because thousands are open at once
class OpenSpan:
    """A span in progress. `with` makes it the present span and ends it. Without `with`, its holder must call `end`."""

    recorder: Recorder
    name: SpanName
    lane: str
    context: SpanContext
    parent: SpanContext | None
    attributes: dict[str, Value] = field(default_factory=dict)
    began_s: float = field(init=False)
    _ended_s: float | None = field(init=False, default=None)
    _outer: SpanContext | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.began_s = self.recorder.now()
        if self.recorder.has_sinks:
            self.recorder.open[self.context.span_id] = self

    @property
    def traceparent(self) -> str:
        """The header for a peer that does a part of this work; empty without sinks."""
        return self.context.traceparent

    def add_attributes(self, **attributes: Value) -> None:
        """Add attributes that were not known at the beginning."""
        self.attributes.update(attributes)

    def end(self, error: str = "") -> None:
        """End the span now. Later calls change nothing. error: class of the exception that ended it."""
        if self._ended_s is None:
            self.end_at(self.recorder.now(), error)

    def end_at(self, ended_s: float, error: str = "") -> None:
        """End the span at `ended_s`, in unix seconds."""
        self._ended_s = ended_s
        span = Span(self.name, self.lane, self.began_s, ended_s, self.attributes, self.context, self.parent, error)
        self.recorder.emit_span(span)

    def discard(self) -> None:
        """Discard the span: no sink receives it."""
        # Set, so that a later `end` does nothing.
        self._ended_s = self.recorder.now()
        self.recorder.open.pop(self.context.span_id, None)

    def end_with_parts(self, *parts: tuple[SpanName, float]) -> None:
        """End the span now, and record `parts`, (name, seconds) that a peer reports, as its last seconds."""
        # A peer reports no clock times. The rest of the span is transport, which is placed before the parts.
        ended_s = self.recorder.now()
        self.end_at(ended_s)
        self.recorder.record_parts(parts, self.lane, self.context, (self.began_s, ended_s))

    def __enter__(self) -> Self:
        self._outer = _present.get()
        _present.set(self.context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Not `ContextVar.reset`, which raises in another context: the generator of an abandoned stream is closed in
        # another task than it was started in.
        _present.set(self._outer)
        self.end("" if kind is None else kind.__name__)


class _NoSpan(OpenSpan):
    """The span of a recorder without sinks: every method does nothing."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        return ""

    def add_attributes(self, **attributes: Value) -> None:
        """Do nothing."""

    def end(self, error: str = "") -> None:
        """Do nothing."""

    def end_at(self, ended_s: float, error: str = "") -> None:
        """Do nothing."""

    def discard(self) -> None:
        """Do nothing."""

    def end_with_parts(self, *parts: tuple[SpanName, float]) -> None:
        """Do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Do nothing."""


SILENT_RECORDER = Recorder()
"""A recorder without sinks."""

NO_SPAN: OpenSpan = _NoSpan(SILENT_RECORDER, SpanName.START, COORDINATOR, SpanContext(1, 1), None)
