"""Whatever an answer does to its verifier, the pool has a verdict; there is none only for what no answer can cause."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.hogs import hogs

from specrl.errors import VerifierFailed
from specrl.records import Prompt, Reward
from specrl.rewards import FailureKind, Verifier, VerifierPool, verifier_for
from specrl.spec.data import MathVerifier, RewardPool, Rewards

PROMPT = Prompt("p0", 0, (1,), "question", "right")
TIMEOUT_S = 2
"""Of `hurried_pool`. What `hostile` waits in it, on purpose, is longer."""


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Verifier:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # workers import `hostile` by name
    from hostile import Hostile  # type: ignore[import-not-found]

    return Hostile()


@pytest.fixture
async def pool(hostile: Verifier) -> AsyncIterator[VerifierPool]:
    """Its time is never up: what happens here does not depend on how busy the machine is."""
    async with VerifierPool(hostile, RewardPool(workers=1, timeout_s=300)) as pool:
        yield pool


@pytest.fixture
async def hurried_pool(hostile: Verifier) -> AsyncIterator[VerifierPool]:
    """For questions that take all of their time. Others are answered at once, and what they wait is not counted."""
    async with VerifierPool(hostile, RewardPool(workers=1, timeout_s=TIMEOUT_S)) as pool:
        yield pool


def workers(pool: VerifierPool) -> list[int]:
    assert pool._pool is not None
    return list(pool._pool._pool_manager.worker_manager.workers)


async def test_verdicts_are_the_verifiers_own(pool: VerifierPool) -> None:
    assert (await pool.grade(PROMPT, "right")).value == 1.0
    assert (await pool.grade(PROMPT, "wrong")).value == 0.0
    assert pool.graded == 2
    assert not pool.failures


@pytest.mark.parametrize(
    ("completion", "error", "failures"),
    [
        ("die", "crash", {FailureKind.CRASH: 2}),
        ("exit", "crash", {FailureKind.CRASH: 2}),
        ("fill memory", "crash", {FailureKind.CRASH: 2}),
        ("leave", "SystemExit at hostile.py:", {}),
        ("raise", "KeyError at hostile.py:", {}),
        ("recurse", "RecursionError at hostile.py:", {}),
        ("speak", "SilentError at hostile.py:", {}),
        ("blame the reference", "VerifierFailed at hostile.py:", {}),
        ("nonsense", "ValueError at hostile.py:", {}),
        ("too large for float32", "ValueError at hostile.py:", {}),
    ],
)
async def test_what_an_answer_causes_is_a_verdict_of_0(
    pool: VerifierPool, completion: str, error: str, failures: dict[FailureKind, int]
) -> None:
    """It was ungraded, and sampled again: an answer chose whether it was graded."""
    reward = await pool.grade(PROMPT, completion)
    assert reward.value == 0.0
    assert reward.error.startswith(error)
    assert not reward.lacks_answer
    assert dict(pool.failures) == failures
    assert (await pool.grade(PROMPT, "right")).value == 1.0, "the next rollout meets a sound worker"
    assert pool.graded == 2


@pytest.mark.parametrize("completion", ["hang", "hang deaf", "exit politely"])
async def test_an_answer_that_takes_all_time_is_a_verdict_of_0(hurried_pool: VerifierPool, completion: str) -> None:
    reward = await hurried_pool.grade(PROMPT, completion)
    assert (reward.value, reward.error, reward.lacks_answer) == (0.0, "timeout", False)
    assert dict(hurried_pool.failures) == {FailureKind.TIMEOUT: 1}
    assert (await hurried_pool.grade(PROMPT, "right")).value == 1.0, "the next rollout meets a sound worker"
    assert hurried_pool.graded == 2


async def test_a_reference_that_takes_all_time_is_ungraded(hurried_pool: VerifierPool) -> None:
    reward = await hurried_pool.grade(replace(PROMPT, answer="hang"), "right")
    assert (reward.value, reward.failure) == (None, f"timeout: the verifier took longer than timeoutS={TIMEOUT_S}")
    assert (await hurried_pool.grade(PROMPT, "right")).value == 1.0


@pytest.mark.parametrize(
    ("reference", "said"),
    [
        ("die", "crash: the verifier's process ended with exit status -9"),
        ("fill memory", "crash: the verifier needed more than memoryMib=4096"),
        ("raise", "error: the verifier raised KeyError"),
        ("blame the reference", "error: the reference must be better"),
    ],
)
async def test_what_a_reference_causes_without_the_answer_is_ungraded(
    pool: VerifierPool, reference: str, said: str
) -> None:
    reward = await pool.grade(replace(PROMPT, answer=reference), "right")
    assert reward.value is None
    assert reward.failure == said
    assert (await pool.grade(PROMPT, "right")).value == 1.0


@pytest.mark.parametrize("how", ["die", "end", "exit", "fill memory"])
async def test_a_worker_that_somebody_else_ended_costs_no_verdict(pool: VerifierPool, tmp_path: Path, how: str) -> None:
    """An end that does not repeat is not the answer's doing, nor is a want of memory that earlier answers have left."""
    reward = await pool.grade(PROMPT, f"{how} once {tmp_path / 'marker'}")
    assert reward == Reward(1.0, extracted="right")
    assert dict(pool.failures) == {FailureKind.CRASH: 1}


