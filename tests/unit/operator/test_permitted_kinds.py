"""What is watched follows what is served, and what the operator may list of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from specrl_operator import watches
from specrl_operator.api import JOB_LABEL, JOB_SET, RLJOB, SCALED_OBJECT, Kind
from specrl_operator.cluster import Change, ClusterError, Listing
from specrl_operator.queue import Key
from specrl_operator.watches import Cache, Watches

A_JOB = {"metadata": {"name": "tiny", "namespace": "rl"}}
A_JOB_SET = {"metadata": {"name": "tiny-trainer", "namespace": "rl", "labels": {JOB_LABEL: "tiny"}}}


class ACluster:
    """Serves JobSets, ScaledObjects and core kinds; refuses to list what is `forbidden`, and knows not what is `gone`.

    Of jobs and of JobSets there is one, until they are gone.
    """

    def __init__(self, *forbidden: Kind) -> None:
        self.forbidden = set(forbidden)
        self.gone: set[Kind] = set()
        self.closed = threading.Event()

    def served(self) -> frozenset[str]:
        return frozenset({JOB_SET.api_version, SCALED_OBJECT.api_version})

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        if kind in self.forbidden:
            raise ClusterError(403, f"{kind.plural} is forbidden")
        if kind in self.gone:
            raise ClusterError(404, "the server could not find the requested resource")
        return Listing([item] if (item := {RLJOB: A_JOB, JOB_SET: A_JOB_SET}.get(kind)) else [], "1")

    def watch(self, kind: Kind, namespace: str | None, selector: str, resource_version: str) -> Iterator[Change]:
        while not self.closed.wait(0.05):
            if kind in self.gone:
                raise ClusterError(404, "the server could not find the requested resource")
        yield from ()


def synced(cluster: ACluster, wake: Callable[[Key], None] = lambda _: None) -> tuple[Watches, Cache]:
    cache = Cache()
    found = Watches(cluster, cache, (None,), wake)  # type: ignore[arg-type]
    found.start()
    for _ in range(6000):
        if found.is_synced:
            break
        threading.Event().wait(0.01)
    return found, cache


def test_kind_that_may_not_be_listed_counts_as_not_installed_and_holds_nothing_up() -> None:
    cluster = ACluster(SCALED_OBJECT)
    found, cache = synced(cluster)
    assert found.is_synced
    assert cache.served == {JOB_SET.api_version}
    cluster.closed.set()
    found.close()


def test_right_that_is_granted_later_is_picked_up_and_jobs_that_may_wait_for_it_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "SERVED_S", 0.01)
    cluster, woken = ACluster(SCALED_OBJECT), list[Key]()
    found, cache = synced(cluster, woken.append)
    threading.Event().wait(0.1)
    woken.clear()
    cluster.forbidden.clear()
    for _ in range(6000):
        if ("rl", "tiny") in woken:
            break
        threading.Event().wait(0.01)
    assert cache.served == {JOB_SET.api_version, SCALED_OBJECT.api_version}
    assert ("rl", "tiny") in woken
    cluster.closed.set()
    found.close()


def test_kind_whose_definition_is_deleted_is_forgotten_and_its_watch_is_no_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "PAUSE_S", 0.01)
    cluster = ACluster()
    found, cache = synced(cluster)
    assert cache.find(JOB_SET, "rl", "tiny") == [A_JOB_SET]
    found._beats[JOB_SET, None] = time.monotonic() - 2000
    cluster.gone.add(JOB_SET)
    for _ in range(6000):
        if not cache.find(JOB_SET, "rl", "tiny") and found.silent_s() < 1000:
            break
        threading.Event().wait(0.01)
    assert cache.find(JOB_SET, "rl", "tiny") == []
    assert found.silent_s() < 1000
    cluster.closed.set()
    found.close()
