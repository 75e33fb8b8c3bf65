"""Operator: whether jobs are looked after, and how they are. Its series know no coordinator, so that they select alone.

`operator` is the namespace of the operator's own pod, `namespace` that of the jobs.
"""

from __future__ import annotations

from tools.dashboards.model import Dashboard, Panel, Variable

OWN = '{namespace=~"$operator"}'
JOBS = 'namespace=~"$namespace"'


def _rate(metric: str, by: str) -> str:
    return f"sum by (namespace, {by}) (rate({metric}{OWN}[$__rate_interval]))"


def _mean(histogram: str) -> str:
    above, below = (f"sum by (namespace) ({histogram}_{part}{OWN})" for part in ("sum", "count"))
    return f"{above} / ({below} > 0)"


OPERATOR = Dashboard(
    "specrl-operator",
    "specrl / Operator",
    "Whether jobs are looked after, and how they are.",
    (
        Variable("operator", "namespace", "specrl_operator_is_leader{}"),
        Variable("namespace", "namespace", "specrl_rljob_condition{}"),
    ),
    (
        Panel(
            "Jobs by condition",
            "RLJobs of which a condition holds; one job may be in several.",
            "short",
            ((f'sum by (type) (specrl_rljob_condition{{{JOBS},status="True"}})', "{{type}}"),),
        ),
        Panel(
            "Jobs that cannot run, or have failed",
            "1 for a job whose condition Failed is true, or whose condition Accepted is false.",
            "short",
            (
                (
                    f'sum by (namespace, name) (specrl_rljob_condition{{{JOBS},type="Failed",status="True"}})',
                    "{{namespace}}/{{name}} failed",
                ),
                (
                    f'sum by (namespace, name) (specrl_rljob_condition{{{JOBS},type="Accepted",status="False"}})',
                    "{{namespace}}/{{name}} not accepted",
                ),
            ),
        ),
        Panel(
            "Operators that lead",
            "One should: with none nothing is created, scaled or restarted.",
            "short",
            ((f"sum by (namespace) (specrl_operator_is_leader{OWN})", "{{namespace}}"),),
        ),
        Panel(
            "Looks at jobs, by result",
            "A second: done, failed (and repeated).",
            "ops",
            ((_rate("specrl_operator_reconcile_seconds_count", "result"), "{{namespace}} {{result}}"),),
        ),
        Panel(
            "Duration of a look",
            "95th percentile of the wall seconds of one look at one job.",
            "s",
            (
                (
                    f"histogram_quantile(0.95, {_rate('specrl_operator_reconcile_seconds_bucket', 'le')})",
                    "{{namespace}}",
                ),
            ),
        ),
        Panel(
            "Queue",
            "Jobs that are due to be looked at, and looks that are repeated after a failure, a second.",
            "short",
            (
                (f"sum by (namespace) (specrl_operator_workqueue_depth{OWN})", "{{namespace}} due"),
                (
                    f"sum by (namespace) (rate(specrl_operator_workqueue_retries_total{OWN}[$__rate_interval]))",
                    "{{namespace}} repeated a second",
                ),
            ),
        ),
        Panel(
            "Jobs that ended",
            "Since the operator started, by result.",
            "short",
            ((f"sum by (namespace, result) (specrl_rljob_terminal_total{OWN})", "{{namespace}} {{result}}"),),
        ),
        Panel(
            "From start to nodes, and to ready",
            "Mean wall seconds from a job's start until its coordinator runs, and until all its parts were ready; of "
            "all jobs since the operator started.",
            "s",
            (
                (_mean("specrl_rljob_scheduling_seconds"), "{{namespace}} scheduling"),
                (_mean("specrl_rljob_startup_seconds"), "{{namespace}} startup"),
            ),
        ),
    ),
)
