"""The operator's metrics, and the HTTP server of `/metrics`, `/healthz` and `/readyz`.

Invariant: the series of a job exist as long as the job. `main.py` calls this module. May be used by many threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from threading import Lock

from prometheus_client import Counter, Gauge, Histogram

from specrl.spec.rljob.status import CoordinatorCondition
from specrl.telemetry.exporter import MetricsText, PageResponse, serve_pages
from specrl_operator.api import Object, find_condition, is_condition_true, parse_time
from specrl_operator.cluster.queue import JobKey

RECONCILE_SECONDS = Histogram(
    "specrl_operator_reconcile_seconds",
    "Wall seconds of one reconciliation of one RLJob, by result: done, failed.",
    ["result"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
QUEUE_DEPTH = Gauge("specrl_operator_workqueue_depth", "RLJobs that are due for reconciliation.")
QUEUE_RETRIES = Counter("specrl_operator_workqueue_retries_total", "Reconciliations that failed and are retried.")
IS_LEADER = Gauge("specrl_operator_is_leader", "1 in the process that holds the leader's lease, 0 in the others.")
CONDITION = Gauge(
    "specrl_rljob_condition",
    "1 for the present status of each condition of each RLJob, 0 for the others. Removed with the RLJob.",
    ["namespace", "name", "type", "status"],
)
SCHEDULING_SECONDS = Histogram(
    "specrl_rljob_scheduling_seconds",
    "Seconds from a job's start until its coordinator is ready.",
    buckets=(1, 5, 15, 60, 300, 900, 3600, 14400),
)
STARTUP_SECONDS = Histogram(
    "specrl_rljob_startup_seconds",
    "Seconds from a job's start, or its resumption, until all its parts were ready for the first time.",
    buckets=(5, 15, 60, 300, 900, 3600, 14400),
)
TERMINAL = Counter("specrl_rljob_terminal_total", "RLJobs that ended, by result: Complete, Failed.", ["result"])

# Series must exist at 0 before the first event: `increase()` in an alert does not see a series that begins at 1.
for _result in ("done", "failed"):
    RECONCILE_SECONDS.labels(_result)
for _result in ("Complete", "Failed"):
    TERMINAL.labels(_result)

_STATUSES = ("True", "False", "Unknown")
_lock = Lock()
_shown: dict[JobKey, set[str]] = {}


def export_status(key: JobKey, before: Object, status: Object) -> None:
    """Export a job's conditions, and observe the changes from its previous status. key: namespace and name.

    The coordinator's conditions are not in `status`, which the operator writes. They come from the previous status.
    """
    reported = [it for it in before.get("conditions") or [] if it["type"] in CoordinatorCondition]
    with _lock:
        found = {"conditions": [*(status.get("conditions") or []), *reported]}
        kinds = {condition["type"] for condition in found["conditions"]} | {"Complete", "Failed"}
        # Conditions that were exported before and are gone now, such as Suspended, must be set to 0.
        for kind in kinds | _shown.get(key, set()):
            for said in _STATUSES:
                CONDITION.labels(*key, kind, said).set(find_condition(found, kind).get("status") == said)
        _shown[key] = kinds
    if not before:
        return  # the first status of a job, or the first since this process started, is no change
    for result in ("Complete", "Failed"):
        if is_condition_true(status, result) and not is_condition_true(before, result):
            TERMINAL.labels(result).inc()
    if status.get("startTime"):
        for kind, histogram in (("CoordinatorReady", SCHEDULING_SECONDS), ("Started", STARTUP_SECONDS)):
            turned = find_condition(status, kind)
            if turned.get("status") == "True" and not is_condition_true(before, kind):
                since = parse_time(turned["lastTransitionTime"]) - parse_time(status["startTime"])
                histogram.observe(max(0.0, since.total_seconds()))


def remove_status(key: JobKey) -> None:
    """Remove the series of a job that was deleted."""
    with _lock:
        for kind in _shown.pop(key, set()):
            for said in _STATUSES:
                CONDITION.remove(*key, kind, said)


def serve_metrics(host: str, port: int, checks: Mapping[str, Callable[[], str | None]]) -> ThreadingHTTPServer:
    """Serve metrics and probes in a thread.

    checks: functions by path. Each returns the fault (answered with 503), or None. Raises OSError if the port is
    taken.
    """
    probes = {path: partial(_answer_probe, check) for path, check in checks.items()}
    return serve_pages(host, port, {"/metrics": MetricsText().answer} | probes, "http")


def _answer_probe(check: Callable[[], str | None]) -> PageResponse:
    wrong = check()
    status = HTTPStatus.SERVICE_UNAVAILABLE if wrong else HTTPStatus.OK
    return PageResponse((wrong or "ok").encode() + b"\n", status=status)
