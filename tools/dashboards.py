"""Writes the Grafana dashboards of the chart: `make gen`. Never edit the JSON; edit this page.

Every expression selects by the dashboard's variables, `namespace` and `rljob`, and keeps the two apart. Tests parse
each one with promtool and look each metric up in the code that exports it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PANEL_WIDTH, PANEL_HEIGHT = 12, 8  # of a grid of 24 columns: two panels in a row
SCHEMA_VERSION = 39  # Grafana 11; later ones migrate it when they load it
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One graph over time: its queries are pairs of (expression, legend)."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    stacked: bool = False
    maximum: float | None = None


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. uid: part of its address in Grafana, so it never changes."""

    uid: str
    title: str
    description: str
    panels: tuple[Panel, ...]


# -- expressions ------------------------------------------------------------------------------------------------------


def series(metric: str, where: str = "") -> str:
    """The series of a metric that the variables select, and `where` besides."""
    selectors = ['namespace=~"$namespace"', 'rljob=~"$rljob"', *([where] if where else [])]
    return f"{metric}{{{','.join(selectors)}}}"


def rate(metric: str, by: str = "", where: str = "") -> str:
    """A counter's increase a second, summed per run and `by`."""
    return f"sum by ({_labels(by)}) (rate({series(metric, where)}[$__rate_interval]))"


def latest(metric: str, by: str = "", how: str = "sum") -> str:
    """A gauge, summed (or `how`) per run and `by`."""
    return f"{how} by ({_labels(by)}) ({series(metric)})"


def mean(histogram: str, by: str = "") -> str:
    """Mean of what a histogram observed."""
    return ratio(rate(f"{histogram}_sum", by), rate(f"{histogram}_count", by))


def ratio(above: str, below: str) -> str:
    """A quotient of two expressions with the same labels; nothing where the divisor is 0."""
    return f"{above} / ({below} > 0)"


def ratio_to_run(above: str, below: str) -> str:
    """The same where `above` has labels beyond those of the run, and `below` has not.

    The empty list keeps the parser from reading the divisor as labels of group_left.
    """
    return f"{above} / on (namespace, rljob) group_left () ({below} > 0)"


def quantile(share: float, histogram: str) -> str:
    """A quantile of what a histogram observed."""
    return f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le')})"


def _labels(by: str) -> str:
    return f"namespace, rljob, {by}" if by else "namespace, rljob"


# -- dashboards -------------------------------------------------------------------------------------------------------

COORDINATOR = "specrl_coordinator"

