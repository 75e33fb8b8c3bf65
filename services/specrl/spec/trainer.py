"""Sections about training: parallelism, optimizer, loss, drafter."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import Change, DecimalString, OnCluster, Section
from specrl.spec.cluster import NodeCount, PodTemplate
from specrl.spec.data import NotNegative, Positive

Ranks = Annotated[int, Field(ge=1, le=4096, strict=True)]


class Parallelism(Section):
    """How the trainer's ranks share the work. World size is the product."""

    tensor: Ranks = 1
    """Tensor parallel ranks; must divide the attention heads and key/value groups of the model."""
    data: Ranks = 1
    """Data parallel ranks; rollouts of a batch are dealt to them."""

    @property
    def world_size(self) -> int:
        return self.tensor * self.data


class Optimizer(Section):
    """AdamW with decoupled weight decay and a gradient clip by global norm."""

    learning_rate: DecimalString
    """Step size after warm-up."""
    beta1: DecimalString = Field(default="0.9", validate_default=True)
    """Decay of the first moment."""
    beta2: DecimalString = Field(default="0.95", validate_default=True)
    """Decay of the second moment."""
    epsilon: DecimalString = Field(default="1e-8", validate_default=True)
    """Added to the root of the second moment."""
    weight_decay: DecimalString = Field(default="0", validate_default=True)
    """Decoupled weight decay per step, times the learning rate."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises linearly from 0."""
    clip_norm: DecimalString = Field(default="1", validate_default=True)
    """Largest global gradient norm; larger gradients are scaled down to it."""


class Loss(Section):
    """GRPO: a clipped policy gradient with group-centred rewards (arXiv:2402.03300, 2503.20783)."""

    normalise_advantages: bool = False
    """Divide the group-centred rewards by their standard deviation (GRPO). False: centre only (Dr. GRPO)."""
    clip_low: DecimalString = Field(default="0.2", validate_default=True)
    """The ratio to the step's starting policy is clipped below 1 - clipLow."""
    clip_high: DecimalString = Field(default="0.2", validate_default=True)
    """... and above 1 + clipHigh."""
    importance_cap: DecimalString = Field(default="2", validate_default=True)
    """Upper bound of the per-token importance weight (trainer over sampler) that corrects for lag. "0" turns it off."""


class DrafterInitialisation(Section):
    """Supervised start of a fresh drafter on rollouts of the first policy."""

    prompts: Positive = 128
    """Prompts of the run's own stream that are answered for it. They are trained on later all the same."""
    samples_per_prompt: Positive = 1
    """Completions of each."""
    epochs: Positive = 4
    """Passes over them."""
    held_out: DecimalString = Field(default="0.1", validate_default=True)
    """Share of the prompts that are answered but not trained on: acceptance is measured on them. "0": none."""


class DrafterLoss(StrEnum):
    SOFT_CROSS_ENTROPY = "SoftCrossEntropy"
    TOTAL_VARIATION = "TotalVariation"


class DrafterTraining(Section):
    """The EAGLE-3 head's own optimizer; it never touches the policy's gradients."""

    learning_rate: DecimalString = Field(default="1e-3", validate_default=True)
    """AdamW step size. During the run it is less in steps on few tokens, and in the first steps of a head that was
    trained elsewhere (`drafting/online.py`)."""
    clip_norm: DecimalString = Field(default="1", validate_default=True)
    """Largest gradient norm of the head, clipped apart from the policy's."""
    passes: Positive = 3
    """Positions that the head is trained to draft ahead (training-time test, arXiv:2503.01840)."""
    loss: DrafterLoss = DrafterLoss.SOFT_CROSS_ENTROPY
    """`SoftCrossEntropy`: against the policy's whole distribution. `TotalVariation`: the share of drafts refused when
    they are sampled from the head (arXiv:2310.08461, 2606.12370); the first half of an initialisation is by
    cross-entropy all the same, since a head that knows nothing has almost no gradient of it."""
    online: bool = True
    """Train the head at every step on the policy's forward pass. False keeps it as it was initialised."""
    token_budget: Positive | None = None
    """Most tokens of a step that the head is trained to draft from; the rollouts take turns. Null: as many as a fixed
    share (3.5 %) of the policy's floating-point operations pays for, which keeps the step's time within 7 %."""
    initialisation: DrafterInitialisation = DrafterInitialisation()
    """How a fresh head starts; not used when `generation.speculation.eagle3.path` is set."""


class Trainer(Section):
    """The trainer service: Megatron-Core ranks."""

    parallelism: Parallelism = Parallelism()
    """How the ranks share the work."""
    optimizer: Optimizer
    """Policy optimizer."""
    loss: Loss = Loss()
    """Policy loss."""
    drafter: DrafterTraining = DrafterTraining()
    """Drafter training; without effect unless speculation is `eagle3`."""
    micro_batch_tokens: Positive = 16384
    """Most tokens in one forward pass of one rank. Rollouts are packed one after another, without padding."""
    threads: Positive = 1
    """CPU threads of one rank."""
    num_nodes: Annotated[NodeCount, OnCluster.ONLY] = 1
    """Pods of the trainer on a cluster, each on a node of its own if it has GPUs. The ranks are dealt to them evenly. A
    local run does not use it, nor the two fields below."""
    gpus_per_node: Annotated[int, Field(ge=0, le=16, strict=True), OnCluster.ONLY] = 0
    """GPUs of each of these pods, one a rank. 0: the trainer computes on CPUs."""
    pod_template: Annotated[PodTemplate | None, Change.SUSPENDED, OnCluster.ONLY] = None
    """As coordinator.podTemplate, for every pod of the trainer; its container is `trainer`."""
