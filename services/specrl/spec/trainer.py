"""Sections about training: parallelism, optimizer, loss, drafter."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import (
    ChangePolicy,
    DecimalString,
    HubName,
    OnCluster,
    PathText,
    RelativePath,
    Section,
    ShortText,
    WholeNumber,
)
from specrl.spec.cluster import NodeCount, PodTemplate
from specrl.spec.data import NotNegative, Positive

Ranks = Annotated[WholeNumber, Field(ge=1, le=4096)]


class Parallelism(Section):
    """Parallelism of the trainer. The number of ranks is tensor x context x pipeline x data."""

    tensor: Ranks = 1
    """Tensor parallel ranks. Must divide the attention heads and key/value groups of the model. Between matrix
    multiplications the ranks split the tokens (sequence parallelism)."""
    context: Ranks = 1
    """Context parallel ranks. They split the tokens of every rollout, for rollouts that are too long for one rank."""
    pipeline: Ranks = 1
    """Pipeline stages. Times virtualStages, it must divide the layers of the model."""
    virtual_stages: Ranks = 1
    """Virtual stages per pipeline rank (interleaved schedule). More of them shorten the pipeline bubble and add
    communication."""
    data: Ranks = 1
    """Data parallel ranks. They split the rollouts of a batch, and shard the optimizer's state."""
    expert: Ranks = 1
    """Expert parallel ranks. They split the experts of each layer; an expert is never split. They add no ranks: the
    tensor, context and data parallel ranks of a stage form groups of this size. It must divide the model's experts. 1:
    every rank has all experts of its layers."""

    @property
    def stage_size(self) -> int:
        """Number of ranks of a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline


class Decay(StrEnum):
    NONE = "None"
    LINEAR = "Linear"
    COSINE = "Cosine"


class OptimizerKind(StrEnum):
    ADAMW = "AdamW"
    MUON = "Muon"


class Muon(Section):
    """Muon's settings for the weight matrices of attention, MLPs, experts and routers."""

    learning_rate: DecimalString | None = None
    """Learning rate of these matrices. It rises and decays in proportion to the rate of all other parameters. Null:
    the same rate. Updates have the size of AdamW's (0.2 times the square root of the longer side, arXiv:2502.16982),
    so a rate for AdamW is where to begin."""
    momentum: DecimalString = Field(default="0.95", validate_default=True)
    """Decay rate of the momentum that is orthogonalised."""


class Optimizer(Section):
    """AdamW or Muon with decoupled weight decay, a learning-rate schedule, and gradient clipping by global norm."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    """`AdamW`: all parameters. `Muon`: orthogonalised momentum for the weight matrices of layers, and AdamW for
    embedding, output layer, norms and biases. Muon's state is not shared out over data parallel ranks."""
    muon: Muon | None = None
    """Muon's settings. Null: the defaults, if kind is Muon."""
    learning_rate: DecimalString
    """Learning rate after warm-up and before decay."""
    beta1: DecimalString = Field(default="0.9", validate_default=True)
    """Decay rate of the first moment."""
    beta2: DecimalString = Field(default="0.95", validate_default=True)
    """Decay rate of the second moment."""
    epsilon: DecimalString = Field(default="1e-8", validate_default=True)
    """Added to the square root of the second moment."""
    weight_decay: DecimalString = Field(default="0", validate_default=True)
    """Decoupled weight decay per step, multiplied by the learning rate."""
    warmup_steps: NotNegative = 0
    """Steps over which the learning rate rises linearly from 0."""
    decay: Decay = Decay.NONE
    """Shape of the learning rate's decay to finalLearningRate, which it reaches at the run's last step."""
    decay_steps: Positive | None = None
    """Number of the run's last steps over which the learning rate decays. Before them it is constant (warm-up, stable,
    decay). Null: all steps after the warm-up."""
    final_learning_rate: DecimalString = Field(default="0", validate_default=True)
    """Learning rate at the end of the decay. No effect with decay `None`."""
    clip_norm: DecimalString = Field(default="1", validate_default=True)
    """Largest global gradient norm. Larger gradients are scaled down to it."""
    updates_per_step: Positive = 1
    """Optimizer updates per step, each on the whole batch (GRPO's mu). From the second update on, the ratio to the
    step's start differs from 1 and is clipped. Each update costs another forward and backward pass."""
    max_skipped_steps: NotNegative = 3
    """Most consecutive steps that are skipped because their gradients are not finite. One more ends the run. The first
    update with such gradients ends the updates of its step: it and later ones are not made, earlier ones are kept
    (updatesPerStep). A skipped step is reported. 0: the first such step ends the run."""


