"""Sections about training: parallelism, optimizer, loss, drafter."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import Change, DecimalString, OnCluster, PathText, Section
from specrl.spec.cluster import NodeCount, PodTemplate
from specrl.spec.data import NotNegative, Positive

Ranks = Annotated[int, Field(ge=1, le=4096, strict=True)]


class Parallelism(Section):
    """How the trainer's ranks share the work. Their number is tensor x context x pipeline x data."""

    tensor: Ranks = 1
    """Tensor parallel ranks; must divide the attention heads and key/value groups of the model. Between the matrices
    they share the tokens (sequence parallelism)."""
    context: Ranks = 1
    """Context parallel ranks: they share the tokens of every rollout, for rollouts that are too long for one rank."""
    pipeline: Ranks = 1
    """Pipeline stages; times virtualStages it must divide the layers of the model."""
    virtual_stages: Ranks = 1
    """Stages of each pipeline rank, taken in turns (interleaved schedule): less waiting, more messages."""
    data: Ranks = 1
    """Data parallel ranks: rollouts of a batch are dealt to them, and each keeps its part of the optimizer's state."""
    expert: Ranks = 1
    """Expert parallel ranks: the experts of each layer are dealt to them, whole. Not ranks of their own: the tensor,
    context and data parallel ones of a stage form groups of this size. It must divide the model's experts. 1: every
    rank has all experts of its layers."""

    @property
    def stage_size(self) -> int:
        """Ranks of a pipeline stage."""
        return self.tensor * self.context * self.data

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pipeline


class Decay(StrEnum):
    NONE = "None"
    LINEAR = "Linear"
    COSINE = "Cosine"


class Optimizer(Section):
    """AdamW with decoupled weight decay, a learning rate that follows the step, and a gradient clip by global norm."""

    learning_rate: DecimalString
    """Step size after warm-up and before decay."""
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
    decay: Decay = Decay.NONE
    """How the learning rate falls to finalLearningRate, which it reaches at the run's last step."""
    decay_steps: Positive | None = None
    """Last steps of the run over which it falls; it is constant before them (warm-up, stable, decay). Null: all steps
    after the warm-up."""
    final_learning_rate: DecimalString = Field(default="0", validate_default=True)
    """Where the decay ends."""
    clip_norm: DecimalString = Field(default="1", validate_default=True)
    """Largest global gradient norm; larger gradients are scaled down to it."""
    updates_per_step: Positive = 1
    """Optimizer updates of each step, each on its whole batch (GRPO's mu). From the second on the ratio to the step's
    start moves, and is clipped; each costs another forward and backward pass."""
    max_skipped_steps: NotNegative = 3
    """Steps in a row that may be skipped, because their gradients are not finite, before the run ends. A skipped step
    leaves the policy as it is, and is reported. 0: the first one ends the run."""


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
    """Importance weights, trainer over sampler: they correct for policy lag and for engines that differ."""

    method: CorrectionMethod = CorrectionMethod.TRUNCATE
    """`Truncate`: weights are held within low and high (TIS). `Mask`: what has a weight outside counts nothing (MIS;
    IcePop with low "0.5" and high "5"). `None`: every weight is 1."""
    level: CorrectionLevel = CorrectionLevel.TOKEN
    """`Token`: each token has the weight of its own probability. `Sequence`: all tokens of a rollout have that of the
    whole rollout, the product of its tokens' ratios."""
    low: DecimalString = Field(default="0", validate_default=True)
    """Smallest weight."""
    high: DecimalString = Field(default="2", validate_default=True)
    """Largest weight."""


class RolloutMask(Section):
    """Leaves whole rollouts out of the policy gradient that the trainer finds too unlike what it would sample."""

    ratio_low: DecimalString | None = None
    """Rollouts whose tokens' ratios, trainer over sampler, have a geometric mean below this are left out. Null: none
    are."""
    ratio_high: DecimalString | None = None
    """... and those with one above this."""
    max_divergence: DecimalString | None = None
    """Rollouts with a negative advantage whose tokens are on average more than so many nats likelier under the sampler
    than under the policy are left out (DeepSeek-V3.2). Null: none are."""


