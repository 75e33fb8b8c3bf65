"""What is kept of what was listed and watched, and how soon it is tried again. Threads are in tests/integration."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operator.builders import an_rljob
from tests.unit.operator.world import a_pod

from specrl_operator import watches
from specrl_operator.api import DEPLOYMENT, JOB_LABEL, POD, RLJOB, Object
from specrl_operator.cluster import Change, ClusterError, Listing
from specrl_operator.watches import Cache, Watches


def pod(name: str, job: str = "tiny", namespace: str = "rl") -> Object:
    item = a_pod(name, "trainer", {"kind": "X", "metadata": {"uid": "u", "labels": {JOB_LABEL: job}}})
    item["metadata"]["namespace"] = namespace
    return item


def names(cache: Cache, job: str = "tiny", namespace: str = "rl") -> list[str]:
    return [item["metadata"]["name"] for item in cache.find(POD, namespace, job)]


def test_a_job_s_objects_are_found_by_its_label_in_its_namespace() -> None:
    cache = Cache()
    for item in (pod("b"), pod("a"), pod("c", job="other"), pod("d", namespace="elsewhere")):
        cache.take(POD, Change("ADDED", item))
    assert names(cache) == ["a", "b"]
    assert names(cache, "other") == ["c"]
    assert names(cache, namespace="elsewhere") == ["d"]
    assert cache.find(DEPLOYMENT, "rl", "tiny") == []


def test_changes_say_which_job_to_look_at() -> None:
    cache = Cache()
    assert cache.take(POD, Change("ADDED", pod("a"))) == ("rl", "tiny")
    assert cache.take(RLJOB, Change("ADDED", an_rljob(name="mine"))) == ("rl", "mine")
    stray = pod("a")
    stray["metadata"]["labels"] = {}
    assert cache.take(POD, Change("ADDED", stray)) is None


def test_what_is_deleted_is_forgotten_and_the_job_still_told() -> None:
    cache = Cache()
    cache.take(POD, Change("ADDED", pod("a")))
    assert cache.take(POD, Change("DELETED", pod("a"))) == ("rl", "tiny")
    assert names(cache) == []


def test_a_listing_replaces_what_was_known_and_names_those_who_lost_something() -> None:
    cache = Cache()
    for item in (pod("a"), pod("b", job="gone"), pod("c", namespace="elsewhere")):
        cache.take(POD, Change("ADDED", item))
    cache.take(RLJOB, Change("ADDED", an_rljob()))
    assert cache.replace(POD, "rl", [pod("z")]) == {("rl", "tiny"), ("rl", "gone")}
    assert names(cache) == ["z"]
    assert names(cache, "gone") == []
    assert names(cache, namespace="elsewhere") == ["c"]  # another listing's
    assert len(cache.find(RLJOB, "rl", "tiny")) == 1  # another kind's
    assert cache.replace(POD, None, []) == {("rl", "tiny"), ("elsewhere", "tiny")}


class Broken:
    """An API server that fails as told, on a clock of its own: at a listing, or so many seconds after one."""

    def __init__(self, failures: list[float | None]) -> None:
        self.now, self.failures = 0.0, failures

    def list(self, *_: object) -> Listing:
        if self.failures[0] is None:
            self.failures.pop(0)
            raise ClusterError(0, "connection refused")
        return Listing([], "1")

    def watch(self, *_: object) -> Iterator[Change]:
        self.now += self.failures.pop(0) or 0.0
        raise ClusterError(0, "the watch broke")
        yield


@pytest.mark.parametrize(
    ("failures", "pauses"),
    [
        ([None, None, None, None], [1, 2, 4, 8]),
        ([None, None, None, 100.0, 0.0], [1, 2, 4, 1, 2]),  # it has worked since
        ([0.0, 0.0, 0.0, 0.0], [1, 2, 4, 8]),  # each time just a listing: no reason to ask for one every second
        ([10.0, 10.0, 10.0], [1, 1, 1]),
    ],
    ids=["not reached", "worked since", "breaks at once", "breaks now and then"],
)
def test_pauses_grow_while_nothing_works_and_begin_anew_afterwards(
    failures: list[float | None], pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, waited = Broken(failures), list[float]()
    monkeypatch.setattr(watches, "time", SimpleNamespace(monotonic=lambda: server.now))
    found: Any = Watches(server, Cache(), [None], lambda key: None)  # type: ignore[arg-type]
    found._stop = SimpleNamespace(is_set=lambda: not server.failures, wait=waited.append)
    found._keep(POD, None)
    assert waited == pauses
