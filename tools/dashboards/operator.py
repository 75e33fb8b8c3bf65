"""The dashboard of the operator: its reconciliations, and the conditions of all jobs.

The operator's series have other labels than those of runs, so this module builds its own expressions. The variable
`operator` is the namespace of the operator's pod, `namespace` that of the jobs.
"""

from __future__ import annotations

from tools.dashboards.model import Dashboard, Panel, Variable

OWN = '{namespace=~"$operator"}'
JOBS = 'namespace=~"$namespace"'


def _sum_rate(metric: str, by: str) -> str:
    return f"sum by (namespace, {by}) (rate({metric}{OWN}[$__rate_interval]))"


def _histogram_mean(histogram: str) -> str:
    above, below = (f"sum by (namespace) ({histogram}_{part}{OWN})" for part in ("sum", "count"))
    return f"{above} / ({below} > 0)"


OPERATOR = Dashboard(
    "specrl-operator",
    "specrl / Operator",
    "Reconciliations of the operator, and the conditions of all jobs.",
    (
        Variable("operator", "namespace", "specrl_operator_is_leader{}"),
        Variable("namespace", "namespace", "specrl_rljob_condition{}"),
    ),
    (
        Panel(
            "Jobs by condition",
            "Number of RLJobs for which a condition is true. One job can count in several.",
            "short",
            ((f'sum by (type) (specrl_rljob_condition{{{JOBS},status="True"}})', "{{type}}"),),
        ),
        Panel(
            "Failed and refused jobs",
            "1 for each job whose condition Failed is true, or whose condition Accepted is false.",
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
            "Leading operators",
            "Must be 1. With 0, nothing is created, scaled or restarted; running jobs go on.",
            "short",
            ((f"sum by (namespace) (specrl_operator_is_leader{OWN})", "{{namespace}}"),),
        ),
        Panel(
            "Reconciliations per second, by result",
            "Results: done, and failed, which is retried with backoff.",
            "ops",
            ((_sum_rate("specrl_operator_reconcile_seconds_count", "result"), "{{namespace}} {{result}}"),),
        ),
        Panel(
            "Duration of a reconciliation",
            "95th percentile of the wall seconds of one reconciliation of one job.",
            "s",
            (
                (
                    f"histogram_quantile(0.95, {_sum_rate('specrl_operator_reconcile_seconds_bucket', 'le')})",
                    "{{namespace}}",
                ),
            ),
        ),
        Panel(
            "Work queue",
            "Jobs that are due for reconciliation, and retries after failures per second.",
            "short",
            (
                (f"sum by (namespace) (specrl_operator_workqueue_depth{OWN})", "{{namespace}} due"),
                (
                    f"sum by (namespace) (rate(specrl_operator_workqueue_retries_total{OWN}[$__rate_interval]))",
                    "{{namespace}} retries per second",
                ),
            ),
        ),
        Panel(
            "Finished jobs",
            "Number of jobs that completed or failed since the operator started.",
            "short",
            ((f"sum by (namespace, result) (specrl_rljob_terminal_total{OWN})", "{{namespace}} {{result}}"),),
        ),
        Panel(
            "Time to schedule and to start",
            "Mean wall seconds from a job's start until its coordinator is ready (scheduling), and until all its parts "
            "are ready (startup), over all jobs since the operator started.",
            "s",
            (
                (_histogram_mean("specrl_rljob_scheduling_seconds"), "{{namespace}} scheduling"),
                (_histogram_mean("specrl_rljob_startup_seconds"), "{{namespace}} startup"),
            ),
        ),
    ),
)
