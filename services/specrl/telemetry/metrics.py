"""All metrics of specrl's services. docs/metrics.md is generated from this file.

Metrics use base units. Label values come from small fixed sets, never from ids of requests or rollouts. `rljob` is the
run's name; `replica` has at most a few hundred values. The coordinator sets these labels itself. For the metrics of
replicas and of the trainer, and for vLLM's own, which a replica exports unchanged, the scraper adds `rljob` and
`replica` (docs/metrics.md). Counters start at 0 with their process, so that increase() sees the first event. The
operator's metrics are in specrl_operator/telemetry.py.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from specrl.telemetry.training_figures import FIGURES

# Buckets from a step of a tiny model on a laptop to one of a large model on a cluster.
SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)

STEP_SECONDS = Histogram(
    "specrl_coordinator_step_seconds",
    "Wall seconds of one step, by phase: data, prepare (weight sync), generation (exposed), logprob, train, and "
    "validation and checkpoint in steps that wait for them. The phases do not overlap; they sum to the step.",
    ["rljob", "phase"],
    buckets=SECONDS,
)
EXPOSED_GENERATION_SECONDS = Counter(
    "specrl_coordinator_exposed_generation_seconds_total",
    "Wall seconds in which the trainer was idle because it had no batch, by cause. buffer_wait: too few rollouts were "
    "sampled. sync_drain: replicas that joined were receiving weights. grading: all rollouts of the step were sampled, "
    "and verifiers graded the last ones. The causes sum to the phase generation.",
    ["rljob", "cause"],
)
GENERATION_UNDER_WAY_SECONDS = Counter(
    "specrl_coordinator_generation_under_way_seconds_total",
    "Wall seconds of steps in which at least one rollout was in flight: a replica had been given it and had not "
    "returned it.",
    ["rljob"],
)
HIDDEN_GENERATION_SECONDS = Counter(
    "specrl_coordinator_hidden_generation_seconds_total",
    "Wall seconds of generation under way in which the trainer did not wait for rollouts.",
    ["rljob"],
)
POLICY_LAG = Histogram(
    "specrl_coordinator_policy_lag_steps",
    "Policy lag of each trained rollout: step - 1 minus the oldest policy version among its tokens.",
    ["rljob"],
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16),
)
POLICY_LAG_BOUND = Gauge("specrl_coordinator_policy_lag_bound_steps", "schedule.maxPolicyLag of the run.", ["rljob"])
ROLLOUTS = Counter(
    "specrl_coordinator_rollouts_total",
    "Rollouts by outcome: trained; requeued (their replica was lost); resumed (after a restart of the coordinator). "
    "Two outcomes are sampled again: poisoned (failed a record check) and ungraded (could not be graded).",
    ["rljob", "outcome"],
)
TOOL_CALLS = Counter(
    "specrl_coordinator_tool_calls_total",
    "Tool calls by outcome. answered: with an output. malformed: an end without a beginning; the policy gets an error "
    "as answer. failed: the rollout is ungraded and sampled again.",
    ["rljob", "outcome"],
)
REWARD_MEAN = Gauge("specrl_coordinator_reward_mean", "Mean reward of the last trained batch.", ["rljob"])
NAMED_REWARD_MEAN = Gauge(
    "specrl_coordinator_named_reward_mean",
    "Mean of one of several rewards in the last trained batch that it applied to, before weighting.",
    ["rljob", "reward"],
)
NO_ANSWER_SHARE = Gauge(
    "specrl_coordinator_no_answer_share",
    "Share of the last step's verdicts on completions in which the verifier found no answer.",
    ["rljob"],
)
VERIFIER_ERROR_SHARE = Gauge(
    "specrl_coordinator_verifier_error_share",
    "Share of the last step's verdicts that are 0 because the verifier raised, crashed or timed out.",
    ["rljob"],
)
VERIFIER_ERRORS = Counter(
    "specrl_coordinator_verifier_errors_total",
    "Verdicts of trained steps that are 0 because the verifier failed, by exception and place (KeyError at "
    "my_rewards.py:12), timeout or crash. Beyond 32 kinds, further ones count as other.",
    ["rljob", "error"],
)
UNGRADED_SHARE = Gauge(
    "specrl_coordinator_ungraded_share",
    "Rollouts since the previous step that could not be graded, as a share of these and the last step's verdicts.",
    ["rljob"],
)
VALIDATION_REWARD_MEAN = Gauge(
    "specrl_coordinator_validation_reward_mean", "Mean reward of the last validation.", ["rljob"]
)
VALIDATION_NAMED_REWARD_MEAN = Gauge(
    "specrl_coordinator_validation_named_reward_mean",
    "Mean of one of several rewards in the last validation, before weighting.",
    ["rljob", "reward"],
)
VALIDATION_PASS_RATE = Gauge(
    "specrl_coordinator_validation_pass_rate",
    "pass@k of the last validation: the estimate, and both ends of its 95 % interval over problems. Only set if all "
    "rewards are 0 or 1.",
    ["rljob", "k", "bound"],
)
GROUPS_IN_FLIGHT = Gauge("specrl_coordinator_groups_in_flight", "Groups that are started and not complete.", ["rljob"])
GROUPS_WITHOUT_SIGNAL = Counter(
    "specrl_coordinator_groups_without_signal_total",
    "Groups of trained steps whose rewards were all equal, by outcome: trained, left_out.",
    ["rljob", "outcome"],
)
GROUPS_BUFFERED = Gauge("specrl_coordinator_groups_buffered", "Complete groups that wait for their step.", ["rljob"])
POLICY_VERSION = Gauge(
    "specrl_coordinator_policy_version", "Newest policy version that every replica serves.", ["rljob"]
)
REPLICAS = Gauge("specrl_coordinator_replicas", "Generation replicas by state.", ["rljob", "state"])
REPLICAS_MINIMUM = Gauge(
    "specrl_coordinator_replicas_minimum",
    "Minimum number of generation replicas of the run: failurePolicy.minGenerationReplicas.",
    ["rljob"],
)
REPLICAS_DEMAND = Gauge(
    "specrl_coordinator_replicas_demand",
    "Replicas with which generation would be under way just as long as the trainer works: replicas x generation under "
    "way / (wall time - exposed generation), over 15 minutes and at least 4 steps. For autoscalers.",
    ["rljob"],
)
REPLICA_LIVE_ROLLOUTS = Gauge(
    "specrl_coordinator_replica_live_rollouts",
    "Rollouts that are assigned to a replica and not finished. The series is removed with the replica.",
    ["rljob", "replica"],
)
REPLICA_POLICY_VERSION = Gauge(
    "specrl_coordinator_replica_policy_version",
    "Policy version that a replica serves; -1 before the first. The series is removed with the replica.",
    ["rljob", "replica"],
)
REPLICA_TRANSITIONS = Counter(
    "specrl_coordinator_replica_transitions_total",
    "State transitions of generation replicas, by the state before and after.",
    ["rljob", "before", "after"],
)
TRAINER_RECOVERIES = Counter(
    "specrl_coordinator_trainer_recoveries_total",
    "Times that a restarted trainer replayed the missing steps and rejoined the run.",
    ["rljob"],
)
CHECKPOINTS_FAILED = Counter(
    "specrl_coordinator_checkpoints_failed_total",
    "Checkpoints that the trainer could not write. The run continues.",
    ["rljob"],
)
STORE_SECONDS = Histogram(
    "specrl_coordinator_store_seconds",
    "Wall seconds of one successful read or durable write of the run's state, by operation.",
    ["rljob", "operation"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
STORE_RETRIES = Counter(
    "specrl_coordinator_store_retries_total",
    "Reads and writes of the run's state that failed and were retried, by operation.",
    ["rljob", "operation"],
)
PAUSED = Gauge("specrl_coordinator_paused", "1 while a user has paused the run, otherwise 0.", ["rljob"])
STORE_REACHABLE = Gauge(
    "specrl_coordinator_store_reachable",
    "1 while the run's state can be written; 0 while it cannot, and the run does not advance.",
    ["rljob"],
)
WEIGHT_SYNC_SECONDS = Histogram(
    "specrl_weight_sync_seconds",
    "Wall seconds of one weight update, by part: pause, broadcast, verify, resume (includes loading).",
    ["rljob", "phase"],
    buckets=SECONDS,
)
WEIGHT_SYNC_BYTES = Counter(
    "specrl_weight_sync_bytes_total", "Bytes of broadcast weights, counted once per update.", ["rljob"]
)
WEIGHT_SYNC_RETRIES = Counter(
    "specrl_weight_sync_retries_total", "Weight transfers that were retried, by reason.", ["rljob", "reason"]
)
CANARIES = Counter(
    "specrl_sampler_canaries_total",
    "Canaries of single replicas, by outcome. disagreed: the weights are sent again, or the run ends. skipped: no "
    "answer in time. lost: the replica was lost. The other outcome is agreed.",
    ["rljob", "outcome"],
)
CANARY_TOKENS = Counter("specrl_sampler_canary_tokens_total", "Tokens that canaries compared.", ["rljob"])
CANARY_MEAN_ABS = Gauge(
    "specrl_sampler_canary_mean_abs_nats",
    "Mean absolute difference between sampler and trainer log-probabilities in the last canary.",
    ["rljob"],
)
CANARY_MAX_ABS = Gauge(
    "specrl_sampler_canary_max_abs_nats",
    "Largest absolute difference between sampler and trainer log-probabilities in the last canary.",
    ["rljob"],
)
CANARY_SECONDS = Histogram(
    "specrl_sampler_canary_seconds",
    "Wall seconds of the canaries of one update, of all replicas concurrently. Part of the step's phase prepare.",
    ["rljob"],
    buckets=SECONDS,
)
ACCEPTANCE_LENGTH = Gauge(
    "specrl_generation_acceptance_length",
    "Mean tokens per verification over the last step, including the bonus token.",
    ["rljob"],
)
DRAFT_LENGTH = Gauge("specrl_generation_draft_length", "Mean tokens per draft over the last step.", ["rljob"])
SPECULATION_GAIN = Gauge(
    "specrl_generation_speculation_gain",
    "Measured decoding speed divided by the measured speed without drafts, mean of the replicas. Adaptive draft "
    "length only.",
    ["rljob"],
)
DRAFTERS_OFF = Gauge(
    "specrl_generation_drafters_off",
    "Replicas whose drafter is switched off because drafting would slow them down.",
    ["rljob"],
)
DRAFTER_VERSION_LAG = Gauge(
    "specrl_drafter_version_lag",
    "Newest policy version minus the version at which the oldest served drafter was last trained.",
    ["rljob"],
)
DRAFTER_LOSS = Gauge("specrl_drafter_loss", "Loss of the drafter at the last step.", ["rljob"])
ACCEPTED_SHARE = Gauge(
    "specrl_generation_accepted_share",
    "Share of the last step's drafts whose token at this position was accepted. Positions count from 0.",
    ["rljob", "position"],
)
SINK_STEP = Gauge(
    "specrl_coordinator_sink_step",
    "Last step that was sent to a sink (tensorboard, wandb or mlflow). Lags behind while the sink is unreachable.",
    ["rljob", "sink"],
)
SINK_FAILURES = Counter(
    "specrl_coordinator_sink_failures_total",
    "Failures of a sink. It is reopened and then catches up.",
    ["rljob", "sink"],
)

# -- of a replica; the scraper adds the labels rljob and replica -------------------------------------------------------

CHOSEN_DRAFT_LENGTH = Gauge(
    "specrl_generation_chosen_draft_length",
    "Draft length that the adaptive controller has chosen for this many live requests; 0: no drafts.",
    ["live"],
)
STEP_COST_SECONDS = Gauge(
    "specrl_generation_step_cost_seconds",
    "Wall seconds of one decoding step with this many live requests and this draft length, "
    "learnt from the steps of this run and of earlier ones. draft_length -1: the drafter is switched off.",
    ["live", "draft_length"],
)
CATCH_UPS = Counter(
    "specrl_generation_catch_ups_total",
    "Times that all live requests were recomputed. The drafter then reads the tokens that were decoded while it was "
    "switched off for a large batch. Adaptive draft length only.",
)
REPLICA_GAIN = Gauge(
    "specrl_generation_replica_speculation_gain",
    "Decoding speed divided by the measured speed without drafts, at this replica's recent batch sizes, by kind: "
    "predicted (from costs and acceptance) and measured. Adaptive draft length only.",
    ["kind"],
)
REPLICA_DRAFTER_VERSION = Gauge(
    "specrl_generation_drafter_version",
    "Policy version at which the drafter that this replica serves was last trained; -1 without a drafter.",
)

# -- of the trainer, from rank 0; the scraper adds the label rljob -----------------------------------------------------

TRAINER_STEP = Gauge("specrl_trainer_step", "Last step trained, or loaded from a checkpoint.")
TRAINER_PHASE_SECONDS = Histogram(
    "specrl_trainer_phase_seconds",
    "Wall seconds of one step at the trainer, by part: logprob, train (includes the drafter).",
    ["phase"],
    buckets=SECONDS,
)
TRAINER_TOKENS = Counter("specrl_trainer_tokens_total", "Sampled tokens trained on.")
# A figure that is averaged over nothing in a step is unknown there, and its gauge keeps the last known value.
TRAINER_FIGURES = {
    name: Gauge(
        figure.gauge,
        f"{figure.help} Of the last step{' in which it is known' if figure.over else ''}. Unit: {figure.unit}.",
    )
    for name, figure in FIGURES.items()
    if figure.gauge
}
TRAINER_CLIP_FRACTION = Gauge(
    "specrl_trainer_clip_fraction",
    "Share of the last batch's tokens that were clipped: low and high (bounds of the policy ratio), importance (cap of "
    "the importance weight).",
    ["clip"],
)
TRAINER_STEPS_SKIPPED = Counter(
    "specrl_trainer_steps_skipped_total", "Steps in which an update was skipped because its gradients were not finite."
)
TRAINER_DRAFTER_GRAD_NORM = Gauge(
    "specrl_trainer_drafter_grad_norm", "Norm of the drafter's gradient at the last step, before clipping."
)
TRAINER_DRAFTER_ACCEPTANCE = Gauge(
    "specrl_trainer_drafter_acceptance",
    "Probability that the policy accepts the draft token at this position, given those before it, at the last step. "
    "Positions count from 0.",
    ["position"],
)
TRAINER_CHECKPOINT_SECONDS = Histogram(
    "specrl_trainer_checkpoint_seconds", "Wall seconds of one checkpoint, until it is complete.", buckets=SECONDS
)
TRAINER_CHECKPOINT_SNAPSHOT_SECONDS = Histogram(
    "specrl_trainer_checkpoint_snapshot_seconds",
    "Wall seconds for which one checkpoint blocks training.",
    buckets=SECONDS,
)

# -- of any process ---------------------------------------------------------------------------------------------------

RPC_RETRIES = Counter(
    "specrl_rpc_retries_total",
    "gRPC calls that were retried after a transient failure, by the called role.",
    ["role"],
)
WORKER_FAILURES = Counter(
    "specrl_worker_failures_total",
    "Requests that a worker did not answer, by pool (verifier, tool) and kind. error, crash, timeout: the request may "
    "be the cause, so a verdict is 0. ungraded: it is not the cause, so the rollout is sampled again.",
    ["pool", "kind"],
)
CALLS_REFUSED = Counter(
    "specrl_rpc_calls_refused_total",
    "gRPC calls that were answered with an error, by method and error class. Unexpected means a bug in specrl.",
    ["method", "error"],
)
HTTP_REFUSALS = (
    *("host", "token", "permission", "body", "timeout"),
    *("malformed", "pipelined", "crowded", "unread"),
)
"""Kinds of HTTP requests and connections that are refused."""

HTTP_REFUSED = Counter(
    "specrl_http_refused_total",
    "HTTP requests and connections that were refused, by kind. host: of another name than the run's. token: without "
    "that is right. permission: of a user without the right, or whose token could not be reviewed. body: too long. "
    "timeout: too slow, or idle. malformed: not HTTP, or headers too long. pipelined: sent before the last answer. "
    "crowded: the oldest of too many connections. unread: its answer was not read.",
    ["kind"],
)
FILES_SKIPPED = Counter(
    "specrl_files_skipped_total",
    "Files, or records in them, that could not be read and were skipped, by kind: checkpoint, step_answer, "
    "draft_costs, drafter_progress, report, prompt, timeline.",
    ["kind"],
)
