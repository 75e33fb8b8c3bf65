"""Every metric that specrl's services export, on one page. Base units; labels from small fixed sets, never an id.

`rljob` is the run's name, `replica` one of at most a few hundred. What the coordinator exports has the label itself; to
the series of replicas and trainer, and to vLLM's own, which a replica exports beside these as they are, whoever scrapes
them adds `rljob` and `replica` (docs/metrics.md). Counters exist from their process's start at 0, so that increase()
sees the first event. The operator's metrics are in specrl_operator/telemetry.py.
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
    "Wall seconds in which the trainer could run but had no admissible batch, by cause: buffer_wait (too few rollouts "
    "were finished), sync_drain (replicas that joined were given weights meanwhile). Sums to the stage generation.",
    ["rljob", "cause"],
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
NO_ANSWER_SHARE = Gauge(
    "specrl_coordinator_no_answer_share",
    "Share of the last step's verdicts on completions in which the verifier found no answer.",
    ["rljob"],
)
VERIFIER_ERROR_SHARE = Gauge(
    "specrl_coordinator_verifier_error_share",
    "Share of the last step's verdicts that are 0 because the verifier raised, or was ended by the answer.",
    ["rljob"],
)
VERIFIER_ERRORS = Counter(
    "specrl_coordinator_verifier_errors_total",
    "Verdicts of trained steps that are 0 because the verifier raised, by type and place (KeyError at "
    "my_rewards.py:12), or was ended by the answer (timeout, crash). Rare kinds are counted as other.",
    ["rljob", "error"],
)
UNGRADED_SHARE = Gauge(
    "specrl_coordinator_ungraded_share",
    "Share of rollouts without a verdict since the step before, among them and the last step's verdicts.",
    ["rljob"],
)
VALIDATION_REWARD_MEAN = Gauge(
    "specrl_coordinator_validation_reward_mean", "Mean reward of the last validation's answers.", ["rljob"]
)
VALIDATION_PASS_RATE = Gauge(
    "specrl_coordinator_validation_pass_rate",
    "Last validation's pass@k, and the ends of its 95 % interval over problems; where all rewards are 0 or 1.",
    ["rljob", "k", "bound"],
)
GROUPS_IN_FLIGHT = Gauge("specrl_coordinator_groups_in_flight", "Groups begun and not complete.", ["rljob"])
GROUPS_WITHOUT_SIGNAL = Counter(
    "specrl_coordinator_groups_without_signal_total",
    "Groups of trained steps whose rewards were all the same, by what became of them: trained, left_out.",
    ["rljob", "outcome"],
)
GROUPS_BUFFERED = Gauge("specrl_coordinator_groups_buffered", "Complete groups that wait for their step.", ["rljob"])
POLICY_VERSION = Gauge("specrl_coordinator_policy_version", "Newest policy version served by every replica.", ["rljob"])
REPLICAS = Gauge("specrl_coordinator_replicas", "Generation replicas by state.", ["rljob", "state"])
REPLICAS_MINIMUM = Gauge(
    "specrl_coordinator_replicas_minimum",
    "Fewest generation replicas that the run should have: failurePolicy.minGenerationReplicas.",
    ["rljob"],
)
REPLICA_LIVE_ROLLOUTS = Gauge(
    "specrl_coordinator_replica_live_rollouts",
    "Rollouts that a replica has been given and has not finished; its series goes with the replica.",
    ["rljob", "replica"],
)
REPLICA_POLICY_VERSION = Gauge(
    "specrl_coordinator_replica_policy_version",
    "Policy version that a replica serves; -1 before the first. Its series goes with the replica.",
    ["rljob", "replica"],
)
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
PAUSED = Gauge("specrl_coordinator_paused", "1 while people have the run paused; 0: it goes on.", ["rljob"])
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
    "KL (k3) between sampler and trainer over the last batch's rollouts of the newest version, in nats; that of the "
    "last batch that had any.",
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
ACCEPTED_SHARE = Gauge(
    "specrl_generation_accepted_share",
    "Share of the last step's drafts whose token at this position, from 0, was accepted.",
    ["rljob", "position"],
)
SINK_STEP = Gauge(
    "specrl_coordinator_sink_step",
    "Last step that a sink has taken: tensorboard, wandb or mlflow. Behind the policy version while it is away.",
    ["rljob", "sink"],
)
SINK_FAILURES = Counter(
    "specrl_coordinator_sink_failures_total",
    "Failures of a sink; it is opened again and catches up.",
    ["rljob", "sink"],
)

# -- a replica's own: rljob and replica are added by who scrapes it ----------------------------------------------------

CHOSEN_DRAFT_LENGTH = Gauge(
    "specrl_generation_chosen_draft_length",
    "Tokens that a draft has at this many live requests, as chosen by an adaptive draft length; 0 drafts none.",
    ["live"],
)
STEP_COST_SECONDS = Gauge(
    "specrl_generation_step_cost_seconds",
    "Wall seconds of one decoding step at this many live requests and this draft length: calibrated, and corrected by "
    "what is seen since. draft_length -1: the drafter rests.",
    ["live", "draft_length"],
)
CATCH_UPS = Counter(
    "specrl_generation_catch_ups_total",
    "Times that all live requests were computed anew, for the drafter to read what was decoded without it while the "
    "batch was too large for drafts to pay. Adaptive draft length only.",
)
REPLICA_GAIN = Gauge(
    "specrl_generation_replica_speculation_gain",
    "Speed over the calibrated speed without drafts, at this replica's recent loads: predicted from costs and "
    "acceptance, and measured. Adaptive draft length only.",
    ["kind"],
)
REPLICA_DRAFTER_VERSION = Gauge(
    "specrl_generation_drafter_version",
    "Policy version at which the drafter that this replica serves was last trained; -1: none.",
)

# -- the trainer's own, of rank 0: rljob is added by who scrapes it ----------------------------------------------------

TRAINER_STEP = Gauge("specrl_trainer_step", "Last step trained, or loaded from a checkpoint.")
TRAINER_STAGE_SECONDS = Histogram(
    "specrl_trainer_stage_seconds",
    "Wall seconds of one step at the trainer, by stage: logprob, train (drafter included).",
    ["stage"],
    buckets=SECONDS,
)
TRAINER_TOKENS = Counter("specrl_trainer_tokens_total", "Sampled tokens trained on.")
TRAINER_LOSS = Gauge("specrl_trainer_loss", "Policy's loss at the last step, a mean over tokens.")
TRAINER_GRAD_NORM = Gauge("specrl_trainer_grad_norm", "Norm of the policy's last gradient, before its clip.")
TRAINER_LEARNING_RATE = Gauge("specrl_trainer_learning_rate", "Learning rate of the last step.")
TRAINER_ENTROPY = Gauge("specrl_trainer_entropy_nats", "Policy's mean entropy of a token at the last step, in nats.")
TRAINER_EFFECTIVE_SAMPLE_SIZE = Gauge(
    "specrl_trainer_effective_sample_size",
    "Share of the last batch's tokens that count as much as uncorrected ones: (sum w)^2 / (n sum w^2), 0 to 1.",
)
TRAINER_IMPORTANCE_WEIGHT = Gauge(
    "specrl_trainer_importance_weight_mean", "Mean importance weight of the last batch's tokens, after its cap."
)
TRAINER_CLIP_FRACTION = Gauge(
    "specrl_trainer_clip_fraction",
    "Share of the last batch's tokens that a clip held: low and high (the policy's ratio), importance (the cap of the "
    "weight).",
    ["clip"],
)
TRAINER_MASKED_FRACTION = Gauge(
    "specrl_trainer_masked_fraction",
    "Share of the last batch's tokens that a mask, of tokens or of rollouts, left out of the policy gradient.",
)
TRAINER_REFERENCE_KL = Gauge(
    "specrl_trainer_reference_kl_nats",
    "Divergence of the policy from its reference at the last step, nats per token (k3, weighted by policy over "
    "sampler); 0 without a reference.",
)
TRAINER_STEPS_SKIPPED = Counter(
    "specrl_trainer_steps_skipped_total", "Steps of which an update was not made, since gradients were not finite."
)
TRAINER_DRAFTER_GRAD_NORM = Gauge(
    "specrl_trainer_drafter_grad_norm", "Norm of the drafter's gradient at the last step, before its clip."
)
TRAINER_DRAFTER_ACCEPTANCE = Gauge(
    "specrl_trainer_drafter_acceptance",
    "How probably the policy accepts the draft token at this position, from 0, given those before it; last step.",
    ["position"],
)
TRAINER_CHECKPOINT_SECONDS = Histogram(
    "specrl_trainer_checkpoint_seconds", "Wall seconds of one checkpoint, until it is complete.", buckets=SECONDS
)
TRAINER_CHECKPOINT_SNAPSHOT_SECONDS = Histogram(
    "specrl_trainer_checkpoint_snapshot_seconds",
    "Wall seconds for which one checkpoint keeps the trainer from training.",
    buckets=SECONDS,
)

# -- of every process -------------------------------------------------------------------------------------------------

RPC_RETRIES = Counter(
    "specrl_rpc_retries_total",
    "gRPC calls that were repeated after a failure that may pass, by the role that was called.",
    ["role"],
)
WORKER_FAILURES = Counter(
    "specrl_worker_failures_total",
    "Questions that workers left unanswered, by pool (verifier, tool) and kind: error, crash and timeout, which a "
    "question may have caused, and ungraded. A verdict that fails through its answer is 0.",
    ["pool", "kind"],
)

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
