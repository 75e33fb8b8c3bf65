"""The watched kinds follow the served kinds and the operator's rights to list them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from specrl_operator.api import JOB_LABEL
from specrl_operator.cluster import watches
from specrl_operator.cluster.cache import WatchedObjects
from specrl_operator.cluster.interface import ClusterError, Listing, WatchEvent
from specrl_operator.cluster.queue import JobKey
from specrl_operator.cluster.watches import Watches
from specrl_operator.kinds import JOB_SET, RLJOB, SCALED_OBJECT, Kind

A_JOB = {"metadata": {"name": "tiny", "namespace": "rl"}}
A_JOB_SET = {"metadata": {"name": "tiny-trainer", "namespace": "rl", "labels": {JOB_LABEL: "tiny"}}}


class ACluster:
    """Serves JobSets, ScaledObjects and core kinds. Lists of `forbidden` kinds are refused; `gone` kinds do not exist.

    There is one RLJob and one JobSet, unless their kind is gone.
    """

    def __init__(self, *forbidden: Kind) -> None:
        self.forbidden = set(forbidden)
        self.gone: set[Kind] = set()
        self.closed = threading.Event()

    def list_served_versions(self) -> frozenset[str]:
        return frozenset({JOB_SET.api_version, SCALED_OBJECT.api_version})

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        if kind in self.forbidden:
            raise ClusterError(403, f"{kind.plural} is forbidden")
        if kind in self.gone:
            raise ClusterError(404, "the server could not find the requested resource")
        return Listing([item] if (item := {RLJOB: A_JOB, JOB_SET: A_JOB_SET}.get(kind)) else [], "1")

    def watch(self, kind: Kind, namespace: str | None, selector: str, resource_version: str) -> Iterator[WatchEvent]:
        while not self.closed.wait(0.05):
            if kind in self.gone:
                raise ClusterError(404, "the server could not find the requested resource")
        yield from ()


def synced(cluster: ACluster, wake: Callable[[JobKey], None] = lambda _: None) -> tuple[Watches, WatchedObjects]:
    cache = WatchedObjects()
    found = Watches(cluster, cache, (None,), wake)  # type: ignore[arg-type]
    found.start()
    for _ in range(6000):
        if found.is_synced:
            break
        threading.Event().wait(0.01)
    return found, cache


def test_a_kind_that_must_not_be_listed_counts_as_not_installed() -> None:
    cluster = ACluster(SCALED_OBJECT)
    found, cache = synced(cluster)
    assert found.is_synced
    assert cache.served == {JOB_SET.api_version}
    cluster.closed.set()
    found.close()


def test_a_kind_that_must_not_be_listed_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was logged at every discovery, that is every ten seconds."""
    monkeypatch.setattr(watches, "DISCOVERY_S", 0.01)
    logged = list[str]()
    monkeypatch.setattr(watches, "log", SimpleNamespace(info=lambda event, **_: logged.append(event)))
    cluster = ACluster(SCALED_OBJECT)
    found, _ = synced(cluster)
    threading.Event().wait(0.1)
    assert logged == ["kind_not_permitted"]
    cluster.closed.set()
    found.close()


def test_a_right_that_is_granted_later_is_used_and_all_jobs_are_reconciled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "DISCOVERY_S", 0.01)
    cluster = ACluster(SCALED_OBJECT)
    woken = list[JobKey]()
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


def test_a_kind_whose_definition_is_deleted_is_dropped_and_its_watch_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watches, "MIN_PAUSE_S", 0.01)
    cluster = ACluster()
    found, cache = synced(cluster)
    assert cache.list_objects(JOB_SET, "rl", "tiny") == [A_JOB_SET]
    found._beats[JOB_SET, None] = time.monotonic() - 2000
    cluster.gone.add(JOB_SET)
    for _ in range(6000):
        if not cache.list_objects(JOB_SET, "rl", "tiny") and found.longest_silence_s() < 1000:
            break
        threading.Event().wait(0.01)
    assert cache.list_objects(JOB_SET, "rl", "tiny") == []
    assert found.longest_silence_s() < 1000
    cluster.closed.set()
    found.close()
