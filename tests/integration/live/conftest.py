"""One small run for all tests of a file; who changes it leaves it going on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.coordinator.small_run import a_spec
from tests.integration.live.live_run import LiveRun


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """A run that goes on as long as anybody looks, with at least three steps behind it."""
    folder = tmp_path_factory.mktemp("live")
    spec = a_spec(folder, steps=100_000)
    shown = spec.telemetry.model_copy(update={"rollouts_shown": 8})
    with LiveRun(folder, spec.model_copy(update={"telemetry": shown})) as run:
        run.until(lambda: run.trained() >= 3)
        yield run
