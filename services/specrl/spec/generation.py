"""Sections about rollouts: replicas, sampling, speculation."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import (
    ChangePolicy,
    DecimalString,
    EmptySection,
    HubName,
    OnCluster,
    PathText,
    RelativePath,
    Section,
    ShortText,
    UnionSection,
    WholeNumber,
)
from specrl.spec.cluster import Autoscaling, PodTemplate, ReplicaCount
from specrl.spec.data import NotNegative, Positive


class SamplingSpec(Section):
    """How training rollouts are sampled from the policy."""

    temperature: DecimalString = Field(default="1", validate_default=True)
    """Sampling temperature, from 0.01 to 2. The trainer computes log-probabilities at the same temperature."""
    top_p: DecimalString = Field(default="1", validate_default=True)
    """Nucleus sampling, above 0 and at most 1: each token is drawn from the most likely tokens whose probabilities sum
    to at least this, after topK. 1: off. Below 1, a rollout carries the ids of these tokens, and all log-probabilities,
    entropies and divergences of the run are over them (docs/losses.md)."""
    top_k: NotNegative = 0
    """Each token is drawn from this many most likely tokens, at least 2. 0: off. As for topP, a rollout carries the ids
    of these tokens."""
    max_tokens: Positive
    """Longest completion, in tokens. The end token and the outputs of tools count."""
    stop: Annotated[tuple[Annotated[ShortText, Field(min_length=1)], ...], Field(max_length=64)] = ()
    """Strings that end a completion. They are not part of its text. A special token, such as `<|im_end|>`, must stand
    alone."""
    end_tokens: Annotated[tuple[ShortText, ...], Field(max_length=16)] = ()
    """Tokens that end a completion, as in tokenizer.json, such as `<|im_end|>`. They are part of it, and are trained
    on. The policy's own end tokens always end one: the tokenizer's, and all of config.json and
    generation_config.json."""

    @property
    def is_truncated(self) -> bool:
        """Whether topP or topK may leave tokens out, so that rollouts carry their sampling sets."""
        return self.top_p < 1 or self.top_k > 0


class DraftSampling(StrEnum):
    GREEDY = "Greedy"
    PROBABILISTIC = "Probabilistic"


class Eagle3(Section):
    """An EAGLE-3 head that drafts from the policy's hidden states."""

    num_draft_tokens: Positive = 3
    """k: tokens drafted per verification."""
    draft_sampling: DraftSampling = DraftSampling.GREEDY
    """`Greedy`: the draft is the head's most likely token. `Probabilistic`: it is sampled from the head's distribution
    at the sampling temperature. More drafts are accepted where the policy is uncertain, but the samples are not seeded,
    so a run is not reproducible bit for bit."""
    path: Annotated[PathText | None, RelativePath.TO_RUN_FILE, HubName.ALLOWED] = None
    """Head to start from: a Hugging Face folder, or a name on the hub, as model.path. Null: a fresh head, initialised
    on the policy's own rollouts."""
    revision: ShortText | None = None
    """As model.revision."""
    draft_vocab_size: Positive | None = None
    """Size of a fresh head's vocabulary: the most frequent tokens of the initialisation rollouts. Null: the policy's
    whole vocabulary. Not used with `path`: a head has its own."""


class Ngram(Section):
    """Drafts what followed the same n-gram earlier in the prompt or completion. Needs no weights."""

    num_draft_tokens: Positive = 3
    """k: tokens drafted per verification."""
    lookup_min: Positive = 1
    """Shortest n-gram that is matched, in tokens."""
    lookup_max: Positive = 3
    """Longest n-gram that is matched, in tokens."""


class Suffix(Section):
    """Drafts what followed the same tokens in earlier completions of the replica. Needs no weights."""

    num_draft_tokens: Positive = 8
    """k: most tokens drafted per verification. A draft is at most as long as the match that it was found by, and
    both together have at most 24 tokens. So more than 12 has no use."""
    cached_rollouts: Positive = 10000
    """Completions that are cached; the oldest is evicted first. One epoch needs prompts x group size."""


class DraftModel(Section):
    """A smaller model of the same vocabulary drafts. It is trained together with the policy, unless
    `trainer.drafter.online` is false."""

    num_draft_tokens: Positive = 3
    """k: tokens drafted per verification."""
    path: Annotated[PathText, RelativePath.TO_RUN_FILE, HubName.ALLOWED]
    """The model: a Hugging Face folder with the policy's own tokenizer, or a name on the hub, as model.path. To be
    trained, it must be a dense model that transformers knows, and not quantised. The run does not change the folder."""
    revision: ShortText | None = None
    """As model.revision."""
    draft_sampling: DraftSampling = DraftSampling.GREEDY
    """As eagle3.draftSampling."""


class Mtp(Section):
    """Drafts with the policy's own heads for multi-token prediction.

    They are part of the policy: of its versions, checkpoints and exports.
    """

    num_draft_tokens: Positive = 1
    """k: tokens drafted per verification. The policy's first head runs k times, and is trained in as many passes."""
    draft_sampling: DraftSampling = DraftSampling.GREEDY
    """As eagle3.draftSampling."""


