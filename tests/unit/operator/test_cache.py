"""What is kept of what was listed and watched. The threads themselves are in tests/integration/operator."""

from __future__ import annotations

from tests.unit.operator.builders import an_rljob
from tests.unit.operator.world import a_pod

from specrl_operator.api import DEPLOYMENT, JOB_LABEL, POD, RLJOB, Object
from specrl_operator.cluster import Change
from specrl_operator.watches import Cache


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