class Objective(StrEnum):
    CLIP = "Clip"
    GSPO = "Gspo"
    CISPO = "Cispo"


class RatioTo(StrEnum):
    STEP_START = "StepStart"
    SAMPLER = "Sampler"


class Normaliser(StrEnum):
    TOKENS = "Tokens"
    SEQUENCES = "Sequences"
    FIXED_LENGTH = "FixedLength"


class Advantages(StrEnum):
    GROUP_CENTRED = "GroupCentred"
    GROUP_STANDARDISED = "GroupStandardised"
    LEAVE_ONE_OUT = "LeaveOneOut"
    BATCH_STANDARDISED = "BatchStandardised"
    GROUP_CENTRED_BATCH_STANDARDISED = "GroupCentredBatchStandardised"


class CorrectionMethod(StrEnum):
    NONE = "None"
    TRUNCATE = "Truncate"
    MASK = "Mask"


class CorrectionLevel(StrEnum):
    TOKEN = "Token"  # noqa: S105 - of a text, not of a user
    SEQUENCE = "Sequence"


class Correction(Section):
    """Importance weights, trainer over sampler. They correct for policy lag and for differences between the engines."""

    method: CorrectionMethod = CorrectionMethod.TRUNCATE
    """`Truncate`: weights are clamped to low and high (TIS). `Mask`: weights outside of low and high become 0 (MIS;
    IcePop with low "0.5" and high "5"). `None`: every weight is 1."""
    level: CorrectionLevel = CorrectionLevel.TOKEN
    """`Token`: each token's weight is its own ratio. `Sequence`: the weight of all tokens of a rollout is the product
    of their ratios."""
    low: DecimalString = Field(default="0", validate_default=True)
    """Smallest weight."""
    high: DecimalString = Field(default="2", validate_default=True)
    """Largest weight."""


class RolloutMask(Section):
    """Masks rollouts out of the policy gradient whose probabilities in trainer and sampler differ too much."""

    ratio_low: DecimalString | None = None
    """Smallest geometric mean of a rollout's ratios, trainer over sampler. Rollouts below it are masked. Null: no
    bound."""
    ratio_high: DecimalString | None = None
    """Largest geometric mean of a rollout's ratios, trainer over sampler. Rollouts above it are masked. Null: no
    bound."""
    max_divergence: DecimalString | None = None
    """Largest mean of log sampler - log policy over a rollout's tokens, in nats. Rollouts with a negative advantage
    above it are masked (DeepSeek-V3.2). Null: no bound."""


class KlEstimator(StrEnum):
    K1 = "K1"
    K2 = "K2"
    K3 = "K3"


class KlPlace(StrEnum):
    LOSS = "Loss"
    REWARD = "Reward"


