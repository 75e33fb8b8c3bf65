"""Where nodes are: the value of a label of each, read when a job's pods are first seen on it.

What was read is remembered for a while, since a look at a job that has not moved is to cost no request. It is nothing
that an operator depends on: the next one reads again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta

import structlog

from specrl_operator.api import NODE
from specrl_operator.cluster import Cluster, ClusterError

REMEMBERED = timedelta(minutes=10)
"""NVIDIA's feature discovery writes the label anew about once a minute; what is bound to a node stays in its domain."""

log = structlog.get_logger(__name__)


class Topology:
    """Labels of nodes. Used by many workers at once: two of them may read the same node, which does no harm."""

    def __init__(self, cluster: Cluster, now: Callable[[], datetime]) -> None:
        self._cluster, self._now = cluster, now
        self._known: dict[tuple[str, str], tuple[datetime, str | None]] = {}

    def domains(self, nodes: Iterable[str], key: str) -> str | None:
        """Values of the label `key` of these nodes, each once and in order; None where no node has it."""
        found = {value for node in sorted(set(nodes)) if (value := self._label(node, key)) is not None}
        return ", ".join(sorted(found)) or None

    def _label(self, node: str, key: str) -> str | None:
        known = self._known.get((node, key))
        if known is not None and self._now() < known[0] + REMEMBERED:
            return known[1]
        try:
            found = self._cluster.get(NODE, None, node)
        except ClusterError as error:
            if error.status != 403:
                raise
            log.info("nodes_not_permitted", reason=str(error))
            found = None
        value: str | None = (found or {}).get("metadata", {}).get("labels", {}).get(key)
        self._known[node, key] = self._now(), value
        return value
