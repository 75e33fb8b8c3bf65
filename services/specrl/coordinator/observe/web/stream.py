"""Streams a run's changes to live pages as server-sent events, at most once per second.

    event: beat      status, exposure, and the id of the coordinator's start; sent when one of them has changed
    event: happened  one event of the run, with its id

Each stream polls, and nothing is pushed. So a page that does not read delays nothing and takes one answer's memory. All
streams share one beat per BEAT_S. A comment every QUIET_S keeps proxies from closing an idle stream.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator

from specrl.coordinator.observe.exposure import Exposure
from specrl.coordinator.observe.observer import RunObserver
from specrl.formats.reports import ReportModel, StatusReport

BEAT_S = 1.0
QUIET_S = 15.0  # nginx, for example, closes a connection after 60 s without data
MAX_STREAMS = 64
OWNERS_STREAMS = 16
"""Streams of MAX_STREAMS that are kept for requests with the token, so that others cannot take all of them."""


class Beat(ReportModel):
    """The state of the run that a stream sends."""

    boot: str
    """Identifies this start of the coordinator."""
    status: StatusReport
    exposure: Exposure


class EventStreams:
    """The open streams of one run."""

    def __init__(self, observer: RunObserver) -> None:
        self._observer = observer
        self._events = observer.events
        self._open = 0
        self._beat = ""
        self._beat_until_s = -math.inf

    def is_full(self, *, is_owner: bool) -> bool:
        """Whether no further stream may be opened. is_owner: the request has shown the token."""
        return self._open >= MAX_STREAMS - (0 if is_owner else OWNERS_STREAMS)

    async def stream_changes(self, last_event_id: str) -> AsyncIterator[str]:
        """Yield changes until the reader disconnects. last_event_id: BOOT.NUMBER of the last event that it has."""
        boot, _, number = last_event_id.partition(".")
        is_known = boot == self._events.boot and number.isascii() and number.isdecimal()
        seen = int(number[:15]) if is_known else 0  # 15 digits hold any id; a header may have more
        last_beat = ""
        sent_at_s = time.monotonic()
        self._open += 1
        try:
            while True:
                texts = []
                beat = self._make_beat()
                if beat != last_beat:
                    texts.append(f"event: beat\ndata: {beat}\n\n")
                    last_beat = beat
                for event in self._events.list_after(seen):
                    seen = event.id
                    line = event.model_dump_json(by_alias=True)
                    texts.append(f"id: {self._events.boot}.{event.id}\nevent: happened\ndata: {line}\n\n")
                if not texts and time.monotonic() - sent_at_s > QUIET_S:
                    texts.append(": quiet\n\n")
                if texts:
                    sent_at_s = time.monotonic()
                    yield "".join(texts)
                await asyncio.sleep(BEAT_S)
        finally:
            self._open -= 1

    def _make_beat(self) -> str:
        """Return the present beat as JSON, made at most once per BEAT_S for all streams."""
        now_s = time.monotonic()
        if now_s >= self._beat_until_s:
            beat = Beat(
                boot=self._events.boot,
                status=self._observer.build_status(),
                exposure=self._observer.measure_recent_exposure(),
            )
            self._beat = beat.model_dump_json(by_alias=True)
            self._beat_until_s = now_s + BEAT_S
        return self._beat
