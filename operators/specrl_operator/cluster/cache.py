"""The operator's in-memory copy of RLJobs, their children and pods. `watches.py` fills it, `reconcile.py` reads it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from specrl_operator import kinds
from specrl_operator.api import CLAIM_SUFFIX, JOB_LABEL, Object, key_of
from specrl_operator.cluster.interface import WatchEvent
from specrl_operator.cluster.queue import JobKey
from specrl_operator.kinds import Kind


class WatchedObjects:
    """Objects by kind and job. They may be seconds old: `reconcile.py` gets an object before it writes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_job: dict[tuple[Kind, JobKey], dict[str, Object]] = {}
        self.served: frozenset[str] = frozenset()

    def list_objects(self, kind: Kind, namespace: str, job: str) -> list[Object]:
        """List a job's objects of a kind, sorted by name."""
        with self._lock:
            found = self._by_job.get((kind, (namespace, job)), {})
            return [found[name] for name in sorted(found)]

    def list_jobs(self) -> set[JobKey]:
        """List the keys of all RLJobs."""
        with self._lock:
            return {key for kind, key in self._by_job if kind is kinds.RLJOB}

    def apply_event(self, kind: Kind, change: WatchEvent) -> JobKey | None:
        """Apply one watch event. Returns the job that the object belongs to; None if it belongs to none."""
        key = find_job_key(kind, change.item)
        if key is None:
            return None
        with self._lock:
            known = self._by_job.setdefault((kind, key), {})
            name = change.item["metadata"]["name"]
            if change.type == "DELETED":
                known.pop(name, None)
                if not known:
                    del self._by_job[kind, key]
            else:
                known[name] = change.item
        return key

    def replace_all(self, kind: Kind, namespace: str | None, items: Sequence[Object]) -> set[JobKey]:
        """Replace all objects of a kind, of one namespace or of all. Returns the jobs of the old and the new ones.

        Jobs of the old ones included: an object may have been deleted while nobody watched.
        """
        with self._lock:
            old = [place for place in self._by_job if place[0] == kind and namespace in (None, place[1][0])]
            touched = {key for _, key in old}
            for place in old:
                del self._by_job[place]
            for item in items:
                key = find_job_key(kind, item)
                if key is not None:
                    self._by_job.setdefault((kind, key), {})[item["metadata"]["name"]] = item
                    touched.add(key)
        return touched


def find_job_key(kind: Kind, item: Object) -> JobKey | None:
    """Return the key of the job that an object is or belongs to; None if there is none."""
    namespace, name = key_of(item)
    if kind is kinds.RLJOB:
        return namespace, name
    if kind is kinds.CLAIM_TEMPLATE:
        # NVIDIA's driver creates it, without the labels of the job. A wake-up of a job that does not exist is harmless.
        return (namespace, name.removesuffix(CLAIM_SUFFIX)) if name.endswith(CLAIM_SUFFIX) else None
    job = (item["metadata"].get("labels") or {}).get(JOB_LABEL)
    return (namespace, job) if job else None