class ReferenceKl(Section):
    """Penalizes the divergence of the policy from a reference policy. Every trainer rank holds the reference's weights,
    too."""

    coefficient: DecimalString
    """Coefficient of the divergence in nats: per token, normalised as the loss, or per rollout, in units of reward."""
    estimator: KlEstimator = KlEstimator.K3
    """Estimator, with d = log policy - log reference of a sampled token. `K1`: d. `K2`: d^2 / 2. `K3`:
    exp(-d) - 1 + d."""
    place: KlPlace = KlPlace.LOSS
    """`Loss`: added to the loss, with gradient. `Reward`: summed over each rollout and subtracted from its reward
    before advantages are computed, without gradient."""
    importance_weighted: bool = True
    """With `place: Loss`: true multiplies each token's term by policy over sampler, and uses the gradient of the
    divergence itself. Value and gradient are then unbiased for tokens that an older policy sampled. False uses the
    plain term, as in GRPO's paper; with a policy lag of 1 or more, its value and gradient are biased. No effect with
    `place: Reward`."""
    path: Annotated[PathText | None, RelativePath.TO_RUN_FILE, HubName.ALLOWED] = None
    """Hugging Face folder of the reference, with the policy's architecture, or a name on the hub, as model.path. Null:
    model.path, the policy that the run starts from."""
    revision: ShortText | None = None
    """As model.revision."""


class Overlong(Section):
    """DAPO's soft overlong punishment: a penalty on the reward of rollouts close to the length limit."""

    buffer_tokens: Positive
    """Number of tokens below generation.sampling.maxTokens over which the penalty grows from 0 to `penalty`."""
    penalty: DecimalString = Field(default="1", validate_default=True)
    """Penalty of a rollout as long as the limit, subtracted from its reward."""


class WithoutSignal(StrEnum):
    TRAIN = "Train"
    LEAVE_OUT = "LeaveOut"


class Lora(Section):
    """Trains low-rank updates of the policy's linear layers and nothing else (arXiv:2106.09685).

    In a mixture of experts, only the attention's linear layers are trained. Replicas and the exported model get the
    merged weights.
    """

    rank: Positive = 16
    """Rank of each update."""
    alpha: DecimalString = Field(default="32", validate_default=True)
    """Scale: updates are multiplied by alpha / rank."""


class Loss(Section):
    """The policy's loss. docs/losses.md has the formulas, and the settings of each named recipe."""

    objective: Objective = Objective.CLIP
    """Objective. `Clip`: the clipped ratio of each token (PPO, GRPO, DAPO). `Gspo`: the clipped ratio of each rollout,
    the geometric mean of its tokens' ratios. `Cispo`: each token's log-probability, weighted by its clipped ratio
    without gradient."""
    ratio_to: RatioTo = RatioTo.STEP_START
    """Denominator of the ratio. `StepStart`: the policy at the start of the step; `correction` then corrects for the
    sampler (decoupled PPO). `Sampler`: the sampler, as in PPO; the clip then also bounds lag and mismatch."""
    advantages: Advantages = Advantages.GROUP_CENTRED
    """Advantage of a rollout. `GroupCentred`: its reward minus the group's mean (Dr. GRPO). `GroupStandardised`: the
    same, divided by the group's standard deviation (GRPO). `LeaveOneOut`: minus the mean of the group's other rollouts
    (RLOO). `BatchStandardised`: minus the batch's mean, divided by the batch's standard deviation (REINFORCE++).
    `GroupCentredBatchStandardised`: minus the group's mean, divided by the batch's standard deviation of these
    differences (REINFORCE++-baseline)."""
    normaliser: Normaliser = Normaliser.TOKENS
    """Divisor of the sum over tokens. `Tokens`: the batch's tokens (DAPO). `Sequences`: each rollout's tokens, then the
    number of rollouts (GRPO, GSPO). `FixedLength`: the number of rollouts times generation.sampling.maxTokens (Dr.
    GRPO)."""
    clip_low: DecimalString = Field(default="0.2", validate_default=True)
    """Lower clip: the ratio is clipped below 1 - clipLow. "1" or more: no lower clip."""
    clip_high: DecimalString = Field(default="0.2", validate_default=True)
    """Upper clip: the ratio is clipped above 1 + clipHigh."""
    correction: Correction = Correction()
    """Importance weights of tokens that an older policy or another engine sampled."""
    rollout_mask: RolloutMask | None = None
    """Masks rollouts that are too far from the policy. Null: no mask."""
    reference_kl: ReferenceKl | None = None
    """Penalty on the divergence from a reference policy. Null: no reference is loaded."""
    overlong: Overlong | None = None
    """Penalty on long rollouts. Null: no penalty."""
    without_signal: WithoutSignal = WithoutSignal.TRAIN
    """Groups without signal: the verifier gave all their rollouts the same reward. Their advantages are 0, unless
    `overlong` or `referenceKl.place: Reward` makes rewards differ afterwards. `Train`: they are trained on, and count
    in the normaliser. `LeaveOut`: they are not sent to the trainer, whatever these two would add, and the step's report
    names them (DAPO's dynamic sampling, without sampling more prompts)."""


