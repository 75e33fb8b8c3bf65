"""Room on the disk, and what the cache holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import constants

from specrl.errors import FetchFailed, RunInvalid
from specrl.hub import FetchedSource, read_sources, write_sources
from specrl.hub.client import Listing, Repository, RepositoryKind, list_repository
from specrl.hub.fetching import SPARE_BYTES, check_room

COMMIT = "ab" * 20
REPOSITORY = Repository(RepositoryKind.MODEL, "team/tiny", COMMIT, "model.path")


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def listing(tmp_path: Path) -> Listing:
    """Two files, of which the cache has one."""
    found = Listing(REPOSITORY, COMMIT, {"config.json": 2, "model.safetensors": 5 << 30}, tmp_path / "hub")
    found.folder.mkdir(parents=True)
    (found.folder / "config.json").write_bytes(b"{}")
    return found


@pytest.fixture
def set_free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    return lambda free: monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(1 << 50, 0, free))


def test_a_model_that_does_not_fit_on_the_disk_is_refused(listing: Listing, set_free: Callable[[int], None]) -> None:
    set_free((4 << 30) + SPARE_BYTES)
    with pytest.raises(
        FetchFailed, match=r"model\.path must fit on the disk of .*, got 5\.0 GiB of team/tiny for 4\.0"
    ):
        check_room(listing, list(listing.sizes))
    set_free((5 << 30) + SPARE_BYTES)
    check_room(listing, list(listing.sizes))


def test_what_the_cache_has_needs_no_room(listing: Listing, set_free: Callable[[int], None]) -> None:
    set_free(0)
    check_room(listing, ["config.json"])


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with HF_HUB_OFFLINE, which huggingface_hub reads when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_what_another_program_fetched_is_used_offline(listing: Listing) -> None:
    """transformers and `hf download` keep no sizes: what is there counts."""
    found = list_repository(REPOSITORY, listing.cache)
    assert (found.sizes, found.notice) == ({"config.json": 2}, "HF_HUB_OFFLINE is set")
    main = replace(REPOSITORY, revision=None)
    with pytest.raises(FetchFailed, match=r"must be in the cache .* in offline mode, got team/tiny, which is not"):
        list_repository(main, listing.cache)
    (listing.folder.parents[1] / "refs").mkdir()
    (listing.folder.parents[1] / "refs/main").write_text(COMMIT)
    assert list_repository(main, listing.cache).commit == COMMIT


@pytest.mark.usefixtures("offline")
def test_a_listing_that_is_damaged_is_not_used(listing: Listing) -> None:
    file = listing.cache / "models--team--tiny/specrl" / f"{COMMIT}.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"commit": COMMIT, "sizes": {"config.json": 2, "other": 3}}))
    assert list_repository(REPOSITORY, listing.cache).sizes == {"config.json": 2, "other": 3}
    infinite = json.dumps({"commit": COMMIT, "sizes": {"config.json": float("inf")}})
    for content in (infinite, '{"commit": 1', '{"commit": "../..", "sizes": {}}', '{"commit": 1, "sizes": []}'):
        file.write_text(content)
        assert list_repository(REPOSITORY, listing.cache).sizes == {"config.json": 2}


def test_sources_are_read_back(tmp_path: Path) -> None:
    source = FetchedSource(field="model.path", name="a/b", revision="main", commit=COMMIT, folder="/hub/x")
    assert read_sources(tmp_path) == ()
    write_sources(tmp_path, [])
    assert not (tmp_path / "sources.json").exists()
    write_sources(tmp_path, [source])
    assert read_sources(tmp_path) == (source,)
    assert source.describe() == "model.path: a/b at commit abababababab (main), in /hub/x"
    (tmp_path / "sources.json").write_text('[{"field": "model.path"}]')
    with pytest.raises(RunInvalid, match=r"sources\.json must be as specrl wrote it, got 4 validation errors"):
        read_sources(tmp_path)
