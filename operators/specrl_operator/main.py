"""The operator's process. Console script `specrl-operator`.

    watches --add--> queue --get--> workers --> reconcile --> API server

Invariant: only the process that holds the lease reconciles. Workers start when the lease is won, and the process exits
with code 1 when it is lost. All other threads are daemons: a hanging request must not keep alive a process that no
longer leads.
"""

from __future__ import annotations

import specrl.exit_on_sigterm  # noqa: F401 - first: asyncio and structlog take ten times as long as the interpreter

# isort: split

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec

import structlog

from specrl.telemetry import logs
from specrl.telemetry.hosts import ALL_ADDRESSES, join_address
from specrl_operator import kinds, telemetry
from specrl_operator.cluster import leader
from specrl_operator.cluster.cache import WatchedObjects
from specrl_operator.cluster.interface import Cluster, ClusterError
from specrl_operator.cluster.queue import JobKey, WorkQueue
from specrl_operator.cluster.watches import RELIST_S, Watches
from specrl_operator.plan.job_plan import Settings
from specrl_operator.reconcile import Reconciler

MAX_WATCH_SILENCE_S = 3 * RELIST_S
"""A watch without event or relist for this long hangs: it should relist every RELIST_S even when nothing changes."""
DRAIN_S = 10.0
"""Time that workers have after SIGTERM to finish their reconciliations. The pod's grace period is 30 s."""
MAX_RECONCILE_S = 300.0
"""A reconciliation that takes longer hangs. It makes some dozen requests with deadlines of 15 s (`cluster/kube.py`)."""

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the operator until SIGTERM or SIGINT, or until it loses its lease. Exits with 2 if it cannot start."""
    options = parse_arguments(arguments)
    if find_spec("kubernetes") is None:
        sys.stderr.write(
            "specrl-operator: the Python package kubernetes is not installed; install the extra `operator` "
            "(docs/install.md)\n"
        )
        sys.exit(2)
    from specrl_operator.cluster.kube import connect_cluster

    logs.configure_logging(options.log_level, "operator", "")
    logs.log_process_start()
    try:
        cluster = connect_cluster(options.context)
        elector = connect_cluster(options.context, leader.REQUEST_S)
    except ClusterError as error:
        sys.stderr.write(f"specrl-operator: {error}\n")
        sys.exit(2)
    sys.exit(Operator(cluster, elector, options).run())


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Exits with 2 and a usage message if it is invalid."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="specrl-operator",
        description="Reconciles RLJobs: creates, scales and deletes their pods, and writes their status.",
    )
    add = parser.add_argument
    add("--namespace", action="append", default=[], help="namespace to watch; repeatable (default: all namespaces)")
    add("--context", help="kubeconfig context; '' for the current one (default: the pod's own cluster)")
    add("--workers", type=int, default=2, help="jobs that are reconciled in parallel (default: %(default)s)")
    add("--host", default=ALL_ADDRESSES, help="address of metrics and probes (default: %(default)s, all)")
    add("--port", type=int, default=8080, help="port of metrics and probes (default: %(default)s)")
    add(
        "--log-level",
        default="info",
        choices=("debug", "info", "warning"),
        help="least severe event that is logged (default: %(default)s)",
    )
    add(
        "--lease-namespace",
        default=os.environ.get("POD_NAMESPACE", "default"),
        help="namespace of the leader's lease (default: POD_NAMESPACE, now %(default)s)",
    )
    add(
        "--lease-name",
        default="specrl-operator",
        help="name of the leader's lease; of the operators that share one, one is active (default: %(default)s)",
    )
    add("--control-image", default=default.control_image, help="image of the coordinator (default: %(default)s)")
    add("--generation-image", default=default.generation_image, help="image of replicas (default: %(default)s)")
    add("--trainer-image", default=default.trainer_image, help="image of the trainer (default: %(default)s)")
    add("--store-image", default=default.store_image, help="image of a job's Redis or Valkey (default: %(default)s)")
    add(
        "--pull-policy",
        default=default.pull_policy,
        choices=("Always", "IfNotPresent", "Never"),
        help="imagePullPolicy of all containers (default: %(default)s)",
    )
    add("--pull-secret", action="append", default=[], help="imagePullSecret of all pods; repeatable (default: none)")
    add("--store-size", default=default.store_size, help="size of the volume of a job's store (default: %(default)s)")
    add("--store-class", help="StorageClass of the volume of a job's store (default: the cluster's default)")
    add(
        "--metrics-namespace",
        action="append",
        default=[],
        help="namespace whose pods may scrape jobs; repeatable (default: none)",
    )
    add(
        "--api-server-port",
        action="append",
        type=int,
        default=[],
        help="TCP port that coordinators may reach, for the API server; repeatable (default: 443, 6443)",
    )
    add(
        "--node-cidr",
        action="append",
        default=[],
        help="addresses of nodes, for jobs with placement.rdma.hostNetwork; repeatable (default: they are refused)",
    )
    add(
        "--finished-job-ttl",
        type=int,
        metavar="SECONDS",
        help="delete jobs so long after their end, unless they name ttlSecondsAfterFinished (default: never)",
    )
    add(
        "--no-disruption-budgets",
        action="store_true",
        help="let `kubectl drain` evict coordinators, trainers and stores of running jobs (default: it waits)",
    )
    add(
        "--job-egress",
        action="append",
        type=_parse_egress,
        default=[],
        metavar="JSON",
        help="egress rule of a NetworkPolicy that all pods of jobs get, such as "
        '{"ports": [{"port": 9000}]}; repeatable (default: none)',
    )
    add("--prometheus-url", help="Prometheus server that KEDA queries for the share of exposed generation")
    return parser.parse_args(arguments)


def _parse_egress(text: str) -> dict[str, object]:
    """Parse an egress rule. The API server checks its fields. Raises ArgumentTypeError, which argparse reports."""
    try:
        rule = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be JSON, got {text}: {error}") from error
    # An empty rule would allow everything.
    if not isinstance(rule, dict) or not rule:
        raise argparse.ArgumentTypeError(f"must be an object with `to` or `ports`, got {text}")
    return rule


def read_settings(options: argparse.Namespace) -> Settings:
    """Return the flags that concern every job's children."""
    return Settings(
        control_image=options.control_image,
        generation_image=options.generation_image,
        trainer_image=options.trainer_image,
        store_image=options.store_image,
        pull_policy=options.pull_policy,
        pull_secrets=tuple(options.pull_secret),
        store_size=options.store_size,
        store_class=options.store_class,
        metrics_namespaces=tuple(options.metrics_namespace),
        api_server_ports=tuple(options.api_server_port) or Settings.api_server_ports,
        node_cidrs=tuple(options.node_cidr),
        finished_job_ttl_s=options.finished_job_ttl,
        has_disruption_budgets=not options.no_disruption_budgets,
        job_egress=tuple(options.job_egress),
        prometheus_url=options.prometheus_url,
    )


