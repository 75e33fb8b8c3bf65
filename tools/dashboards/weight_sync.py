"""Weight sync: what an update of all replicas takes, and whether they compute with what they were sent."""

from __future__ import annotations

from tools.dashboards.expressions import latest, mean, quantile, rate, ratio
from tools.dashboards.model import OF_A_RUN, Dashboard, Panel

SECONDS, STEP = "specrl_weight_sync_seconds", "specrl_coordinator_step_seconds"
BYTES = rate("specrl_weight_sync_bytes_total")

WEIGHT_SYNC = Dashboard(
    "specrl-weight-sync",
    "specrl / Weight sync",
    "What an update of all replicas takes, and whether they compute with what they were sent.",
    OF_A_RUN,
    (
        Panel(
            "Update by stage",
            "Mean wall seconds of an update of all replicas: pause, broadcast, verify, resume (loading included). Only "
            "during pause and resume no token is computed.",
            "s",
            ((mean(SECONDS, "stage"), "{{rljob}} {{stage}}"),),
            stacked=True,
        ),
        Panel(
            "Slow updates by stage",
            "95th percentile of the wall seconds of each stage.",
            "s",
            ((quantile(0.95, SECONDS, "stage"), "{{rljob}} {{stage}}"),),
        ),
        Panel(
            "Share of a step",
            "Share of wall time that the trainer spends on publishing, canaries included.",
            "percentunit",
            ((ratio(rate(f"{STEP}_sum", where='phase="prepare"'), rate(f"{STEP}_sum")), "{{rljob}}"),),
            maximum=1,
        ),
        Panel(
            "Size of an update",
            "Bytes of policy and drafter, counted once, however many replicas receive them.",
            "bytes",
            ((ratio(BYTES, rate(f"{SECONDS}_count", where='stage="broadcast"')), "{{rljob}}"),),
        ),
        Panel(
            "Speed of the broadcast",
            "Bytes sent a second of broadcasting.",
            "Bps",
            ((ratio(BYTES, rate(f"{SECONDS}_sum", where='stage="broadcast"')), "{{rljob}}"),),
        ),
        Panel(
            "Transfers that were repeated",
            "By reason, a second: checksum (what arrived was not what was sent), failed.",
            "ops",
            ((rate("specrl_weight_sync_retries_total", "reason"), "{{rljob}} {{reason}}"),),
        ),
        Panel(
            "Policy version by replica",
            "What each replica serves, and what all of them do.",
            "short",
            (
                (latest("specrl_coordinator_replica_policy_version", "replica"), "{{rljob}} {{replica}}"),
                (latest("specrl_coordinator_policy_version"), "{{rljob}} all"),
            ),
            minimum=None,
        ),
        Panel(
            "Replicas' changes of state",
            "A second, by the state that was reached.",
            "ops",
            ((rate("specrl_coordinator_replica_transitions_total", "after"), "{{rljob}} {{after}}"),),
        ),
        Panel(
            "Canaries by outcome",
            "After an update each replica answers a few prompts and the trainer scores them; a second: agreed, "
            "disagreed, skipped, lost.",
            "ops",
            ((rate("specrl_sampler_canaries_total", "outcome"), "{{rljob}} {{outcome}}"),),
        ),
        Panel(
            "Canaries: sampler against trainer",
            "Absolute difference of log-probabilities in the last replica's canary, in nats: mean, and at the worst "
            "token. The run file's canary bounds both.",
            "short",
            (
                (latest("specrl_sampler_canary_mean_abs_nats", how="max"), "{{rljob}} mean"),
                (latest("specrl_sampler_canary_max_abs_nats", how="max"), "{{rljob}} worst token"),
            ),
        ),
        Panel(
            "What canaries take",
            "Mean wall seconds of the canaries of one update, all replicas at once; and the tokens compared, a second.",
            "short",
            (
                (mean("specrl_sampler_canary_seconds"), "{{rljob}} seconds"),
                (rate("specrl_sampler_canary_tokens_total"), "{{rljob}} tokens a second"),
            ),
        ),
    ),
)
