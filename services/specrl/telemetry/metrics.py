"""Every metric that specrl exports, on one page. Base units; labels from small fixed sets, never an id of a rollout.

`rljob` is the run's name, `replica` one of at most a few hundred. vLLM's own metrics are exported beside these by the
generation service, as they are.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000, 2500)

STEP_SECONDS = Histogram(
    "specrl_coordinator_step_seconds",
    "Wall seconds of one step, by stage: data, prepare (weight sync), generation (exposed), logprob, train, and "
    "validation and checkpoint in the steps that have them. The stages partition the step.",
    ["rljob", "phase"],
    buckets=SECONDS,
)
EXPOSED_GENERATION_SECONDS = Counter(
    "specrl_coordinator_exposed_generation_seconds_total",
    "Wall seconds in which the trainer could run but had no admissible batch, by cause.",
    ["rljob", "cause"],
)
POLICY_LAG = Histogram(
    "specrl_coordinator_policy_lag_steps",
    "Policy lag of each trained rollout: step - 1 minus the oldest policy version among its tokens.",
    ["rljob"],
    buckets=(0, 1, 2, 3, 4, 6, 8, 12, 16),
)
ROLLOUTS = Counter(
    "specrl_coordinator_rollouts_total",
    "Rollouts by outcome: trained, requeued (their replica was lost), resumed (taken up after a restart of the "
    "coordinator), poisoned (failed record checks), ungraded.",
    ["rljob", "outcome"],
)
TOOL_CALLS = Counter(
    "specrl_coordinator_tool_calls_total",
    "Calls of tools by outcome: answered, malformed (an end without a beginning; the policy reads that), failed (their "
    "rollouts are ungraded and sampled again).",
    ["rljob", "outcome"],
)
REWARD_MEAN = Gauge("specrl_coordinator_reward_mean", "Mean reward of the last trained batch.", ["rljob"])
VALIDATION_ACCURACY = Gauge("specrl_coordinator_validation_accuracy", "Last validation accuracy, 0 to 1.", ["rljob"])
GROUPS_IN_FLIGHT = Gauge("specrl_coordinator_groups_in_flight", "Groups begun and not complete.", ["rljob"])
GROUPS_BUFFERED = Gauge("specrl_coordinator_groups_buffered", "Complete groups that wait for their step.", ["rljob"])
POLICY_VERSION = Gauge("specrl_coordinator_policy_version", "Newest policy version served by every replica.", ["rljob"])
REPLICAS = Gauge("specrl_coordinator_replicas", "Generation replicas by state.", ["rljob", "state"])
REPLICA_TRANSITIONS = Counter(
    "specrl_coordinator_replica_transitions_total",
    "Changes of state of generation replicas, by state before and after.",
    ["rljob", "before", "after"],
)
TRAINER_RECOVERIES = Counter(
    "specrl_coordinator_trainer_recoveries_total", "Times the trainer came back and was brought up to date.", ["rljob"]
)
CHECKPOINTS_FAILED = Counter(
    "specrl_coordinator_checkpoints_failed_total",
    "Checkpoints that the trainer could not write; the run goes on.",
    ["rljob"],
)
STORE_SECONDS = Histogram(
    "specrl_coordinator_store_seconds",
    "Wall seconds of one durable write, or read, of the run's state, by operation; attempts that failed left out.",
    ["rljob", "operation"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5),
)
STORE_RETRIES = Counter(
    "specrl_coordinator_store_retries_total",
    "Reads and writes of the run's state that failed and were repeated, by operation.",
    ["rljob", "operation"],
)
STORE_REACHABLE = Gauge(
    "specrl_coordinator_store_reachable", "1 while the run's state can be written; 0: nothing advances.", ["rljob"]
)
WEIGHT_SYNC_SECONDS = Histogram(
    "specrl_weight_sync_seconds",
    "Wall seconds of one weight update by stage: pause, broadcast, verify, resume (loading included).",
    ["rljob", "stage"],
    buckets=SECONDS,
)
WEIGHT_SYNC_BYTES = Counter("specrl_weight_sync_bytes_total", "Bytes broadcast, counted once per update.", ["rljob"])
WEIGHT_SYNC_RETRIES = Counter(
    "specrl_weight_sync_retries_total", "Weight transfers that were repeated, by reason.", ["rljob", "reason"]
)
SAMPLER_MISMATCH_KL = Gauge(
    "specrl_sampler_mismatch_kl",
    "KL (k3) between sampler and trainer over the last batch's rollouts of the newest version, in nats.",
    ["rljob"],
)
CANARIES = Counter(
    "specrl_sampler_canaries_total",
    "Canaries of single replicas by outcome: agreed, disagreed (the weights are sent again, or the run ends), skipped "
    "(no answer in time), lost (the replica died).",
    ["rljob", "outcome"],
)
CANARY_TOKENS = Counter("specrl_sampler_canary_tokens_total", "Tokens that canaries compared.", ["rljob"])
CANARY_MEAN_ABS = Gauge(
    "specrl_sampler_canary_mean_abs_nats",
    "Mean absolute difference of sampler and trainer log-probabilities over the last replica's canary.",
    ["rljob"],
)
CANARY_MAX_ABS = Gauge("specrl_sampler_canary_max_abs_nats", "The same, at the token where it is largest.", ["rljob"])
CANARY_SECONDS = Histogram(
    "specrl_sampler_canary_seconds",
    "Wall seconds of the canaries of one update, all replicas at once; part of the step's prepare stage.",
    ["rljob"],
    buckets=SECONDS,
)
ACCEPTANCE_LENGTH = Gauge(
    "specrl_generation_acceptance_length",
    "Mean tokens emitted per verification over the last step, bonus token included.",
    ["rljob"],
)
DRAFT_LENGTH = Gauge(
    "specrl_generation_draft_length", "Mean tokens of a draft over the last step: the k that was chosen.", ["rljob"]
)
SPECULATION_GAIN = Gauge(
    "specrl_generation_speculation_gain",
    "Measured speed over the calibrated speed without drafts, mean of the replicas; adaptive draft length only.",
    ["rljob"],
)
DRAFTERS_RESTING = Gauge(
    "specrl_generation_drafters_resting", "Replicas whose drafter is switched off because it does not pay.", ["rljob"]
)
DRAFTER_VERSION_LAG = Gauge(
    "specrl_drafter_version_lag",
    "Newest policy version minus the version at which the oldest drafter that is served was last trained.",
    ["rljob"],
)
DRAFTER_LOSS = Gauge("specrl_drafter_loss", "Drafter's loss at the last step.", ["rljob"])

# -- what crosses a border and is refused -----------------------------------------------------------------------------

CALLS_REFUSED = Counter(
    "specrl_rpc_calls_refused_total",
    "gRPC calls that were answered with an error, by method and the error's class; Unexpected is a bug of ours.",
    ["method", "error"],
)
FILES_PASSED_OVER = Counter(
    "specrl_files_passed_over_total",
    "Files, or records in them, that could not be read and were done without, by kind: checkpoint, step_answer, "
    "draft_costs, drafter_progress, report, prompt.",
    ["kind"],
)
