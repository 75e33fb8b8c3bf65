"""Fixtures that run trainers in several parallel layouts.

Layouts with the same number of ranks run in the same processes, one after another. The processes are forks of one
(`tests/fork_server.py`), which saves importing torch for each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fork_server import ROOT, ForkServer
from tests.integration.trainer.worker_group import ALONE, sizes
from tests.tiny_models import Shape, make_policy

from specrl.launcher.processes.ports import find_free_port
from specrl.spec.trainer import Parallelism
from specrl.trainer.checkpointing import checkpoints

VOCAB = 265  # divisible neither by 2 ranks nor by 128, so the vocabulary is padded
TWO_RANKS = ["tensor=2", "data=2", "pipeline=2", "context=2", "pipeline=2,virtualStages=2"]
FOUR_RANKS = ["tensor=2,pipeline=2", "tensor=2,context=2", "pipeline=2,virtualStages=2,data=2"]
# Only deep tests run these. The first is part of the last layout of four ranks, the second of one in test_layouts.py.
DEEP = {"pipeline=2,virtualStages=2", "tensor=2,context=2"}

# In these `make test` also resumes after too many skipped steps: with zero, one and two parallel dimensions. Deep tests
# do it in all layouts.
LONG = {ALONE, "data=2", "tensor=2,pipeline=2"}


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the environment of a rank that runs as a separate program."""
    python_path = os.pathsep.join((str(ROOT / "services"), str(ROOT)))  # this tree, whatever is installed
    of_program = {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    return os.environ | rank_variables(rank, world_size, port) | of_program


class Launch:
    """The processes that run some layouts one after another, and the folder with their results."""

    def __init__(self, ranks: ForkServer, out: Path, layout: str, program: Sequence[str], sends: Sequence[str]) -> None:
        """layout: one of the layouts. program: a worker's module and arguments. sends: subfolders of `out` whose
        workers broadcast weights, in order."""
        self.out = out
        self.sends = sends
        port = find_free_port()
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
        """Wait until all have ended. Returns their exit codes."""
        return [process.wait(timeout=240) for process in self.processes]

    def log(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.out.glob("rank-*.log")))

    def finish(self, expected: list[int]) -> Path:
        """Receive the broadcasts as a replica would, check the exit codes, and return the folder."""
        from tests.integration.trainer.receiver import receive_broadcasts

        for folder in self.sends:
            receive_broadcasts(self, self.out / folder)
        codes = self.codes()
        assert codes == expected, f"exit codes {codes}\n{self.log()}"
        return self.out


@dataclass(frozen=True)
class Trainers:
    """Starts `worker.py` in layouts with the same number of ranks. is_deep: with what only deep tests need."""

    ranks: ForkServer
    is_deep: bool

    def train(self, policy: Path, every: Sequence[str], out: Path, resume: Path | None = None) -> Launch:
        layouts = [layout for layout in every if self.is_deep or layout not in DEEP]
        long = layouts if self.is_deep else sorted(LONG.intersection(layouts))
        arguments = [str(policy), str(out), json.dumps(layouts), json.dumps(long), *([str(resume)] if resume else [])]
        return Launch(self.ranks, out, layouts[0], ["worker", *arguments], layouts)


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
    """The same, with an embedding that is also the output layer."""
    path = tmp_path_factory.mktemp("tied")
    return make_policy(path, seed=4, sharpness=4.0, shape=Shape(heads=4, groups=2, vocab=VOCAB, is_tied=True))


@pytest.fixture(scope="session")
def single(trainers: Trainers, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the layout with one rank."""
    return trainers.train(policy, [ALONE], tmp_path_factory.mktemp("single") / "out").finish([9]) / ALONE


@pytest.fixture(scope="session")
def two_ranks(trainers: Trainers, policy: Path, single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the layouts with two ranks. Each also resumes the single rank's checkpoint."""
    out = tmp_path_factory.mktemp("two") / "out"
    resume = checkpoints.find_newest(single)
    return trainers.train(policy, TWO_RANKS, out, resume).finish([0, 0])


@pytest.fixture(scope="session")
def four_ranks(trainers: Trainers, tied_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the layouts with four ranks, of a policy with a tied embedding."""
    return trainers.train(tied_policy, FOUR_RANKS, tmp_path_factory.mktemp("four") / "out").finish([0] * 4)
