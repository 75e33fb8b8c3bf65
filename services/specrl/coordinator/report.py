"""What the coordinator tells people: one report a step, a status at any moment, a summary at the end.

These are plain JSON on the REST side, in `metrics.jsonl` and in the store; keys are camelCase as in the run file.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict, computed_field
from pydantic.alias_generators import to_camel


class Report(BaseModel):
    """Base: frozen, camelCase in JSON."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)


class Phase(StrEnum):
    """WAITING -> INITIALISING -> TRAINING (validation included) -> FINISHED; FAILED or STOPPED from any."""

    WAITING = "waiting"
    INITIALISING = "initialising"
    TRAINING = "training"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


class StageSeconds(Report):
    """Wall seconds of one step by stage. They partition the step: their sum is its wall time."""

    data: float = 0.0
    """Assembling the batch and carrying it to the trainer."""
    prepare: float = 0.0
    """Weight sync and its canary."""
    generation: float = 0.0
    """Exposed: the trainer waited for rollouts."""
    logprob: float = 0.0
    train: float = 0.0
    validation: float = 0.0
    """Only what the step waited for."""
    checkpoint: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(self.model_dump().values()))


class StepReport(Report):
    """One optimizer step."""

    step: int
    policy_version: int
    stages: StageSeconds
    exposed_generation: float
    """Seconds; equals stages.generation."""
    exposed_by_cause: dict[str, float] = {}
    """The same by cause: buffer_wait (too few rollouts were finished) and sync_drain (replicas that joined were given
    weights meanwhile)."""
    reward: float | None
    """Mean over the batch's rollouts; null when it has none, since every prompt of the step failed. Nothing was trained
    then, and the numbers of training are 0."""
    reward_error: float | None = None
    """Standard error of `reward`: of the mean over the prompts' means. Null with fewer than two prompts."""
    validation_reward: float | None = None
    """Mean reward of `policy_version` on the validation's problems, when it was validated."""
    validation_low: float | None = None
    validation_high: float | None = None
    """Its 95 % interval over problems; null where there is none (ValidationReport)."""
    groups: int = 0
    """Groups of the step whose rollouts are graded, trained on or left out; without the prompts that were given up."""
    rollouts: int
    tokens: int
    mean_length: float
    """In sampled tokens, as `tokens`."""
    tool_calls: float = 0.0
    """Mean answered calls of a rollout; 0 without tools."""
    acceptance_length: float | None
    """Mean tokens per verification since the step before; null without speculation."""
    accepted_per_position: list[float] = []
    """Share of drafts whose token i was accepted."""
    draft_length: float | None = None
    """Mean tokens of a draft since the step before; null without drafts."""
    speculation_gain: float | None = None
    """Speed over that of decoding without drafts, as measured of late, mean of the replicas; null when the draft
    length is fixed."""
    drafters_resting: int = 0
    """Replicas whose drafter is switched off because it does not pay."""
    policy_lag_max: int
    policy_lag_mean: float
    policy_lags: list[int] = []
    """How many rollouts had a policy lag of 0, of 1, and so on to the largest."""
    cursor: int | None = None
    """First place of the stream, from 0, whose prompt neither this step nor one before it settled; null in reports of
    runs that knew no order but InOrder."""
    ahead: list[int] = []
    """Places beyond the cursor that are settled: they overtook it. Always empty with order InOrder."""
    failed: dict[str, str] = {}
    """Prompts that this step gave up, by group id, each with the reason."""
    left_out: dict[str, list[int]] = {}
    """Places of the stream that this step settled without training their groups, since all rewards of a group were the
    same; by that reward. Empty unless trainer.loss.withoutSignal is LeaveOut."""
    groups_without_signal: int = 0
    """Of `groups`, those whose rewards were all the same: they teach nothing, trained on or left out."""
    verdicts: int = 0
    """Rollouts of the step's groups, each with a verdict; those that are left out included."""
    no_answer: int = 0
    """Of these verdicts, those on completions in which the verifier found no answer."""
    verifier_errors: dict[str, int] = {}
    """Of these verdicts, those that are 0 because the verifier raised while it read the answer, by type and place
    (`KeyError at my_rewards.py:12`), or because the answer ended it (`timeout`, `crash`)."""
    ungraded: int = 0
    """Rollouts since the step before that have no verdict, for reasons that no answer can cause, and were sampled
    again."""
    is_skipped: bool = False
    """An update was not made, since its gradients were not finite, nor any after it in this step. With `updates` 0 this
    version's policy is the one before."""
    updates: int = 1
    """Optimizer updates that the step has made."""
    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    clip_fraction: float
    clip_fraction_high: float = 0.0
    """Of clip_fraction, tokens whose ratio was above the upper clip."""
    importance_capped_fraction: float = 0.0
    """Tokens whose importance weight a bound has truncated or masked."""
    masked_fraction: float = 0.0
    """Tokens that a mask, of tokens or of rollouts, left out of the policy gradient."""
    reference_kl: float | None = None
    """Divergence of the policy from its reference, nats per token, weighted k3 estimate; null without a reference."""
    importance_weight_mean: float
    effective_sample_size: float
    mismatch_mean_abs: float
    mismatch_max_abs: float
    mismatch_kl: float
    mismatch_tokens: int
    drafter_loss: float | None = None
    drafter_acceptance: list[float] = []
    weight_sync: dict[str, float] = {}
    """Seconds by stage: pause, broadcast, verify, resume."""
    drafter_version: int = -1
    """Policy version at which the drafter that is served with this version was last trained; -1 without a drafter."""
    canary_mean_abs: float | None = None
    canary_max_abs: float | None = None
    """Sampler against trainer over the canaries since the step before, all replicas, in nats; null without any."""
    canary_tokens: int = 0
    """How many tokens the two above are over."""
    canary_seconds: float = 0.0
    """Wall time of these canaries; in `prepare`, and for a replica that joined in `generation`."""
    checksum: str = ""
    """One digest over the checksums of every tensor of this version; equal at the trainer and at all replicas."""

    @computed_field  # type: ignore[prop-decorator] # mypy has no decorated properties
    @property
    def no_answer_share(self) -> float:
        """Of the step's verdicts."""
        return self.no_answer / max(self.verdicts, 1)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verifier_error_share(self) -> float:
        """Of the step's verdicts."""
        return sum(self.verifier_errors.values()) / max(self.verdicts, 1)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ungraded_share(self) -> float:
        """Of the step's verdicts and the ungraded rollouts together."""
        return self.ungraded / max(self.ungraded + self.verdicts, 1)


