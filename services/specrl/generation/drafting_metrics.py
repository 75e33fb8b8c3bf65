"""Exports the decisions of an adaptive draft length as Prometheus metrics of one replica.

Called by `vllm_backend.draft_length_client` after each report of the controller.
"""

from __future__ import annotations

from typing import Any

from specrl.telemetry import metrics


def export_report(report: dict[str, Any]) -> None:
    """Set the metrics from a `DraftLengthController.build_report`."""
    metrics.CATCH_UPS.inc(report["catch_ups"])
    costs = report["costs"]
    for live in costs["nodes"]:
        chosen = next(length for first, last, length in report["table"] if first <= live <= last)
        metrics.CHOSEN_DRAFT_LENGTH.labels(str(live)).set(max(0, chosen))  # OFF is -1; shown as 0 drafts
    for length, row in costs["seconds"].items():
        for live, seconds in zip(costs["nodes"], row, strict=True):
            if seconds is not None:
                metrics.STEP_COST_SECONDS.labels(str(live), length).set(seconds)
    metrics.REPLICA_GAIN.labels("predicted").set(report["predicted_gain"])
    if report["measured_gain"] is not None:
        metrics.REPLICA_GAIN.labels("measured").set(report["measured_gain"])
