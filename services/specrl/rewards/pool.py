"""Verdicts from processes that may hang or die, without holding up the event loop that asks for them.

Stage 3 of the loop; the coordinator awaits `VerifierPool.grade` for every finished rollout. Invariants: a verdict is
the verifier's own; whatever else happens, the rollout is ungraded with the reason, and counted, never 0. And every
wait ends: for a free worker (each verdict before it in line is bounded), for the verdict (below).

    QUEUED -> RUNNING -> GRADED                  the worker answered
                      -> UNGRADED(error)         the verifier raised: VerifierFailed
                      -> UNGRADED(crash)         the worker died; pebble notices within 0.1 s and replaces it
                      -> UNGRADED(timeout)       no answer in timeoutS; pebble kills the worker and replaces it

Two more clocks stand behind pebble's: the worker's own alarm signal, which ends a verifier in native code even when
this process is gone; and a deadline in `grade`, after which the whole pool is replaced. Pebble gives up its pool when
an idle worker dies (pebble 5.2, `find_expired_task`); the pool is replaced then too, and the rollout tried again.

Workers come from a fork server: started fresh, it never has gRPC's threads, and has loaded math-verify, so that a
replacement is there in milliseconds. They ignore Ctrl-C; the coordinator closes the pool.
"""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import resource
import signal
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from enum import StrEnum

import pebble

from specrl.errors import VerifierFailed
from specrl.records import Prompt, Reward
from specrl.rewards.verifiers import Verifier
from specrl.spec.data import RewardPool

_GRACE_S = 10
"""How much later than pebble's time limit the worker's own alarm goes off."""
_START_S = 60
"""Longest start of a worker on a loaded machine: it imports SymPy, which takes 2 s on an idle one."""
_MEMORY_BYTES = 4 * 2**30
"""Address space of one worker. SymPy needs 0.3 GiB; an answer like 9^9^9^9 would otherwise take the machine's."""
_PRELOADED = ["specrl.rewards.verifiers", "math_verify"]


class FailureKind(StrEnum):
    """Why a rollout has no verdict: the label of the failure counter."""

    ERROR = "error"
    CRASH = "crash"
    TIMEOUT = "timeout"


class VerifierPool:
    """Verifier processes. Use as `async with VerifierPool(...) as pool`, or `start` and `close`."""

    def __init__(self, verifier: Verifier, limits: RewardPool) -> None:
        self._verifier = verifier
        self._limits = limits
        self._free = asyncio.Semaphore(limits.workers)
        self._pool: pebble.ProcessPool | None = None
        self._is_closed = False
        self.graded = 0
        """Verdicts given."""
        self.failures: Counter[FailureKind] = Counter()
        """Rollouts left ungraded, by kind."""

    async def __aenter__(self) -> VerifierPool:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start and warm up the workers. Raises VerifierFailed when they do not answer."""
        pool = await self._living()
        warm = [pool.schedule(_answer, timeout=_START_S) for _ in range(self._limits.workers)]
        try:
            async with asyncio.timeout(2 * _START_S):
                await asyncio.gather(*(asyncio.wrap_future(future) for future in warm))
        except (TimeoutError, BrokenProcessPool, pebble.ProcessExpired) as error:
            await self.close()
            raise VerifierFailed(
                f"verifier workers must start within {_START_S} s, got {type(error).__name__}; see the log above"
            ) from error

    async def grade(self, prompt: Prompt, rollout_text: str) -> Reward:
        """The verdict on one completion, or an ungraded Reward with the reason.

        Raises VerifierFailed only when the pool is closed or cannot be started again: then no rollout can be graded.
        """
        async with self._free:
            for _ in range(2):
                reward = await self._attempt(prompt, rollout_text)
                if reward is not None:
                    return reward
        raise VerifierFailed(
            "verifier workers must stay alive between verdicts, got two pools in a row that did not; "
            "see the log above, and the machine's memory"
        )

    async def close(self) -> None:
        """Kill the workers; verdicts still awaited are cancelled. Safe to call twice."""
        self._is_closed = True
        await self._discard(self._pool)

    async def _attempt(self, prompt: Prompt, text: str) -> Reward | None:
        """One try; None when the pool itself broke, which says nothing about this rollout."""
        pool = await self._living()
        limit = self._limits.timeout_s
        try:
            future = pool.schedule(_verdict, (self._verifier, prompt.answer, text, limit + _GRACE_S), timeout=limit)
        except RuntimeError:  # broken since the last verdict
            await self._discard(pool)
            return None
        awaited = asyncio.wrap_future(future)
        done, _ = await asyncio.wait({awaited}, timeout=limit + _GRACE_S + _START_S)
        if not done:
            await self._discard(pool)
            return self._ungraded(FailureKind.TIMEOUT, f"no verdict within {limit + _GRACE_S + _START_S} s")
        try:
            value: object = awaited.result()
        except TimeoutError:
            return self._ungraded(FailureKind.TIMEOUT, f"the verifier took longer than timeoutS={limit}")
        except pebble.ProcessExpired as error:
            return self._ungraded(FailureKind.CRASH, f"the verifier's process ended with exit status {error.exitcode}")
        except BrokenProcessPool:
            await self._discard(pool)
            return None
        except VerifierFailed as error:
            return self._ungraded(FailureKind.ERROR, str(error))
        except Exception as error:  # noqa: BLE001 - the edge of a process: whatever a verifier raises ends here, counted
            return self._ungraded(FailureKind.ERROR, f"the verifier raised {type(error).__name__}")
        if not isinstance(value, float) or not math.isfinite(value):
            return self._ungraded(FailureKind.ERROR, f"the verifier must answer a finite number, got {value!r:.80}")
        self.graded += 1
        return Reward(value)

    def _ungraded(self, kind: FailureKind, reason: str) -> Reward:
        self.failures[kind] += 1
        return Reward(None, f"{kind}: {reason}")

    async def _living(self) -> pebble.ProcessPool:
        if self._is_closed:
            raise VerifierFailed("the verifier pool must be open to grade, got a closed one; the run is ending")
        if self._pool is None:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            self._pool = pebble.ProcessPool(self._limits.workers, initializer=_prepare_worker, context=context)
            # The first look starts the processes.
            await asyncio.to_thread(lambda pool: pool.active, self._pool)
        return self._pool

    async def _discard(self, pool: pebble.ProcessPool | None) -> None:
        """Stop a pool. Several verdicts may find the same one broken; the first of them discards it."""
        if pool is None or pool is not self._pool:
            return
        self._pool = None
        pool.stop()  # type: ignore[no-untyped-call] # pebble annotates it in part
        await asyncio.to_thread(pool.join)


def _prepare_worker() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limit is off
    import math_verify  # noqa: F401 - loaded now, so that the first verdict is as fast as the others


def _answer() -> bool:
    return True


def _verdict(verifier: Verifier, reference: str, completion: str, limit_s: int) -> float:
    """In the worker: one verdict, ended by the kernel when nobody else ended it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit_s)
    try:
        return verifier.reward(reference, completion)
    finally:
        signal.alarm(0)