EXPOSED_GENERATION = Dashboard(
    "specrl-exposed-generation",
    "specrl / Exposed generation",
    "How much of a step the trainer waits for rollouts, and why.",
    (
        Panel(
            "Exposed generation share",
            "Share of wall time in which the trainer could run but had no admissible batch. 0: generation is hidden "
            "behind training.",
            "percentunit",
            (
                (
                    ratio(
                        rate(f"{COORDINATOR}_exposed_generation_seconds_total"), rate(f"{COORDINATOR}_step_seconds_sum")
                    ),
                    "{{rljob}}",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Exposed generation by cause",
            "buffer_wait: too few rollouts were finished. sync_drain: rollouts waited for weights.",
            "percentunit",
            ((rate(f"{COORDINATOR}_exposed_generation_seconds_total", "cause"), "{{rljob}} {{cause}}"),),
            stacked=True,
        ),
        Panel(
            "Step by stage",
            "Mean wall seconds of a step. The stages partition it: data, prepare (weight sync), generation (exposed), "
            "logprob, train, and validation and checkpoint in the steps that have them.",
            "s",
            (
                (
                    ratio_to_run(
                        rate(f"{COORDINATOR}_step_seconds_sum", "phase"),
                        rate(f"{COORDINATOR}_step_seconds_count", where='phase="train"'),
                    ),
                    "{{rljob}} {{phase}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Policy lag of trained rollouts",
            "Steps from the oldest token trained on to the policy trained. maxPolicyLag is a bound, not a target.",
            "short",
            (
                (quantile(0.5, f"{COORDINATOR}_policy_lag_steps"), "{{rljob}} median"),
                (mean(f"{COORDINATOR}_policy_lag_steps"), "{{rljob}} mean"),
            ),
        ),
        Panel(
            "Generation replicas by state",
            "What the coordinator knows of each replica; only those that serve are given rollouts.",
            "short",
            ((latest(f"{COORDINATOR}_replicas", "state"), "{{rljob}} {{state}}"),),
            stacked=True,
        ),
        Panel(
            "Groups begun and waiting",
            "Groups whose rollouts are under way, and complete groups that wait for their step.",
            "short",
            (
                (latest(f"{COORDINATOR}_groups_in_flight"), "{{rljob}} in flight"),
                (latest(f"{COORDINATOR}_groups_buffered"), "{{rljob}} buffered"),
            ),
        ),
        Panel(
            "Rollouts by outcome",
            "Trained, requeued (a replica was lost), resumed, poisoned, ungraded; a second.",
            "short",
            ((rate(f"{COORDINATOR}_rollouts_total", "outcome"), "{{rljob}} {{outcome}}"),),
        ),
        Panel(
            "Reward and validation",
            "Mean reward of the last trained batch; last validation accuracy.",
            "short",
            (
                (latest(f"{COORDINATOR}_reward_mean"), "{{rljob}} reward"),
                (latest(f"{COORDINATOR}_validation_accuracy"), "{{rljob}} validation"),
            ),
        ),
        Panel(
            "Weight sync by stage",
            "Mean wall seconds of an update of all replicas: pause, broadcast, verify, resume.",
            "s",
            ((mean("specrl_weight_sync_seconds", "stage"), "{{rljob}} {{stage}}"),),
            stacked=True,
        ),
        Panel(
            "Sampler against trainer",
            "KL (k3) between sampler and trainer over the newest version's rollouts: what importance correction sees.",
            "short",
            ((latest("specrl_sampler_mismatch_kl"), "{{rljob}} KL, nats"),),
        ),
    ),
)

GENERATION = Dashboard(
    "specrl-generation",
    "specrl / Generation",
    "How fast replicas generate and what speculation adds: series of vLLM as it exports them, and the coordinator's.",
    (
        Panel(
            "Generated tokens a second, by replica",
            "vLLM's own count of sampled tokens.",
            "short",
            ((rate("vllm:generation_tokens_total", "pod"), "{{pod}}"),),
            stacked=True,
        ),
        Panel(
            "Live and waiting requests",
            "Waiting requests mean that KV memory or maxLiveRollouts is the limit.",
            "short",
            (
                (latest("vllm:num_requests_running"), "{{rljob}} running"),
                (latest("vllm:num_requests_waiting"), "{{rljob}} waiting"),
            ),
        ),
        Panel(
            "KV cache in use",
            "Share of the blocks, by replica. Near 1, requests are preempted and computed again.",
            "percentunit",
            ((latest("vllm:kv_cache_usage_perc", "pod", how="max"), "{{pod}}"),),
            maximum=1,
        ),
        Panel(
            "Preemptions",
            "Requests that lost their blocks, a second.",
            "short",
            ((rate("vllm:num_preemptions_total", "pod"), "{{pod}}"),),
        ),
        Panel(
            "Acceptance length",
            "Mean tokens of a verification, bonus token included: 1 is no gain from drafts. At the run's own sampling.",
            "short",
            (
                (
                    "1 + "
                    + ratio(
                        rate("vllm:spec_decode_num_accepted_tokens_total"), rate("vllm:spec_decode_num_drafts_total")
                    ),
                    "{{rljob}} measured by vLLM",
                ),
                (latest("specrl_generation_acceptance_length"), "{{rljob}} of the last step"),
            ),
        ),
        Panel(
            "Acceptance by position",
            "Share of drafts whose token at this position was accepted.",
            "percentunit",
            (
                (
                    ratio_to_run(
                        rate("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"),
                        rate("vllm:spec_decode_num_drafts_total"),
                    ),
                    "{{rljob}} position {{position}}",
                ),
            ),
            maximum=1,
        ),
        Panel(
            "Draft length, and drafters that rest",
            "The k that was chosen, and replicas whose drafter is switched off because it does not pay.",
            "short",
            (
                (latest("specrl_generation_draft_length"), "{{rljob}} draft length"),
                (latest("specrl_generation_drafters_resting"), "{{rljob}} resting"),
            ),
        ),
        Panel(
            "What speculation gains",
            "Measured speed over the calibrated speed without drafts, mean of the replicas; adaptive lengths only.",
            "short",
            ((latest("specrl_generation_speculation_gain"), "{{rljob}}"),),
        ),
        Panel(
            "Drafter's age",
            "Policy versions since the oldest served drafter was trained, and its loss.",
            "short",
            (
                (latest("specrl_drafter_version_lag"), "{{rljob}} versions"),
                (latest("specrl_drafter_loss"), "{{rljob}} loss"),
            ),
        ),
        Panel(
            "Policy version served",
            "Newest version that every replica serves.",
            "short",
            ((latest(f"{COORDINATOR}_policy_version"), "{{rljob}}"),),
        ),
    ),
)

DASHBOARDS = {"exposed-generation.json": EXPOSED_GENERATION, "generation.json": GENERATION}


# -- Grafana's JSON ---------------------------------------------------------------------------------------------------


def as_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    variables = [_variable("namespace", ""), _variable("rljob", 'namespace=~"$namespace"')]
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["specrl"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [datasource, *variables]},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _variable(label: str, selector: str) -> dict[str, Any]:
    """A variable with the values of a label: several at once, all by default."""
    query = f"label_values({COORDINATOR}_policy_version{{{selector}}}, {label})"
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": PROMETHEUS,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    column, row = number % 2, number // 2
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.description,
        "type": "timeseries",
        "datasource": PROMETHEUS,
        "gridPos": {"x": PANEL_WIDTH * column, "y": PANEL_HEIGHT * row, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def main() -> None:
    """Write every dashboard into the folder that the command line names; other JSON files there are deleted."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("*.json"):
        stale.unlink()
    for name, dashboard in DASHBOARDS.items():
        text = json.dumps(as_grafana(dashboard), indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
