"""Processes that may hang or die, and answer without holding up the event loop that asks: for verdicts, and for tools.

`pool.VerifierPool` and `specrl.tools.ToolPool` are such pools. Invariants: an answer is the worker's own. Whatever else
happens there is none, and its kind says what: no question can cause `ungraded`. Every question without an answer is
counted, and every wait ends.

    QUEUED -> RUNNING -> ANSWERED                the worker answered
                      -> FAILED(error)           it raised
                      -> FAILED(crash)           its process ended, or its memory was used up, with which it ends
                                                 itself; pebble notices within 0.1 s and replaces it
                      -> FAILED(timeout)         timeoutS is used up; its worker is killed and replaced
                      -> FAILED(ungraded)        it raised Ungraded, or waited too long for a processor

Time is the wall time since a worker took the question, less what the worker and its sandboxed programs waited for a
processor (`question_time`). At most MOST_WAITING times timeoutS is taken off: after that the machine is too busy, and
nobody can say how long the question takes. What bounds each wait:

- for a free worker: the bounds of the questions before it.
- for a worker to take the question, and for a replacement to start: `_START_S`, then the whole pool is replaced.
- for the answer: timeoutS plus the waiting that is taken off. This process looks every `_LOOK_S`, and cancels the
  question when its time is up. Pebble then ends the worker, by SIGKILL if it must.
- where this process is gone or stopped: the worker's own alarm, which ends native code, too. It is set to the most that
  a question can take, and `_GRACE_S`.

Pebble gives up its pool when an idle worker dies (pebble 5.2, `find_expired_task`); the pool is replaced then too, and
the question asked again.

Workers come from a fork server: started fresh, it never has gRPC's threads, and has loaded what the work needs, so that
a replacement is there in milliseconds. They ignore Ctrl-C from their first instruction on, since the fork server does
(`specrl.ignore_interrupts`); the coordinator closes the pool.
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
from typing import Any, ClassVar, Protocol, Self

import pebble
import structlog

from specrl.errors import SpecInvalid, SpecrlError, ToolFailed, VerifierFailed
from specrl.rewards import question_time
from specrl.rewards.question_time import MOST_WAITING, QuestionTime, Slots
from specrl.rewards.verifier import Ungraded
from specrl.spec.data import WorkerLimits
from specrl.telemetry import metrics

_GRACE_S = 10
"""How much later than this process the worker's own alarm ends a question."""
_POOLS = 5
"""Pools that may break in a row before no question can be answered. One question can break two by ending its worker at
once: pebble then takes the worker for an idle one, now and then."""
_OUT_OF_MEMORY = 77
"""Exit status of a worker whose question needed more than memoryMib."""
_START_S = 60
"""Longest start of a worker on a loaded machine: it imports SymPy, which takes 2 s on an idle one."""
_LOOK_S = 1.0
"""Between two looks at a question's time: a few files of /proc each."""

log = structlog.get_logger(__name__)


class FailureKind(StrEnum):
    """Why there is no answer: the label of the failure counter."""

    ERROR = "error"
    CRASH = "crash"
    TIMEOUT = "timeout"
    UNGRADED = "ungraded"
    """For a reason that no question can cause."""


class Work(Protocol):
    """What workers are for. Instances pickle."""

    @property
    def preloads(self) -> tuple[str, ...]:
        """Modules that take long to load; the pool loads them once for all of its workers."""

    def ready(self) -> None:
        """Once in a worker before it is asked: raise SpecInvalid when it cannot work on this machine."""


@dataclass(frozen=True)
class Answer:
    """What a worker answered, or why it did not."""

    value: object = None
    failure: str = ""
    failed: FailureKind | None = None


