"""Trainers of several parallel layouts, those with as many ranks in the same processes, one after another.

Their ranks are forks of one process (`tests/fork_server.py`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fork_server import ROOT, ForkServer
from tests.integration.trainer.worker_group import ALONE, sizes
from tests.tiny_models import Shape, make_policy

from specrl.spec.trainer import Parallelism
from specrl.trainer import checkpoints

VOCAB = 265  # not divisible by 2 ranks, and not by 128: padding has to work
TWO_RANKS = ["tensor=2", "data=2", "pipeline=2", "context=2", "pipeline=2,virtualStages=2"]
FOUR_RANKS = ["tensor=2,pipeline=2", "tensor=2,context=2", "pipeline=2,virtualStages=2,data=2"]
IMPORTED = (
    "tests.integration.trainer.worker",
    "tests.integration.trainer.layout_worker",
    "specrl.trainer.main",
    "specrl.trainer.service",
    "specrl.trainer.ranks",
    "torch._dynamo",  # which the first optimizer imports
)
DEEP = {"pipeline=2,virtualStages=2", "tensor=2,context=2"}
"""Formed by deep tests alone. The first is part of the last of four ranks, the second of one in test_layouts.py."""
LONG = {ALONE, "data=2", "tensor=2,pipeline=2"}
"""`make test` goes on after too many skipped steps in these: no, one and two ways of cutting the counters. Deep tests
do it in all layouts."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """torchrun's contract."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """All variables of a rank that is a program of its own."""
    python_path = os.pathsep.join((str(ROOT / "services"), str(ROOT)))  # this tree, whatever is installed
    of_program = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    return os.environ | rank_variables(rank, world_size, port) | of_program


class Launch:
    """The processes that form some layouts one after another, and the folder in which they leave what they saw."""

    def __init__(self, ranks: ForkServer, out: Path, layout: str, program: Sequence[str], sends: Sequence[str]) -> None:
        """layout: one of them. program: a worker's module and arguments. sends: the folders in `out` of whoever
        broadcasts, one after another."""
        self.out, self.sends, port = out, sends, free_port()
        count = Parallelism.model_validate(sizes(layout)).world_size
        out.mkdir(parents=True)
        self.processes = [
            ranks.start(
                f"tests.integration.trainer.{program[0]}",
                program[1:],
                rank_variables(rank, count, port),
                out / f"rank-{rank}.log",
            )
            for rank in range(count)
        ]

    def codes(self) -> list[int]:
        """Exit codes, when all have ended."""
        return [process.wait(timeout=240) for process in self.processes]

    def log(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.out.glob("rank-*.log")))

    def finish(self, expected: list[int]) -> Path:
        """Receive their broadcasts as a replica would, wait for their end, return their folder."""
        from tests.integration.trainer.receiver import receive_broadcasts

        for folder in self.sends:
            receive_broadcasts(self, self.out / folder)
        codes = self.codes()
        assert codes == expected, f"exit codes {codes}\n{self.log()}"
        return self.out


@dataclass(frozen=True)
class Trainers:
    """Starts `worker.py` in some layouts with as many ranks, as deep tests or the others need it."""

    ranks: ForkServer
    is_deep: bool

    def train(self, policy: Path, every: Sequence[str], out: Path, resume: Path | None = None) -> Launch:
        layouts = [layout for layout in every if self.is_deep or layout not in DEEP]
        long = layouts if self.is_deep else sorted(LONG.intersection(layouts))
        arguments = [str(policy), str(out), json.dumps(layouts), json.dumps(long), *([str(resume)] if resume else [])]
        return Launch(self.ranks, out, layouts[0], ["worker", *arguments], layouts)


@pytest.fixture(scope="session")
def ranks() -> Iterator[ForkServer]:
    """Starts ranks."""
    server = ForkServer(*IMPORTED)
    yield server
    server.close()


@pytest.fixture(scope="session")
def trainers(ranks: ForkServer, request: pytest.FixtureRequest) -> Trainers:
    return Trainers(ranks, request.config.getoption("--deep"))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with grouped queries, sharp enough that its distributions differ."""
    path = tmp_path_factory.mktemp("policy")
    return make_policy(path, seed=3, sharpness=4.0, shape=Shape(heads=4, groups=2, vocab=VOCAB))


@pytest.fixture(scope="session")
def tied_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, but with an embedding that is its output layer, too."""
    path = tmp_path_factory.mktemp("tied")
    return make_policy(path, seed=4, sharpness=4.0, shape=Shape(heads=4, groups=2, vocab=VOCAB, is_tied=True))


@pytest.fixture(scope="session")
def single(trainers: Trainers, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank."""
    return trainers.train(policy, [ALONE], tmp_path_factory.mktemp("single") / "out").finish([9]) / ALONE


@pytest.fixture(scope="session")
def two_ranks(trainers: Trainers, policy: Path, single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layouts of two ranks, each of which afterwards resumes the single rank's checkpoint."""
    out, resume = tmp_path_factory.mktemp("two") / "out", checkpoints.newest(single)
    return trainers.train(policy, TWO_RANKS, out, resume).finish([0, 0])


@pytest.fixture(scope="session")
def four_ranks(trainers: Trainers, tied_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layouts of four ranks, of another policy."""
    return trainers.train(tied_policy, FOUR_RANKS, tmp_path_factory.mktemp("four") / "out").finish([0] * 4)
