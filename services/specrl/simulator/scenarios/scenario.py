"""The fields of a scenario file: camelCase on disk, unknown fields refused, every field with its unit.

`scenario_file.py` reads scenarios, `from_run.py` makes them from a run file, and `rules.py` checks rules between
fields.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from specrl.spec.base import Section
from specrl.spec.data import NotNegative, Positive

Above = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AtLeastZero = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Chance = Annotated[float, Field(ge=0, le=1)]
Group = Annotated[tuple[Above, ...], Field(min_length=1, max_length=4096)]


class Precision(StrEnum):
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"


class ModelChoice(Section):
    """The policy."""

    name: str | None = None
    """Name of a model in simulator/scenarios/models.py, as in qwen3-8b."""
    path: str | None = None
    """Or a Hugging Face folder, whose config.json is read."""
    precision: Precision = Precision.BFLOAT16
    """Precision of weights and matrix products in generation. Training computes in bfloat16."""


class Cluster(Section):
    """The GPUs and their price."""

    gpu: str | None = None
    """Name of a GPU in simulator/scenarios/hardware.py, as in GB200. Null: no GPUs; costs come from a calibration."""
    gpus: Positive
    """Number of GPUs; without GPUs, number of computing processes."""
    usd_per_gpu_hour: AtLeastZero | None = None
    """Price. Null: costs are reported in GPU-hours only."""


class Layout(Section):
    """Which GPUs compute what."""

    colocated: bool = False
    """True: all GPUs generate, then all of them train. False: generation and training have separate GPUs."""
    generation_gpus: Positive
    training_gpus: Positive
    tensor_parallel: Positive = 1
    """GPUs that share one copy of a replica's attention and dense layers."""
    expert_parallel: Positive = 1
    """GPUs that share a replica's experts, if the model has any.

    A replica has as many GPUs as the larger of both degrees. Its attention is then computed by several groups of
    tensorParallel GPUs, each for a part of the rollouts.
    """

    @property
    def gpus_per_replica(self) -> int:
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def replica_count(self) -> int:
        return self.generation_gpus // self.gpus_per_replica

    @property
    def attention_groups(self) -> float:
        """Groups of a replica that each compute the attention of a part of the rollouts."""
        return self.gpus_per_replica / self.tensor_parallel


class Workload(Section):
    """The prompts and completions of a step. Lengths are of completions, in tokens."""

    named: str | None = None
    """Name of a length distribution in simulator/scenarios/lengths.py, instead of the four fields below."""
    median_tokens: Above | None = None
    """Median of log-normal lengths before they are cut off at maxTokens."""
    sigma: Annotated[float, Field(ge=0, le=4)] | None = None
    """Standard deviation of the logarithm of the lengths."""
    quantiles: Annotated[tuple[Above, ...], Field(min_length=2, max_length=4097)] | None = None
    """Or lengths at equally spaced probabilities from 0 to 1."""
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=4096)] | None = None
    """Or the lengths of each prompt's rollouts, as a run measured them."""
    max_tokens: Positive
    """Longest possible completion."""
    group_correlation: Chance = 0.5
    """Similarity of the lengths of one prompt's rollouts: 0 unrelated, 1 equal. Not used with `groups`."""
    prompt_tokens: Positive = 200
    """Mean length of prompts."""


class Steps(Section):
    """Same meaning as the section `schedule` of a run file."""

    steps: Positive = 8
    """Steps to simulate. Means leave out the first ones, in which the pipeline fills."""
    run_steps: Positive | None = None
    """Steps of the whole run, for its GPU-hours and price. Null: the simulated steps."""
    prompts_per_step: Positive
    group_size: Positive
    max_policy_lag: NotNegative = 0
    seed: NotNegative = 0
    """Seed of the lengths. The same seed gives exactly the same result."""

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.group_size


class Mechanism(StrEnum):
    NONE = "none"
    EAGLE3 = "eagle3"
    NGRAM = "ngram"


class Speculation(Section):
    """How tokens are drafted. Also accepts `speculation: ngram` and `speculation: {ngram: {k: 5}}`."""

    mechanism: Mechanism = Mechanism.NONE
    k: NotNegative = 3
    """Tokens drafted per verification."""
    acceptance_length: Above | None = None
    """Mean tokens per verification at this k, bonus token included: 1 to k + 1."""
    chances: Annotated[tuple[Chance, ...], Field(max_length=64)] | None = None
    """Or the chance, by position, that a token is accepted once those before it are."""
    is_adaptive: bool = False
    """k is chosen for every step by the live batch, from 0 to k, like the run file's draftLength Adaptive.

    This shows the best choice with known costs and acceptance, not how fast a controller learns them.
    """

    @property
    def draft_tokens(self) -> int:
        """Tokens drafted per verification; 0 without a mechanism."""
        return 0 if self.mechanism is Mechanism.NONE else self.k

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"mechanism": given}
        if isinstance(given, dict):
            inner = [name for name in Mechanism if isinstance(given.get(name.value), dict)]
            if len(inner) == 1 and "mechanism" not in given:
                rest = {key: value for key, value in given.items() if key != inner[0].value}
                return {"mechanism": inner[0].value, **rest, **given[inner[0].value]}
        return given


