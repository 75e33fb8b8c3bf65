"""Sections about rollouts: replicas, sampling, speculation."""

from __future__ import annotations

from pydantic import Field

from specrl.spec.base import DecimalString, Empty, Section, Union
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
    """Longest completion, in tokens, the end token included."""
    stop: tuple[str, ...] = ()
    """A completion also ends before any of these strings."""


class Eagle3(Section):
    """An EAGLE-3 head that drafts from the policy's hidden states."""

    num_draft_tokens: Positive = 3
    """k: tokens drafted per verification."""
    path: str | None = None
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


class Speculation(Union):
    """How tokens are drafted; exactly one member. None of them changes what is sampled."""

    none: Empty | None = None
    """No speculation."""
    eagle3: Eagle3 | None = None
    """A learned head, kept in step with the policy."""
    ngram: Ngram | None = None
    """Prompt look-up."""

    @property
    def num_draft_tokens(self) -> int:
        """k of the mechanism, 0 without speculation."""
        member = self.eagle3 or self.ngram
        return member.num_draft_tokens if member is not None else 0


class Generation(Section):
    """The generation service: vLLM replicas, each a process (or pod) of its own."""

    replicas: Positive = 1
    """Replicas to run. The one number that may be changed while the run goes on."""
    sampling: SamplingSpec
    """How training rollouts are drawn."""
    speculation: Speculation = Speculation(none=Empty())
    """How tokens are drafted."""
    max_live_rollouts: Positive = 64
    """Completions that one replica computes at once (vLLM's max_num_seqs)."""
    kv_cache_mib: Positive | None = None
    """Memory for the KV cache, in MiB. Null: 256 on CPUs, vLLM's own choice on GPUs."""
    tensor_parallel: Positive = 1
    """GPUs (or CPU processes) that share one replica."""
    eager: bool | None = None
    """True computes without compilation or CUDA graphs. Null: true on CPUs, false on GPUs."""
    threads: Positive = 1
    """CPU threads of one replica's computation."""
