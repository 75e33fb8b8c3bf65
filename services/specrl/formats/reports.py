"""The records that the coordinator reports: one per step and per validation, the present status, the final summary.

They are JSON in the REST API, in metrics.jsonl and in the store. Keys are camelCase, as in the run file.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, computed_field
from pydantic.alias_generators import to_camel

from specrl.telemetry.training_figures import TrainingFigures


class ReportModel(BaseModel):
    """Base of all reports: frozen, with camelCase keys in JSON."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)


class Phase(StrEnum):
    """The phase of a run.

    WAITING -> INITIALISING -> TRAINING (with validations) -> FINISHED
    any of these -> FAILED or STOPPED
    """

    WAITING = "waiting"
    INITIALISING = "initialising"
    TRAINING = "training"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def is_over(self) -> bool:
        """Whether this coordinator process does no more work on the run."""
        return self in (Phase.FINISHED, Phase.FAILED, Phase.STOPPED)


CAUSES = ("bufferWait", "syncDrain", "grading")
"""Causes of exposed generation. bufferWait: too few rollouts were sampled. syncDrain: replicas that joined were
receiving weights. grading: all rollouts of the step were sampled, and verifiers graded the last ones."""


class PhaseSeconds(ReportModel):
    """Wall seconds of one step by activity. Activities do not overlap, so the sum is the step's wall time."""

    data: float = 0.0
    """Assembling the batch and sending it to the trainer."""
    prepare: float = 0.0
    """Weight sync, with its canary."""
    generation: float = 0.0
    """Exposed generation: the trainer waited for rollouts."""
    logprob: float = 0.0
    """Computing log-probabilities at the trainer."""
    train: float = 0.0
    """Training the policy and the drafter."""
    validation: float = 0.0
    """Waiting for a validation. A validation that overlaps the step does not count."""
    checkpoint: float = 0.0
    """Waiting for a checkpoint. Writing one while training goes on does not count."""

    @property
    def wall_seconds(self) -> float:
        """Wall seconds of the step."""
        return float(sum(self.model_dump().values()))

    @property
    def exposed_share(self) -> float:
        """Share of the wall time in which the trainer waited for rollouts, 0 to 1."""
        return self.generation / self.wall_seconds if self.wall_seconds else 0.0


class SourceReport(ReportModel):
    """The groups of one step that are of one source."""

    reward: float
    """Mean over the rollouts of these groups."""
    groups: int
    """Graded groups, trained on or left out."""
    groups_without_signal: int
    """Number of `groups` whose rewards were all equal."""


