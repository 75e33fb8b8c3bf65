"""What is simulated, as a file says it: camelCase on disk, unknown fields refused, every field with its unit.

Read by `scenario_file.py`, made of a run file by `from_run.py`. `rules.py` checks what fields say of each other.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, model_validator

from specrl.spec.base import Section
from specrl.spec.data import NotNegative, Positive
from specrl.spec.run import Order

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
    """One of simulator/models.py, as in qwen3-8b."""
    path: str | None = None
    """Or a Hugging Face folder; its config.json is read."""
    precision: Precision = Precision.BFLOAT16
    """Of weights and matrix products in generation. Training computes in bfloat16."""


class Cluster(Section):
    """What there is."""

    gpu: str | None = None
    """One of simulator/hardware.py, as in GB200. Null: processors; then all costs come from a calibration."""
    gpus: Positive
    """GPUs altogether; without GPUs, processes that compute."""
    usd_per_gpu_hour: AtLeastZero | None = None
    """Price. Null: costs are told in GPU-hours alone."""


class Layout(Section):
    """What computes what."""

    colocated: bool = False
    """True: all GPUs generate, then all of them train. False: generation and training have GPUs of their own."""
    generation_gpus: Positive
    training_gpus: Positive
    tensor_parallel: Positive = 1
    """GPUs that share one copy of a replica's attention and dense layers."""
    expert_parallel: Positive = 1
    """GPUs that a replica's experts are dealt to, of models that have any. A replica has as many GPUs as the larger of
    both; its attention is then computed by several groups of tensorParallel, each for its part of the rollouts."""

    @property
    def gpus_per_replica(self) -> int:
        return max(self.tensor_parallel, self.expert_parallel)

    @property
    def replicas(self) -> int:
        return self.generation_gpus // self.gpus_per_replica


class Workload(Section):
    """What a step is made of. Lengths are of completions, in tokens."""

    named: str | None = None
    """A length distribution of simulator/workloads.py instead of the four fields below."""
    median_tokens: Above | None = None
    """Median of log-normal lengths before they are cut off at maxTokens."""
    sigma: Annotated[float, Field(ge=0, le=4)] | None = None
    """Standard deviation of their logarithm."""
    quantiles: Annotated[tuple[Above, ...], Field(min_length=2, max_length=4097)] | None = None
    """Or lengths at equally spaced probabilities from 0 to 1."""
    groups: Annotated[tuple[Group, ...], Field(min_length=1, max_length=4096)] | None = None
    """Or the lengths of each prompt's rollouts, as a run measured them."""
    max_tokens: Positive
    """No rollout is longer."""
    group_correlation: Chance = 0.5
    """How alike the lengths of one prompt's rollouts are: 0 not at all, 1 equal. Groups say so themselves."""
    prompt_tokens: Positive = 200
    """Mean length of prompts."""


class Steps(Section):
    """As the section `schedule` of a run file."""

    steps: Positive = 8
    """Steps simulated. The first ones, in which a pipeline fills, are left out of means."""
    run_steps: Positive | None = None
    """Steps of the whole run, for its GPU-hours and price. Null: those that are simulated."""
    prompts_per_step: Positive
    group_size: Positive
    max_policy_lag: NotNegative = 0
    order: Order = Order.IN_ORDER
    seed: NotNegative = 0
    """Of the lengths that are drawn. The same seed gives the same answer, digit by digit."""


class Mechanism(StrEnum):
    NONE = "none"
    EAGLE3 = "eagle3"
    NGRAM = "ngram"


