"""The pool returns a verdict whatever an answer does to its verifier, except for failures that no answer can cause."""

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
from tests.processor_load import occupy_processor

from specrl.errors import VerifierFailed
from specrl.records import Prompt, Reward
from specrl.rewards.choice import verifier_for
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier import Verifier
from specrl.rewards.workers import FailureKind
from specrl.spec.data import MathVerifier, RewardPool, Rewards

PROMPT = Prompt("p0", 0, (1,), "question", "right")
TIMEOUT_S = 2
"""Time limit of `hurried_pool`. The waits in `hostile` are longer."""


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Verifier:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # workers import `hostile` by name
    from hostile import Hostile  # type: ignore[import-not-found]

    return Hostile()


@pytest.fixture
async def pool(hostile: Verifier) -> AsyncIterator[VerifierPool]:
    """A pool whose time limit is out of reach, so that tests do not depend on the load of the machine."""
    async with VerifierPool(hostile, RewardPool(workers=1, timeout_s=300)) as pool:
        yield pool


@pytest.fixture
async def hurried_pool(hostile: Verifier) -> AsyncIterator[VerifierPool]:
    """A pool with a short time limit. Other questions finish in time on a loaded machine, since waits do not count."""
    async with VerifierPool(hostile, RewardPool(workers=1, timeout_s=TIMEOUT_S)) as pool:
        yield pool


def workers(pool: VerifierPool) -> list[int]:
    assert pool._pool is not None
    return list(pool._pool._pool_manager.worker_manager.workers)


async def test_the_pool_returns_the_verifiers_verdicts(pool: VerifierPool) -> None:
    assert (await pool.grade(PROMPT, "right")).value == 1.0
    assert (await pool.grade(PROMPT, "wrong")).value == 0.0
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
async def test_a_failure_that_the_answer_causes_gives_0(
    pool: VerifierPool, completion: str, error: str, failures: dict[FailureKind, int]
) -> None:
    """Such rollouts used to be ungraded and sampled again, so an answer could avoid its grade."""
    reward = await pool.grade(PROMPT, completion)
    assert reward.value == 0.0
    assert reward.error.startswith(error)
    assert not reward.lacks_answer
    assert dict(pool.failures) == failures
    assert (await pool.grade(PROMPT, "right")).value == 1.0, "the next rollout must get a working worker"


@pytest.mark.parametrize("completion", ["hang", "hang deaf", "exit politely"])
async def test_an_answer_that_times_out_gets_0(hurried_pool: VerifierPool, completion: str) -> None:
    reward = await hurried_pool.grade(PROMPT, completion)
    assert (reward.value, reward.error, reward.lacks_answer) == (0.0, "timeout", False)
    assert dict(hurried_pool.failures) == {FailureKind.TIMEOUT: 1}
    assert (await hurried_pool.grade(PROMPT, "right")).value == 1.0, "the next rollout must get a working worker"


async def test_a_reference_that_times_out_is_ungraded(hurried_pool: VerifierPool) -> None:
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
async def test_a_failure_of_the_reference_alone_is_ungraded(pool: VerifierPool, reference: str, said: str) -> None:
    reward = await pool.grade(replace(PROMPT, answer=reference), "right")
    assert reward.value is None
    assert reward.failure == said
    assert (await pool.grade(PROMPT, "right")).value == 1.0


@pytest.mark.parametrize("how", ["die", "end", "exit", "fill memory"])
async def test_a_worker_killed_from_outside_costs_no_verdict(pool: VerifierPool, tmp_path: Path, how: str) -> None:
    """A crash that does not repeat is not caused by the answer. Nor is a lack of memory that earlier answers caused."""
    reward = await pool.grade(PROMPT, f"{how} once {tmp_path / 'marker'}")
    assert reward == Reward(1.0, extracted="right")
    assert dict(pool.failures) == {FailureKind.CRASH: 1}


async def test_a_judge_that_is_down_leaves_the_rollout_ungraded(pool: VerifierPool) -> None:
    reward = await pool.grade(PROMPT, "judge away")
    assert reward.value is None
    assert reward.failure == "ungraded: the judge must answer, got nothing"
    assert (await pool.grade(PROMPT, "right")).value == 1.0


