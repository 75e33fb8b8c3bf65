"""Fixtures that several tiers share. Engines take tens of seconds to start, so each is started once per session.

Tests that use an engine run in the session's event loop: `pytestmark = pytest.mark.asyncio(loop_scope="session")`.
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


# The tests fork sandboxes from this process; the product forks them from a small server. With fork support gRPC starts
# threads in the child, and a process with threads cannot make a user namespace.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

# torch and OpenMP read the variable when they are imported. On small tensors, several threads spend more time waiting
# for each other than computing, most of all on a busy machine. The product sets it for each of its processes.
os.environ["OMP_NUM_THREADS"] = "1"

# On a busy machine, an example may be slow without being wrong. Every run of a developer draws other examples, so many
# runs try many. CI draws the same ones each time: a change is judged by its own faults, and not by the draw. Where one
# run must try more, its test says so.
settings.register_profile("specrl", deadline=None, max_examples=50, derandomize="CI" in os.environ)
settings.load_profile("specrl")

MECHANISMS = ("eagle3", "draftModel", "mtp", "suffix", "ngram", "none")
"""Members of generation.speculation. Tests of all of them are `parametrize`d by `kind` with session scope.

pytest then runs all tests of one mechanism together, across modules, so that each engine starts once.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--costs` and `--deep`."""
    parser.addoption(
        "--costs", type=Path, metavar="FILE", help="write wall time, CPU time and processes of each module, as JSON"
    )
    parser.addoption("--deep", action="store_true", help="run the tests marked deep, and no others")


def pytest_configure(config: pytest.Config) -> None:
    """Add the summaries of skipped requirements and of costs to every run."""
    config.pluginmanager.register(Skips())
    config.pluginmanager.register(Costs(config.getoption("--costs")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep either the deep tests or all others, never both: `make test-deep` records the result of the deep ones.

    Tests of the session's engines come last. Each engine has 14 threads of gloo that wake up a hundred times a second.
    An idle engine costs 2 % of a core for as long as it lives.
    """
    chosen = [item for item in items if (item.get_closest_marker("deep") is not None) == config.getoption("--deep")]
    left_out = set(items).difference(chosen)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = sorted(chosen, key=needs_engines)


def needs_engines(item: pytest.Item) -> bool:
    """Whether a test has the fixture `engines`."""
    return "engines" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="module")
def forkable() -> None:
    """Wait until OpenTelemetry's exporters of earlier tests have ended, before a module starts sandboxes.

    They start a thread in every fork. If the collector does not answer, that thread keeps a closed worker alive until
    its own deadline.
    """
    for thread in threading.enumerate():
        if thread.name.startswith(("OtelBatch", "close-traces")):
            thread.join(timeout=60)
            assert not thread.is_alive(), f"{thread.name} of an earlier test must end: is its sink closed?"
    gc.collect()


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """Import vllm without the deprecation warnings of its dependencies, which would be errors here."""
    _import_vllm()


def _import_vllm() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.engine.async_llm  # noqa: F401


@pytest.fixture(scope="session")
def models_when_needed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Models]:
    """Return a function that makes `models` at its first call, so that tests without models import no vLLM."""

    @cache
    def make() -> Models:
        _import_vllm()
        from tests.vllm_cases import make_models

        folder: Path = tmp_path_factory.mktemp("models")
        return make_models(folder)

    return make


@pytest.fixture(scope="session")
def models(models_when_needed: Callable[[], Models]) -> Models:
    """Two versions of a tiny policy with drafters, and two versions of one with native heads."""
    return models_when_needed()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engines(models_when_needed: Callable[[], Models]) -> AsyncIterator[Engines]:
    """vLLM with any mechanism: eagle3 runs for the whole session, of the others one at a time."""
    from tests.vllm_cases import Engines

    found = Engines(models_when_needed)
    yield found
    await found.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def eagle3_engine(engines: Engines) -> VllmEngine:
    """vLLM with the first version of policy and EAGLE-3 drafter. Tests leave it running, with any version loaded."""
    return (await engines.get_served("eagle3")).engine