class WorkerPool:
    """Worker processes. Use as `async with ... as pool`, or `start` and `close`.

    start_method: of processes (multiprocessing). noun: what the messages call a worker, "verifier" or "tool"; error:
    what is raised when no question can be answered.
    """

    start_method: ClassVar[str] = "forkserver"

    def __init__(self, work: Work, limits: WorkerLimits, noun: str, error: type[SpecrlError]) -> None:
        self._work, self._limits, self._noun, self._error = work, limits, noun, error
        self._context = multiprocessing.get_context(self.start_method)
        self._slots = Slots(limits.workers, self._context)
        self._free = asyncio.Semaphore(limits.workers)
        self._pool: pebble.ProcessPool | None = None
        self._is_closed = False
        self.failures: Counter[FailureKind] = Counter()
        """Questions without an answer, by kind."""
        for kind in FailureKind:
            metrics.WORKER_FAILURES.labels(noun, kind.value)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start and warm up the workers.

        Raises SpecInvalid when they cannot work on this machine, the pool's error when they do not answer.
        """
        pool = await self._living()
        warm = [pool.schedule(self._work.ready, timeout=_START_S) for _ in range(self._limits.workers)]
        try:
            async with asyncio.timeout(2 * _START_S):
                await asyncio.gather(*(asyncio.wrap_future(future) for future in warm))
        except (TimeoutError, BrokenProcessPool, pebble.ProcessExpired) as error:
            await self.close()
            raise self._error(
                f"{self._noun} workers must start within {_START_S} s, got {type(error).__name__}; see the log above"
            ) from error
        except SpecInvalid:
            await self.close()
            raise

    async def close(self) -> None:
        """Kill the workers; answers still awaited are cancelled. Safe to call twice."""
        self._is_closed = True
        await self._discard(self._pool)

    async def _ask(self, question: Callable[..., object], *arguments: object) -> Answer:
        """What `question` returns in a worker, or why it did not.

        Raises the pool's error only when it is closed or cannot be started again: then no question can be answered.
        """
        async with self._free:
            for _ in range(_POOLS):
                answer = await self._attempt(question, arguments)
                if answer is not None:
                    return answer
        raise self._error(
            f"{self._noun} workers must stay alive between answers, got {_POOLS} pools in a row that did not; "
            "see the log above, and the machine's memory"
        )

    def _failed(self, kind: FailureKind, reason: str) -> Answer:
        self.failures[kind] += 1
        metrics.WORKER_FAILURES.labels(self._noun, kind.value).inc()
        return Answer(None, f"{kind}: {reason}", kind)

    async def _attempt(self, question: Callable[..., object], arguments: tuple[object, ...]) -> Answer | None:
        """One try; None when the pool itself broke, which says nothing about this question."""
        pool = await self._living()
        most_s = self._limits.timeout_s * (1 + MOST_WAITING)
        with self._slots.question() as spent:
            task = (question, arguments, spent.index, spent.number, most_s + _GRACE_S)
            try:
                future = pool.schedule(_answer, task)
            except RuntimeError:  # broken since the last answer
                await self._discard(pool)
                return None
            awaited = asyncio.wrap_future(future)
            try:
                failure = await self._wait(awaited, spent)
                if failure is not None:
                    if not spent.has_begun:
                        await self._discard(pool)
                    return failure
                return Answer(awaited.result())
            except pebble.ProcessExpired as error:
                return self._ended(error.exitcode)
            except BrokenProcessPool:
                await self._discard(pool)
                return None
            except Ungraded as error:
                return self._failed(FailureKind.UNGRADED, str(error))
            except (VerifierFailed, ToolFailed) as error:
                log.debug("question_failed", asked=self._noun, traceback=str(error.__cause__))
                return self._failed(FailureKind.ERROR, str(error))
            except Exception as error:  # noqa: BLE001 - the edge of a process: whatever is raised there ends here
                log.debug("question_failed", asked=self._noun, traceback=str(error.__cause__))
                return self._failed(FailureKind.ERROR, f"the {self._noun} raised {type(error).__name__}")
            finally:
                future.cancel()  # type: ignore[no-untyped-call] # of a question that still runs, pebble ends the worker
                awaited.cancel()  # or asyncio complains that nobody looked how it ended

    async def _wait(self, awaited: asyncio.Future[object], spent: QuestionTime) -> Answer | None:
        """Wait for the answer until the question's time is up; the failure in that case."""
        limit_s = self._limits.timeout_s
        queued_s, left_s = time.monotonic(), float(limit_s)
        while not (await asyncio.wait({awaited}, timeout=min(_LOOK_S, left_s)))[0]:
            elapsed_s, waited_s = spent.look()
            if not spent.has_begun and time.monotonic() - queued_s > _START_S:
                return self._failed(FailureKind.UNGRADED, f"no {self._noun} worker was ready within {_START_S} s")
            left_s = limit_s - (elapsed_s - min(waited_s, MOST_WAITING * limit_s))
            if left_s > 0:
                continue
            if waited_s >= MOST_WAITING * limit_s:
                return self._failed(
                    FailureKind.UNGRADED,
                    f"the {self._noun} waited {waited_s:.0f} s for a processor; the machine is too busy",
                )
            return self._failed(FailureKind.TIMEOUT, f"the {self._noun} took longer than timeoutS={limit_s}")
        return None

    def _ended(self, status: int | None) -> Answer:
        """The worker has died of the question, by its alarm for one, or somebody has killed it."""
        limits = self._limits
        if status == -signal.SIGALRM:
            return self._failed(FailureKind.TIMEOUT, f"the {self._noun} took longer than timeoutS={limits.timeout_s}")
        if status == _OUT_OF_MEMORY:
            return self._failed(FailureKind.CRASH, f"the {self._noun} needed more than memoryMib={limits.memory_mib}")
        return self._failed(FailureKind.CRASH, f"the {self._noun}'s process ended with exit status {status}")

    async def _living(self) -> pebble.ProcessPool:
        if self._is_closed:
            raise self._error(f"the {self._noun} pool must be open to answer, got a closed one; the run is ending")
        if self._pool is None:
            preloads = ["specrl.ignore_interrupts", "specrl.rewards.choice", *self._work.preloads]
            self._context.set_forkserver_preload(preloads)
            self._pool = pebble.ProcessPool(
                self._limits.workers,
                initializer=_prepare_worker,
                initargs=[self._limits.memory_mib * 2**20, self._slots.shared],
                context=self._context,
            )
            # The first look starts the processes.
            await asyncio.to_thread(lambda pool: pool.active, self._pool)
        return self._pool

    async def _discard(self, pool: pebble.ProcessPool | None) -> None:
        """Stop a pool. Several questions may find the same one broken; the first of them discards it."""
        if pool is None or pool is not self._pool:
            return
        self._pool = None
        pool.stop()  # type: ignore[no-untyped-call] # pebble annotates it in part
        await asyncio.to_thread(pool.join)


def _prepare_worker(memory_bytes: int, slots: Any) -> None:
    """SymPy needs 0.3 GiB of address space; an answer like 9^9^9^9 would otherwise take the machine's memory."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    question_time.enter_worker(slots)


def _answer(question: Callable[..., Any], arguments: tuple[object, ...], slot: int, number: int, most_s: int) -> object:
    """In the worker: one answer, ended by the kernel when nobody else ended it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(most_s)
    try:
        question_time.begin(slot, number)
        return question(*arguments)
    except MemoryError:  # what the answer has left here would be the next one's want of memory
        os._exit(_OUT_OF_MEMORY)
    except Exception:
        raise
    except BaseException as error:  # SystemExit, for one: raised where the answer is awaited, it would end that process
        raise VerifierFailed(f"a question must return, got {type(error).__name__}") from error
    finally:
        signal.alarm(0)