class Engine(Section):
    """Settings of the generation engine."""

    max_live_rollouts: Positive = 512
    """Rollouts that one replica computes at once."""
    capture_tokens: Positive | None = 512
    """Most query tokens (live rollouts x (k + 1)) for which CUDA graphs are captured. vLLM's default is 512.

    A replica with several groups of tensorParallel GPUs has such graphs in each group, for its part of the rollouts.
    Larger steps launch every kernel separately. Null: all steps are covered.
    """
    overlaps_host: bool = True
    """Whether the host prepares a step while the GPU computes the one before: vLLM's async scheduling.

    It does not with n-gram drafts, whatever this says. Set false for replicas that Ray executes, and for old releases.
    """


class Efficiency(Section):
    """The efficiencies that programs reach; one set for all scenarios. docs/simulator.md names the sources."""

    memory_bandwidth: Share = 0.85
    """Share of the memory bandwidth that a decode step reaches."""
    flops: Share = 0.70
    """Share that matrix products in generation reach, prefill included."""
    train_flops: Share = 0.38
    """Share that the trainer reaches with dense models, forward and backward."""
    train_flops_experts: Share = 0.13
    """The same for models with experts. Routing, imbalance and smaller products lower it."""
    kernel_us_per_layer: AtLeastZero = 15.0
    """Microseconds of a layer's kernels that do not shrink with their work."""
    collective_us: AtLeastZero = 8.0
    """Latency of one all-reduce or all-to-all, in microseconds."""
    sampler_passes: AtLeastZero = 12.0
    """How often a token's float32 logits are read or written until it is sampled and its log-probability is known."""
    host_step_ms: AtLeastZero = 1.0
    """CPU time of the engine per step, in milliseconds."""
    host_sequence_us: AtLeastZero = 112.0
    """Additional CPU time for each live rollout, in microseconds. The GPU computes meanwhile, except with n-grams."""
    kv_reread_share: Chance = 0.55
    """Share of a rollout's KV cache that is read again for each drafted token that a step verifies."""
    eager_us_per_layer: AtLeastZero = 440.0
    """Microseconds per layer added to a step that no CUDA graph covers."""
    logprob_passes: AtLeastZero = 2.0
    """Forward passes of the logprob phase: policy and reference."""
    sync_bandwidth: Share = 0.3
    """Share of the network bandwidth that weight transfers to the replicas reach."""
    prepare_s: AtLeastZero = 0.9
    """Seconds of the prepare phase beside the transfer."""
    data_s: AtLeastZero = 0.2
    """Seconds of the data phase."""


class Failure(Section):
    """A replica that fails. One that joins late is a replica that fails at 0 s and returns."""

    replica: NotNegative
    at_s: AtLeastZero
    back_after_s: AtLeastZero | None = None
    """Seconds until it registers again. Null: never."""


class Scenario(Section):
    """One run on one cluster."""

    name: str
    about: str = ""
    """A description: what the scenario stands for, and which of its figures are known."""
    model: ModelChoice
    cluster: Cluster
    layout: Layout
    workload: Workload
    schedule: Steps
    speculation: Speculation = Speculation()
    engine: Engine = Engine()
    efficiency: Efficiency = Efficiency()
    failures: tuple[Failure, ...] = ()

    @property
    def max_rollouts(self) -> int:
        """Most rollouts that can be in progress: those of all steps that overlap."""
        return self.schedule.rollouts_per_step * (self.schedule.max_policy_lag + 1)

    @property
    def max_replica_rollouts(self) -> int:
        """Most of them that one replica is given, if they are spread evenly."""
        return -(-self.max_rollouts // max(1, self.layout.replica_count))

    def with_fields(self, **sections: dict[str, Any]) -> Scenario:
        """Return a copy with other values in some sections, as in `with_fields(speculation={"k": 5})`.

        The copy is not validated; `prepare_scenario` checks the rules between fields.
        """
        update = {name: getattr(self, name).model_copy(update=fields) for name, fields in sections.items()}
        return self.model_copy(update=update)

    def without_failures(self) -> Scenario:
        """Return a copy without failures."""
        return self.model_copy(update={"failures": ()})
