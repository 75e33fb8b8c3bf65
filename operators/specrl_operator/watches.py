"""What the operator knows without asking: objects of the kinds that it watches, kept up to date.

    UNKNOWN --list--> KNOWN --watch ends--> KNOWN (watched on from there) --gone, broken, or RELIST_S--> list again

One thread per kind and namespace. Every change wakes the job that the object belongs to. A connection that has died
may look like one on which nothing happens, so that everything is listed again every RELIST_S and every job looked at; a
kind that is not served is looked for again every SERVED_S, so that what an admin installs later is picked up: every job
is looked at then, since it may have waited for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

import structlog

from specrl_operator.api import CHILDREN, JOB_LABEL, MANAGED_LABEL, MANAGER, OPTIONAL, POD, RLJOB, Kind, Object, key_of
from specrl_operator.cluster import Change, Cluster, ClusterError, Gone
from specrl_operator.queue import Key

RELIST_S = 300.0
SERVED_S = 10.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0

log = structlog.get_logger(__name__)


class Cache:
    """Objects of jobs by kind and job. What it answers may be seconds old: `reconcile.py` reads before it writes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_job: dict[tuple[Kind, Key], dict[str, Object]] = {}
        self.served: frozenset[str] = frozenset()

    def find(self, kind: Kind, namespace: str, job: str) -> list[Object]:
        """A job's objects of a kind, by name."""
        with self._lock:
            found = self._by_job.get((kind, (namespace, job)), {})
            return [found[name] for name in sorted(found)]

    def jobs(self) -> set[Key]:
        """The jobs that there are."""
        with self._lock:
            return {key for kind, key in self._by_job if kind is RLJOB}

    def take(self, kind: Kind, change: Change) -> Key | None:
        """Keep one change. Returns the job that it is about."""
        key = _job_of(kind, change.item)
        if key is None:
            return None
        with self._lock:
            known, name = self._by_job.setdefault((kind, key), {}), change.item["metadata"]["name"]
            if change.what == "DELETED":
                known.pop(name, None)
                if not known:
                    del self._by_job[kind, key]
            else:
                known[name] = change.item
        return key

    def replace(self, kind: Kind, namespace: str | None, items: Sequence[Object]) -> set[Key]:
        """Keep a whole listing. Returns the jobs that have, or had, something in it."""
        with self._lock:
            old = [place for place in self._by_job if place[0] == kind and namespace in (None, place[1][0])]
            touched = {key for _, key in old}
            for place in old:
                del self._by_job[place]
            for item in items:
                key = _job_of(kind, item)
                if key is not None:
                    self._by_job.setdefault((kind, key), {})[item["metadata"]["name"]] = item
                    touched.add(key)
        return touched


