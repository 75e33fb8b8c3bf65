"""The figures of a run, or of two, as `specrl report --json` prints them. `specrl.load_report` returns the former."""

from __future__ import annotations

from typing import Any

from pydantic import JsonValue

from specrl.formats.reports import ReportModel, ValidationReport


class PhaseFigures(ReportModel):
    """One phase of a step, mean over all steps."""

    seconds: float
    """Wall seconds per step."""
    share: float
    """Share of the steps' wall time, 0 to 1."""


class SpeedFigures(ReportModel):
    """Generation speed of one mechanism relative to none, as `specrl demo` measures it after its run."""

    mechanism: str
    """The mechanism and its draft length, such as eagle3:3."""
    batch: int
    """Live rollouts."""
    speed: float
    """Median of the tokens per second, divided by those without speculation."""
    speed_low: float
    """Lowest measured speed."""
    speed_high: float
    """Highest measured speed."""


class EdgeFigures(ReportModel):
    """Mean of a figure over the first and over the last five steps, or fewer, so that no step counts twice."""

    first: float | None
    """Mean of the first steps. Null with fewer than two values."""
    last: float | None
    """Mean of the last steps. Null without any value."""


class RunReport(ReportModel):
    """All figures of one run's report. Figures of time and batches are null, 0 or empty before the first step."""

    # The run
    run: str
    """Name of the run's folder."""
    path: str
    """The run's folder."""
    state: str
    """finished, failed, in progress or interrupted."""
    error: str | None
    """Why the run failed; null unless it did."""
    notices: list[str]
    """What the report says before any figure: the run is in progress, lines are missing, no group has a signal."""
    steps: int
    """Trained steps, of which all figures are."""
    steps_wanted: int
    """schedule.steps."""

    # Time
    wall_seconds: float
    """Wall seconds of all steps."""
    step_seconds: float | None
    """Mean wall seconds of a step."""
    phases: dict[str, PhaseFigures]
    """By phase: data, prepare, generation, logprob, train, validation, checkpoint."""
    exposed_generation_share: float
    """Share of the wall time in which the trainer waited for rollouts, 0 to 1."""
    exposed_generation: float
    """Seconds of the whole run in which the trainer waited for rollouts."""
    generation_under_way: float
    """Seconds of the whole run in which at least one rollout was in flight."""
    hidden_generation: float
    """Seconds of `generation_under_way` in which the trainer did not wait for rollouts."""
    exposed_by_cause: dict[str, float]
    """Exposed generation by cause, in seconds of the whole run."""
    weight_sync: dict[str, float]
    """Mean seconds per step by part of the weight sync."""

    # Rollouts
    rollouts: int
    """Rollouts trained on."""
    rollouts_per_second: float
    """Rollouts per second of wall time."""
    tokens: int
    """Sampled tokens trained on, without prompts."""
    tokens_per_second: float
    """Sampled tokens per second of wall time."""
    mean_length: float
    """Mean sampled tokens of a rollout."""

    # Speculation
    speculation: str
    """The mechanism of the run file, such as eagle3, or none."""
    acceptance_length: float | None
    """Mean tokens per verification, over the steps that drafted; null if none did."""
    accepted_per_position: list[float]
    """For each position of a draft, the share of drafts whose token there was accepted."""
    draft_length: float | None
    """Mean tokens per draft, over the steps that drafted."""
    speculation_gain: float | None
    """Decoding speed divided by the speed without drafts, median of the steps. Null with a fixed draft length."""
    speed_ups: list[SpeedFigures]
    """Generation speed measured after `specrl demo`. Empty for other runs."""

    # Rewards
    first_reward: float | None
    """Mean over the first `reward_steps` steps that have a reward. Null if there are too few steps to compare."""
    last_reward: float | None
    """Mean over the last `reward_steps` steps that have a reward, or the reward of the only step."""
    reward_steps: int
    """At most five, and so few that no step counts at both ends. 0: too few steps to compare."""
    sources: dict[str, EdgeFigures]
    """Mean reward of each training source, by its name. Empty if there is only one."""
    validations: list[ValidationReport]
    """Validations, by policy version."""
    verdicts: int
    """Graded rollouts of all steps."""
    no_answer: int
    """Number of `verdicts` on completions in which the verifier found no answer."""
    verifier_errors: dict[str, int]
    """Number of `verdicts` on which the verifier failed, by exception and place."""
    ungraded: int
    """Rollouts that could not be graded and were sampled again."""
    groups: int
    """Graded groups."""
    groups_without_signal: int
    """Number of `groups` whose rewards were all equal."""

    # Policy lag
    policy_lags: list[int]
    """Number of rollouts with a policy lag of 0, 1, ... up to the largest."""
    policy_lag_max: int
    """Largest policy lag of a rollout."""
    policy_lag_mean: float
    """Mean policy lag of the rollouts."""

    # Training
    mismatch_kl: float | None
    """Mean KL divergence between sampler and trainer in nats; null if no token was compared."""
    training: dict[str, EdgeFigures]
    """Figures of training by name. metrics.md lists the names."""

    # Failures, since the coordinator's last start
    counters: dict[str, int]
    """Events by name. Those of `specrl status --json`."""
    verdict_failures: dict[str, int]
    """Failed verdicts by reason."""
    given_up: dict[str, int]
    """Prompts of the whole run that were given up, by reason."""
    replicas_given_up: dict[str, str]
    """Why replicas were given up, by name."""
    replica_transitions: dict[str, int]
    """How often replicas changed state."""

    # Settings
    origin: dict[str, str]
    """Versions and machine of the coordinator, by name."""
    run_file: dict[str, JsonValue]
    """The run file with all defaults."""


class ComparisonReport(ReportModel):
    """The figures of two runs, and whether their speeds may be compared."""

    runs: list[RunReport]
    """RUN and OTHER, in this order."""
    is_comparable: bool
    """Whether a step of both is the same work. If not, `speed_ups` is empty."""
    speed_ups: dict[str, float | None]
    """For each phase and for `step`: seconds of RUN divided by those of OTHER. Above 1, OTHER is faster. Null if OTHER
    took too little time to be measured."""
    differences: dict[str, list[Any]]
    """Fields of the run file that differ: path to the value of RUN and that of OTHER."""
    notices: list[str]
    """What the report says before any figure."""
