"""The dashboard of weight sync: time and size of updates, and canaries, which check the replicas' weights."""

from __future__ import annotations

from tools.dashboards.expressions import divide_series, histogram_mean, histogram_quantile, latest_value, sum_rate
from tools.dashboards.model import RUN_VARIABLES, Dashboard, Panel

SECONDS = "specrl_weight_sync_seconds"
STEP = "specrl_coordinator_step_seconds"
BYTES = sum_rate("specrl_weight_sync_bytes_total")

WEIGHT_SYNC = Dashboard(
    "specrl-weight-sync",
    "specrl / Weight sync",
    "Time and size of weight updates, and canaries, which check that replicas have the right weights.",
    RUN_VARIABLES,
    (
        Panel(
            "Update by phase",
            "Mean wall seconds of an update of all replicas: pause, broadcast, verify, resume (including loading). "
            "Replicas generate during broadcast and verify, but not during pause and resume.",
            "s",
            ((histogram_mean(SECONDS, "phase"), "{{rljob}} {{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Slow updates by phase",
            "95th percentile of the wall seconds of each phase of an update.",
            "s",
            ((histogram_quantile(0.95, SECONDS, "phase"), "{{rljob}} {{phase}}"),),
        ),
        Panel(
            "Share of a step",
            "Share of wall time that the trainer spends on publishing weights, including canaries.",
            "percentunit",
            ((divide_series(sum_rate(f"{STEP}_sum", where='phase="prepare"'), sum_rate(f"{STEP}_sum")), "{{rljob}}"),),
            maximum=1,
        ),
        Panel(
            "Size of an update",
            "Bytes of policy and drafter, counted once for all replicas.",
            "bytes",
            ((divide_series(BYTES, sum_rate(f"{SECONDS}_count", where='phase="broadcast"')), "{{rljob}}"),),
        ),
        Panel(
            "Broadcast throughput",
            "Bytes per second during broadcasts.",
            "Bps",
            ((divide_series(BYTES, sum_rate(f"{SECONDS}_sum", where='phase="broadcast"')), "{{rljob}}"),),
        ),
        Panel(
            "Retried transfers",
            "Per second, by reason: checksum (the received bytes differ from the sent ones), failed.",
            "ops",
            ((sum_rate("specrl_weight_sync_retries_total", "reason"), "{{rljob}} {{reason}}"),),
        ),
        Panel(
            "Policy version by replica",
            "Policy version that each replica serves, and the newest one that all serve.",
            "short",
            (
                (latest_value("specrl_coordinator_replica_policy_version", "replica"), "{{rljob}} {{replica}}"),
                (latest_value("specrl_coordinator_policy_version"), "{{rljob}} all"),
            ),
            minimum=None,
        ),
        Panel(
            "Replica state changes",
            "State changes per second, by new state.",
            "ops",
            ((sum_rate("specrl_coordinator_replica_transitions_total", "after"), "{{rljob}} {{after}}"),),
        ),
        Panel(
            "Canaries by outcome",
            "Canaries per second. After an update, each replica answers a few prompts, and the trainer scores the "
            "answers. Outcomes: agreed, disagreed, skipped, lost.",
            "ops",
            ((sum_rate("specrl_sampler_canaries_total", "outcome"), "{{rljob}} {{outcome}}"),),
        ),
        Panel(
            "Canary difference of sampler and trainer",
            "Absolute difference of log-probabilities in the last replica's canary, in nats: the mean, and the largest "
            "of one token. The run file's section canary bounds both.",
            "short",
            (
                (latest_value("specrl_sampler_canary_mean_abs_nats", how="max"), "{{rljob}} mean"),
                (latest_value("specrl_sampler_canary_max_abs_nats", how="max"), "{{rljob}} worst token"),
            ),
        ),
        Panel(
            "Canary time and tokens",
            "Mean wall seconds of one update's canaries, for all replicas in parallel, and compared tokens per second.",
            "short",
            (
                (histogram_mean("specrl_sampler_canary_seconds"), "{{rljob}} seconds"),
                (sum_rate("specrl_sampler_canary_tokens_total"), "{{rljob}} tokens per second"),
            ),
        ),
    ),
)