class PassAt(Report):
    """pass@k: how probably one of k answers to a problem is right, mean over problems, with its 95 % interval."""

    k: int
    rate: float
    low: float
    high: float
    problems: int
    """That have at least k answers."""


class ValidationReport(Report):
    """One validation, all of it under one policy version."""

    policy_version: int
    reward: float
    """Mean reward of all answers; an answer without a reward counts as 0."""
    reward_low: float | None = None
    reward_high: float | None = None
    """Its 95 % interval over problems: by Student's t over the problems' means; where all rewards are 0 or 1 that of
    pass@1, which it then is. Null where there is nothing to judge by: one problem, or the same mean for all."""
    problems: int
    answers: int = 0
    """problems x validation.sampling.samplesPerPrompt."""
    seconds: float
    pass_at: list[PassAt] = []
    """For k = 1, 2, 4 and so on up to validation.sampling.samplesPerPrompt. Empty unless all rewards are 0 or 1: only
    then is an answer right or wrong. One without a reward is wrong."""
    ungraded: int = 0
    """Answers that have no reward."""
    failures: dict[str, int] = {}
    """Answers that the verifier has not judged, ungraded ones included, by reason."""

    @property
    def failed(self) -> int:
        """Answers that the verifier has not judged."""
        return sum(self.failures.values())


