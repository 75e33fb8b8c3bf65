"""Overview: how long the trainer waits for rollouts, why, and what the run achieves."""

from __future__ import annotations

from tools.dashboards.expressions import heat, latest, mean, quantile, rate, ratio_to_run
from tools.dashboards.model import OF_A_RUN, Dashboard, Kind, Panel

COORDINATOR = "specrl_coordinator"
EXPOSED, STEP = f"{COORDINATOR}_exposed_generation_seconds_total", f"{COORDINATOR}_step_seconds"
STEPS = rate(f"{STEP}_count", where='phase="train"')

OVERVIEW = Dashboard(
    "specrl-overview",
    "specrl / Overview",
    "How much of a step the trainer waits for rollouts, where the rest goes, and what the run achieves.",
    OF_A_RUN,
    (
        Panel(
            "Exposed generation, share of the time",
            "Share of wall time in which the trainer could run but had no admissible batch. 0: generation is hidden "
            "behind training. buffer_wait: too few rollouts were finished. sync_drain: replicas that joined were given "
            "weights meanwhile.",
            "percentunit",
            ((ratio_to_run(rate(EXPOSED, "cause"), rate(f"{STEP}_sum")), "{{rljob}} {{cause}}"),),
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Exposed generation, seconds a step",
            "Mean wall seconds of a step in which the trainer waited for rollouts, by cause.",
            "s",
            ((ratio_to_run(rate(EXPOSED, "cause"), STEPS), "{{rljob}} {{cause}}"),),
            stacked=True,
        ),
        Panel(
            "Step by stage",
            "Mean wall seconds of a step. The stages partition it: data, prepare (weight sync), generation (exposed), "
            "logprob, train, and validation and checkpoint in the steps that have them.",
            "s",
            ((ratio_to_run(rate(f"{STEP}_sum", "phase"), STEPS), "{{rljob}} {{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Reward and validation",
            "Mean reward of the last trained batch; mean reward of the last validation.",
            "short",
            (
                (latest(f"{COORDINATOR}_reward_mean"), "{{rljob}} reward"),
                (latest(f"{COORDINATOR}_validation_reward_mean"), "{{rljob}} validation"),
            ),
            minimum=None,
        ),
        Panel(
            "Policy lag of trained rollouts",
            "How many rollouts were trained at each lag: steps from a rollout's oldest token to the policy trained.",
            "short",
            ((heat(f"{COORDINATOR}_policy_lag_steps"), "{{le}}"),),
            kind=Kind.HEATMAP,
        ),
        Panel(
            "Policy lag against its bound",
            "Mean lag of trained rollouts, and maxPolicyLag, which no rollout exceeds.",
            "short",
            (
                (mean(f"{COORDINATOR}_policy_lag_steps"), "{{rljob}} mean"),
                (latest(f"{COORDINATOR}_policy_lag_bound_steps"), "{{rljob}} bound"),
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
            "Generated tokens a second, by replica",
            "vLLM's own count of sampled tokens.",
            "short",
            ((rate("vllm:generation_tokens_total", "replica"), "{{rljob}} {{replica}}"),),
            stacked=True,
        ),
        Panel(
            "Rollouts by replica",
            "Rollouts that the coordinator has given to a replica and that are not finished, and requests that its "
            "vLLM computes: what is between the two waits there, or is being judged.",
            "short",
            (
                (latest(f"{COORDINATOR}_replica_live_rollouts", "replica"), "{{rljob}} {{replica}} given"),
                (latest("vllm:num_requests_running", "replica"), "{{rljob}} {{replica}} computed"),
            ),
        ),
        Panel(
            "KV cache in use",
            "Share of the blocks, by replica. Near 1, requests are preempted and computed again.",
            "percentunit",
            ((latest("vllm:kv_cache_usage_perc", "replica", how="max"), "{{rljob}} {{replica}}"),),
            maximum=1,
        ),
        Panel(
            "Preempted and waiting requests",
            "Requests that lost their blocks, a second, and those that wait for room: KV memory or maxLiveRollouts is "
            "the limit.",
            "short",
            (
                (rate("vllm:num_preemptions_total", "replica"), "{{rljob}} {{replica}} preempted a second"),
                (latest("vllm:num_requests_waiting", "replica"), "{{rljob}} {{replica}} waiting"),
            ),
        ),
        Panel(
            "Rollouts by outcome",
            "Trained, requeued (a replica was lost), resumed, poisoned, ungraded; a second.",
            "ops",
            ((rate(f"{COORDINATOR}_rollouts_total", "outcome"), "{{rljob}} {{outcome}}"),),
        ),
        Panel(
            "Verdicts on no answer",
            "Shares of the last step: no answer was found in the completion; the verifier raised, or the answer ended "
            "it; no verdict, sampled again.",
            "percentunit",
            (
                (latest(f"{COORDINATOR}_no_answer_share"), "{{rljob}} no answer"),
                (latest(f"{COORDINATOR}_verifier_error_share"), "{{rljob}} verifier errors"),
                (latest(f"{COORDINATOR}_ungraded_share"), "{{rljob}} ungraded"),
            ),
        ),
        Panel(
            "What failed and was tried again",
            "Verdicts and answers of tools that workers owed, gRPC calls and store operations that were repeated; a "
            "second.",
            "ops",
            (
                (rate("specrl_worker_failures_total", "pool, kind"), "{{rljob}} {{pool}} {{kind}}"),
                (rate("specrl_rpc_retries_total", "role"), "{{rljob}} calls of {{role}}"),
                (rate(f"{COORDINATOR}_store_retries_total"), "{{rljob}} store"),
            ),
        ),
        Panel(
            "Store latency",
            "Wall seconds of one durable read or write: the mean of each operation, and the 95th percentile of all.",
            "s",
            (
                (mean(f"{COORDINATOR}_store_seconds", "operation"), "{{rljob}} {{operation}}"),
                (quantile(0.95, f"{COORDINATOR}_store_seconds"), "{{rljob}} 95 %"),
            ),
        ),
        Panel(
            "Policy version served",
            "Newest version that every replica serves: the steps trained.",
            "short",
            ((latest(f"{COORDINATOR}_policy_version"), "{{rljob}}"),),
            minimum=None,
        ),
    ),
)