class Speculation(UnionSection):
    """How tokens are drafted; exactly one member. Speculation is lossless: it does not change the distribution of
    samples."""

    none: EmptySection | None = None
    """No speculation."""
    eagle3: Eagle3 | None = None
    """A learned head, trained together with the policy."""
    ngram: Ngram | None = None
    """Prompt look-up."""
    suffix: Suffix | None = None
    """Look-up in the prompt, in the completion, and in all completions that the replica has generated: of the same
    group and of earlier epochs. Needs the package arctic-inference (`make suffix`). Drafts depend on all of these, so a
    run is not reproducible bit for bit."""
    draft_model: DraftModel | None = None
    """A smaller model with the policy's tokenizer, trained together with the policy."""
    mtp: Mtp | None = None
    """The policy's own heads for multi-token prediction, trained together with the policy. MiMo has such heads."""

    @property
    def num_draft_tokens(self) -> int:
        """k of the member that is set; 0 without speculation."""
        member = self.eagle3 or self.ngram or self.suffix or self.draft_model or self.mtp
        return member.num_draft_tokens if member is not None else 0

    @property
    def draft_sampling(self) -> DraftSampling | None:
        """How a drafter with weights samples its drafts; None for the other members."""
        member = self.eagle3 or self.draft_model or self.mtp
        return member.draft_sampling if member is not None else None


class KvCacheDtype(StrEnum):
    AUTO = "Auto"
    FP8 = "Fp8"


class DraftLength(StrEnum):
    ADAPTIVE = "Adaptive"
    FIXED = "Fixed"


class Generation(Section):
    """The generation service: vLLM replicas, each in its own process or pod."""

    replicas: Annotated[ReplicaCount, ChangePolicy.ANY_TIME] = 1
    """Number of replicas. It may be changed while the run goes on: by `kubectl scale rljob/NAME`, or by
    `specrl scale RUN -n N` on one machine."""
    sampling: SamplingSpec
    """How training rollouts are sampled."""
    speculation: Speculation = Speculation(none=EmptySection())
    """How tokens are drafted."""
    draft_length: DraftLength = DraftLength.ADAPTIVE
    """`Adaptive`: at every step, up to numDraftTokens are drafted, chosen for the live batch from measured costs and
    acceptance; none if drafting does not pay. `suffix` chooses its own length. `Fixed`: always numDraftTokens, so that
    a run without policy lag is reproducible bit for bit."""
    max_live_rollouts: Positive = 64
    """Completions that one replica computes at the same time (vLLM's max_num_seqs)."""
    drain_s: NotNegative = 60
    """Most seconds that a replica drains: after SIGTERM or a dismissal it finishes its rollouts and gets no new ones.
    Rollouts that are unfinished by then are generated by other replicas. 0: it exits at once."""
    reattach_s: NotNegative = 120
    """Seconds that a replica without coordinator continues its rollouts, and keeps finished ones. A coordinator that
    restarts within this time gets them; afterwards they are generated again. 0: they are aborted at once."""
    max_batched_tokens: Positive | None = None
    """Most tokens of one step, of prompts and drafts together (vLLM's max_num_batched_tokens), at least maxLiveRollouts
    x (numDraftTokens + 1). More speeds up long prompts and needs more memory. Null: on GPUs 8192, or that product if it
    is larger. On CPUs prompts are never split, so that a step has room for model.maxLength tokens more."""
    kv_cache_mib: Positive | None = None
    """Memory for the KV cache on each GPU, in MiB. Null: 256 on CPUs; on a GPU what gpuMemoryUtilization leaves. On a
    GPU that programs of a local run share, and without gpuMemoryUtilization: what the others leave, chosen when the run
    starts."""
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Precision of the KV cache. `Auto`: that of model.dtype. `Fp8`: one byte a number, so twice the tokens of bfloat16
    fit. Log-probabilities then differ more from the trainer's, so the canary's bounds may have to be raised."""
    gpu_memory_utilization: DecimalString | None = None
    """Share of each GPU's memory that a replica may use, above 0 and at most 1. It must be free when the replica
    starts. vLLM gives the KV cache what weights and activations leave of it. Null: "0.92", or with kvCacheMib, what
    weights, activations and that cache need. CPUs ignore it."""
    attention_backend: Annotated[str | None, Field(pattern="^[A-Z][A-Z0-9_]*$", max_length=64)] = None
    """Attention kernels, by vLLM's name, such as FLASHINFER. Null: vLLM chooses. CPUs ignore it."""
    tensor_parallel: Positive = 1
    """Tensor parallel GPUs (or CPU processes) of one replica."""
    expert_parallel: bool = False
    """Whether each of a replica's GPUs holds some experts of a mixture whole, instead of a part of every expert. Needs
    tensorParallel above 1. Not on CPUs, for which vLLM has no such kernel."""
    eager: bool | None = None
    """True: compute without compilation and CUDA graphs. Null: false on GPUs. On CPUs, false costs half a minute of CPU
    time or more at each start, and needs g++ and Python's headers. So null is false there if the run is long enough to
    be worth it, which follows from schedule, sampling.maxTokens and the policy's layers."""
    threads: Positive = 1
    """CPU threads of each of a replica's tensorParallel ranks."""
    gpus_per_replica: Annotated[WholeNumber, Field(ge=0, le=1024), OnCluster.ONLY] = 0
    """GPUs that one replica's pods request together on a cluster, at least tensorParallel. A replica with more GPUs
    than a node has takes whole nodes, one pod on each, and must have exactly tensorParallel GPUs. 0: only
    with placement.profile `CPU`; the replica computes on CPUs. A local run ignores this field and the two below."""
    autoscaling: Annotated[Autoscaling | None, ChangePolicy.ANY_TIME, OnCluster.ONLY] = None
    """Scales `replicas` by itself. Null: users set `replicas`."""
    pod_template: Annotated[PodTemplate | None, ChangePolicy.SUSPENDED, OnCluster.ONLY] = None
    """As coordinator.podTemplate, for every pod of a replica. Its container is `generation`."""

    @property
    def full_step_tokens(self) -> int:
        """Tokens that a decoding step with all live rollouts computes, drafts included."""
        return self.max_live_rollouts * (self.speculation.num_draft_tokens + 1)
