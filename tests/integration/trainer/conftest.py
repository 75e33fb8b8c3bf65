"""Trainers of several parallel layouts, each run once in processes of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.tiny_models import Shape, make_policy

from specrl.trainer import checkpoints

ROOT = Path(__file__).parents[3]
VOCAB = 265  # not divisible by 2 ranks, and not by 128: padding has to work


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """torchrun's contract."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "services"), str(ROOT))),  # this tree, whatever is installed
    }


class Layout:
    """The processes of one layout, and the folder in which they leave what they saw."""

    def __init__(self, out: Path, policy: Path, tensor: int, data: int, resume: Path | None = None) -> None:
        self.out = out
        port, arguments = (
            free_port(),
            [str(policy), str(out), str(tensor), str(data), *([str(resume)] if resume else [])],
        )
        command = [sys.executable, "-m", "tests.integration.trainer.worker", *arguments]
        out.mkdir(parents=True)
        self.processes = []
        for rank in range(tensor * data):
            with (out / f"rank-{rank}.log").open("w") as log:
                environment = rank_environment(rank, tensor * data, port)
                process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            self.processes.append(process)

    def codes(self) -> list[int]:
        """Exit codes, when all have ended."""
        return [process.wait(timeout=240) for process in self.processes]

    def log(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.out.glob("rank-*.log")))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with grouped queries, sharp enough that its distributions differ."""
    path = tmp_path_factory.mktemp("policy")
    return make_policy(path, seed=3, sharpness=4.0, shape=Shape(heads=4, groups=2, vocab=VOCAB))


@pytest.fixture(scope="session")
def single(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank."""
    return finish(Layout(tmp_path_factory.mktemp("single") / "out", policy, 1, 1), [9])


@pytest.fixture(scope="session")
def tensor_2(policy: Path, single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tensor parallel ranks, which afterwards resume the single rank's checkpoint."""
    resume = checkpoints.newest(single)
    return finish(Layout(tmp_path_factory.mktemp("tensor") / "out", policy, 2, 1, resume), [0, 0])


@pytest.fixture(scope="session")
def data_2(policy: Path, single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data parallel ranks, which afterwards resume the single rank's checkpoint."""
    resume = checkpoints.newest(single)
    return finish(Layout(tmp_path_factory.mktemp("data") / "out", policy, 1, 2, resume), [0, 0])


def finish(layout: Layout, expected: list[int]) -> Path:
    """Receive its broadcast as a replica would, wait for its end, return its folder."""
    from tests.integration.trainer.receiver import receive_broadcasts

    receive_broadcasts(layout)
    codes = layout.codes()
    assert codes == expected, f"exit codes {codes}\n{layout.log()}"
    return layout.out