class DrafterInitialisation(Section):
    """Supervised initialisation of a fresh drafter on rollouts of the first policy. Epochs go on while the acceptance
    length on held-out prompts grows. If more rollouts are missing, twice as many prompts are sampled."""

    prompts: Positive = 128
    """Number of prompts of the run's own stream that rollouts are generated for at first. Training uses the same
    prompts later."""
    max_prompts: Positive | None = None
    """Most prompts. Their number is doubled, up to this, as long as the drafter does better on the rollouts that it is
    trained on than on the held-out ones. Null: four times `prompts`."""
    samples_per_prompt: Positive = 1
    """Completions per prompt."""
    epochs: Positive = 12
    """Most passes over the completions, for each number of prompts. Over them the learning rate falls linearly to a
    tenth."""
    min_gain: DecimalString = Field(default="0.02", validate_default=True)
    """Smallest growth of the held-out acceptance length, in tokens per verification, that an epoch must bring. After an
    epoch that brings less, the learning rate is at most a third of its start, after a second one at most a tenth; after
    the third, the training ends. Up to an acceptance length of 1.1, growth is not judged. Twice the prompts must bring
    as much, too. "0": all `epochs` are trained."""
    budget_s: Positive | None = None
    """Most seconds of the whole initialisation; no epoch but the first begins later. The drafter then depends on the
    machine's speed. Null: no limit."""
    held_out: DecimalString = Field(default="0.1", validate_default=True)
    """Share of the first `prompts` that the drafter is not trained on. Acceptance is measured on them. "0": none. All
    `epochs` are trained then, and no more prompts are sampled."""

    @property
    def most_prompts(self) -> int:
        """Number of prompts that are sampled at most."""
        return 4 * self.prompts if self.max_prompts is None else self.max_prompts

    @property
    def most_epochs(self) -> int:
        """Number of epochs that are trained at most, over all numbers of prompts."""
        doublings = max(0, math.ceil(math.log2(self.most_prompts / self.prompts)))
        return self.epochs * (1 + doublings)


class DrafterLoss(StrEnum):
    SOFT_CROSS_ENTROPY = "SoftCrossEntropy"
    TOTAL_VARIATION = "TotalVariation"


