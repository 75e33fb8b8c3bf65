"""The coordinator's hold on the store: remembers what is read often, and waits for a store that is away.

    REACHABLE --a read or write fails--> AWAY --the same one succeeds--> REACHABLE
    any --give_up--> GIVEN_UP: what fails now, fails

While the store is away nothing advances: the operation that failed is repeated until it succeeds, all others wait for
their turn behind it, and their callers with them. So the order of writes is the order of calls. What bounds each
attempt is the store's own deadline; what bounds the wait between two is `LONGEST_WAIT_S`; what ends it is the store's
return, StoreInvalid (another coordinator took over), the caller's cancellation, or `give_up`.

Operations run in one thread beside the event loop, which goes on answering signals, health checks and heartbeats.
Progress, facts and reports are remembered here, since this coordinator is the only one that can write them: people are
shown them while the store is away. Rollouts that finish while others are being written are written together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from specrl.coordinator.progress import Progress
from specrl.coordinator.store import REPORTS_KEPT, Store, StoredRollout
from specrl.errors import SpecrlError, StoreFailed
from specrl.telemetry import metrics

FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Between two attempts; doubled each time. Long enough to spare a server that is starting, short enough to go on."""

TOGETHER = 64
"""Most rollouts in one write: 6 MB of 8k tokens each, which no deadline of seconds cuts off."""

OPERATIONS = (
    *("open", "watch", "rollouts", "batch", "batch_rollouts"),
    *("put_rollouts", "put_batch", "set_fact", "finish_step", "set_report", "forget_batches"),
)
"""What metrics call the reads and writes."""

BEGUN_AFTER = "begunAfter"
"""Fact of the store: how far the stream was settled by the checkpoint that the run was begun with."""

Sleep = Callable[[float], Awaitable[object]]

log = structlog.get_logger(__name__)


