"""The one run that the tests of this folder look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.integration.observability.real_run import Observed, observe


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    """A run of the real services that has ended, and the Prometheus that scraped it."""
    found = observe(tmp_path_factory.mktemp("observed"))
    yield found
    found.prometheus.close()