class KlEstimator(StrEnum):
    K1 = "K1"
    K2 = "K2"
    K3 = "K3"


class KlPlace(StrEnum):
    LOSS = "Loss"
    REWARD = "Reward"


class ReferenceKl(Section):
    """Keeps the policy near a reference, whose weights every trainer rank holds besides its own."""

    coefficient: DecimalString
    """What a nat of divergence costs: per token, normalised as the loss is, or per rollout, in units of reward."""
    estimator: KlEstimator = KlEstimator.K3
    """With d = log policy - log reference of a sampled token: `K1` d, `K2` d^2 / 2, `K3` exp(-d) - 1 + d."""
    place: KlPlace = KlPlace.LOSS
    """`Loss`: added to the loss, with gradient. `Reward`: summed over each rollout and taken off its reward before
    advantages are made, without gradient."""
    importance_weighted: bool = True
    """In the loss, multiply the term of each token by policy over sampler, and take the divergence's own gradient: both
    are right for tokens that an older policy sampled. False: the term as the policy's own tokens would have it, as in
    GRPO's paper; with a policy lag of 1 or more its value and gradient are biased. Without effect with `place: Reward`,
    where the correction weighs the divergence as it weighs the rest of the reward."""
    path: PathText | None = None
    """Hugging Face folder of the reference, of the policy's architecture. Null: model.path, the policy that the run
    starts from."""


class Overlong(Section):
    """DAPO's soft punishment of long rollouts: the reward falls towards the length limit."""

    buffer_tokens: Positive
    """Over the last so many tokens below generation.sampling.maxTokens the punishment grows from 0 to `penalty`."""
    penalty: DecimalString = Field(default="1", validate_default=True)
    """Taken off the reward of a rollout as long as the limit."""


class WithoutSignal(StrEnum):
    TRAIN = "Train"
    LEAVE_OUT = "LeaveOut"


class Lora(Section):
    """Train low-rank updates of the policy's linear layers, and nothing else of it (arXiv:2106.09685).

    Of a mixture of experts the attention's are. Replicas, and the exported model, get the updated weights.
    """

    rank: Positive = 16
    """Rank of every update."""
    alpha: DecimalString = Field(default="32", validate_default=True)
    """Updates are multiplied by alpha / rank."""