class StepReport(ReportModel, TrainingFigures):
    """The report of one step. It inherits the figures of training from `TrainingFigures`."""

    # Time
    step: int
    """Number of the step, from 1."""
    policy_version: int
    """The version that the step produced; equals `step`."""
    phases: PhaseSeconds
    """Wall seconds of the step by activity."""
    exposed_generation: float
    """Seconds in which the trainer waited for rollouts. Equals phases.generation."""
    generation_under_way: float = 0.0
    """Seconds in which at least one rollout was in flight: a replica was given it and had not returned it."""
    hidden_generation: float = 0.0
    """Seconds of `generation_under_way` in which the trainer did not wait for rollouts."""
    exposed_by_cause: dict[str, float] = {}
    """Exposed generation by cause, in seconds. bufferWait: too few rollouts were sampled. syncDrain: replicas that
    joined were receiving weights. grading: all rollouts of the step were sampled, and verifiers graded the last ones.
    """

    # Rewards
    reward: float | None
    """Mean over the rollouts of the step's groups. Null only in reports of earlier versions: a step without any valid
    reward ends the run, and has no report."""
    reward_error: float | None = None
    """Standard error of `reward`, from the means of the step's prompts. Null with fewer than two prompts."""
    rewards: dict[str, float] = {}
    """Mean of each reward by name, before weighting, over the rollouts that it applied to. Empty if the run has one
    reward. A reward that applied to none of the step's rollouts has no entry."""
    sources: dict[str, SourceReport] = {}
    """The rewards of each training source, by its name. Empty if there is only one. A source without a graded group in
    this step has no entry."""
    validation_reward: float | None = None
    """Mean reward of `policy_version` on the validation problems. Null when this version was not validated."""
    validation_low: float | None = None
    """Lower end of the 95 % interval of `validation_reward` over problems; null if there is none (ValidationReport)."""
    validation_high: float | None = None
    """Upper end of that interval."""
    validation_rewards: dict[str, float] = {}
    """Mean of each reward by name in that validation. Empty as `rewards`."""

    # Size of the batch
    groups: int = 0
    """Graded groups of the step, trained on or left out. Prompts that were given up do not count."""
    rollouts: int
    """Rollouts trained on."""
    tokens: int
    """Sampled tokens trained on, without prompts."""
    mean_length: float
    """Mean sampled tokens of a rollout."""
    tool_calls: float = 0.0
    """Mean number of answered tool calls per rollout; 0 without tools."""

    # Speculation
    acceptance_length: float | None
    """Mean tokens per verification since the previous step. Null without speculation, and if nothing was drafted since:
    drafting was off, or the step's rollouts were sampled before, as those of the last steps with a policy lag."""
    accepted_per_position: list[float] = []
    """For each position of a draft, the share of drafts whose token there was accepted. Without positions that no draft
    reached."""
    draft_length: float | None = None
    """Mean tokens per draft since the previous step; null without drafts."""
    speculation_gain: float | None = None
    """Recent decoding speed divided by the speed without drafts, mean of the replicas. Null with a fixed draft
    length."""
    drafters_off: int = 0
    """Replicas whose drafter is switched off because drafting would slow them down."""

    # Policy lag, in steps
    policy_lag_max: int
    """Largest policy lag of a rollout."""
    policy_lag_mean: float
    """Mean policy lag of the rollouts."""
    policy_lags: list[int] = []
    """Number of rollouts with a policy lag of 0, 1, ... up to the largest."""

    # Groups that were not trained or had no signal
    failed: dict[str, str] = {}
    """Prompts that this step gave up: group id to reason."""
    left_out: dict[str, list[int]] = {}
    """Groups that this step left out because all their rewards were equal: that reward to positions in the prompt
    stream. Empty unless trainer.loss.withoutSignal is LeaveOut."""
    groups_without_signal: int = 0
    """Number of `groups` whose rewards were all equal, so that they have no advantage; trained on or left out."""

    # Verdicts
    verdicts: int = 0
    """Graded rollouts of the step's groups, including groups that were left out."""
    no_answer: int = 0
    """Number of `verdicts` on completions in which the verifier found no answer."""
    verifier_errors: dict[str, int] = {}
    """Number of `verdicts` that are 0 because the verifier failed on the answer. The key is the exception and its place
    (`KeyError at my_rewards.py:12`), or `timeout` or `crash`."""
    ungraded: int = 0
    """Rollouts since the previous step that could not be graded, for reasons outside the answer, and were sampled
    again."""

    # Updates of policy and drafter
    is_skipped: bool = False
    """Whether an update was skipped because its gradients were not finite; the step's later updates are then skipped
    too. With `updates` 0 the policy of this version equals the previous one."""
    updates: int = 1
    """Optimizer updates that the step made."""
    drafter_loss: float | None = None
    """Loss of the drafter's training. Null when the drafter was not trained."""
    drafter_acceptance: list[float] = []
    """For each position, the probability that the policy accepts the draft token, given those before it, in training.
    Empty when the drafter was not trained."""

    # Publication of the version to the replicas
    weight_sync: dict[str, float] = {}
    """Seconds of the weight sync by part: pause, broadcast, verify, resume."""
    drafter_version: int = -1
    """Policy version at which the drafter that is served with this version was last trained; -1 without a drafter."""
    canary_mean_abs: float | None = None
    """Mean absolute difference between sampler and trainer log-probabilities, in nats, over all canaries since the
    previous step. Null without canaries."""
    canary_max_abs: float | None = None
    """Largest absolute difference, likewise."""
    canary_tokens: int = 0
    """Tokens that these canaries compared."""
    canary_seconds: float = 0.0
    """Wall seconds of these canaries. Part of `prepare`; for a replica that joined, part of `generation`."""
    checksum: str = ""
    """Digest over the checksums of all tensors of this version. Equal at the trainer and at all replicas."""

    def with_validation(self, validation: ValidationReport | None) -> StepReport:
        """Return this report with the result of its version's validation. None returns it unchanged."""
        if validation is None:
            return self
        return self.model_copy(
            update={
                "validation_reward": validation.reward,
                "validation_low": validation.reward_low,
                "validation_high": validation.reward_high,
                "validation_rewards": validation.rewards,
            }
        )

    @computed_field  # type: ignore[prop-decorator] # mypy has no decorated properties
    @property
    def no_answer_share(self) -> float:
        """Share of the step's verdicts on completions without an answer."""
        return self.no_answer / max(self.verdicts, 1)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def verifier_error_share(self) -> float:
        """Share of the step's verdicts on which the verifier failed."""
        return sum(self.verifier_errors.values()) / max(self.verdicts, 1)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def ungraded_share(self) -> float:
        """Share of ungraded rollouts, among the step's verdicts and the ungraded rollouts together."""
        return self.ungraded / max(self.ungraded + self.verdicts, 1)


