"""Pools of worker processes that may hang or crash, for verdicts and for tool calls. The event loop never blocks.

`pool.VerifierPool` and `specrl.agent_tools.ToolPool` are the two subclasses. Invariants: an answer is what the worker
returned. A question without an answer has a failure kind and is counted; no question can cause the kind `ungraded`.
Every wait is bounded.

    QUEUED -> RUNNING -> ANSWERED                the worker answered
                      -> FAILED(error)           it raised
                      -> FAILED(crash)           its process ended, or exited because its memory was used up;
                                                 pebble notices within 0.1 s and replaces it
                      -> FAILED(timeout)         it used up timeoutS; its worker is killed and replaced
                      -> FAILED(ungraded)        it raised Ungraded, or waited too long for a processor

The time of a question is the wall time since a worker took it, minus the time that the worker and its sandboxed
programs waited for a processor (`question_time`). At most MAX_WAITING times timeoutS is subtracted. Beyond that the
machine is too busy to measure the question. Each wait has a bound:

- for a free worker: the bounds of the questions ahead in the queue.
- for a worker to take the question, or a replacement to start: `_START_S`. Then the whole pool is replaced.
- for the answer: timeoutS plus the subtracted waiting. This process checks every `_POLL_S` and cancels the question
  when its time is up. Pebble then ends the worker, with SIGKILL if necessary.
- if this process is gone or stopped: the worker's own alarm, which ends native code, too. It is set to the longest time
  that a question can take, plus `_GRACE_S`.

Pebble breaks its pool when an idle worker dies (pebble 5.2, `find_expired_task`). The pool is replaced then, too, and
the question is asked again. So are all other questions of a pool that is replaced.

Workers are forked from a fork server. It starts as a fresh process, so it never inherits gRPC's threads. It has
imported what workers need, so a replacement starts in milliseconds. Workers ignore Ctrl-C from their first instruction
on, as the fork server does (`specrl.ignore_interrupts`); the coordinator closes the pool.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Self

import pebble
import structlog

from specrl.errors import SpecInvalid, SpecrlError, ToolFailed, VerifierFailed
from specrl.rewards import question_time
from specrl.rewards.question_time import MAX_WAITING, QuestionTime, TimeSlots
from specrl.rewards.sandbox.kernel import forbid_core_dumps
from specrl.rewards.verifier import SandboxChoice, Ungraded, WorkerSetup
from specrl.spec.data import WorkerLimits
from specrl.telemetry import metrics

_GRACE_S = 10
"""Extra time before the worker's own alarm fires, so that this process, which knows the real limit, acts first."""

_MAX_BROKEN_POOLS = 5
"""Pools that may break in a row before the pool gives up. One question can break two of them: if it ends its worker at
once, pebble sometimes takes the worker for an idle one."""

_OUT_OF_MEMORY = 77
"""Exit status of a worker that needed more than memoryMib. Python itself and signals use other values."""

_START_S = 60
"""Limit for the start of a worker on a loaded machine. It imports SymPy, which takes 2 s on an idle machine."""

_POLL_S = 1.0
"""Interval at which a question's time is checked. Each check reads a few files in /proc."""

log = structlog.get_logger(__name__)


class FailureKind(StrEnum):
    """Reason why there is no answer. The values label the counter of failures."""

    ERROR = "error"
    CRASH = "crash"
    TIMEOUT = "timeout"
    UNGRADED = "ungraded"
    """The failure has a reason that no question can cause."""


@dataclass(frozen=True)
class WorkerAnswer:
    """The value that a worker returned, or the failure, as text for users and by kind."""

    value: object = None
    failure: str = ""
    failure_kind: FailureKind | None = None