class ReplicaReport(Report):
    id: str
    state: str
    """joining, catchingUp, serving, updating, suspect, stale or draining (coordinator/replica_states.py)."""
    reason: str = ""
    """Why it is in this state, where that was not as planned."""
    policy_version: int
    live_rollouts: int
    drafter_version: int = -1
    """Policy version at which its drafter was last trained; -1: it has none, or no weights yet."""
    canary_mean_abs: float | None = None
    canary_max_abs: float | None = None
    """Its last canary, in nats; null before the first."""
    drafting: str | None = None
    """drafting, off or trial: what its adaptive draft length is doing; null when it is fixed."""
    predicted_gain: float | None = None
    measured_gain: float | None = None
    """Speed over that of decoding without drafts, as predicted from calibration and acceptance, and as measured."""


class Status(Report):
    """The run at this moment."""

    run: str
    phase: Phase
    detail: str = ""
    """What is going on, in words."""
    done: int = 0
    """Progress within `detail`, of `total`; both 0 when it cannot be counted."""
    total: int = 0
    step: int = 0
    """Last step trained."""
    steps: int = 0
    policy_version: int = 0
    replicas: list[ReplicaReport] = []
    replica_transitions: dict[str, int] = {}
    """How often replicas went from one state to another since the coordinator started: "joining -> catchingUp": 2."""
    is_paused: bool = False
    """Nothing new begins until somebody resumes it; what was under way is finished."""
    replicas_wanted: int | None = None
    """How many replicas the launcher of a local run is to keep; null in a cluster, where the RLJob says it."""
    checkpoint_step: int = 0
    """Step of the newest complete checkpoint; 0: none."""
    trainer: str = "absent"
    """absent | ready | training | recovering."""
    rollouts_collected: int = 0
    """Graded rollouts of the step that is being collected ..."""
    rollouts_wanted: int = 0
    """... of this many."""
    counters: dict[str, int] = {}
    """Events since the coordinator started, by name; counters.py has their meaning."""
    verdict_failures: dict[str, int] = {}
    """Verdicts that failed since the coordinator started, by reason; validation included."""
    given_up: dict[str, int] = {}
    """Prompts of the whole run that were given up, by reason."""
    error: str | None = None
    needs_user: bool = False
    """The run has failed, and would fail again: its user must repair something first."""
    summary: Summary | None = None


class DrafterStart(Report):
    """How a fresh drafter was initialised. Acceptance by position, at the run's temperature, greedy drafts."""

    rollouts: int
    """Trained on."""
    loss_per_epoch: list[float]
    trained_acceptance: list[float]
    """In the last epoch, on the rollouts that were trained on."""
    trained_acceptance_length: float
    held_out_prompts: int
    """Not trained on; what follows is measured on their rollouts. 0: none were held out."""
    held_out_acceptance: list[float] = []
    held_out_acceptance_length: float | None = None


class Summary(Report):
    """What a finished run has achieved, measured."""

    steps: int
    first_validation_reward: float | None
    last_validation_reward: float | None
    """Mean reward of the first and of the last validation; the first is null where there was one alone."""
    first_reward: float | None
    last_reward: float | None
    """Mean over the first and over the last `reward_steps` steps that have a reward."""
    reward_steps: int = 0
    """At most five, and so few that no step is in both. 0: too few steps to compare; first_reward is null then, and
    last_reward that of the only step."""
    first_acceptance_length: float | None
    last_acceptance_length: float | None
    """At the first step that drafted, and mean over the last steps that did, five at most, without that first one.
    With one such step alone the first is null."""
    groups: int = 0
    groups_without_signal: int = 0
    """Of all groups that the run has settled, those whose rewards were all the same: they taught nothing."""
    given_up: dict[str, int] = {}
    """Prompts that were given up, by reason."""
    policy_lag_max: int
    rollouts_trained: int
    prompts_trained: int
    discarded_for_age: int
    exposed_generation_share: float
    policy_path: str
    drafter_path: str
    checkpoint_path: str
    drafter_start: DrafterStart | None = None
    """None: the run's drafter was given, or it has none."""
