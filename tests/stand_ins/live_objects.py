"""The operator's cache of objects without watches: every look-up asks the API server, so it is never stale."""

from __future__ import annotations

from specrl_operator.api import Object
from specrl_operator.cluster.cache import WatchedObjects, find_job_key
from specrl_operator.cluster.interface import Cluster, ClusterError
from specrl_operator.cluster.watches import build_selector
from specrl_operator.kinds import Kind


class LiveObjects(WatchedObjects):
    """Reads the objects and served kinds of a cluster when it is asked for them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def served(self) -> frozenset[str]:  # type: ignore[override]
        return self._cluster.list_served_versions()

    def list_objects(self, kind: Kind, namespace: str, job: str) -> list[Object]:
        try:
            found = self._cluster.list(kind, namespace, build_selector(kind)).items
        except ClusterError as error:
            # The kind is not served. A server checks the right to list it before it looks for it.
            if error.status in (403, 404):
                return []
            raise
        return [item for item in found if find_job_key(kind, item) == (namespace, job)]
