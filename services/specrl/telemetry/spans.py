"""Spans: which part of a run's work took how long, where, and as part of what. Handed to whoever listens when they end.

    Recorder.begin --> OpenSpan --end--> Span --> every sink

A span knows the span that it is part of, also across processes: what runs inside of `with recorder.begin(...)` is below
it, calls over gRPC included, since `rpc/clients.py` sends the present span as W3C `traceparent` and `rpc/server.py`
takes it up. The present span is a context variable, one per task of the event loop; nothing else here is global.

A recorder without sinks makes no spans, and sends nothing: `begin` then costs a function call. Attributes are numbers
and names. Prompts, completions, and messages of errors, which may quote them, never become attributes.
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

COORDINATOR, TRAINER, VERIFIERS = "coordinator", "trainer", "verifiers"
"""Lanes. Every replica has one of its own, its id."""

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?", re.ASCII)
"""https://www.w3.org/TR/trace-context/#traceparent-header; what later versions append is passed over."""


class SpanName(StrEnum):
    """What is done, with the lane that it stands in."""

    START = "start"
    """Coordinator: all before the first step, or before going on after a restart."""
    STEP = "step"
    """Coordinator: one step, from the end of the one before; its wall time."""
    COLLECT = "collect"
    """Coordinator: the trainer waits for groups. This is exposed generation."""
    PROMPT = "prompt"
    """Coordinator: one prompt's group, from its first rollout's beginning to its choice by a step."""
    ROLLOUT = "rollout"
    """A replica: one rollout, from being given to it until it came back."""
    REWARD = "reward"
    """Verifiers: one verdict, its wait for a worker included."""
    TRAIN_STEP = "train_step"
    """Trainer: the call that computes log-probabilities and trains, transport and repetitions included."""
    LOGPROB = "logprob"
    """Trainer, as it reports it."""
    TRAIN = "train"
    """Trainer, as it reports it."""
    REPLAY = "replay"
    """Trainer: one that came back is brought up to date."""
    SYNC = "sync"
    """Coordinator: one version to replicas, without the canary."""
    BROADCAST = "broadcast"
    """Trainer: it sends, or writes files."""
    RECEIVE = "receive"
    """A replica: weights arrive, while it goes on generating."""
    COMMIT = "commit"
    """A replica: the call in which it takes the version; the next four are its parts."""
    VERIFY = "verify"
    PAUSE = "pause"
    LOAD = "load"
    RESUME = "resume"
    CANARY = "canary"
    """Coordinator: short rollouts of updated replicas, and the trainer's scores of them."""
    VALIDATION = "validation"
    """Coordinator: mean reward under one version."""
    CHECKPOINT = "checkpoint"
    """Trainer: it stands still for a snapshot, and for the last one until that is written."""
    WRITE = "write"
    """Trainer: a checkpoint is written, beside the training of the next steps."""
    DRAFTER = "drafter"
    """Coordinator: the drafter is initialised."""
    FINISH = "finish"
    """Coordinator: all after the last step."""
    EXPORT = "export"
    """Trainer: Hugging Face folders of what was trained."""
    CALL = "call"
    """A peer, in its own process: a call that it answers; the attribute `METHOD` says which."""
    GENERATE = "generate"
    """A replica, in its own process: one turn of a rollout, from its arrival to its end; the next three, if the engine
    knows them, are its parts."""
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"


METHOD = "method"
"""Attribute: what is called, as `specrl.api.v1.TrainerService/TrainParts`."""

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Which span: trace_id of 128 bits, span_id of 64, neither 0. step: whose trace it is; None in other processes."""

    trace_id: int
    span_id: int
    step: int | None = None

    @property
    def traceparent(self) -> str:
        """As W3C Trace Context writes it; sampled."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @classmethod
    def parse(cls, text: str) -> SpanContext | None:
        """The span that a traceparent names. None when it names none: what a peer sends is never an error here."""
        found = _TRACEPARENT.fullmatch(text)
        if found is None or text.startswith("ff") or (text.startswith("00") and found[3]):
            return None
        trace_id, span_id = int(found[1], 16), int(found[2], 16)
        return cls(trace_id, span_id) if trace_id and span_id else None


@dataclass(frozen=True)
class Span:
    """Finished work. began_s, ended_s: unix seconds, both of one monotonic clock. parent: None for a trace's root.

    error: what ended it early, in a word (an error's class), empty when nothing did. links: spans of other traces that
    it took something from.
    """

    name: SpanName
    lane: str
    step: int | None
    began_s: float
    ended_s: float
    attributes: Mapping[str, Value]
    context: SpanContext
    parent: SpanContext | None = None
    error: str = ""
    links: tuple[SpanContext, ...] = ()


Sink = Callable[[Span], None]
"""Takes finished spans, on the event loop: it neither blocks nor raises."""

_present: ContextVar[SpanContext | None] = ContextVar("present_span", default=None)


def present() -> SpanContext | None:
    """The span that the present task works in, of this process or of the caller's."""
    return _present.get()


def continue_from(traceparent: str) -> None:
    """What the present task does from now on is part of the caller's span; nothing changes if that names none."""
    context = SpanContext.parse(traceparent)
    if context is not None:
        _present.set(context)


