"""The operator's process. Console script `specrl-operator`.

    watches --wake--> queue --> workers --> reconcile --> API server
    election: no worker takes anything before the lease is held; when it is lost, the process ends (exit code 1)

Every thread but the main one is a daemon: a request that hangs must not keep a process alive that may no longer act.
"""

from __future__ import annotations

import argparse
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
from specrl_operator import leader, telemetry
from specrl_operator.api import RLJOB
from specrl_operator.cluster import Cluster, ClusterError
from specrl_operator.facts import Settings
from specrl_operator.queue import Key, WorkQueue
from specrl_operator.reconcile import Reconciler
from specrl_operator.watches import RELIST_S, Cache, Watches

SILENT_S = 3 * RELIST_S
"""A watch that has not come round for so long hangs, whatever it looks like."""
REST_S = 10.0
"""What workers have to end what they are at when the process is told to stop; Kubernetes gives it 30 s."""
WORK_S = 300.0
"""One look at one job takes requests of 15 s each; a worker that takes longer hangs."""

log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the operator until it is told to stop, or loses its lease."""
    options = parse(arguments)
    if find_spec("kubernetes") is None:
        sys.stderr.write(
            "specrl-operator: the extra `operator` must be installed, got no kubernetes; "
            "pip install 'specrl[operator]'\n"
        )
        sys.exit(2)
    from specrl_operator.kube import connect

    logs.configure(options.log_level, "operator", "")
    try:
        cluster, elector = connect(options.context), connect(options.context, leader.REQUEST_S)
    except ClusterError as error:
        sys.stderr.write(f"specrl-operator: {error}\n")
        sys.exit(2)
    sys.exit(Operator(cluster, elector, options).run())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; argparse exits with 2 and a usage line when it is wrong."""
    default = Settings()
    parser = argparse.ArgumentParser(prog="specrl-operator", description="Turns RLJobs into placed pods.")
    add = parser.add_argument
    add(
        "--namespace", action="append", default=[], help="watch this namespace alone; may be given again (default: all)"
    )
    add("--context", help="context of the kubeconfig; '' its current one (default: the pod's own cluster)")
    add("--workers", type=int, default=2, help="jobs that are looked at together (default: %(default)s)")
    add("--host", default="0.0.0.0", help="address of metrics and probes (default: %(default)s)")  # noqa: S104 - a pod's
    add("--port", type=int, default=8080, help="port of metrics and probes (default: %(default)s)")
    add("--log-level", default="info", choices=("debug", "info", "warning"))
    add("--lease-namespace", default=os.environ.get("POD_NAMESPACE", "default"), help="where the lease lies")
    add("--lease-name", default="specrl-operator", help="operators that share it act one at a time")
    add("--control-image", default=default.control_image, help="coordinator (default: %(default)s)")
    add("--generation-image", default=default.generation_image, help="replicas (default: %(default)s)")
    add("--trainer-image", default=default.trainer_image, help="trainer (default: %(default)s)")
    add("--store-image", default=default.store_image, help="a job's own Redis or Valkey (default: %(default)s)")
    add("--pull-policy", default=default.pull_policy, choices=("Always", "IfNotPresent", "Never"))
    add("--pull-secret", action="append", default=[], help="imagePullSecret of all pods; may be given again")
    add("--store-size", default=default.store_size, help="volume of a job's own store (default: %(default)s)")
    add("--store-class", help="its StorageClass (default: the cluster's)")
    add("--metrics-namespace", action="append", default=[], help="whose pods may scrape jobs; may be given again")
    add(
        "--api-server-port", action="append", type=int, default=[], help="jobs may reach it; again (default: 443, 6443)"
    )
    add("--prometheus-url", help="what KEDA asks for the share of exposed generation")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """What the flags say of every job."""
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
        prometheus_url=options.prometheus_url,
    )


class Operator:
    """Watches, workers and the election of one process."""

    def __init__(self, cluster: Cluster, elector: Cluster, options: argparse.Namespace) -> None:
        """elector: the same cluster, with a shorter patience."""
        self._options = options
        self._queue = WorkQueue(time.monotonic)
        self._cache = Cache()
        namespaces = options.namespace or [None]
        self._watches = Watches(cluster, self._cache, namespaces, self._queue.add)
        self._reconciler = Reconciler(cluster, settings_of(options), _now, self._cache, telemetry.show)
        identity = f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        self._election = leader.Election(
            elector, (options.lease_namespace, options.lease_name), identity, time.monotonic, _now
        )
        self._stop = threading.Event()
        self._busy_since: dict[str, float] = {}

    def run(self) -> int:
        """Act while the lease is held. Returns the exit code: 0 when told to stop, 1 when the lease is lost."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        checks = {"/healthz": self._hangs, "/readyz": self._is_unready}
        server = telemetry.serve(self._options.host, self._options.port, checks)
        log.info("operator_started", address=f"{self._options.host}:{server.server_port}")
        self._watches.start()
        has_led = is_working = False
        while not self._stop.is_set():
            leads = self._election.turn()
            telemetry.IS_LEADER.set(leads)
            if has_led and not leads:
                return 1
            has_led = leads
            if leads and not is_working and self._watches.is_synced:
                is_working = True
                for worker in range(self._options.workers):
                    threading.Thread(target=self._work, name=f"worker-{worker}", daemon=True).start()
            telemetry.QUEUE_DEPTH.set(self._queue.depth())
            self._stop.wait(leader.RETRY_S)
        self._queue.close()
        self._watches.close()
        if self._are_idle(within_s=REST_S):
            self._election.release()  # else another would begin while a worker still writes
        log.info("operator_stopped")
        return 0

    def _are_idle(self, within_s: float) -> bool:
        """Wait for the workers to end what they are at."""
        until = time.monotonic() + within_s
        while self._busy_since and time.monotonic() < until:
            time.sleep(0.05)
        return not self._busy_since

    def _work(self) -> None:
        """Take jobs that are due, one after the other, while this process leads."""
        name = threading.current_thread().name
        while (key := self._queue.take()) is not None:
            if not self._election.is_leader:
                return
            began = self._busy_since[name] = time.monotonic()
            after_s, failed = None, True
            try:
                after_s = self._reconciler.reconcile(*key)
                failed = False
                self._show(key)
            except ClusterError as error:
                log.warning("reconcile_failed", namespace=key[0], name=key[1], reason=str(error))
            except Exception:  # the edge of a worker: one job's bug must not stop the others
                log.exception("reconcile_broke", namespace=key[0], name=key[1])
            finally:
                del self._busy_since[name]
                if failed:
                    telemetry.QUEUE_RETRIES.inc()
                result = "failed" if failed else "done"
                telemetry.RECONCILE_SECONDS.labels(result).observe(time.monotonic() - began)
                self._queue.done(key, failed=failed, after_s=after_s)

    def _show(self, key: Key) -> None:
        found = self._cache.find(RLJOB, *key)
        if not found:
            telemetry.forget(key)

    def _hangs(self) -> str | None:
        """What makes this process one that a restart helps."""
        silent_s, now = self._watches.silent_s(), time.monotonic()
        if silent_s > SILENT_S:
            return f"a watch has not come round for {silent_s:.0f} s"
        slow = [name for name, since in list(self._busy_since.items()) if now - since > WORK_S]
        return f"{', '.join(slow)} has looked at one job for more than {WORK_S:.0f} s" if slow else None

    def _is_unready(self) -> str | None:
        return None if self._watches.is_synced else "not everything that is watched has been listed yet"


def _now() -> datetime:
    return datetime.now(UTC)


if __name__ == "__main__":
    main()