class Watches:
    """The threads that keep a Cache."""

    def __init__(
        self, cluster: Cluster, cache: Cache, namespaces: Sequence[str | None], wake: Callable[[Key], None]
    ) -> None:
        """namespaces: those to watch; (None,) for all."""
        self._cluster, self._cache, self._namespaces, self._wake = cluster, cache, namespaces, wake
        self._stop = threading.Event()
        self._watched: set[Kind] = set()
        self._listed: set[tuple[Kind, str | None]] = set()
        self._beats: dict[tuple[Kind, str | None], float] = {}

    def start(self) -> None:
        """Begin to watch; returns at once."""
        threading.Thread(target=self._discover, name="discover", daemon=True).start()

    def close(self) -> None:
        """Let the threads end; those that wait for a watch end with the process."""
        self._stop.set()

    @property
    def is_synced(self) -> bool:
        """Whether every kind that is served has been listed once."""
        kinds = {kind for kind in (RLJOB, POD, *CHILDREN) if kind not in OPTIONAL} | self._watched
        return bool(self._cache.served) and all((k, n) in self._listed for k in kinds for n in self._namespaces)

    def silent_s(self) -> float:
        """How long the watch that is silent for longest has not come round."""
        now = time.monotonic()
        return max((now - beat for beat in self._beats.values()), default=0.0)

    def _discover(self) -> None:
        while not self._stop.is_set():
            try:
                served = self._permitted(self._cluster.served())
            except ClusterError as error:
                log.warning("discovery_failed", reason=str(error))
                self._stop.wait(PAUSE_S)
                continue
            for kind in (RLJOB, POD, *CHILDREN):
                if kind not in self._watched and (kind not in OPTIONAL or kind.api_version in served):
                    self._watched.add(kind)
                    for namespace in self._namespaces:
                        self._beats[kind, namespace] = time.monotonic()
                        arguments = (kind, namespace)
                        threading.Thread(
                            target=self._keep, args=arguments, name=f"watch-{kind.plural}", daemon=True
                        ).start()
            if served != self._cache.served:
                self._cache.served = served
                for key in self._cache.jobs():
                    self._wake(key)
            self._stop.wait(SERVED_S)

    def _permitted(self, served: frozenset[str]) -> frozenset[str]:
        """What is served, less the optional kinds that this operator may not list: to it they are not installed.

        Asked again every time, since a right may be granted later, until the kind is watched.
        """
        refused = set()
        for kind in CHILDREN:
            if kind in OPTIONAL and kind not in self._watched and kind.api_version in served:
                try:
                    for namespace in self._namespaces:
                        self._cluster.list(kind, namespace, f"{MANAGED_LABEL}={MANAGER}")
                except ClusterError as error:
                    if error.status != 403:
                        raise
                    log.info("kind_not_permitted", kind=kind.plural, reason=str(error))
                    refused.add(kind.api_version)
        return served - refused

    def _keep(self, kind: Kind, namespace: str | None) -> None:
        """List and watch one kind until the process ends."""
        pause_s = PAUSE_S
        while not self._stop.is_set():
            listed_at = None
            try:
                version = self._list(kind, namespace)
                listed_at = time.monotonic()
                self._follow(kind, namespace, version)
                pause_s = PAUSE_S
            except ClusterError as error:
                if error.status == 404:  # its definition is gone, and everything of its kind with it
                    self._take_all(kind, namespace, [])
                if not isinstance(error, Gone):
                    log.warning("watch_failed", kind=kind.plural, namespace=namespace, reason=str(error))
                    if listed_at is not None and time.monotonic() - listed_at > pause_s:
                        pause_s = PAUSE_S  # it worked for longer than the last pause: this is a new failure
                    self._stop.wait(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except Exception:  # the edge of a thread: without it this kind would be forgotten in silence
                log.exception("watch_broke", kind=kind.plural)
                self._stop.wait(LONGEST_PAUSE_S)

    def _list(self, kind: Kind, namespace: str | None) -> str:
        """Take all that there is; returns from where to watch on."""
        listing = self._cluster.list(kind, namespace, _selector(kind))
        self._take_all(kind, namespace, listing.items)
        self._listed.add((kind, namespace))
        return listing.resource_version

    def _follow(self, kind: Kind, namespace: str | None, version: str) -> None:
        """Take every change from a version on, until it is time to list again."""
        selector, until = _selector(kind), time.monotonic() + RELIST_S
        while not self._stop.is_set() and time.monotonic() < until:
            self._beats[kind, namespace] = time.monotonic()
            with closing(self._cluster.watch(kind, namespace, selector, version)) as changes:  # type: ignore[type-var]
                for change in changes:
                    self._beats[kind, namespace] = time.monotonic()
                    version = change.item["metadata"]["resourceVersion"]
                    about = None if change.what == "BOOKMARK" else self._cache.take(kind, change)
                    if about is not None:
                        self._wake(about)

    def _take_all(self, kind: Kind, namespace: str | None, items: Sequence[Object]) -> None:
        self._beats[kind, namespace] = time.monotonic()
        for key in self._cache.replace(kind, namespace, items):
            self._wake(key)


def _selector(kind: Kind) -> str:
    return "" if kind is RLJOB else f"{MANAGED_LABEL}={MANAGER}"


def _job_of(kind: Kind, item: Object) -> Key | None:
    """The job that an object is, or belongs to."""
    namespace, name = key_of(item)
    if kind is RLJOB:
        return namespace, name
    job = (item["metadata"].get("labels") or {}).get(JOB_LABEL)
    return (namespace, job) if job else None
