"""Trainers of several parallel layouts, those with as many ranks in the same processes, one after another."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.integration.trainer.worker_group import ALONE, sizes
from tests.tiny_models import Shape, make_policy

from specrl.spec.trainer import Parallelism
from specrl.trainer import checkpoints

ROOT = Path(__file__).parents[3]
VOCAB = 265  # not divisible by 2 ranks, and not by 128: padding has to work
TWO_RANKS = ["tensor=2", "data=2", "pipeline=2", "context=2", "pipeline=2,virtualStages=2"]
FOUR_RANKS = ["tensor=2,pipeline=2", "tensor=2,context=2", "pipeline=2,virtualStages=2,data=2"]


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


class Launch:
    """The processes that form some layouts one after another, and the folder in which they leave what they saw."""

    def __init__(self, out: Path, ranks: int, worker: str, arguments: Sequence[str], sends: Sequence[str]) -> None:
        """sends: the folders in `out` of whoever broadcasts, one after another."""
        self.out, self.sends, port = out, sends, free_port()
        command = [sys.executable, "-m", f"tests.integration.trainer.{worker}", *arguments]
        out.mkdir(parents=True)
        self.processes = []
        for rank in range(ranks):
            with (out / f"rank-{rank}.log").open("w") as log:
                environment = rank_environment(rank, ranks, port)
                process = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
            self.processes.append(process)

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


def all_of(policy: Path, layouts: Sequence[str], out: Path, resume: Path | None = None) -> Launch:
    """`worker.py` in some layouts with as many ranks."""
    ranks = Parallelism.model_validate(sizes(layouts[0])).world_size
    arguments = [str(policy), str(out), json.dumps(layouts), *([str(resume)] if resume else [])]
    return Launch(out, ranks, "worker", arguments, layouts)


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
def single(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank."""
    return all_of(policy, [ALONE], tmp_path_factory.mktemp("single") / "out").finish([9]) / ALONE


@pytest.fixture(scope="session")
def two_ranks(policy: Path, single: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layouts of two ranks, each of which afterwards resumes the single rank's checkpoint."""
    out, resume = tmp_path_factory.mktemp("two") / "out", checkpoints.newest(single)
    return all_of(policy, TWO_RANKS, out, resume).finish([0, 0])


@pytest.fixture(scope="session")
def four_ranks(tied_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layouts of four ranks, of another policy."""
    return all_of(tied_policy, FOUR_RANKS, tmp_path_factory.mktemp("four") / "out").finish([0] * 4)
