"""List and watch the operator's kinds: keep the cache of their objects, and wake a job at each change.

    NOT LISTED --list--> LISTED --watch--> LISTED --watch expired or failed, or RELIST_S passed--> list again

One thread per kind and namespace. Every change wakes the job that the object is or belongs to. A dead connection may
look like one without changes, so everything is listed again, and every job reconciled, every RELIST_S.

Optional kinds are looked for every DISCOVERY_S. When the set of served kinds changes, every job is reconciled, since it
may have waited for one. `main.py` starts the threads; `reconcile.py` reads the cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import structlog

from specrl_operator import kinds
from specrl_operator.api import MANAGED_LABEL, MANAGER, Object
from specrl_operator.cluster.cache import WatchedObjects
from specrl_operator.cluster.interface import Cluster, ClusterError, WatchExpired
from specrl_operator.cluster.queue import JobKey
from specrl_operator.kinds import Kind

RELIST_S = 300.0
"""Seconds after which a kind is listed again. Bounds how long a lost event goes unnoticed."""
DISCOVERY_S = 10.0
"""Seconds between two discoveries of the served kinds."""
MIN_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
"""The pause after consecutive failures of a watch doubles from MIN_PAUSE_S up to MAX_PAUSE_S."""

WATCHED_KINDS = (kinds.RLJOB, kinds.POD, kinds.CLAIM_TEMPLATE, *kinds.CHILD_KINDS)

log = structlog.get_logger(__name__)


class Watches:
    """The threads that keep the cache up to date."""

    def __init__(
        self, cluster: Cluster, cache: WatchedObjects, namespaces: Sequence[str | None], wake: Callable[[JobKey], None]
    ) -> None:
        """namespaces: those to watch; (None,) for all. wake: called from the threads with the key of a changed job."""
        self._cluster = cluster
        self._cache = cache
        self._namespaces = namespaces
        self._wake = wake
        self._stop = threading.Event()
        self._watched: set[Kind] = set()
        self._refused: set[str] = set()
        self._listed: set[tuple[Kind, str | None]] = set()
        self._beats: dict[tuple[Kind, str | None], float] = {}

    def start(self) -> None:
        """Start the threads. Returns before anything is listed; see `is_synced`."""
        threading.Thread(target=self._discover_kinds, name="discover", daemon=True).start()

    def close(self) -> None:
        """Ask the threads to end. A thread that reads from a watch ends with the process, since it is a daemon."""
        self._stop.set()

    @property
    def is_synced(self) -> bool:
        """Whether every kind that the API server serves has been listed at least once."""
        kinds = {kind for kind in WATCHED_KINDS if not kind.is_optional} | self._watched
        return bool(self._cache.served) and all((k, n) in self._listed for k in kinds for n in self._namespaces)

    def longest_silence_s(self) -> float:
        """Return the seconds since the last sign of life of the most silent watch."""
        now = time.monotonic()
        return max((now - beat for beat in self._beats.values()), default=0.0)

    def _discover_kinds(self) -> None:
        """Start the watches of newly served kinds, until the process ends."""
        while not self._stop.is_set():
            try:
                served = self._drop_forbidden(self._cluster.list_served_versions())
            except ClusterError as error:
                log.warning("discovery_failed", reason=str(error))
                self._stop.wait(MIN_PAUSE_S)
                continue
            for kind in WATCHED_KINDS:
                if kind not in self._watched and kind.is_served(served):
                    self._watched.add(kind)
                    for namespace in self._namespaces:
                        # Before the thread starts, so that one that never comes to run is noticed.
                        self._beats[kind, namespace] = time.monotonic()
                        arguments = (kind, namespace)
                        threading.Thread(
                            target=self._list_and_watch, args=arguments, name=f"watch-{kind.plural}", daemon=True
                        ).start()
            if served != self._cache.served:
                # A set is replaced, never changed: readers need no lock.
                self._cache.served = served
                for key in self._cache.list_jobs():
                    self._wake(key)
            self._stop.wait(DISCOVERY_S)

    def _drop_forbidden(self, served: frozenset[str]) -> frozenset[str]:
        """Remove the group versions of optional kinds that the operator has no right to list.

        They count as not installed. Each is tried again at every discovery until it is watched, since the right may be
        granted later.
        """
        refused = set()
        for kind in WATCHED_KINDS:
            if kind.is_optional and kind not in self._watched and kind.is_served(served):
                try:
                    for namespace in self._namespaces:
                        self._cluster.list(kind, namespace, build_selector(kind))
                except ClusterError as error:
                    if error.status != 403:
                        raise
                    if kind.api_version not in self._refused:  # logged once, not at every discovery
                        log.info("kind_not_permitted", kind=kind.plural, reason=str(error))
                    refused.add(kind.api_version)
        self._refused = refused
        return served - refused

    def _list_and_watch(self, kind: Kind, namespace: str | None) -> None:
        """List and watch one kind until the process ends."""
        pause_s = MIN_PAUSE_S
        while not self._stop.is_set():
            listed_at = None
            try:
                version = self._list_objects(kind, namespace)
                listed_at = time.monotonic()
                self._follow_changes(kind, namespace, version)
                pause_s = MIN_PAUSE_S
            except ClusterError as error:
                if error.status == 404:  # the CRD was deleted, and all objects of the kind with it
                    self._replace_objects(kind, namespace, [])
                if not isinstance(error, WatchExpired):
                    log.warning("watch_failed", kind=kind.plural, namespace=namespace, reason=str(error))
                    if listed_at is not None and time.monotonic() - listed_at > pause_s:
                        pause_s = MIN_PAUSE_S  # the watch ran for longer than the last pause, so this is a new failure
                    self._stop.wait(pause_s)
                    pause_s = min(2 * pause_s, MAX_PAUSE_S)
            except Exception:  # the edge of a thread: a bug here must not end the watch of this kind unnoticed
                log.exception("watch_crashed", kind=kind.plural)
                self._stop.wait(MAX_PAUSE_S)

    def _list_objects(self, kind: Kind, namespace: str | None) -> str:
        """List a kind into the cache. Returns the resource version to watch from."""
        listing = self._cluster.list(kind, namespace, build_selector(kind))
        self._replace_objects(kind, namespace, listing.items)
        self._listed.add((kind, namespace))
        return listing.resource_version

    def _follow_changes(self, kind: Kind, namespace: str | None, version: str) -> None:
        """Apply every change after a resource version, until RELIST_S has passed.

        Blocks on the API server, which ends each watch within minutes; the next one continues where it ended.
        """
        selector = build_selector(kind)
        until = time.monotonic() + RELIST_S
        while not self._stop.is_set() and time.monotonic() < until:
            self._beats[kind, namespace] = time.monotonic()
            with closing(self._cluster.watch(kind, namespace, selector, version)) as changes:  # type: ignore[type-var]
                for change in changes:
                    self._beats[kind, namespace] = time.monotonic()
                    version = change.item["metadata"]["resourceVersion"]
                    # A bookmark only carries a newer version to continue from.
                    about = None if change.type == "BOOKMARK" else self._cache.apply_event(kind, change)
                    if about is not None:
                        self._wake(about)

    def _replace_objects(self, kind: Kind, namespace: str | None, items: Sequence[Object]) -> None:
        self._beats[kind, namespace] = time.monotonic()
        for key in self._cache.replace_all(kind, namespace, items):
            self._wake(key)


def build_selector(kind: Kind) -> str:
    """Build the label selector of the watched objects. Only those that the operator created have its label."""
    return "" if kind in (kinds.RLJOB, kinds.CLAIM_TEMPLATE) else f"{MANAGED_LABEL}={MANAGER}"
