"""The ranks of a node: their environment, and the one exit code that stands for all of them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from specrl.rank_processes import Node


def start_ranks(node: Node, script: str, ending_s: float = 60.0) -> subprocess.Popen[str]:
    """Start ranks that run a shell script, in a process of their own, since it takes over signals."""
    program = (
        "import sys; from specrl import rank_processes as it; from specrl.rank_processes import Node; "
        f"it.ENDING_S = {ending_s}; sys.exit(it.run_ranks({node!r}, ['sh', '-c', sys.argv[1]]))"
    )
    return subprocess.Popen([sys.executable, "-c", program, script], stdout=subprocess.PIPE, text=True)


def run(node: Node, script: str, ending_s: float = 60.0) -> tuple[int, list[str]]:
    """Return the exit code, and the lines that the ranks wrote, sorted."""
    process = start_ranks(node, script, ending_s)
    out, _ = process.communicate(timeout=60)
    return process.returncode, sorted(out.splitlines())


def test_ranks_get_what_a_rendezvous_needs() -> None:
    names = "$RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"
    code, said = run(Node(ranks=2, count=3, number=1, address="first", port=29500), f"echo {names}")
    assert code == 0
    assert said == ["2 0 6 2 first 29500", "3 1 6 2 first 29500"]


def test_ranks_of_one_node_meet_at_a_port_that_was_free() -> None:
    code, said = run(Node(ranks=2), "echo $MASTER_PORT")
    assert code == 0
    assert said[0] == said[1]
    assert int(said[0]) > 0


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 2", 2),
        ("exit 143", 143),
        ("kill -9 $$", 137),
        # Rank 0 loses rank 1, which refuses its input: the refusal counts, whoever is first.
        ("[ $RANK = 0 ] && exit 1; exit 2", 2),
        ("[ $RANK = 1 ] && exit 1; exit 2", 2),
        ("[ $RANK = 1 ] && exit 3; exit 0", 3),
    ],
)
def test_exit_code_is_that_of_the_ranks(script: str, code: int) -> None:
    """torchrun ended with 1 whatever its ranks said. A refusal was retried until no restarts were left."""
    assert run(Node(ranks=2), script)[0] == code


def test_a_rank_that_hangs_after_another_has_failed_is_killed() -> None:
    assert run(Node(ranks=2), "[ $RANK = 0 ] && exit 3; trap '' TERM; exec sleep 1000", ending_s=0.0)[0] == 3


def test_a_signal_reaches_every_rank() -> None:
    script = "trap 'exit 143' TERM; echo up; while :; do sleep 0.01; done"
    process = start_ranks(Node(ranks=2), script)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 143
    process.stdout.close()
