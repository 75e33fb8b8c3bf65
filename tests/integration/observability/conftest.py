"""The one run that all tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fork_server import ForkServer
from tests.integration.observability.real_run import Observed, observe


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory, ranks: ForkServer) -> Iterator[Observed]:
    """A finished run of the real services, and the Prometheus that scraped it."""
    found = observe(tmp_path_factory.mktemp("observed"), ranks)
    yield found
    found.prometheus.close()