def list_reward_names(reports: Iterable[StepReport]) -> list[str]:
    """Return the names of the rewards in these reports, in the order in which they first appear."""
    return list(dict.fromkeys(name for report in reports for name in report.rewards))


def list_source_names(reports: Iterable[StepReport]) -> list[str]:
    """Return the names of the sources in these reports, in the order in which they first appear."""
    return list(dict.fromkeys(name for report in reports for name in report.sources))


class PassAt(ReportModel):
    """pass@k: the probability that at least one of k answers is right, mean over problems, with its 95 % interval."""

    k: int
    """Number of answers."""
    rate: float
    """pass@k, 0 to 1."""
    low: float
    """Lower end of its 95 % interval."""
    high: float
    """Upper end of that interval."""
    problems: int
    """Problems with at least k answers, over which the mean is taken."""


class ValidationReport(ReportModel):
    """The result of one validation, which uses a single policy version."""

    policy_version: int
    """The version that was validated."""
    reward: float
    """Mean over problems of the mean reward of their answers. An answer without a reward counts as 0."""
    reward_low: float | None = None
    """Lower end of the 95 % interval of `reward`; null without one."""
    reward_high: float | None = None
    """Upper end of that interval. It is over problems, by Student's t over the problems' means. If all rewards are 0 or
    1, it is the interval of pass@1. Null without any spread to estimate from: one problem, or equal means."""
    rewards: dict[str, float] = {}
    """Mean of each reward by name, before weighting, over the answers that it applied to. An answer that it could not
    grade counts as 0. Empty if the run has one reward."""
    problems: int
    """Problems that were asked."""
    answers: int = 0
    """Of each problem as many as its samplesPerPrompt."""
    seconds: float
    """Wall time of the validation."""
    pass_at: list[PassAt] = []
    """pass@k for k = 1, 2, 4, ... up to validation.sampling.samplesPerPrompt. Empty unless all rewards are 0 or 1,
    because only then is an answer right or wrong. An answer without a reward counts as wrong."""
    ungraded: int = 0
    """Answers without a reward."""
    failures: dict[str, int] = {}
    """Answers that the verifier could not judge, by reason. Includes the ungraded ones."""
    sources: dict[str, ValidationReport] = {}
    """The same of each source, by its name. Empty if there is only one."""

    @property
    def failed_count(self) -> int:
        """Number of answers that the verifier could not judge."""
        return sum(self.failures.values())

    @property
    def is_judged(self) -> bool:
        """Whether the verifier judged any answer. If not, the reward is 0, whatever the policy does."""
        return not self.failures or self.failed_count < self.answers


class BestVersion(ReportModel):
    """The policy version with the best validation among those that have a checkpoint. See checkpoint.keepBest."""

    policy_version: int
    """The version, and the step of its checkpoint."""
    reward: float
    """Mean reward of its validation."""


class ReplicaReport(ReportModel):
    """One generation replica at this moment."""

    id: str
    """Name of the replica."""
    state: str
    """joining, catchingUp, serving, updating, suspect, stale or draining (coordinator/members/replica_states.py); or
    givenUp, if it has refused the weights several times for the same reason and is sent nothing more, or if it has
    failed alike so often that the launcher starts it no more."""
    reason: str = ""
    """Reason of this state. Empty when the transition was planned."""
    policy_version: int
    """Policy version that it serves; -1 before its first weights."""
    live_rollouts: int
    """Rollouts that it is generating."""
    drafter_version: int = -1
    """Policy version at which its drafter was last trained; -1 without a drafter or before its first weights."""
    canary_mean_abs: float | None = None
    """Mean absolute difference between sampler and trainer in its last canary, in nats; null before the first."""
    canary_max_abs: float | None = None
    """Largest absolute difference, likewise."""
    drafting: str | None = None
    """State of its adaptive draft length: drafting, off or trial. Null with a fixed draft length."""
    predicted_gain: float | None = None
    """Decoding speed divided by the speed without drafts, predicted from measured costs of steps and acceptance."""
    measured_gain: float | None = None
    """The same ratio, measured."""