class WorkerPool[Work: WorkerSetup]:
    """Worker processes that answer questions. Use `async with ... as pool`, or `start` and `close`."""

    noun: ClassVar[str]
    """Name of a worker in messages: "verifier" or "tool"."""
    error: ClassVar[type[SpecrlError]]
    """Raised if no question can be answered any more."""
    start_method: ClassVar[str] = "forkserver"
    """How multiprocessing starts the workers."""

    def __init__(self, work: Work, limits: WorkerLimits) -> None:
        self._work = work
        self._limits = limits
        self._context = multiprocessing.get_context(self.start_method)
        self._slots = TimeSlots(limits.workers, self._context)
        self._free = asyncio.Semaphore(limits.workers)  # one permit per worker, hence never more questions than slots
        self._pool: pebble.ProcessPool | None = None
        self._is_closed = False
        self.failures: Counter[FailureKind] = Counter()
        """Number of questions without an answer, by kind."""
        for kind in FailureKind:  # so that Prometheus sees a 0 before the first failure
            metrics.WORKER_FAILURES.labels(self.noun, kind.value)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start and warm up the workers. The first one makes the choices that depend on the machine.

        Raises SpecInvalid if they cannot work on this machine, and the pool's error if they do not answer in time.
        """
        pool = await self._ensure_pool()
        # Pebble ends a task that takes too long; the asyncio timeout also bounds workers that never start.
        try:
            async with asyncio.timeout(2 * _START_S):
                settling = pool.schedule(self._work.settle_on_machine, timeout=_START_S)
                self._work = await asyncio.wrap_future(settling)
                # One task per worker, so usually each worker prepares itself.
                warm = [pool.schedule(self._work.prepare_worker, timeout=_START_S) for _ in range(self._limits.workers)]
                await asyncio.gather(*(asyncio.wrap_future(future) for future in warm))
        except (TimeoutError, BrokenProcessPool, pebble.ProcessExpired) as error:
            await self.close()
            raise self.error(
                f"{self.noun} workers must start within {_START_S} s, got {type(error).__name__}; see the log above"
            ) from error
        except SpecInvalid:
            await self.close()
            raise

    def list_sandboxes(self) -> tuple[SandboxChoice, ...]:
        """List the sandboxes that the workers run programs in. After `start`, isolations are chosen."""
        return self._work.list_sandboxes()

    async def close(self) -> None:
        """Kill the workers and cancel the answers that are still awaited. Safe to call twice."""
        self._is_closed = True
        await self._discard_pool(self._pool)

    async def _ask_worker(self, question: Callable[..., object], *arguments: object) -> WorkerAnswer:
        """Call `question` in a worker and return its result, or why there is none.

        Raises the pool's error only if the pool is closed or cannot be restarted; no question can be answered then.
        """
        async with self._free:
            for _ in range(_MAX_BROKEN_POOLS):
                answer = await self._ask_once(question, arguments)
                if answer is not None:
                    return answer
        raise self.error(
            f"{self.noun} workers must stay alive between answers, got {_MAX_BROKEN_POOLS} broken pools in a row; "
            "see the log above, and check the machine's free memory"
        )

    def _record_failure(self, kind: FailureKind, reason: str) -> WorkerAnswer:
        self.failures[kind] += 1
        metrics.WORKER_FAILURES.labels(self.noun, kind.value).inc()
        return WorkerAnswer(None, f"{kind}: {reason}", kind)

    async def _ask_once(self, question: Callable[..., object], arguments: tuple[object, ...]) -> WorkerAnswer | None:
        """Ask once. Returns None if the pool itself broke, which says nothing about this question."""
        pool = await self._ensure_pool()
        most_s = self._limits.timeout_s * (1 + MAX_WAITING)
        with self._slots.reserve_slot() as spent:
            task = (question, arguments, spent.index, spent.number, most_s + _GRACE_S)
            try:
                future = pool.schedule(_run_question, task)
            except RuntimeError:  # pebble's error for a pool that broke since the last answer
                await self._discard_pool(pool)
                return None
            awaited = asyncio.wrap_future(future)
            try:
                failure = await self._wait_for_answer(pool, awaited, spent)
                if failure is not None:
                    if not spent.has_begun:  # no worker took the question within _START_S: the pool itself is stuck
                        await self._discard_pool(pool)
                    return failure
                return WorkerAnswer(awaited.result())
            except pebble.ProcessExpired as error:
                return self._explain_worker_exit(error.exitcode)
            except BrokenProcessPool:
                await self._discard_pool(pool)
                return None
            except Ungraded as error:
                return self._record_failure(FailureKind.UNGRADED, str(error))
            except Exception as error:  # noqa: BLE001 - the edge of a process: any exception of the worker ends here
                # pebble puts the worker's traceback into __cause__. It may quote a completion, hence DEBUG.
                log.debug("question_failed", worker=self.noun, traceback=str(error.__cause__))
                is_ours = isinstance(error, VerifierFailed | ToolFailed)
                reason = str(error) if is_ours else f"the {self.noun} raised {type(error).__name__}"
                return self._record_failure(FailureKind.ERROR, reason)
            finally:
                future.cancel()  # type: ignore[no-untyped-call] # if the question still runs, pebble ends its worker
                awaited.cancel()  # otherwise asyncio logs that the exception was never retrieved

    async def _wait_for_answer(
        self, pool: pebble.ProcessPool, awaited: asyncio.Future[object], spent: QuestionTime
    ) -> WorkerAnswer | None:
        """Wait for the answer. Returns the failure if the question's time is up first, else None.

        Raises BrokenProcessPool if another question has replaced the pool meanwhile.
        """
        limit_s = self._limits.timeout_s
        queued_s = time.monotonic()
        left_s = float(limit_s)
        while not (await asyncio.wait({awaited}, timeout=min(_POLL_S, left_s)))[0]:
            elapsed_s, waited_s = spent.measure_seconds()
            if not spent.has_begun and time.monotonic() - queued_s > _START_S:
                reason = f"no {self.noun} worker was ready within {_START_S} s"
                return self._record_failure(FailureKind.UNGRADED, reason)
            if self._pool is not pool:  # a stopped pool may never resolve the futures that it has left
                raise BrokenProcessPool
            left_s = limit_s - (elapsed_s - min(waited_s, MAX_WAITING * limit_s))
            if left_s > 0:
                continue

            # The time is up. If that is because the cap on waiting was reached, the machine is at fault.
            if waited_s >= MAX_WAITING * limit_s:
                reason = f"the {self.noun} waited {waited_s:.0f} s for a processor; the machine is too busy"
                return self._record_failure(FailureKind.UNGRADED, reason)
            return self._record_timeout()
        return None

    def _record_timeout(self) -> WorkerAnswer:
        reason = f"the {self.noun} took longer than timeoutS={self._limits.timeout_s}"
        return self._record_failure(FailureKind.TIMEOUT, reason)

    def _explain_worker_exit(self, status: int | None) -> WorkerAnswer:
        """Classify the exit of a worker: its own alarm, lack of memory, or a crash or kill."""
        if status == -signal.SIGALRM:
            return self._record_timeout()
        reason = f"the {self.noun}'s process ended with exit status {status}"
        if status == _OUT_OF_MEMORY:
            reason = f"the {self.noun} needed more than memoryMib={self._limits.memory_mib}"
        return self._record_failure(FailureKind.CRASH, reason)

    async def _ensure_pool(self) -> pebble.ProcessPool:
        if self._is_closed:
            raise self.error(f"the {self.noun} pool must be open to answer, got a closed one; the run is ending")
        if self._pool is None:
            preloads = ["specrl.ignore_interrupts", "specrl.rewards.choice", *self._work.preloads]
            self._context.set_forkserver_preload(preloads)
            self._pool = pebble.ProcessPool(
                self._limits.workers,
                initializer=_initialize_worker,
                initargs=[self._limits.memory_mib * 2**20, self._slots.shared],
                context=self._context,
            )
            # Reading `active` starts the processes, which takes too long for the event loop.
            await asyncio.to_thread(lambda pool: pool.active, self._pool)
        return self._pool

    async def _discard_pool(self, pool: pebble.ProcessPool | None) -> None:
        """Stop a pool. Several questions may find the same pool broken; the first one discards it."""
        if pool is None or pool is not self._pool:
            return
        self._pool = None  # before the await below, so that no other question uses or discards it
        pool.stop()  # type: ignore[no-untyped-call] # pebble annotates it in part
        await asyncio.to_thread(pool.join)


def _initialize_worker(memory_bytes: int, slots: Any) -> None:
    """Limit the worker's memory, and give it the pool's slots. Runs in the worker, before its first question."""
    # An answer like 9^9^9^9 would otherwise use all memory of the machine. SymPy alone needs 0.3 GiB of address space.
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    forbid_core_dumps()
    question_time.enter_worker(slots)


def _run_question(
    question: Callable[..., Any], arguments: tuple[object, ...], slot: int, number: int, most_s: int
) -> object:
    """Answer one question in a worker. The alarm lets the kernel end it if the asking process is gone."""
    # SIGALRM's default action kills the process even inside native code, where a Python handler would not run.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(most_s)
    try:
        question_time.begin_question(slot, number)
        return question(*arguments)
    except MemoryError:  # exit, since memory that this question still holds would make the next one fail
        os._exit(_OUT_OF_MEMORY)
    except Exception:
        raise
    except BaseException as error:  # pebble would raise SystemExit again in the asking process, and end it
        raise VerifierFailed(f"a question must return, got {type(error).__name__}") from error
    finally:
        signal.alarm(0)
