"""Server-sent events of a run: what has changed, at most once a second, to however many pages look on.

    event: beat      status, exposure, and which start of the coordinator this is; when one of them has changed
    event: happened  one event of the run, with its id

Nothing is pushed by whoever changes something: every stream looks by itself, so a page that does not read holds up
nobody and costs one answer's memory. The beat is made at most once in BEAT_S, for all of them. A comment every QUIET_S
keeps proxies from closing a quiet stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

from specrl.coordinator.exposure import Exposure
from specrl.coordinator.parts import Parts
from specrl.coordinator.report import Report, Status

BEAT_S = 1.0
QUIET_S = 15.0
MOST_STREAMS = 64


class Beat(Report):
    """The run at this moment, as a stream tells it."""

    boot: str
    """Names this start of the coordinator."""
    status: Status
    exposure: Exposure


class Streams:
    """Those that are open."""

    def __init__(self, parts: Parts) -> None:
        self._board, self._events = parts.board, parts.events
        self._open = 0
        self._beat, self._beat_until_s = "", -math.inf

    @property
    def is_full(self) -> bool:
        """Whether another one would be too many."""
        return self._open >= MOST_STREAMS

    async def follow(self, last_event_id: str) -> AsyncIterator[str]:
        """Tell what changes until the reader is gone. last_event_id: BOOT.NUMBER of the last event that it has."""
        boot, _, number = last_event_id.partition(".")
        is_known = boot == self._events.boot and number.isascii() and number.isdecimal()
        seen = int(number[:15]) if is_known else 0
        said, said_at_s = "", time.monotonic()
        self._open += 1
        try:
            while True:
                texts = []
                beat = self._present_beat()
                if beat != said:
                    texts.append(f"event: beat\ndata: {beat}\n\n")
                    said = beat
                for event in self._events.after(seen):
                    seen = event.id
                    line = event.model_dump_json(by_alias=True)
                    texts.append(f"id: {self._events.boot}.{event.id}\nevent: happened\ndata: {line}\n\n")
                if not texts and time.monotonic() - said_at_s > QUIET_S:
                    texts.append(": quiet\n\n")
                if texts:
                    said_at_s = time.monotonic()
                    yield "".join(texts)
                await asyncio.sleep(BEAT_S)
        finally:
            self._open -= 1

    def _present_beat(self) -> str:
        """As JSON."""
        now_s = time.monotonic()
        if now_s >= self._beat_until_s:
            beat = Beat(boot=self._events.boot, status=self._board.status(), exposure=self._board.exposure())
            self._beat, self._beat_until_s = beat.model_dump_json(by_alias=True), now_s + BEAT_S
        return self._beat