class StatusReport(ReportModel):
    """The run at this moment."""

    # Progress
    run: str
    """Name of the run, from its run file."""
    phase: Phase
    """What the run does. stopped: nothing, and it can be resumed. failed: nothing, because of `error`."""
    detail: str = ""
    """A sentence that describes the present activity."""
    done: int = 0
    """How much of `total` is done in what `detail` describes. 0 when it cannot be counted."""
    total: int = 0
    """How much there is to do in what `detail` describes. 0 when it cannot be counted."""
    step: int = 0
    """Last trained step."""
    steps: int = 0
    """Steps of the whole run."""
    policy_version: int = 0
    """Newest version that every replica has served; -1 before the first."""

    # Replicas and trainer
    replicas: list[ReplicaReport] = []
    """The replicas, by name."""
    replica_transitions: dict[str, int] = {}
    """How often replicas changed state since the coordinator started, for example "joining -> catchingUp": 2."""
    is_paused: bool = False
    """Whether a user has paused the run. No rollout or step starts until it is resumed; those under way finish."""
    replicas_wanted: int | None = None
    """Number of replicas that the launcher of a local run should keep. Null in a cluster, where the RLJob sets it."""
    checkpoint_step: int = 0
    """Step of the newest complete checkpoint; 0 without one."""
    checkpoint_error: str = ""
    """Why a checkpoint after that one could not be written; empty if none failed. The run continues without it."""
    is_checkpoint_requested: bool = False
    """Whether a user has requested a checkpoint that is neither complete nor failed yet."""
    trainer: str = "absent"
    """absent, registered (not used yet), recovering, ready or training."""
    weight_transport: str = ""
    """Transport of the weights to the replicas, Gloo, Nccl or Checkpoint, and why it was chosen, such as
    "Gloo: 2 ranks on 1 GPUs". Empty before the first weights."""
    nccl_transport: str = ""
    """NCCL's transports between trainer and replicas, such as NET/IB, NET/Socket or P2P/MNNVL (NVLink between nodes).
    Empty before the first weights, with other transports, and where NCCL writes no log."""
    rollouts_collected: int = 0
    """Graded rollouts of the step that is being collected."""
    rollouts_grading: int = 0
    """Rollouts of that step that are sampled and not graded yet."""
    rollouts_wanted: int = 0
    """How many rollouts that step needs."""

    # What a user should know
    notices: list[str] = []
    """What has held since the run's start: native heads that are not trained, or not there, and programs that run in
    the weaker isolation."""
    warnings: list[str] = []
    """What the last steps show, with what to try: a collapse, or at least three steps in a row without a signal."""
    isolations: dict[str, str] = {}
    """Isolation of the sandbox of each section that runs programs: `{"rewards.code": "Namespaces"}`."""

    collapsed_since: int | None = None
    """First of at least three steps in a row, up to now, whose rewards and gradients were all 0. Null otherwise."""

    # Failures
    counters: dict[str, int] = {}
    """Events since the coordinator started, by name."""
    verdict_failures: dict[str, int] = {}
    """Failed verdicts since the coordinator started, by reason. Includes validations."""
    given_up: dict[str, int] = {}
    """Prompts of the whole run that were given up, by reason."""
    replicas_given_up: dict[str, str] = {}
    """Why replicas were given up, by name: several starts in a row, or several updates, failed for this reason."""
    error: str | None = None
    """Why the run failed; null unless it did."""
    needs_user: bool = False
    """Whether the failed run would fail again unless its user repairs something first."""
    summary: RunSummary | None = None
    """Results of the run. Null until the run is finished."""


class DrafterAnswersPoint(ReportModel):
    """What a number of rollouts gave in a drafter's initialisation."""

    rollouts: int
    """Rollouts that it was trained on."""
    epochs: int
    """Epochs on them."""
    held_out_acceptance_length: float
    """Tokens per verification on held-out rollouts, after these epochs."""


