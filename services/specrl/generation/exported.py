"""What an adaptive draft length has decided, as Prometheus metrics of one replica."""

from __future__ import annotations

from typing import Any

from specrl.telemetry import metrics


def show_drafting(report: dict[str, Any]) -> None:
    """`DraftLengths.report`: the chosen length at each batch size whose costs are known, these costs, and so on."""
    metrics.CATCH_UPS.inc(report["catch_ups"])
    costs = report["costs"]
    for live in costs["nodes"]:
        chosen = next(length for first, last, length in report["table"] if first <= live <= last)
        metrics.CHOSEN_DRAFT_LENGTH.labels(str(live)).set(max(0, chosen))
    for length, row in costs["seconds"].items():
        for live, seconds in zip(costs["nodes"], row, strict=True):
            metrics.STEP_COST_SECONDS.labels(str(live), length).set(seconds)
    metrics.REPLICA_GAIN.labels("predicted").set(report["predicted_gain"])
    if report["measured_gain"] is not None:
        metrics.REPLICA_GAIN.labels("measured").set(report["measured_gain"])
