"""The cache of watched objects, and the pauses after failures. tests/integration tests the threads."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.operator.builders import an_rljob
from tests.unit.operator.world import a_pod

from specrl_operator.api import JOB_LABEL, Object
from specrl_operator.cluster import watches
from specrl_operator.cluster.cache import WatchedObjects
from specrl_operator.cluster.interface import ClusterError, Listing, WatchEvent
from specrl_operator.cluster.watches import Watches, build_selector
from specrl_operator.kinds import CLAIM_TEMPLATE, DEPLOYMENT, POD, RLJOB


def pod(name: str, job: str = "tiny", namespace: str = "rl") -> Object:
    item = a_pod(name, "trainer", {"kind": "X", "metadata": {"uid": "u", "labels": {JOB_LABEL: job}}})
    item["metadata"]["namespace"] = namespace
    return item


def names(cache: WatchedObjects, job: str = "tiny", namespace: str = "rl") -> list[str]:
    return [item["metadata"]["name"] for item in cache.list_objects(POD, namespace, job)]


def test_a_jobs_objects_are_found_by_its_label_in_its_namespace() -> None:
    cache = WatchedObjects()
    for item in (pod("b"), pod("a"), pod("c", job="other"), pod("d", namespace="elsewhere")):
        cache.apply_event(POD, WatchEvent("ADDED", item))
    assert names(cache) == ["a", "b"]
    assert names(cache, "other") == ["c"]
    assert names(cache, namespace="elsewhere") == ["d"]
    assert cache.list_objects(DEPLOYMENT, "rl", "tiny") == []


def test_a_change_wakes_the_job_of_its_object() -> None:
    cache = WatchedObjects()
    assert cache.apply_event(POD, WatchEvent("ADDED", pod("a"))) == ("rl", "tiny")
    assert cache.apply_event(RLJOB, WatchEvent("ADDED", an_rljob(name="mine"))) == ("rl", "mine")
    stray = pod("a")
    stray["metadata"]["labels"] = {}
    assert cache.apply_event(POD, WatchEvent("ADDED", stray)) is None


def test_a_claim_template_wakes_the_job_that_waits_for_it() -> None:
    """NVIDIA's driver gives it no label of ours, so a job waited for the next relist, up to five minutes."""
    cache = WatchedObjects()
    template = CLAIM_TEMPLATE.build_object({"name": "tiny-imex", "namespace": "rl"})
    assert build_selector(CLAIM_TEMPLATE) == ""
    assert cache.apply_event(CLAIM_TEMPLATE, WatchEvent("ADDED", template)) == ("rl", "tiny")
    assert cache.list_objects(CLAIM_TEMPLATE, "rl", "tiny") == [template]
    foreign = CLAIM_TEMPLATE.build_object({"name": "gpus", "namespace": "rl"})
    assert cache.apply_event(CLAIM_TEMPLATE, WatchEvent("ADDED", foreign)) is None


def test_a_deleted_object_is_dropped_and_its_job_is_woken() -> None:
    cache = WatchedObjects()
    cache.apply_event(POD, WatchEvent("ADDED", pod("a")))
    assert cache.apply_event(POD, WatchEvent("DELETED", pod("a"))) == ("rl", "tiny")
    assert names(cache) == []


def test_a_listing_replaces_all_objects_and_returns_the_jobs_of_old_and_new_ones() -> None:
    cache = WatchedObjects()
    for item in (pod("a"), pod("b", job="gone"), pod("c", namespace="elsewhere")):
        cache.apply_event(POD, WatchEvent("ADDED", item))
    cache.apply_event(RLJOB, WatchEvent("ADDED", an_rljob()))
    assert cache.replace_all(POD, "rl", [pod("z")]) == {("rl", "tiny"), ("rl", "gone")}
    assert names(cache) == ["z"]
    assert names(cache, "gone") == []
    assert names(cache, namespace="elsewhere") == ["c"]  # another listing's
    assert len(cache.list_objects(RLJOB, "rl", "tiny")) == 1  # another kind's
    assert cache.replace_all(POD, None, []) == {("rl", "tiny"), ("elsewhere", "tiny")}


class Broken:
    """An API server with its own clock that fails as scheduled: at a list, or some seconds into the watch after it."""

    def __init__(self, failures: list[float | None]) -> None:
        self.now = 0.0
        self.failures = failures

    def list(self, *_: object) -> Listing:
        if self.failures[0] is None:
            self.failures.pop(0)
            raise ClusterError(0, "connection refused")
        return Listing([], "1")

    def watch(self, *_: object) -> Iterator[WatchEvent]:
        self.now += self.failures.pop(0) or 0.0
        raise ClusterError(0, "the watch broke")
        yield


@pytest.mark.parametrize(
    ("failures", "pauses"),
    [
        ([None, None, None, None], [1, 2, 4, 8]),
        ([None, None, None, 100.0, 0.0], [1, 2, 4, 1, 2]),  # the watch worked in between
        ([0.0, 0.0, 0.0, 0.0], [1, 2, 4, 8]),  # only the list works each time, which does not reset the pause
        ([10.0, 10.0, 10.0], [1, 1, 1]),
    ],
    ids=["not reached", "worked since", "breaks at once", "breaks now and then"],
)
def test_pauses_double_while_a_watch_fails_and_reset_afterwards(
    failures: list[float | None], pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Broken(failures)
    waited = list[float]()
    monkeypatch.setattr(watches, "time", SimpleNamespace(monotonic=lambda: server.now))
    found: Any = Watches(server, WatchedObjects(), [None], lambda key: None)  # type: ignore[arg-type]
    found._stop = SimpleNamespace(is_set=lambda: not server.failures, wait=waited.append)
    found._list_and_watch(POD, None)
    assert waited == pauses
