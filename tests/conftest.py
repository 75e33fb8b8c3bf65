"""Fixtures that several tiers share. Engines take tens of seconds to start, so each is started once per session.

Tests that use one run in the session's event loop: `pytestmark = pytest.mark.asyncio(loop_scope="session")`.
"""

from __future__ import annotations

import gc
import os
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from hypothesis import settings
from tests.costs import Costs
from tests.requirements import Skips

if TYPE_CHECKING:
    from tests.vllm_cases import Engines, Models

    from specrl.generation.vllm_backend.engine import VllmEngine


# Sandboxes are forked from this process here, the product's from a server that loads little. With its support for forks
# gRPC starts threads in the child, and in a process with threads no user namespace can be made.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# torch and OpenMP read it when they are imported. On tensors as small as those of tests, several threads wait for each
# other more than they compute, and on a busy machine far more. The product sets the variable of each of its processes.
os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("specrl", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("specrl")

MECHANISMS = ("eagle3", "draftModel", "mtp", "suffix", "ngram", "none")
"""Members of generation.speculation. Tests of all of them are `parametrize`d by `kind`, for the whole session: pytest
then runs those of one mechanism after each other, in whatever modules they are, and each engine starts once."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--costs` and `--deep`."""
    parser.addoption("--costs", type=Path, metavar="FILE", help="write what each module cost, as JSON")
    parser.addoption("--deep", action="store_true", help="run the tests marked deep, and no others")


def pytest_configure(config: pytest.Config) -> None:
    """Every run ends with what it could not prove on this machine, and with what it cost."""
    config.pluginmanager.register(Skips())
    config.pluginmanager.register(Costs(config.getoption("--costs")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deep tests and the others never run together: `make test-deep` records what the former found."""
    chosen = [item for item in items if (item.get_closest_marker("deep") is not None) == config.getoption("--deep")]
    left_out = set(items).difference(chosen)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = chosen


@pytest.fixture(scope="module")
def forkable() -> None:
    """Before a module's sandboxes: OpenTelemetry's exporters of earlier tests are gone.

    They start a thread in every fork. One whose collector does not answer holds its worker after it was closed, until
    its own deadline.
    """
    for thread in threading.enumerate():
        if thread.name.startswith(("OtelBatch", "close-traces")):
            thread.join(timeout=60)
            assert not thread.is_alive(), f"{thread.name} of an earlier test must end: is its sink closed?"
    gc.collect()


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """vllm, imported without the deprecation warnings of its own dependencies, which would be errors here."""
    _import_vllm()


def _import_vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.engine.async_llm  # noqa: F401


@pytest.fixture(scope="session")
def models_when_needed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Models]:
    """Makes `models` at its first call; a test that turns out to need none imports no vLLM."""

    @cache
    def make() -> Models:
        _import_vllm()
        from tests.vllm_cases import make_models

        folder: Path = tmp_path_factory.mktemp("models")
        return make_models(folder)

    return make


@pytest.fixture(scope="session")
def models(models_when_needed: Callable[[], Models]) -> Models:
    """Two versions of a tiny policy with drafters, and two of one with native heads."""
    return models_when_needed()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(models_when_needed: Callable[[], Models]) -> AsyncIterator[Engines]:
    """vLLM with any mechanism: eagle3 for the whole session, of the others one at a time."""
    from tests.vllm_cases import Engines

    found = Engines(models_when_needed)
    yield found
    await found.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def eagle3_engine(engines: Engines) -> VllmEngine:
    """vLLM with the first version of policy and EAGLE-3 drafter. Tests leave it serving, under any version."""
    return (await engines.serving("eagle3")).engine