class Loss(Section):
    """The policy's loss. docs/losses.md has the formulas, and the lines of each named recipe."""

    objective: Objective = Objective.CLIP
    """What is minimised. `Clip`: the clipped ratio of each token (PPO, GRPO, DAPO). `Gspo`: that of each rollout, the
    geometric mean of its tokens'. `Cispo`: the clipped ratio, without gradient, weighs the token's log-probability."""
    ratio_to: RatioTo = RatioTo.STEP_START
    """What the ratio is taken to. `StepStart`: the policy that the step starts from, the sampler's part being the
    correction's (decoupled PPO). `Sampler`: the sampler, as in PPO; the clip then bounds lag and mismatch, too."""
    advantages: Advantages = Advantages.GROUP_CENTRED
    """How rewards become advantages. `GroupCentred`: less the group's mean (Dr. GRPO). `GroupStandardised`: that over
    the group's standard deviation (GRPO). `LeaveOneOut`: less the mean of the group's others (RLOO).
    `BatchStandardised`: less the batch's mean, over its standard deviation (REINFORCE++).
    `GroupCentredBatchStandardised`: less the group's mean, over the batch's deviation of it (REINFORCE++-baseline)."""
    normaliser: Normaliser = Normaliser.TOKENS
    """What the sum over tokens is divided by. `Tokens`: the batch's tokens (DAPO). `Sequences`: each rollout's tokens,
    then the rollouts (GRPO, GSPO). `FixedLength`: the rollouts times generation.sampling.maxTokens (Dr. GRPO)."""
    clip_low: DecimalString = Field(default="0.2", validate_default=True)
    """The ratio is clipped below 1 - clipLow; from "1" on, not at all."""
    clip_high: DecimalString = Field(default="0.2", validate_default=True)
    """... and above 1 + clipHigh."""
    correction: Correction = Correction()
    """Importance weights of tokens that another policy or engine has drawn."""
    rollout_mask: RolloutMask | None = None
    """Leave out rollouts that are too far off. Null: all are trained on."""
    reference_kl: ReferenceKl | None = None
    """Divergence from a reference. Null: none is held, and nothing of it computed."""
    overlong: Overlong | None = None
    """Punish long rollouts. Null: rewards are the verifier's."""
    without_signal: WithoutSignal = WithoutSignal.TRAIN
    """Groups whose rewards are all the same, and whose advantages are therefore 0. `Train`: they are trained on, and
    count in the normaliser. `LeaveOut`: they are not sent to the trainer; the step is of the others, and its report
    names them (DAPO's dynamic sampling, without drawing more prompts)."""


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
    """AdamW step size. The default suits heads of millions of parameters; published ones as wide as an 8B model are
    trained with 1e-4. Of the run's updates, several a step, it is less in those on few tokens, and in the first ones
    of a head that was trained elsewhere (`drafting/online.py`)."""
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
    share (3 %) of the policy's floating-point operations pays for, which keeps the step's time within 7 %."""
    initialisation: DrafterInitialisation = DrafterInitialisation()
    """How a fresh head starts; not used when `generation.speculation.eagle3.path` is set."""


class Recompute(StrEnum):
    NOTHING = "Nothing"
    LAYERS = "Layers"


class Routing(StrEnum):
    ANEW = "Anew"
    REPLAY = "Replay"


class Trainer(Section):
    """The trainer service: Megatron-Core ranks."""

    parallelism: Parallelism = Parallelism()
    """How the ranks share the work."""
    optimizer: Optimizer
    """Policy optimizer."""
    lora: Lora | None = None
    """Train low-rank updates. Null: all weights are trained."""
    loss: Loss = Loss()
    """Policy loss."""
    drafter: DrafterTraining = DrafterTraining()
    """Drafter training; without effect unless speculation is `eagle3`."""
    micro_batch_tokens: Positive = 16384
    """Most tokens in one forward pass of one rank. Rollouts are packed one after another, without padding."""
    recompute: Recompute = Recompute.NOTHING
    """What the backward pass computes again. `Layers`: every layer, of which its input alone is kept; about a third
    more time, and far less memory where sequences are long."""
    routing: Routing = Routing.ANEW
    """Of a mixture, which experts the tokens of rollouts go to. `Anew`: those that the policy's router chooses in the
    trainer. `Replay`: those that it chose in the replica, which sends them along (R3, arXiv:2510.11370): a byte for
    each token, layer and expert of the token, two with more than 256 experts. The experts' weights are the trainer's
    in either case, and so are gradients."""
    threads: Positive = 1
    """CPU threads of one rank."""
    num_nodes: Annotated[NodeCount, OnCluster.ONLY] = 1
    """Pods of the trainer on a cluster, each on a node of its own if it has GPUs. The ranks are dealt to them evenly. A
    local run does not use it, nor the two fields below."""
    gpus_per_node: Annotated[int, Field(ge=0, le=16, strict=True), OnCluster.ONLY] = 0
    """GPUs of each of these pods, one a rank. 0: the trainer computes on CPUs."""
    pod_template: Annotated[PodTemplate | None, Change.SUSPENDED, OnCluster.ONLY] = None
    """As coordinator.podTemplate, for every pod of the trainer; its container is `trainer`."""