class DrafterInitReport(ReportModel):
    """How a new drafter was initialised. Acceptance is what the trainer expects at the run's temperature, of drafts as
    in the run."""

    rollouts: int
    """Rollouts that it was trained on, in the last epoch."""
    loss_per_epoch: list[float]
    """Mean loss of each epoch."""
    held_out_length_per_epoch: list[float] = []
    """Tokens per verification on held-out rollouts, after each epoch. Empty if nothing is held out."""
    trained_accepted_per_position: list[float] = []
    """For each position of a draft, the share of drafts whose token there is accepted, as a step's
    `acceptedPerPosition`. In the last epoch, on the rollouts that it was trained on."""
    trained_acceptance_length: float
    """Tokens per verification, likewise."""
    held_out_prompts: int
    """Prompts whose rollouts were not trained on, and on which the next three fields are measured. 0: none."""
    held_out_accepted_per_position: list[float] = []
    """The same shares on rollouts that were not trained on. Empty without any."""
    held_out_acceptance_length: float | None = None
    """Tokens per verification, likewise. Null without any."""
    held_out_error: float | None = None
    """Half of the 95 % interval of `heldOutAcceptanceLength`. Null without any."""
    points: list[DrafterAnswersPoint] = []
    """What each number of rollouts gave. Empty if nothing is held out."""
    stop_reason: str = ""
    """Why the initialisation ended: nothingHeldOut, littleGain, answersGainLittle, epochsSpent, promptsSpent or
    timeSpent."""
    expected_gain: float | None = None
    """What twice the rollouts would probably add to `heldOutAcceptanceLength`. Null with fewer than two points."""
    expected_gain_low: float | None = None
    """Lower end of its 95 % interval; null with it."""
    expected_gain_high: float | None = None
    """Upper end of that interval."""
    conclusion: str = ""
    """What was reached, why the initialisation ended, and what twice the rollouts would probably bring."""


class RunSummary(ReportModel):
    """The measured results of a finished run."""

    steps: int
    """Trained steps."""
    first_validation_reward: float | None
    """Mean reward of the first validation. Null with fewer than two."""
    last_validation_reward: float | None
    """Mean reward of the last validation. Null without any."""
    best_version: BestVersion | None = None
    """The version whose checkpoint was kept as the best. Null without checkpoint.keepBest, or without one."""
    first_reward: float | None
    """Mean over the first `reward_steps` steps that have a reward. Null if there are too few steps to compare."""
    last_reward: float | None
    """Mean over the last `reward_steps` steps that have a reward, or the reward of the only step."""
    reward_steps: int = 0
    """At most five, and so few that no step counts at both ends. 0: too few steps to compare."""
    first_rewards: dict[str, float] = {}
    """As first_reward, of each reward by name, over the steps in which it applied to a rollout. Empty if the run has
    one reward."""
    last_rewards: dict[str, float] = {}
    """As last_reward, of each reward by name."""
    first_acceptance_length: float | None
    """Acceptance length of the first step that drafted. Null with fewer than two."""
    last_acceptance_length: float | None
    """Mean over the last five or fewer steps that drafted, without that first one."""
    groups: int = 0
    """Graded groups of all steps, trained on or left out."""
    groups_without_signal: int = 0
    """Number of `groups` whose rewards were all equal, so that they had no advantage."""
    given_up: dict[str, int] = {}
    """Prompts that were given up, by reason."""
    policy_lag_max: int
    """Largest policy lag of a rollout."""
    rollouts_trained: int
    """Rollouts trained on."""
    prompts_trained: int
    """Prompts trained on."""
    unaccounted_rollouts: int
    """Graded rollouts that were neither trained on, left out, kept for a later step, nor of a failed prompt. Anything
    but 0 is a bug in the coordinator."""
    exposed_generation_share: float
    """Share of the steps' wall time in which the trainer waited for rollouts, 0 to 1."""
    exposed_generation: float = 0.0
    """Seconds of all steps in which the trainer waited for rollouts."""
    generation_under_way: float = 0.0
    """Seconds of all steps in which at least one rollout was in flight."""
    hidden_generation: float = 0.0
    """Seconds of `generation_under_way` in which the trainer did not wait for rollouts."""
    weight_sync_seconds: float = 0.0
    """Seconds of all steps in which the replicas received weights: the phase prepare."""
    policy_path: str
    """Folder of the exported policy; empty if the run only initialised a drafter that is a folder of its own."""
    drafter_path: str
    """Folder of the exported drafter; empty without one."""
    checkpoint_path: str
    """The last checkpoint."""
    drafter_start: DrafterInitReport | None = None
    """How a new drafter was initialised. Null when the run's drafter was given, or when it has none."""


class RunState(StatusReport):
    """What `specrl status --json` prints: the status, whether the run runs, and how its last launch ended.

    `phase` and `replicas` are true of this moment, too: without a launcher nothing trains and nothing serves.
    """

    running: bool
    """Whether a launcher runs the run at this moment. Its processes end with it."""
    exit_code: int | None = None
    """Exit code of the last launch. Null while it runs, and after a launch that was killed."""