class StoreLink:
    """A store as the coordinator uses it. Every write returns when it is durable."""

    @classmethod
    async def open(cls, run: str, open_store: Callable[[], Store], sleep: Sleep = asyncio.sleep) -> StoreLink:
        """Open the store as soon as it is there; bounded by cancellation. Raises StoreInvalid."""

        def opened() -> StoreLink:
            store = open_store()
            try:
                return cls(run, store, sleep)
            except SpecrlError:
                store.close()
                raise

        absence, waits = _Absence(run), _waits()
        while True:
            try:
                link = await asyncio.to_thread(opened)
            except StoreFailed as error:
                absence.lost("open", error)
                await sleep(next(waits))
                continue
            absence.found()
            return link

    def __init__(self, run: str, store: Store, sleep: Sleep = asyncio.sleep) -> None:
        """Reads what is remembered, so that it raises what the store raises."""
        self._run, self._store, self._sleep = run, store, sleep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._turn = asyncio.Lock()
        self._is_given_up = False
        self._facts = store.facts()
        self._trained = max(store.trained(), Progress.from_fact(self._facts.get(BEGUN_AFTER)).step)
        self._reports = {int(report["step"]): report for report in store.reports()}
        self._finished: list[StoredRollout] = []
        self._written = 0
        self._put = 0
        self._absence = _Absence(run)
        metrics.STORE_REACHABLE.labels(run).set(1)

    @property
    def away_because(self) -> str:
        """Why the store is away; nothing while it is not."""
        return self._absence.reason

    @property
    def retries(self) -> int:
        """Attempts that failed since it was opened."""
        return self._absence.retries

    # -- remembered ----------------------------------------------------------------------------------------------

    def fact(self, name: str) -> Any | None:
        """A named JSON value; None when it was never set."""
        return self._facts.get(name)

    def trained(self) -> int:
        """Last step trained; 0 before the first."""
        return self._trained

    def reports(self, after: int = 0) -> list[dict[str, Any]]:
        """Reports of steps > `after`, ascending, of the last `REPORTS_KEPT` steps."""
        return [self._reports[step] for step in sorted(self._reports) if step > after]

    def begun_after(self) -> Progress:
        """Where the stream stood when this store was begun."""
        return Progress.from_fact(self.fact(BEGUN_AFTER))

    # -- read ----------------------------------------------------------------------------------------------------

    async def rollouts(self) -> list[StoredRollout]:
        """Finished rollouts that no step has forgotten, in stream order."""
        return await self._do("rollouts", self._store.rollouts)

    async def batch(self, step: int) -> bytes | None:
        """What step `step` trains or trained on, without its rollouts, while it is kept."""
        return await self._do("batch", lambda: self._store.batch(step))

    async def batch_rollouts(self, step: int) -> list[bytes]:
        """The graded rollouts that the batch of step `step` names, in its order."""
        return await self._do("batch_rollouts", lambda: self._store.batch_rollouts(step))

    # -- written -------------------------------------------------------------------------------------------------

    async def put_rollout(self, rollout: StoredRollout) -> None:
        """Keep a finished rollout, together with others that finished while this one waited for its turn."""
        self._finished.append(rollout)
        self._put += 1
        mine = self._put
        async with self._turn:
            while self._written < mine:
                together = self._finished[:TOGETHER]
                await self._repeat("put_rollouts", lambda rows=together: self._store.put_rollouts(rows))  # type: ignore[misc]
                del self._finished[: len(together)]
                self._written += len(together)

    async def put_batch(self, step: int, data: bytes, prompts: Sequence[tuple[int, int]] = ()) -> bool:
        """Fix what step `step` trains on, before it is sent: `data`, and the rollouts of `prompts`, put before.

        False when an earlier call may have fixed something else, which then has to be read.
        """
        return await self._do("put_batch", lambda: self._store.put_batch(step, data, prompts))

    async def set_fact(self, name: str, value: Any) -> None:
        """Set or replace a named JSON value."""
        await self._do("set_fact", lambda: self._store.set_fact(name, value))
        self._facts[name] = value

    async def begin_after(self, progress: Progress) -> None:
        """This run goes on after a step that another store has seen: `trained` is that step until one is trained."""
        await self.set_fact(BEGUN_AFTER, progress.to_fact())
        self._trained = max(self._trained, progress.step)

    async def finish_step(self, step: int, report: dict[str, Any], kept: Sequence[tuple[int, int]] = ()) -> None:
        """Step `step` is trained: keep its report, forget the rollouts of steps up to it but those of `kept`."""
        await self._do("finish_step", lambda: self._store.finish_step(step, report, kept))
        self._trained = max(self._trained, step)
        self._reports[step] = report
        for old in [known for known in self._reports if known <= step - REPORTS_KEPT]:
            del self._reports[old]

    async def set_report(self, step: int, report: dict[str, Any]) -> None:
        """Replace a trained step's report, with what became known afterwards."""
        await self._do("set_report", lambda: self._store.set_report(step, report))
        if step in self._reports:
            self._reports[step] = report

    async def forget_batches(self, up_to: int) -> None:
        """A checkpoint of step `up_to` is complete: batches up to it will never be replayed."""
        await self._do("forget_batches", lambda: self._store.forget_batches(up_to))

    async def watch(self, every_s: float) -> None:
        """Look after the store until cancelled, so that its absence shows also while there is nothing to write.

        What a look finds for good ends only the looking: the next write finds it again, and ends the run.
        """
        while True:
            await self._sleep(every_s)
            try:
                await self._do("watch", self._store.trained)
            except SpecrlError as error:
                log.error("store_refused", reason=str(error))
                return

    # -- the end -------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Wait for the store no longer: from now on an operation that fails raises StoreFailed."""
        self._is_given_up = True

    async def close(self) -> None:
        """Let the attempt under way end, and close the store."""
        await asyncio.to_thread(self._thread.shutdown)
        self._store.close()

    # -- inside --------------------------------------------------------------------------------------------------

    async def _do[T](self, name: str, work: Callable[[], T]) -> T:
        async with self._turn:
            return await self._repeat(name, work)

    async def _repeat[T](self, name: str, work: Callable[[], T]) -> T:
        """Attempt `work` until it succeeds. The caller has the turn."""
        waits = _waits()
        while True:
            began = time.monotonic()
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            except StoreFailed as error:
                self._absence.lost(name, error)
                if self._is_given_up:
                    raise
            else:
                metrics.STORE_SECONDS.labels(self._run, name).observe(time.monotonic() - began)
                self._absence.found()
                return found
            await self._sleep(next(waits))


def _waits() -> Iterator[float]:
    """Seconds between attempts."""
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


class _Absence:
    """Whether a store is away, logged when that changes, and counted."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.reason = ""
        self.retries = 0
        for operation in OPERATIONS:
            metrics.STORE_RETRIES.labels(run, operation)

    def lost(self, operation: str, error: StoreFailed) -> None:
        """An attempt failed."""
        self.retries += 1
        metrics.STORE_RETRIES.labels(self._run, operation).inc()
        if not self.reason:
            log.error("store_lost", operation=operation, reason=str(error))
        self.reason = str(error)
        metrics.STORE_REACHABLE.labels(self._run).set(0)

    def found(self) -> None:
        """An attempt succeeded."""
        if self.reason:
            self.reason = ""
            log.info("store_found", retries=self.retries)
            metrics.STORE_REACHABLE.labels(self._run).set(1)
