"""The operator of `operator_scale.py`: the real one, in its own process, with counts of its requests.

For each line on standard input it prints a line of JSON: seconds, reads and writes of each reconciliation since the
previous line; its CPU seconds; and its peak memory.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from typing import Any

from specrl.telemetry import logs
from specrl_operator import main
from specrl_operator.cluster import leader
from specrl_operator.cluster.kube import KubeCluster, connect_cluster
from specrl_operator.reconcile import Reconciler

READS = ("get", "list", "served")
counts = threading.local()
looks: list[tuple[float, int, int]] = []


class Counted:
    """A cluster that counts the requests of each thread, without watches."""

    def __init__(self, cluster: KubeCluster) -> None:
        self._cluster = cluster

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._cluster, name)
        if name == "watch":
            return method

        def call(*arguments: Any) -> Any:
            kind = "reads" if name in READS else "writes"
            setattr(counts, kind, getattr(counts, kind, 0) + 1)
            return method(*arguments)

        return call


class Recorded(Reconciler):
    """Records seconds, reads and writes of every reconciliation."""

    def reconcile(self, namespace: str, name: str) -> float | None:
        counts.reads = counts.writes = 0
        began = time.monotonic()
        try:
            return super().reconcile(namespace, name)
        finally:
            looks.append((time.monotonic() - began, counts.reads, counts.writes))


def report() -> None:
    """Answer each line of standard input."""
    for _ in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seen = [looks.pop(0) for _ in range(len(looks))]
        found = {"looks": seen, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": used.ru_maxrss * 1024}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    options = main.parse_arguments(sys.argv[1:])
    logs.configure_logging("warning", "operator", "")
    main.Reconciler = Recorded  # type: ignore[misc]
    cluster: Any = Counted(connect_cluster(""))
    threading.Thread(target=report, daemon=True).start()
    sys.exit(main.Operator(cluster, connect_cluster("", leader.REQUEST_S), options).run())
