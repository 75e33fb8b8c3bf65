"""The stream of prompts: endless, shuffled, and seekable.

Stage 1 of the loop; the coordinator asks for position after position and after a restart goes on where it was, with
nothing but a number stored. Invariants: a prompt is a pure function of (data set, tokenizer, spec, position); every
epoch holds each problem exactly once, in an order of its own.

The order of epoch e is the sort order of the problems' keys, problem i's key being output i of the counter-based
generator Philox4x64 under the key (shuffleSeed, e). numpy promises that a bit generator's raw output never changes
(NEP 19), which it does not for its shuffles; sorting integers is the same everywhere.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from specrl.prompts.sources import SHOWN, ProblemSource, open_source
from specrl.prompts.templates import PromptTemplate
from specrl.records import Prompt
from specrl.spec import RunSpec
from specrl.telemetry import metrics

log = structlog.get_logger(__name__)

IDENTIFYING = 256
"""Problems that a stream's identity is made of: they are from all over the source."""

_MASK = 2**64 - 1
_EPOCHS_CACHED = 2
"""Around an epoch's end, groups of two epochs are in flight."""
_PROMPTS_CACHED = 1024
"""A group asks for its prompt twice a rollout, to request it and to grade it, and template and tokenizer take a third
of a millisecond each time. A prompt of 1000 tokens is 36 kB."""


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[count] int64: which problem stands at each place of an epoch. Uniform over permutations (128-bit key)."""
    key = np.array([seed & _MASK, epoch & _MASK], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


class PromptStream:
    """Prompts by position, 0, 1, 2, ... without end; position p lies in epoch p // len(stream)."""

    def __init__(self, source: ProblemSource, template: PromptTemplate, shuffle_seed: int) -> None:
        self._source = source
        self._template, self._shuffle_seed = template, shuffle_seed
        # Bound to this stream, and freed with it.
        self._order = lru_cache(_EPOCHS_CACHED)(lambda epoch: epoch_order(len(source), shuffle_seed, epoch))
        self._made = lru_cache(_PROMPTS_CACHED)(self._make)

    def __len__(self) -> int:
        """Prompts in one epoch: the problems of the source."""
        return len(self._source)

    @property
    def source(self) -> ProblemSource:
        """The problems, in the order of the file."""
        return self._source

    def identity(self) -> str:
        """Digest of the problems, by the first ones of the stream, their number and their order.

        The same for every template and tokenizer. Streams of one identity have the same problem at every position.
        """
        return self._identity

    @cached_property
    def _identity(self) -> str:
        first = [self._source.problem(int(index)) for index in self._order(0)[:IDENTIFYING]]
        words = [str(len(self._source)), str(self._shuffle_seed), *(f"{it.question}\0{it.answer}" for it in first)]
        return xxhash.xxh3_128_hexdigest("\0\0".join(words).encode())

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position, in any order of asking."""
        if position < 0:
            raise IndexError(f"position must be >= 0, got position={position}; streams start at 0")
        return self._made(position)

    def _make(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._source))
        return _prompt(self._source, self._template, int(self._order(epoch)[place]), position)


def load_prompts(spec: RunSpec) -> PromptStream:
    """Open the run's prompts and check every one of them. Paths in `spec` are absolute, as `load_spec` leaves them.

    Raises DatasetInvalid for malformed records and for prompts longer than `prompts.maxTokens`, unless they may be
    skipped (`left_out` of the source); CheckpointInvalid for the policy's tokenizer. All prompts are tokenized once for
    that: GSM8K's 7,473 took 2.4 s on two busy cores.
    """
    template = PromptTemplate(spec.prompts, spec.model.path)
    source = _fitting(open_source(spec.prompts.source), template, spec.prompts.max_tokens)
    return PromptStream(source, template, spec.prompts.shuffle_seed)


def load_validation(spec: RunSpec) -> list[Prompt]:
    """The first `validation.limit` problems of the validation source, formatted like the run's prompts; [] without one.

    `position` is the problem's place in its source. Raises as `load_prompts` does, and DatasetInvalid when a file holds
    problems that the run trains on.
    """
    if spec.validation is None:
        return []
    training = open_source(spec.prompts.source)
    trained = frozenset(training.problem(index).question for index in range(len(training)))
    template = PromptTemplate(spec.prompts, spec.model.path)
    limit = spec.validation.limit
    source = _fitting(open_source(spec.validation.source, exclude=trained), template, spec.prompts.max_tokens, limit)
    return [_prompt(source, template, index, index, prefix="v") for index in range(min(limit, len(source)))]


def _prompt(source: ProblemSource, template: PromptTemplate, index: int, position: int, prefix: str = "p") -> Prompt:
    """prompt_id: the problem's place in its source and a digest of its content, the same in every epoch and run."""
    problem = source.problem(index)
    content = xxhash.xxh3_64_hexdigest(f"{problem.question}\0{problem.answer}".encode())
    text = template.format(problem.question)
    return Prompt(f"{prefix}{index}-{content[:8]}", position, template.tokenize(text), text, problem.answer)


def _fitting(
    source: ProblemSource, template: PromptTemplate, max_tokens: int, limit: int | None = None
) -> ProblemSource:
    """The source without the problems that are too long, where its bad lines may be skipped; says what it is without.

    limit: only so many problems will be asked for. Raises DatasetInvalid.
    """
    checked = len(source) if limit is None else min(limit, len(source))
    texts = [template.format(source.problem(index).question) for index in range(checked)]
    lengths = [len(token_ids) for token_ids in template.tokenize_all(texts)]
    wrong = {
        index: f"{length} tokens, which must be 1 to {max_tokens} (prompts.maxTokens); raise it to {max(lengths)}"
        for index, length in enumerate(lengths)
        if not 1 <= length <= max_tokens
    }
    if wrong:
        # With a limit, others take the place of those that are left out, and must fit, too.
        return _fitting(source.without(wrong), template, max_tokens, limit)
    left_out = source.left_out
    if left_out.skipped:
        log.warning("problems_skipped", count=len(left_out.skipped), first=left_out.skipped[:SHOWN])
        metrics.FILES_PASSED_OVER.labels("prompt").inc(len(left_out.skipped))
    if left_out.repeated:
        log.warning("problems_repeated", count=left_out.repeated)
    return source
