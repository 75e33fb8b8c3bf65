"""A stand-in for the hub, and the files of a tiny model that it may serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.run_files import a_model_folder
from tests.stand_ins.hub import StandInHub, serve_hub


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    with serve_hub() as served:
        yield served


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = a_model_folder(tmp_path_factory.mktemp("tiny") / "model")
    return {path.name: path.read_bytes() for path in folder.iterdir()}
