"""Sections about rollouts: replicas, sampling, speculation."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from specrl.spec.base import Change, DecimalString, Empty, OnCluster, PathText, Section, ShortText, Union
from specrl.spec.cluster import Autoscaling, PodTemplate, ReplicaCount
from specrl.spec.data import NotNegative, Positive


class SamplingSpec(Section):
    """How training rollouts are drawn from the policy."""

    temperature: DecimalString = Field(default="1", validate_default=True)
    """Above 0. The trainer computes log-probabilities at the same temperature."""
    top_p: DecimalString = Field(default="1", validate_default=True)
    """Must be 1 in this version: the trainer's importance ratio is over the whole distribution."""
    top_k: NotNegative = 0
    """Must be 0 (off) in this version, for the same reason."""
    max_tokens: Positive
    """Longest completion, in tokens, the end token and the outputs of tools included."""
    stop: Annotated[tuple[ShortText, ...], Field(max_length=64)] = ()
    """A completion also ends before any of these strings."""


class DraftSampling(StrEnum):
    GREEDY = "Greedy"
    PROBABILISTIC = "Probabilistic"


class Eagle3(Section):
    """An EAGLE-3 head that drafts from the policy's hidden states."""

    num_draft_tokens: Positive = 3
    """k: tokens drafted per verification."""
    draft_sampling: DraftSampling = DraftSampling.GREEDY
    """Greedy drafts the head's likeliest token. Probabilistic draws the draft from the head's distribution at the
    sampling temperature: more is accepted where the policy is unsure, but the draws are not seeded, so that a run
    cannot be repeated bit by bit."""
    path: PathText | None = None
    """Head to start from, a Hugging Face folder. Null: a fresh head, initialised on the policy's own rollouts."""
    draft_vocab_size: Positive | None = None
    """Tokens that the head can propose, the most frequent ones of the initialisation rollouts. Null: all of them."""


class Ngram(Section):
    """Drafts what followed the same n-gram earlier in the prompt or completion. Needs no weights."""

    num_draft_tokens: Positive = 3
    """k: tokens drafted per verification."""
    lookup_min: Positive = 1
    """Shortest n-gram that is matched, in tokens."""
    lookup_max: Positive = 3
    """Longest n-gram that is matched, in tokens."""


class Suffix(Section):
    """Drafts what followed the same tokens in all that a replica has generated. Needs no weights."""

    num_draft_tokens: Positive = 8
    """k: most tokens drafted per verification; a draft is no longer than what it was found by."""
    cached_rollouts: Positive = 10000
    """Completions that are remembered; the oldest is forgotten first. Enough for an epoch: prompts x group size."""


class DraftModel(Section):
    """A smaller model of the same vocabulary drafts. The run does not change its weights."""

    num_draft_tokens: Positive = 3
    """k: tokens drafted per verification."""
    path: PathText
    """The model, a Hugging Face folder with the policy's own tokenizer."""
    draft_sampling: DraftSampling = DraftSampling.GREEDY
    """As eagle3.draftSampling."""


class Mtp(Section):
    """The policy's own heads for multi-token prediction draft."""

    num_draft_tokens: Positive = 1
    """k: tokens drafted per verification. More than the policy has heads runs the last head again."""
    draft_sampling: DraftSampling = DraftSampling.GREEDY
    """As eagle3.draftSampling."""


class Speculation(Union):
    """How tokens are drafted; exactly one member. None of them changes what is sampled."""

    none: Empty | None = None
    """No speculation."""
    eagle3: Eagle3 | None = None
    """A learned head, kept in step with the policy."""
    ngram: Ngram | None = None
    """Prompt look-up."""
    suffix: Suffix | None = None
    """Look-up in the prompt, in the completion, and in every completion that the replica has generated: others of the
    group, and those of earlier epochs. Needs the package arctic-inference (`make suffix`). What is drafted depends on
    all of that, so that a run cannot be repeated bit by bit."""
    draft_model: DraftModel | None = None
    """A smaller model with the policy's tokenizer. The run does not change its weights."""
    mtp: Mtp | None = None
    """The policy's own heads for multi-token prediction. The engine serves them, but the trainer of this version cannot
    train a policy that has any: `specrl run` refuses."""

    @property
    def num_draft_tokens(self) -> int:
        """k of the mechanism, 0 without speculation."""
        member = self.eagle3 or self.ngram or self.suffix or self.draft_model or self.mtp
        return member.num_draft_tokens if member is not None else 0

    @property
    def draft_sampling(self) -> DraftSampling | None:
        """How a learned drafter draws its drafts; None for the other mechanisms."""
        member = self.eagle3 or self.draft_model or self.mtp
        return member.draft_sampling if member is not None else None


class DraftLength(StrEnum):
    ADAPTIVE = "Adaptive"
    FIXED = "Fixed"


class Generation(Section):
    """The generation service: vLLM replicas, each a process (or pod) of its own."""

    replicas: Annotated[ReplicaCount, Change.ANY_TIME] = 1
    """Replicas to run. The one number that may be changed while the run goes on: `kubectl scale rljob/NAME`."""
    sampling: SamplingSpec
    """How training rollouts are drawn."""
    speculation: Speculation = Speculation(none=Empty())
    """How tokens are drafted."""
    draft_length: DraftLength = DraftLength.ADAPTIVE
    """Adaptive: at most numDraftTokens, chosen at every step for the live batch from measured step costs and
    acceptance, none where drafting does not pay; `suffix` chooses for itself. Fixed: always numDraftTokens, so that a
    run without policy lag can be repeated bit by bit."""
    max_live_rollouts: Positive = 64
    """Completions that one replica computes at once (vLLM's max_num_seqs)."""
    drain_s: NotNegative = 60
    """Most seconds that a replica which is told to leave (SIGTERM, or a dismissal) takes to finish the rollouts that it
    has; it gets no new ones. What is not finished by then is generated elsewhere. 0: it leaves at once."""
    reattach_s: NotNegative = 120
    """Seconds that a replica goes on with rollouts whose coordinator is gone, and keeps those that are finished. A
    coordinator that is started again within them takes them up; later they are generated anew. 0: they end at once."""
    kv_cache_mib: Positive | None = None
    """Memory for the KV cache, in MiB. Null: 256 on CPUs, vLLM's own choice on GPUs."""
    tensor_parallel: Positive = 1
    """GPUs (or CPU processes) that share one replica."""
    eager: bool | None = None
    """True computes without compilation or CUDA graphs. Null: true on CPUs, false on GPUs."""
    threads: Positive = 1
    """CPU threads of one replica's computation."""
    gpus_per_replica: Annotated[int, Field(ge=0, le=1024, strict=True), OnCluster.ONLY] = 0
    """GPUs that one replica's pods take together on a cluster, at least tensorParallel, and no more than that if they
    are more than a node has: such a replica takes whole nodes, a pod on each. 0: the replica computes on CPUs. A local
    run does not use it, nor the two fields below."""
    autoscaling: Annotated[Autoscaling | None, Change.ANY_TIME, OnCluster.ONLY] = None
    """Null: replicas is what users set."""
    pod_template: Annotated[PodTemplate | None, Change.SUSPENDED, OnCluster.ONLY] = None
    """As coordinator.podTemplate, for every pod of a replica; its container is `generation`."""
