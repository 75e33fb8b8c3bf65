"""The operator's metrics, on one page, and its HTTP face: `/metrics`, `/healthz`, `/readyz`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from threading import Lock

from prometheus_client import Counter, Gauge, Histogram

from specrl.telemetry.exporter import Answer, metrics_page, serve_pages
from specrl_operator.api import Object, condition_of, is_true, read_time
from specrl_operator.queue import Key

RECONCILE_SECONDS = Histogram(
    "specrl_operator_reconcile_seconds",
    "Wall seconds of one look at one RLJob, by result: done, failed.",
    ["result"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
QUEUE_DEPTH = Gauge("specrl_operator_workqueue_depth", "RLJobs that are due to be looked at.")
QUEUE_RETRIES = Counter("specrl_operator_workqueue_retries_total", "Looks that failed and are repeated.")
IS_LEADER = Gauge("specrl_operator_is_leader", "1 in the process that acts.")
CONDITION = Gauge(
    "specrl_rljob_condition",
    "1 for the present status of each condition of each RLJob; its series go with the job.",
    ["namespace", "name", "type", "status"],
)
SCHEDULING_SECONDS = Histogram(
    "specrl_rljob_scheduling_seconds",
    "From a job's start until a coordinator runs, and with it nodes for it.",
    buckets=(1, 5, 15, 60, 300, 900, 3600, 14400),
)
STARTUP_SECONDS = Histogram(
    "specrl_rljob_startup_seconds",
    "From a job's start, or its resumption, until all its parts were ready for the first time.",
    buckets=(5, 15, 60, 300, 900, 3600, 14400),
)
TERMINAL = Counter("specrl_rljob_terminal_total", "RLJobs that ended, by result: Complete, Failed.", ["result"])

for _result in ("done", "failed"):  # counted from 0: alerts look at increases
    RECONCILE_SECONDS.labels(_result)
for _result in ("Complete", "Failed"):
    TERMINAL.labels(_result)

_STATUSES = ("True", "False", "Unknown")
_lock = Lock()
_shown: dict[Key, set[str]] = {}


def show(key: Key, before: Mapping[str, object], status: Object) -> None:
    """Export a job's status, and count what turned with it."""
    with _lock:
        kinds = {condition["type"] for condition in status.get("conditions") or []} | {"Complete", "Failed"}
        for kind in kinds | _shown.get(key, set()):
            for said in _STATUSES:
                CONDITION.labels(*key, kind, said).set(condition_of(status, kind).get("status") == said)
        _shown[key] = kinds
    if not before:
        return
    for result in ("Complete", "Failed"):
        if is_true(status, result) and not is_true(before, result):
            TERMINAL.labels(result).inc()
    if status.get("startTime"):
        for kind, histogram in (("CoordinatorReady", SCHEDULING_SECONDS), ("Started", STARTUP_SECONDS)):
            turned = condition_of(status, kind)
            if turned.get("status") == "True" and not is_true(before, kind):
                since = read_time(turned["lastTransitionTime"]) - read_time(status["startTime"])
                histogram.observe(max(0.0, since.total_seconds()))


def forget(key: Key) -> None:
    """A job is gone, and its series with it."""
    with _lock:
        for kind in _shown.pop(key, set()):
            for said in _STATUSES:
                CONDITION.remove(*key, kind, said)


def serve(host: str, port: int, checks: Mapping[str, Callable[[], str | None]]) -> ThreadingHTTPServer:
    """Serve metrics and probes in a thread. checks: path to what is wrong, None when nothing is. Raises OSError."""
    probes = {path: partial(_probe, check) for path, check in checks.items()}
    return serve_pages(host, port, {"/metrics": metrics_page} | probes, "http")


def _probe(check: Callable[[], str | None]) -> Answer:
    wrong = check()
    status = HTTPStatus.SERVICE_UNAVAILABLE if wrong else HTTPStatus.OK
    return Answer((wrong or "ok").encode() + b"\n", status=status)