async def test_a_judge_that_is_away_leaves_the_rollout_ungraded(pool: VerifierPool) -> None:
    reward = await pool.grade(PROMPT, "judge away")
    assert reward.value is None
    assert reward.failure == "ungraded: the judge must answer, got nothing"
    assert (await pool.grade(PROMPT, "right")).value == 1.0


async def test_verdicts_belong_to_their_rollouts_when_failures_are_between(pool: VerifierPool) -> None:
    texts = ["right", "wrong", "die", "right", "raise", "wrong", "judge away", "right"]
    rewards = await asyncio.gather(*(pool.grade(PROMPT, text) for text in texts))
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, None, 1.0]


async def test_a_worker_that_waits_for_a_processor_is_given_its_time(hostile: Verifier) -> None:
    """The pool killed it after timeoutS on a clock of its own, however little of it the worker got."""
    with hogs(7):  # before the pool, whose workers are bound to the same processor
        async with VerifierPool(hostile, RewardPool(workers=1, timeout_s=TIMEOUT_S)) as pool:
            assert (await pool.grade(PROMPT, "wait for a processor")).value == 0.0
            assert not pool.failures


async def test_a_question_that_waits_for_ever_is_ungraded(hurried_pool: VerifierPool) -> None:
    reward = await hurried_pool.grade(PROMPT, "wait for programs for ever")
    assert reward.value is None
    assert "the machine is too busy" in reward.failure
    assert dict(hurried_pool.failures) == {FailureKind.UNGRADED: 1}


async def test_what_sandboxed_programs_waited_is_not_their_workers_time(hurried_pool: VerifierPool) -> None:
    assert (await hurried_pool.grade(PROMPT, "wait for programs")).value == 0.0
    assert (await hurried_pool.grade(PROMPT, "right")).value == 1.0, "and its slot is free for the next question"
    assert (await hurried_pool.grade(PROMPT, "hang")).error == "timeout", "which has no credit of an earlier question"
    assert dict(hurried_pool.failures) == {FailureKind.TIMEOUT: 1}


async def test_a_worker_that_dies_idle_costs_no_verdict(pool: VerifierPool) -> None:
    for _ in range(2):
        (worker,) = workers(pool)
        os.kill(worker, signal.SIGKILL)
        assert (await pool.grade(PROMPT, "right")).value == 1.0
    assert not pool.failures


async def test_an_abandoned_verdict_frees_its_worker(pool: VerifierPool) -> None:
    task = asyncio.create_task(pool.grade(PROMPT, "hang"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await pool.grade(PROMPT, "right")).value == 1.0


async def test_a_closed_pool_leaves_no_process_and_refuses(pool: VerifierPool) -> None:
    (worker,) = workers(pool)
    await pool.close()
    await pool.close()
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE
    with pytest.raises(VerifierFailed, match="must be open"):
        await pool.grade(PROMPT, "right")


async def test_the_math_verifier_works_in_the_pool() -> None:
    prompt = Prompt("p0", 0, (1,), "question", "worked\n#### 1/2")
    async with VerifierPool(verifier_for(Rewards(math=MathVerifier())), RewardPool(workers=2, timeout_s=60)) as pool:
        texts = ["#### 0.5", "#### 0.6", r"\boxed{\frac{2}{4}}", ""]
        rewards = await asyncio.gather(*(pool.grade(prompt, text) for text in texts))
    assert [reward.value for reward in rewards] == [1.0, 0.0, 1.0, 0.0]


PROGRAM = """
import asyncio, os, signal, sys
from specrl.rewards import VerifierPool
from specrl.rewards.exact import Exact
from specrl.spec.data import RewardPool

def say_handler():
    print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, flush=True)

async def main():
    async with VerifierPool(Exact("####"), RewardPool(workers=2)) as pool:
        newborn = pool._context.Process(target=say_handler)  # as a worker is before pebble has its first word
        newborn.start()
        newborn.join()
        print(*pool._pool._pool_manager.worker_manager.workers, flush=True)
        await asyncio.sleep(3600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_coordinator_and_in_silence(tmp_path: Path, how: signal.Signals) -> None:
    """Of two workers that a Ctrl-C met, one had just been forked: it had Python's own handler, and a traceback."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "True\n", "a worker must ignore Ctrl-C from the start"
            pids = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
            if how is signal.SIGINT:
                os.killpg(process.pid, how)  # as a terminal does it: to every process of the group
            else:
                process.kill()
            assert process.wait(timeout=60) == (130 if how is signal.SIGINT else -how)
        finally:
            process.kill()
        _, alive = psutil.wait_procs(pids, timeout=60)
        assert len(pids) == 2
        assert not [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE]
        said = process.stderr.read()
        assert "Traceback" not in said
        # After a kill, Python's resource tracker removes the pool's semaphores, and says so.
        assert not said or how is signal.SIGKILL
