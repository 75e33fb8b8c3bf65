"""The NVLink domains of nodes, read from a node label.

Labels are cached for CACHE_TTL, so that reconciling an unchanged job costs no request. The cache affects only
`status.placement.domain`. `reconcile.py` calls this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

import structlog

from specrl_operator import kinds
from specrl_operator.cluster.interface import Cluster, ClusterError

CACHE_TTL = timedelta(minutes=10)
"""Time for which a label is cached. A node's domain changes only when hardware is moved. This bounds how long the
status is wrong after that."""

MAX_DOMAINS = 3
"""Most domains that are named. A label's value has at most 63 characters, and the field of the status 256."""

log = structlog.get_logger(__name__)


class NodeTopology:
    """Cached labels of nodes. Used by many workers without a lock: two may read the same node, and store the same."""

    def __init__(self, cluster: Cluster, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._now = now
        self._known: dict[tuple[str, str], tuple[datetime, str | None]] = {}

    def find_domains(self, nodes: Iterable[str], key: str) -> str | None:
        """Return the distinct values of the label `key` of these nodes, sorted; None if no node has the label.

        Of more than MAX_DOMAINS the first are named, and the others counted.
        """
        found = sorted({value for node in set(nodes) if (value := self._read_label(node, key)) is not None})
        more = f" and {len(found) - MAX_DOMAINS} more" if len(found) > MAX_DOMAINS else ""
        return ", ".join(found[:MAX_DOMAINS]) + more or None

    def _read_label(self, node: str, key: str) -> str | None:
        known = self._known.get((node, key))
        if known is not None and self._now() < known[0] + CACHE_TTL:
            return known[1]
        try:
            found = self._cluster.get(kinds.NODE, None, node)
        except ClusterError as error:
            # In namespaced mode a Role cannot grant access to nodes. The status then shows no domain.
            if error.status != 403:
                raise
            log.info("nodes_not_permitted", reason=str(error))
            found = None
        value: str | None = (found or {}).get("metadata", {}).get("labels", {}).get(key)
        self._known[node, key] = self._now(), value
        return value
