"""Connects the coordinator to its store: caches what is read often, and retries while the store is unreachable.

    REACHABLE --a read or write fails--> AWAY --its retry succeeds--> REACHABLE
    any state --stop_retrying--> no retries: a failure is raised

While the store is unreachable the run does not advance. The failed operation is retried until it succeeds, and all
other operations queue behind it. So writes happen in the order of their calls. The store's own deadline bounds each
attempt, and `LONGEST_WAIT_S` bounds the wait between two. Retrying ends when the store answers, when it raises
StoreInvalid (another coordinator took over), when the caller is cancelled, or after `stop_retrying`.

Operations run in one thread beside the event loop, so signals, health checks and heartbeats are still answered.
Progress, facts and reports are cached here, so the page can show them while the store is unreachable. The cache is
exact, because only this coordinator can write them. Rollouts that finish during a write are written together in the
next one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog

from specrl.coordinator.ledger import REPORTS_KEPT, Store, StoredRollout
from specrl.errors import SpecrlError, StoreFailed
from specrl.telemetry import metrics

# Wait between two attempts, doubled each time. The longest spares a server that is starting, and still resumes the run
# within seconds of its return.
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0

MAX_TOGETHER = 64
"""Most rollouts in one write. With 8k tokens each that is 6 MB, which fits into a deadline of seconds."""
MAX_TOGETHER_BYTES = 16 << 20
"""Most bytes in one write of several rollouts. With the experts of each token one rollout of 8k tokens may have 25 MB:
64 of them would exceed Redis' limit of one request (client-query-buffer-limit, 1 GB), and be retried for ever."""

OPERATIONS = (
    *("open", "watch", "rollouts", "batch", "batch_rollouts"),
    *("put_rollouts", "put_batch", "set_fact", "finish_step", "set_report", "forget_batches"),
)
"""Values of the label `operation` in the store's metrics."""

BEGUN_AFTER = "begunAfter"
"""Name of the fact that holds the step of the checkpoint that the run started from."""

Sleep = Callable[[float], Awaitable[object]]

log = structlog.get_logger(__name__)