class Operator:
    """Watches, workers and leader election of one process."""

    def __init__(self, cluster: Cluster, elector: Cluster, options: argparse.Namespace) -> None:
        """elector: a client of the same cluster with shorter deadlines, for requests about the lease."""
        self._options = options
        self._queue = WorkQueue(time.monotonic)
        self._cache = WatchedObjects()
        namespaces = options.namespace or [None]
        self._watches = Watches(cluster, self._cache, namespaces, self._queue.add)
        self._reconciler = Reconciler(cluster, self._cache, read_settings(options), _utc_now)
        identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._election = leader.LeaderElection(
            elector, (options.lease_namespace, options.lease_name), identity, time.monotonic, _utc_now
        )
        self._stop = threading.Event()
        self._busy_since: dict[str, float] = {}

    def run(self) -> int:
        """Reconcile while the lease is held. Returns the exit code: 0 after SIGTERM or SIGINT, 1 if it is lost."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        checks = {"/healthz": self._find_hang, "/readyz": self._find_unready}
        server = telemetry.serve_metrics(self._options.host, self._options.port, checks)
        log.info("operator_started", address=join_address(self._options.host, server.server_port))
        # Before the election is won: a standby with a warm cache takes over without listing everything first.
        self._watches.start()
        has_led = is_working = False
        while not self._stop.is_set():
            leads = self._election.acquire_or_renew()
            telemetry.IS_LEADER.set(leads)
            if has_led and not leads:
                return 1
            has_led = leads
            # Not before every kind was listed: to an incomplete cache, existing children look missing.
            if leads and not is_working and self._watches.is_synced:
                is_working = True
                for worker in range(self._options.workers):
                    threading.Thread(target=self._run_worker, name=f"worker-{worker}", daemon=True).start()
            telemetry.QUEUE_DEPTH.set(self._queue.count_due())
            self._stop.wait(leader.RETRY_S)  # a signal wakes it
        self._queue.close()
        self._watches.close()
        # If a worker still writes, the lease is left to expire, so that the next leader does not write beside it.
        if self._wait_for_workers(within_s=DRAIN_S):
            self._election.release_lease()
        log.info("operator_stopped")
        return 0

    def _wait_for_workers(self, within_s: float) -> bool:
        """Wait for running reconciliations. Returns whether all finished in time."""
        until = time.monotonic() + within_s
        while self._busy_since and time.monotonic() < until:
            time.sleep(0.05)
        return not self._busy_since

    def _run_worker(self) -> None:
        """Reconcile due jobs, one after the other, while this process leads."""
        name = threading.current_thread().name
        while (key := self._queue.get()) is not None:
            # The lease may have been lost while this thread waited for a key.
            if not self._election.is_leader:
                return
            began = self._busy_since[name] = time.monotonic()
            after_s = None
            failed = True
            try:
                after_s = self._reconciler.reconcile(*key)
                failed = False
                self._remove_deleted(key)
            except ClusterError as error:
                log.warning("reconcile_failed", namespace=key[0], name=key[1], reason=str(error))
            except Exception:  # the edge of a worker: one job's bug must not stop the others
                log.exception("reconcile_crashed", namespace=key[0], name=key[1])
            finally:
                del self._busy_since[name]
                if failed:
                    telemetry.QUEUE_RETRIES.inc()
                result = "failed" if failed else "done"
                telemetry.RECONCILE_SECONDS.labels(result).observe(time.monotonic() - began)
                self._queue.done(key, failed=failed, after_s=after_s)

    def _remove_deleted(self, key: JobKey) -> None:
        found = self._cache.list_objects(kinds.RLJOB, *key)
        if not found:
            telemetry.remove_status(key)

    def _find_hang(self) -> str | None:
        """Describe a hanging watch or worker, which a restart of the process fixes; None if there is none."""
        silent_s = self._watches.longest_silence_s()
        now = time.monotonic()
        if silent_s > MAX_WATCH_SILENCE_S:
            return f"a watch has received nothing for {silent_s:.0f} s"
        # A copy: workers change the mapping meanwhile.
        slow = [name for name, since in list(self._busy_since.items()) if now - since > MAX_RECONCILE_S]
        return f"{', '.join(slow)}: one reconciliation has taken more than {MAX_RECONCILE_S:.0f} s" if slow else None

    def _find_unready(self) -> str | None:
        return None if self._watches.is_synced else "not all watched kinds have been listed yet"


def _utc_now() -> datetime:
    return datetime.now(UTC)


if __name__ == "__main__":
    main()