async def test_verdicts_match_their_rollouts_despite_failures_between_them(pool: VerifierPool) -> None:
    texts = ["right", "wrong", "die", "right", "raise", "wrong", "judge away", "right"]
    rewards = await asyncio.gather(*(pool.grade(PROMPT, text) for text in texts))
    assert [reward.value for reward in rewards] == [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, None, 1.0]


async def test_time_that_a_worker_waits_for_a_processor_does_not_count(hostile: Verifier) -> None:
    """The pool used to kill the worker after timeoutS of wall time, however little processor time the worker got."""
    with occupy_processor(7):  # before the pool, whose workers are bound to the same processor
        async with VerifierPool(hostile, RewardPool(workers=1, timeout_s=TIMEOUT_S)) as pool:
            assert (await pool.grade(PROMPT, "wait for a processor")).value == 0.0
            assert not pool.failures


async def test_a_question_that_waits_too_long_for_a_processor_is_ungraded(hurried_pool: VerifierPool) -> None:
    reward = await hurried_pool.grade(PROMPT, "wait for programs for ever")
    assert reward.value is None
    assert "the machine is too busy" in reward.failure
    assert dict(hurried_pool.failures) == {FailureKind.UNGRADED: 1}


async def test_time_that_sandboxed_programs_wait_does_not_count(hurried_pool: VerifierPool) -> None:
    assert (await hurried_pool.grade(PROMPT, "wait for programs")).value == 0.0
    assert (await hurried_pool.grade(PROMPT, "right")).value == 1.0, "the slot must be free for the next question"
    assert (await hurried_pool.grade(PROMPT, "hang")).error == "timeout", (
        "the slot must not keep the waits of an earlier question"
    )
    assert dict(hurried_pool.failures) == {FailureKind.TIMEOUT: 1}


async def test_an_idle_worker_that_dies_costs_no_verdict(pool: VerifierPool) -> None:
    for _ in range(2):
        (worker,) = workers(pool)
        os.kill(worker, signal.SIGKILL)
        assert (await pool.grade(PROMPT, "right")).value == 1.0
    assert not pool.failures


async def test_a_pool_that_is_replaced_costs_no_other_verdict(hostile: Verifier, tmp_path: Path) -> None:
    """Right answers whose grading had begun got 0 for a timeout when another question found the pool stuck."""
    marker = tmp_path / "marker"
    async with VerifierPool(hostile, RewardPool(workers=1, timeout_s=20)) as pool:
        grading = asyncio.create_task(pool.grade(PROMPT, f"hang once {marker}"))
        while not marker.exists():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.01)
        # A question that no worker takes does this. Pebble's threads end in any order: in this one futures are left.
        stuck = pool._pool
        assert stuck is not None
        assert stuck._message_manager_loop is not None
        stuck.stop()  # type: ignore[no-untyped-call]
        stuck._message_manager_loop.join()
        await pool._discard_pool(stuck)
        assert (await grading).value == 1.0
        assert not pool.failures


async def test_a_cancelled_verdict_frees_its_worker(pool: VerifierPool) -> None:
    task = asyncio.create_task(pool.grade(PROMPT, "hang"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await pool.grade(PROMPT, "right")).value == 1.0


async def test_a_closed_pool_leaves_no_process_and_refuses_questions(pool: VerifierPool) -> None:
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
from specrl.rewards.pool import VerifierPool
from specrl.rewards.text.exact import Exact
from specrl.spec.data import RewardPool

def say_handler():
    print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, flush=True)

async def main():
    async with VerifierPool(Exact("####"), RewardPool(workers=2)) as pool:
        newborn = pool._context.Process(target=say_handler)  # in the state of a worker before pebble's code runs
        newborn.start()
        newborn.join()
        print(*pool._pool._pool_manager.worker_manager.workers, flush=True)
        await asyncio.sleep(3600)

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with SIGINT ignored
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        sys.exit(130)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_exit_silently_with_their_coordinator(tmp_path: Path, how: signal.Signals) -> None:
    """A worker that had just been forked still had Python's handler for Ctrl-C, and printed a traceback."""
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
                os.killpg(process.pid, how)  # a terminal signals every process of the group
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
        # After a SIGKILL, Python's resource tracker removes the pool's semaphores and prints a warning.
        assert not said or how is signal.SIGKILL
