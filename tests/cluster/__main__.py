"""Brings a cluster up, says how to use it, and takes it down at Ctrl-C.

python -m tests.cluster        what `make cluster` runs
"""

from __future__ import annotations

import signal
import sys

from tests.cluster.harness import packages
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.node import REGISTRY
from tests.cluster.programs.build import find_unbuilt


def main() -> int:
    """Return the exit status: 1 if this machine cannot run a cluster."""
    why = packages.why_not_here()
    if not why and (unbuilt := find_unbuilt()):
        why = f"{', '.join(unbuilt)} not built; make cluster-programs"
    if why:
        _say(f"SKIPPED: {why}")
        return 1
    # A terminal's Ctrl-C reaches every process of the group. Only this one acts on it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    cluster = Cluster(_say)
    try:
        cluster.start()
        cluster.install("jobset")
        for number in range(4):
            cluster.add_volume(f"folder-{number}")
        assert cluster.registry is not None
        _say(f"\nexport KUBECONFIG={cluster.kubeconfig}\nkubectl get pods --all-namespaces")
        _say(f"registry: push to {cluster.registry.host} (plain HTTP); pods pull {REGISTRY}/NAME:TAG")
        _say(f"logs: {cluster.folder}\nCtrl-C takes it down")
        signal.pause()
    except KeyboardInterrupt:
        _say("taking it down")
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        cluster.stop()
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