class StoreLink:
    """A store that retries. Every write returns once it is durable."""

    @classmethod
    async def open(cls, run: str, open_store: Callable[[], Store], sleep: Sleep = asyncio.sleep) -> StoreLink:
        """Open the store, and retry until it is reachable or the caller is cancelled. Raises StoreInvalid."""

        def open_link() -> StoreLink:
            store = open_store()
            try:
                return cls(run, store, sleep)
            except SpecrlError:
                store.close()
                raise

        absence = _OutageTracker(run)
        waits = _generate_delays()
        while True:
            try:
                link = await asyncio.to_thread(open_link)
            except StoreFailed as error:
                absence.record_failure("open", error)
                await sleep(next(waits))
                continue
            absence.record_success()
            return link

    def __init__(self, run: str, store: Store, sleep: Sleep = asyncio.sleep) -> None:
        """Fill the cache. Blocks, and raises what the store raises."""
        self._run = run
        self._store = store
        self._sleep = sleep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._turn = asyncio.Lock()
        self._is_given_up = False
        self._facts = store.read_facts()
        self._trained = max(store.read_last_trained_step(), int(self._facts.get(BEGUN_AFTER, 0)))
        self._reports = {int(report["step"]): report for report in store.read_reports()}
        # Finished rollouts that are not written yet, and how many were ever written and ever put.
        self._finished: list[StoredRollout] = []
        self._written = 0
        self._put = 0
        self._absence = _OutageTracker(run)
        metrics.STORE_REACHABLE.labels(run).set(1)

    @property
    def outage_reason(self) -> str:
        """Why the store is unreachable; empty while it is reachable."""
        return self._absence.reason

    @property
    def retry_count(self) -> int:
        """Number of failed attempts since the link was opened."""
        return self._absence.retries

    # -- read from the cache -------------------------------------------------------------------------------------

    def cached_facts(self) -> dict[str, Any]:
        """Return all named JSON values."""
        return dict(self._facts)

    def last_trained_step(self) -> int:
        """Return the last trained step; 0 before the first."""
        return self._trained

    def cached_reports(self, after: int = 0) -> list[dict[str, Any]]:
        """Return the reports of steps > `after`, ascending, as far back as `REPORTS_KEPT` steps."""
        return [self._reports[step] for step in sorted(self._reports) if step > after]

    # -- read from the store -------------------------------------------------------------------------------------

    async def read_rollouts(self) -> list[StoredRollout]:
        """Read the graded rollouts that are not trained, in stream order."""
        return await self._run_in_turn("rollouts", self._store.read_rollouts)

    async def read_batch(self, step: int) -> bytes | None:
        """Read the batch of step `step`, without its rollouts; None when it is not kept."""
        return await self._run_in_turn("batch", lambda: self._store.read_batch(step))

    async def read_batch_rollouts(self, step: int) -> list[bytes]:
        """Read the graded rollouts that the batch of step `step` names, in the batch's order."""
        return await self._run_in_turn("batch_rollouts", lambda: self._store.read_batch_rollouts(step))

    # -- write ---------------------------------------------------------------------------------------------------

    async def put_rollout(self, rollout: StoredRollout) -> None:
        """Store a finished rollout, in one write with others that finished while this one waited for its turn."""
        self._finished.append(rollout)
        self._put += 1
        mine = self._put
        async with self._turn:
            # An earlier holder of the turn may have written this rollout with its own; then there is nothing to do.
            while self._written < mine:
                together = self._choose_rows_together()
                await self._retry_until_done("put_rollouts", lambda rows=together: self._store.put_rollouts(rows))  # type: ignore[misc]
                # Others may have been appended during the write, so delete only those that were written.
                del self._finished[: len(together)]
                self._written += len(together)

    def _choose_rows_together(self) -> list[StoredRollout]:
        """Choose the next rollouts to write, in their order: one, or several within both limits."""
        sizes = itertools.accumulate(len(row.data) for row in self._finished[:MAX_TOGETHER])
        count = sum(size_bytes <= MAX_TOGETHER_BYTES for size_bytes in sizes)
        return self._finished[: max(1, count)]

    async def put_batch(self, step: int, data: bytes, indexes: Sequence[int] = ()) -> bool:
        """Store what step `step` trains on, before it is sent: `data`, and the rollouts of `indexes`, put before.

        Returns False when an earlier call may have stored another batch, which the caller then has to read.
        """
        return await self._run_in_turn("put_batch", lambda: self._store.put_batch(step, data, indexes))

    async def set_fact(self, name: str, value: Any) -> None:
        """Set or replace a named JSON value."""
        await self._run_in_turn("set_fact", lambda: self._store.set_fact(name, value))
        self._facts[name] = value

    async def begin_after(self, step: int) -> None:
        """Start the run after step `step` of a checkpoint: it counts as the last trained step from now on."""
        await self.set_fact(BEGUN_AFTER, step)
        self._trained = max(self._trained, step)

    async def finish_step(self, step: int, report: dict[str, Any]) -> None:
        """Record step `step` as trained: store its report, and delete rollouts up to it that no batch names."""
        await self._run_in_turn("finish_step", lambda: self._store.finish_step(step, report))
        self._trained = max(self._trained, step)
        self._reports[step] = report
        for old in [known for known in self._reports if known <= step - REPORTS_KEPT]:
            del self._reports[old]

    async def set_report(self, step: int, report: dict[str, Any]) -> None:
        """Replace the report of a trained step, with figures that became known later."""
        await self._run_in_turn("set_report", lambda: self._store.set_report(step, report))
        if step in self._reports:
            self._reports[step] = report

    async def forget_batches(self, up_to: int) -> None:
        """Delete batches up to step `up_to`, which no trainer will replay."""
        await self._run_in_turn("forget_batches", lambda: self._store.forget_batches(up_to))

    async def probe_periodically(self, every_s: float) -> None:
        """Probe the store until cancelled, so that an outage is noticed even while there is nothing to write.

        A permanent error, such as another coordinator's claim, ends only the probing. The next write raises it again
        and ends the run.
        """
        while True:
            await self._sleep(every_s)
            try:
                await self._run_in_turn("watch", self._store.read_last_trained_step)
            except SpecrlError as error:
                log.error("store_probe_failed", reason=str(error))
                return

    # -- close ---------------------------------------------------------------------------------------------------

    def stop_retrying(self) -> None:
        """Stop retrying: from now on a failed operation raises StoreFailed."""
        self._is_given_up = True

    async def close(self) -> None:
        """Wait for the attempt under way, which the store's deadline bounds, and close the store."""
        await asyncio.to_thread(self._thread.shutdown)
        self._store.close()

    # -- retries -------------------------------------------------------------------------------------------------

    async def _run_in_turn[T](self, name: str, work: Callable[[], T]) -> T:
        async with self._turn:
            return await self._retry_until_done(name, work)

    async def _retry_until_done[T](self, name: str, work: Callable[[], T]) -> T:
        """Retry `work` until it succeeds or raises StoreInvalid. The caller holds `self._turn`."""
        waits = _generate_delays()
        while True:
            began = time.monotonic()
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            except StoreFailed as error:
                self._absence.record_failure(name, error)
                if self._is_given_up:
                    raise
            else:
                metrics.STORE_SECONDS.labels(self._run, name).observe(time.monotonic() - began)
                self._absence.record_success()
                return found
            await self._sleep(next(waits))


def _generate_delays() -> Iterator[float]:
    """Yield the seconds to wait before each retry."""
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


class _OutageTracker:
    """Logs the beginning and the end of each outage of the store, and counts failed attempts."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.reason = ""
        self.retries = 0
        # Create each series at 0 now: `increase()` would not see the failure with which a series appears.
        for operation in OPERATIONS:
            metrics.STORE_RETRIES.labels(run, operation)

    def record_failure(self, operation: str, error: StoreFailed) -> None:
        """Record a failed attempt."""
        self.retries += 1
        metrics.STORE_RETRIES.labels(self._run, operation).inc()
        if not self.reason:
            log.error("store_lost", operation=operation, reason=str(error))
        self.reason = str(error)
        metrics.STORE_REACHABLE.labels(self._run).set(0)

    def record_success(self) -> None:
        """Record a successful attempt."""
        if self.reason:
            self.reason = ""
            log.info("store_recovered", retries=self.retries)
            metrics.STORE_REACHABLE.labels(self._run).set(1)
