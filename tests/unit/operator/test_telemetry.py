"""The operator's metrics and probes."""

from __future__ import annotations

import urllib.error
import urllib.request

from specrl_operator.telemetry import CONDITION, export_status, remove_status, serve_metrics


def test_metrics_and_probes_are_served_and_nothing_else() -> None:
    wrong: list[str] = []
    server = serve_metrics("127.0.0.1", 0, {"/readyz": lambda: wrong[0] if wrong else None})

    def answer(path: str) -> tuple[int, str, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=60) as found:
                return found.status, found.headers["Content-Type"], found.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.headers["Content-Type"], refusal.read().decode()

    try:
        code, kind, page = answer("/metrics")
        assert (code, kind.split(";")[0]) == (200, "text/plain")
        assert "specrl_operator_is_leader 0.0" in page.splitlines()
        assert answer("/readyz") == (200, "text/plain; charset=utf-8", "ok\n")
        wrong.append("no watch is synced")
        assert answer("/readyz") == (503, "text/plain; charset=utf-8", "no watch is synced\n")
        assert answer("/healthz")[0] == 404
    finally:
        server.shutdown()
        server.server_close()


def test_conditions_of_the_coordinator_are_exported_with_the_operators() -> None:
    """They were not, so no alert could tell that the first weights had not arrived."""

    def shown() -> dict[tuple[str, str], float]:
        samples = (sample for family in CONDITION.collect() for sample in family.samples)
        return {(it.labels["type"], it.labels["status"]): it.value for it in samples if it.labels["name"] == "alerted"}

    ready = {"type": "Ready", "status": "True"}
    before = {"conditions": [{"type": "CollectiveReady", "status": "False"}, {"type": "Suspended", "status": "True"}]}
    export_status(("rl", "alerted"), before, {"conditions": [ready]})
    assert shown()["CollectiveReady", "False"] == 1
    assert shown()["Ready", "True"] == 1
    assert ("Suspended", "True") not in shown(), "the operator has taken it back"
    export_status(
        ("rl", "alerted"), {"conditions": [{"type": "CollectiveReady", "status": "True"}]}, {"conditions": [ready]}
    )
    assert (shown()["CollectiveReady", "False"], shown()["CollectiveReady", "True"]) == (0, 1)
    remove_status(("rl", "alerted"))
    assert not shown()