class UnixClock:
    """Unix seconds that never step back: the wall clock as it was once, plus monotonic time since."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset_s + time.monotonic()


class Recorder:
    """Makes spans and hands them to its sinks. One for each process, passed along to whoever does the work."""

    def __init__(self, *sinks: Sink, clock: Callable[[], float] | None = None) -> None:
        self._sinks = sinks
        self.open: dict[int, OpenSpan] = {}
        """Work under way, by span id; for whoever shows it before it ends."""
        self.now = clock if clock is not None else UnixClock()

    @property
    def is_heard(self) -> bool:
        """Whether anybody listens."""
        return bool(self._sinks)

    def root(self, name: SpanName, lane: str, context: SpanContext) -> OpenSpan:
        """Begin the first span of a trace, whose ids the caller knows."""
        return OpenSpan(self, name, lane, context, None) if self._sinks else NO_SPAN

    def begin(self, name: SpanName, lane: str, parent: SpanContext | None = None, **attributes: Value) -> OpenSpan:
        """Begin a span below `parent`, or below the present one. Without either it is no part of a run: no span."""
        above = parent if parent is not None else _present.get()
        if not self._sinks or above is None:
            return NO_SPAN
        context = SpanContext(above.trace_id, random.getrandbits(64) or 1, above.step)
        return OpenSpan(self, name, lane, context, above, attributes)

    def lay_out(
        self, parts: Sequence[tuple[SpanName, float]], lane: str, parent: SpanContext, within_s: tuple[float, float]
    ) -> None:
        """Spans for `parts`, (name, seconds) in their order, end to end before the end of `within_s`; cut at its begin.

        For what is known to have taken so long, and not when.
        """
        earliest_s, ended_s = within_s
        for name, seconds in reversed(parts):
            part = self.begin(name, lane, parent)
            part.began_s = max(earliest_s, ended_s - seconds)
            part.end_at(ended_s)
            ended_s = part.began_s

    def hand_out(self, span: Span) -> None:
        """Give a finished span to every sink."""
        self.open.pop(span.context.span_id, None)
        for sink in self._sinks:
            sink(span)


@dataclass(eq=False, slots=True)
class OpenSpan:
    """Work under way. `with` makes it the present span inside; without, whoever holds it calls `end`."""

    recorder: Recorder
    name: SpanName
    lane: str
    context: SpanContext
    parent: SpanContext | None
    attributes: dict[str, Value] = field(default_factory=dict)
    links: list[SpanContext] = field(default_factory=list)
    began_s: float = field(init=False)
    _ended_s: float | None = field(init=False, default=None)
    _outer: SpanContext | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.began_s = self.recorder.now()
        if self.recorder.is_heard:
            self.recorder.open[self.context.span_id] = self

    @property
    def traceparent(self) -> str:
        """For a peer that does a part of it; empty when nobody listens."""
        return self.context.traceparent

    def note(self, **attributes: Value) -> None:
        """Add what is known only now."""
        self.attributes.update(attributes)

    def link(self, context: SpanContext) -> None:
        """It takes something from a span of another trace."""
        self.links.append(context)

    def end(self, error: str = "") -> None:
        """It is over; the first end counts. error: the class of what ended it early."""
        if self._ended_s is not None:
            return
        self.end_at(self.recorder.now(), error)

    def end_at(self, ended_s: float, error: str = "") -> None:
        """It was over at that time."""
        self._ended_s = ended_s
        self.recorder.hand_out(
            Span(
                self.name,
                self.lane,
                self.context.step,
                self.began_s,
                ended_s,
                self.attributes,
                self.context,
                self.parent,
                error,
                tuple(self.links),
            )
        )

    def forget(self) -> None:
        """It does not end here: nobody hears of it."""
        self._ended_s = self.recorder.now()
        self.recorder.open.pop(self.context.span_id, None)

    def end_in(self, *parts: tuple[SpanName, float]) -> None:
        """It is over, and its last seconds went into `parts`, as a peer reports it; transport came before."""
        ended_s = self.recorder.now()
        self.end_at(ended_s)
        self.recorder.lay_out(parts, self.lane, self.context, (self.began_s, ended_s))

    def __enter__(self) -> Self:
        self._outer = _present.get()
        _present.set(self.context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _present.set(self._outer)  # no `reset`: an abandoned stream's generator is closed in another task
        self.end("" if kind is None else kind.__name__)


class _NoSpan(OpenSpan):
    """Begun where nobody listens: does nothing, costs nothing."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        return ""

    def note(self, **attributes: Value) -> None:
        """Nothing to add to."""

    def link(self, context: SpanContext) -> None:
        """Nothing to link."""

    def end(self, error: str = "") -> None:
        """Nothing to end."""

    def end_at(self, ended_s: float, error: str = "") -> None:
        """Nothing to end."""

    def forget(self) -> None:
        """Nothing to end."""

    def end_in(self, *parts: tuple[SpanName, float]) -> None:
        """Nothing to end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing to end."""


SILENT = Recorder()
"""Nobody listens."""

NO_SPAN: OpenSpan = _NoSpan(SILENT, SpanName.START, COORDINATOR, SpanContext(1, 1), None)