class Speculation(Section):
    """How tokens are drafted. Also read: `speculation: ngram`, and `speculation: {ngram: {k: 5}}` as in run files."""

    mechanism: Mechanism = Mechanism.NONE
    k: NotNegative = 3
    """Tokens drafted per verification."""
    acceptance_length: Above | None = None
    """Mean tokens per verification at this k, bonus token included: 1 to k + 1."""
    chances: Annotated[tuple[Chance, ...], Field(max_length=64)] | None = None
    """Or the chance of each position that its token is accepted when those before it were."""
    is_adaptive: bool = False
    """k is chosen for every step by the live batch, from 0 to k, as the run file's draftLength Adaptive does. Says
    what is best with known costs and acceptance, not how fast a controller learns them."""

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
    """The generation engine's settings."""

    max_live_rollouts: Positive = 512
    """Rollouts that one replica computes at once."""
    capture_tokens: Positive | None = 512
    """Largest number of query tokens (live rollouts x (k + 1)) that CUDA graphs are captured for; larger steps are
    launched kernel by kernel. vLLM's default is 512. Null: everything is covered."""
    has_host_costs: bool = True
    """False: an engine whose processor costs nothing, as models of GPU time alone assume. An ideal, not a forecast."""


class Efficiency(Section):
    """What programs reach of published figures, one set for all scenarios. docs/simulator.md: where each is from."""

    memory_bandwidth: Share = 0.85
    """Of a decode step."""
    flops: Share = 0.70
    """Of matrix products in generation, prefill included."""
    train_flops: Share = 0.27
    """Of the trainer, forward and backward, dense models."""
    train_flops_experts: Share = 0.13
    """The same for models with experts: routing, imbalance and smaller products halve it."""
    kernel_us_per_layer: AtLeastZero = 15.0
    """Time of a layer's kernels that does not shrink with their work."""
    collective_us: AtLeastZero = 8.0
    """Latency of one all-reduce or all-to-all of a layer."""
    sampler_passes: AtLeastZero = 12.0
    """How often a token's logits (float32) are read or written until it is sampled and its log-probability known."""
    host_step_ms: AtLeastZero = 1.0
    """Of the engine's processor, each step."""
    host_sequence_us: AtLeastZero = 80.0
    """... and for each live rollout."""
    speculation_step_ms: AtLeastZero = 4.5
    """... and for each step that verifies drafts, whoever made them."""
    draft_pass_ms: AtLeastZero = 1.5
    """... and for each pass of a learned drafter, beside its GPU time."""
    lookup_us_per_sequence: AtLeastZero = 40.0
    """... and for each live rollout that an n-gram is looked up for."""
    eager_us_per_layer: AtLeastZero = 800.0
    """Added to a step that no CUDA graph covers."""
    logprob_passes: AtLeastZero = 2.0
    """Forward passes of the stage logprob: policy and reference."""
    sync_bandwidth: Share = 0.3
    """Of the network, when weights go to the replicas."""
    prepare_s: AtLeastZero = 1.5
    """What the stage prepare takes beside that, in seconds."""
    data_s: AtLeastZero = 0.2
    """The stage data, in seconds."""


class Failure(Section):
    """A replica that dies, and comes back or not. Also one that joins: it is away from 0 on, and back later."""

    replica: NotNegative
    at_s: AtLeastZero
    back_after_s: AtLeastZero | None = None
    """Seconds until it registers again. Null: never."""


class Scenario(Section):
    """One run on one cluster."""

    name: str
    about: str = ""
    """What it stands for, and what of it is known."""
    model: ModelChoice
    cluster: Cluster
    layout: Layout
    workload: Workload
    schedule: Steps
    speculation: Speculation = Speculation()
    engine: Engine = Engine()
    efficiency: Efficiency = Efficiency()
    failures: tuple[Failure, ...] = ()

    def with_(self, **sections: dict[str, Any]) -> Scenario:
        """A copy in which fields of sections have these values: `with_(speculation={"k": 5})`. Checked again."""
        update = {name: getattr(self, name).model_copy(update=fields) for name, fields in sections.items()}
        return self.model_copy(update=update)

    def alone(self) -> Scenario:
        """Without failures."""
        return self.model_copy(update={"failures": ()})