class DrafterTraining(Section):
    """Training of the drafter, with an optimizer of its own: of an EAGLE-3 head, a draft model, or the policy's own
    heads. It never changes the policy's gradients."""

    learning_rate: DecimalString | None = None
    """AdamW learning rate. Null: 1e-3, which suits heads of millions of parameters, and 1e-5 for a draft model.
    Published heads as wide as an 8B model use 1e-4. During the run it is lower for updates on few tokens, and for the
    first updates of a drafter that was trained elsewhere (`drafting/online.py`)."""
    clip_norm: DecimalString = Field(default="1", validate_default=True)
    """Largest gradient norm of the drafter. The policy's gradients are clipped separately."""
    passes: Positive = 3
    """Number of positions that an EAGLE-3 head is trained to draft ahead (training-time test, arXiv:2503.01840). Native
    heads and draft models are trained in numDraftTokens passes, as many as the engine runs."""
    loss: DrafterLoss = DrafterLoss.SOFT_CROSS_ENTROPY
    """`SoftCrossEntropy`: cross-entropy with the policy's whole distribution. `TotalVariation`: the share of sampled
    drafts that are rejected (arXiv:2310.08461, 2606.12370). An initialisation uses cross-entropy until half of its
    epochs are trained or the learning rate has fallen, since total variation has almost no gradient for an untrained
    head."""
    online: bool = True
    """True: the drafter is trained at every step, on the policy's forward pass. False: it stays as initialised, or as
    it came with the policy. A draft model then stays that of its folder, and the trainer needs no memory for it."""
    token_budget: Positive | None = None
    """Most tokens per step that the drafter is trained to draft from; rollouts take turns. Null: as many as 3 % of the
    policy's floating-point operations allow, which lengthens the step by at most 7 %. In both cases at most as many as
    have, over all ranks, logits of the policy of 2 GiB and hidden states of 8 GiB, those of the tokens before them
    included. Both are kept until the drafter learns from them."""
    initialisation: DrafterInitialisation = DrafterInitialisation()
    """Initialisation of a fresh head. Not used if `generation.speculation.eagle3.path` is set. Native heads and draft
    models are initialised by `specrl drafter init` alone."""


class Recompute(StrEnum):
    NOTHING = "Nothing"
    LAYERS = "Layers"


class Kernels(StrEnum):
    REFERENCE = "Reference"
    AUTO = "Auto"


class Routing(StrEnum):
    ANEW = "Anew"
    REPLAY = "Replay"


class Trainer(Section):
    """The trainer service, which runs Megatron-Core on its ranks."""

    parallelism: Parallelism = Parallelism()
    """Parallelism of the ranks."""
    optimizer: Optimizer
    """Policy optimizer."""
    lora: Lora | None = None
    """Training of low-rank updates. Null: all weights are trained."""
    loss: Loss = Loss()
    """Policy loss."""
    drafter: DrafterTraining = DrafterTraining()
    """Drafter training. No effect unless speculation is `eagle3`, `draftModel` or `mtp`."""
    micro_batch_tokens: Positive = 16384
    """Most tokens in one forward pass of one rank. Rollouts are packed without padding."""
    recompute: Recompute = Recompute.NOTHING
    """Activation recomputation in the backward pass. `Nothing`: all activations are kept. `Layers`: only each layer's
    input is kept, and the layer is computed again. A step then takes about a third longer, but needs far less memory
    for long sequences."""
    kernels: Kernels = Kernels.AUTO
    """Kernels of the policy's passes. `Reference`: those that run on CPUs, too. `Auto`: a faster one in their place,
    for bfloat16 on a kind of GPU and with a version of torch on which the GPU kit (docs/gpu.md) has found it right. In
    the first micro-batch the trainer compares it with the reference once more."""
    routing: Routing = Routing.ANEW
    """Experts of a mixture that a rollout's tokens use. `Anew`: the router chooses them again in the trainer. `Replay`:
    the replica sends its choices, and the trainer uses them (R3, arXiv:2510.11370). That takes one byte per token,
    layer and chosen expert, or two bytes with more than 256 experts. In both cases the trainer's router computes the
    experts' weights, with gradients."""
    threads: Positive = 1
    """CPU threads of one rank."""
    num_nodes: Annotated[NodeCount, OnCluster.ONLY] = 1
    """Pods of the trainer on a cluster, each on its own node if it has GPUs. The ranks are distributed evenly. A local
    run ignores this field and the two below."""
    gpus_per_node: Annotated[WholeNumber, Field(ge=0, le=16), OnCluster.ONLY] = 0
    """GPUs of each trainer pod, one per rank. 0: only with placement.profile `CPU`; the trainer computes on CPUs."""
    pod_template: Annotated[PodTemplate | None, ChangePolicy.SUSPENDED, OnCluster.ONLY] = None
    """As coordinator.podTemplate, for every pod of the trainer. Its container is `trainer`."""
