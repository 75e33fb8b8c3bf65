"""One small run for all tests of a file. A test that pauses or scales it must restore it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.coordinator.small_run import a_spec
from tests.integration.live.live_run import LiveRun


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """Start a run that continues until the tests end, and wait for its third step."""
    folder = tmp_path_factory.mktemp("live")
    spec = a_spec(folder, steps=100_000)
    shown = spec.telemetry.model_copy(update={"rollouts_shown": 8})
    with LiveRun(folder, spec.model_copy(update={"telemetry": shown})) as run:
        run.until(lambda: run.trained() >= 3)
        yield run
