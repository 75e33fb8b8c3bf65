"""The overview dashboard: how long the trainer waits for rollouts, why, and the run's rewards."""

from __future__ import annotations

from tools.dashboards.expressions import (
    divide_series,
    histogram_heat,
    histogram_mean,
    histogram_quantile,
    latest_value,
    ratio_to_run,
    sum_rate,
)
from tools.dashboards.model import RUN_VARIABLES, Dashboard, Panel, PanelKind

COORDINATOR = "specrl_coordinator"
EXPOSED = f"{COORDINATOR}_exposed_generation_seconds_total"
HIDDEN = f"{COORDINATOR}_hidden_generation_seconds_total"
UNDER_WAY = f"{COORDINATOR}_generation_under_way_seconds_total"
STEP = f"{COORDINATOR}_step_seconds"
STEPS = sum_rate(f"{STEP}_count", where='phase="train"')

OVERVIEW = Dashboard(
    "specrl-overview",
    "specrl / Overview",
    "How long the trainer waits for rollouts, where the rest of a step's time goes, and the run's rewards.",
    RUN_VARIABLES,
    (
        Panel(
            "Exposed generation, share of time",
            "Share of wall time in which the trainer was idle because it had no admissible batch. 0: generation is "
            "hidden behind training. Causes: buffer_wait (too few sampled rollouts), sync_drain (sending weights to "
            "replicas that joined), grading (verifiers grade the last rollouts of the step).",
            "percentunit",
            ((ratio_to_run(sum_rate(EXPOSED, "cause"), sum_rate(f"{STEP}_sum")), "{{rljob}} {{cause}}"),),
            stacked=True,
            maximum=1,
        ),
        Panel(
            "Exposed generation, seconds per step",
            "Mean wall seconds per step in which the trainer waited for rollouts, by cause.",
            "s",
            ((ratio_to_run(sum_rate(EXPOSED, "cause"), STEPS), "{{rljob}} {{cause}}"),),
            stacked=True,
        ),
        Panel(
            "Exposed and hidden generation, and weight sync, seconds per step",
            "Mean wall seconds per step. Under way: at least one rollout was in flight. Hidden: one was in flight, and "
            "the trainer did not wait. Exposed: the trainer waited for rollouts. Weight sync is the phase prepare, and "
            "no part of exposed generation.",
            "s",
            (
                (divide_series(sum_rate(EXPOSED), STEPS), "{{rljob}} exposed"),
                (divide_series(sum_rate(HIDDEN), STEPS), "{{rljob}} hidden"),
                (divide_series(sum_rate(UNDER_WAY), STEPS), "{{rljob}} under way"),
                (divide_series(sum_rate(f"{STEP}_sum", where='phase="prepare"'), STEPS), "{{rljob}} weight sync"),
            ),
        ),
        Panel(
            "Step by phase",
            "Mean wall seconds of a step. Its phases add up: data, prepare (weight sync), generation (exposed), "
            "logprob, train, and in some steps validation and checkpoint.",
            "s",
            ((ratio_to_run(sum_rate(f"{STEP}_sum", "phase"), STEPS), "{{rljob}} {{phase}}"),),
            stacked=True,
        ),
        Panel(
            "Reward and validation",
            "Mean reward of the last trained batch, and of the last validation.",
            "short",
            (
                (latest_value(f"{COORDINATOR}_reward_mean"), "{{rljob}} reward"),
                (latest_value(f"{COORDINATOR}_validation_reward_mean"), "{{rljob}} validation"),
            ),
            minimum=None,
        ),
        Panel(
            "pass@k",
            "pass@k of the last validation: the estimate, and both ends of its 95 % interval over problems. Only for "
            "runs whose rewards are 0 or 1.",
            "percentunit",
            ((latest_value(f"{COORDINATOR}_validation_pass_rate", "k, bound"), "{{rljob}} pass@{{k}} {{bound}}"),),
            maximum=1,
        ),
        Panel(
            "Rewards by name",
            "Mean of each of several rewards before weighting, in the last batch and in the last validation that it "
            "applied to. Empty for runs with one reward.",
            "short",
            (
                (latest_value(f"{COORDINATOR}_named_reward_mean", "reward"), "{{rljob}} {{reward}}"),
                (
                    latest_value(f"{COORDINATOR}_validation_named_reward_mean", "reward"),
                    "{{rljob}} {{reward}}, validation",
                ),
            ),
            minimum=None,
        ),
        Panel(
            "Policy lag of trained rollouts",
            "Trained rollouts by policy lag: steps between a rollout's oldest token and the trained policy.",
            "short",
            ((histogram_heat(f"{COORDINATOR}_policy_lag_steps"), "{{le}}"),),
            kind=PanelKind.HEATMAP,
        ),
        Panel(
            "Policy lag and its bound",
            "Mean policy lag of trained rollouts, and maxPolicyLag, which no rollout exceeds.",
            "short",
            (
                (histogram_mean(f"{COORDINATOR}_policy_lag_steps"), "{{rljob}} mean"),
                (latest_value(f"{COORDINATOR}_policy_lag_bound_steps"), "{{rljob}} bound"),
            ),
        ),
        Panel(
            "Generation replicas by state",
            "Replicas by state, as the coordinator knows it. Only serving replicas get new rollouts.",
            "short",
            ((latest_value(f"{COORDINATOR}_replicas", "state"), "{{rljob}} {{state}}"),),
            stacked=True,
        ),
        Panel(
            "Replicas that generation needs",
            "Replicas with which generation would be under way just as long as the trainer works, and those that "
            "serve. generation.autoscaling follows the first.",
            "short",
            (
                (latest_value(f"{COORDINATOR}_replicas_demand"), "{{rljob}} demand"),
                (latest_value(f"{COORDINATOR}_replicas", where='state="serving"'), "{{rljob}} serving"),
            ),
        ),
        Panel(
            "Groups in flight and buffered",
            "Groups whose rollouts are being generated, and complete groups that wait for their step.",
            "short",
            (
                (latest_value(f"{COORDINATOR}_groups_in_flight"), "{{rljob}} in flight"),
                (latest_value(f"{COORDINATOR}_groups_buffered"), "{{rljob}} buffered"),
            ),
        ),
        Panel(
            "Generated tokens per second, by replica",
            "Sampled tokens, as vLLM counts them.",
            "short",
            ((sum_rate("vllm:generation_tokens_total", "replica"), "{{rljob}} {{replica}}"),),
            stacked=True,
        ),
        Panel(
            "Rollouts by replica",
            "Unfinished rollouts that are assigned to a replica, and requests that its vLLM computes. The others are "
            "queued there, or are being graded.",
            "short",
            (
                (latest_value(f"{COORDINATOR}_replica_live_rollouts", "replica"), "{{rljob}} {{replica}} assigned"),
                (latest_value("vllm:num_requests_running", "replica"), "{{rljob}} {{replica}} running"),
            ),
        ),
        Panel(
            "KV cache in use",
            "Share of KV cache blocks in use, by replica. Near 1, vLLM preempts requests and recomputes them.",
            "percentunit",
            ((latest_value("vllm:kv_cache_usage_perc", "replica", how="max"), "{{rljob}} {{replica}}"),),
            maximum=1,
        ),
        Panel(
            "Preempted and waiting requests",
            "Preemptions per second, and requests that wait because KV cache memory or maxLiveRollouts is exhausted.",
            "short",
            (
                (sum_rate("vllm:num_preemptions_total", "replica"), "{{rljob}} {{replica}} preempted per second"),
                (latest_value("vllm:num_requests_waiting", "replica"), "{{rljob}} {{replica}} waiting"),
            ),
        ),
        Panel(
            "Rollouts by outcome",
            "Rollouts per second: trained, requeued (their replica was lost), resumed, poisoned, ungraded.",
            "ops",
            ((sum_rate(f"{COORDINATOR}_rollouts_total", "outcome"), "{{rljob}} {{outcome}}"),),
        ),
        Panel(
            "Rollouts without a proper reward",
            "Shares of the last step's rollouts. No answer: the completion contains none. Verifier errors: the "
            "verifier raised an error or was killed, and the reward is 0. Ungraded: there is no reward, and the "
            "rollout is sampled again.",
            "percentunit",
            (
                (latest_value(f"{COORDINATOR}_no_answer_share"), "{{rljob}} no answer"),
                (latest_value(f"{COORDINATOR}_verifier_error_share"), "{{rljob}} verifier errors"),
                (latest_value(f"{COORDINATOR}_ungraded_share"), "{{rljob}} ungraded"),
            ),
        ),
        Panel(
            "Verifier errors and tool calls",
            "Per second: verdicts that are 0 because the verifier failed, by exception and place, and tool calls by "
            "outcome.",
            "ops",
            (
                (sum_rate(f"{COORDINATOR}_verifier_errors_total", "error"), "{{rljob}} verifier: {{error}}"),
                (sum_rate(f"{COORDINATOR}_tool_calls_total", "outcome"), "{{rljob}} tool calls {{outcome}}"),
            ),
        ),
        Panel(
            "Skipped files",
            "Per second: files, or records in them, that could not be read and were skipped, by kind.",
            "ops",
            ((sum_rate("specrl_files_skipped_total", "kind"), "{{rljob}} {{kind}}"),),
        ),
        Panel(
            "Sinks of metrics",
            "Last step that each sink (tensorboard, wandb, mlflow) has got, and its failures per second. A sink "
            "catches up after a failure.",
            "short",
            (
                (latest_value(f"{COORDINATOR}_sink_step", "sink"), "{{rljob}} {{sink}} step"),
                (sum_rate(f"{COORDINATOR}_sink_failures_total", "sink"), "{{rljob}} {{sink}} failures per second"),
            ),
        ),
        Panel(
            "Failures and retries",
            "Per second: failures of verifier and tool workers, retried gRPC calls, retried store operations.",
            "ops",
            (
                (sum_rate("specrl_worker_failures_total", "pool, kind"), "{{rljob}} {{pool}} {{kind}}"),
                (sum_rate("specrl_rpc_retries_total", "role"), "{{rljob}} calls of {{role}}"),
                (sum_rate(f"{COORDINATOR}_store_retries_total"), "{{rljob}} store"),
            ),
        ),
        Panel(
            "Refused requests",
            "Per second: HTTP requests and connections by kind, and gRPC calls by error, that were refused.",
            "ops",
            (
                (sum_rate("specrl_http_refused_total", "kind"), "{{rljob}} HTTP {{kind}}"),
                (sum_rate("specrl_rpc_calls_refused_total", "error"), "{{rljob}} gRPC {{error}}"),
            ),
        ),
        Panel(
            "Store latency",
            "Wall seconds of one store operation: the mean by operation, and the 95th percentile of all.",
            "s",
            (
                (histogram_mean(f"{COORDINATOR}_store_seconds", "operation"), "{{rljob}} {{operation}}"),
                (histogram_quantile(0.95, f"{COORDINATOR}_store_seconds"), "{{rljob}} 95 %"),
            ),
        ),
        Panel(
            "Policy version served",
            "Newest policy version that every replica serves. It equals the number of trained steps.",
            "short",
            ((latest_value(f"{COORDINATOR}_policy_version"), "{{rljob}}"),),
            minimum=None,
        ),
    ),
)
