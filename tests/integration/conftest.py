"""Fixtures that tests of the trainer and of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fork_server import ForkServer
from tests.integration.box_runs import a_synchronous_run, make_box_policy, train_to_end, write_questions
from tests.integration.forked_run import ForkedRun
from tests.integration.packages.installation import ROOT, build

IMPORTED = (
    "tests.integration.trainer.worker",
    "tests.integration.trainer.layout_worker",
    "specrl.trainer.main",
    "specrl.trainer.service",
    "specrl.trainer.ranks",
    "torch._dynamo",  # torch imports it when the first optimizer is made
)


@pytest.fixture(scope="session")
def ranks() -> Iterator[ForkServer]:
    """The server that forks trainer ranks, with their modules imported."""
    server = ForkServer(*IMPORTED)
    yield server
    server.close()


@pytest.fixture(scope="session")
def box_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first policy of box_runs."""
    return make_box_policy(tmp_path_factory.mktemp("boxes") / "policy")


@pytest.fixture(scope="session")
def synchronous_run(tmp_path_factory: pytest.TempPathFactory, box_policy: Path, ranks: ForkServer) -> ForkedRun:
    """A finished run with an EAGLE-3 head, two replicas and two trainer ranks."""
    folder = tmp_path_factory.mktemp("synchronous")
    return train_to_end(folder, a_synchronous_run(box_policy, write_questions(folder)), ranks)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the checkout."""
    return build(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")
