"""Fixtures that several tiers share. Engines take tens of seconds to start, so each is started once per session.

Tests that use one run in the session's event loop: `pytestmark = pytest.mark.asyncio(loop_scope="session")`.
"""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from tests.vllm_cases import Models

    from specrl.generation.vllm_backend.engine import VllmEngine


@pytest.fixture(scope="session")
def vllm_imported() -> None:
    """vllm, imported without the deprecation warnings of its own dependencies, which would be errors here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.engine.async_llm  # noqa: F401


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, vllm_imported: None) -> Models:
    """Two versions of a tiny policy with drafters."""
    from tests.vllm_cases import make_models

    folder: Path = tmp_path_factory.mktemp("models")
    return make_models(folder)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def eagle3_engine(models: Models) -> AsyncIterator[VllmEngine]:
    """vLLM with the first version of policy and EAGLE-3 drafter. Tests leave it serving, under any version."""
    from tests.vllm_cases import EAGLE3, a_spec, running, speculation

    async with running(a_spec(models.first.policy, speculation(EAGLE3, models.first))) as engine:
        yield engine
