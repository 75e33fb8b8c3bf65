"""The stream of prompts: endless, shuffled, and seekable.

Stage 1 of the loop; the coordinator asks for position after position and after a restart goes on where it was, with
nothing but a number stored. Invariants: a prompt is a pure function of (data set, tokenizer, spec, position); every
epoch holds each problem exactly once, in an order of its own.

The order of epoch e is the sort order of the problems' keys, problem i's key being output i of the counter-based
generator Philox4x64 under the key (shuffleSeed, e). numpy promises that a bit generator's raw output never changes
(NEP 19), which it does not for its shuffles; sorting integers is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt
import structlog
import xxhash

from specrl.prompts.columns import Problem
from specrl.prompts.sources import SHOWN, ProblemSource, open_source
from specrl.prompts.templates import PromptTemplate
from specrl.records import Prompt
from specrl.spec import RunSpec
from specrl.telemetry import metrics

log = structlog.get_logger(__name__)

Judge = Callable[[Problem], str]
"""Why a problem must not be asked; empty when it may. Its answers do not change while a source is read."""

IDENTIFYING = 256
"""Problems that a stream's identity is made of: they are from all over the source."""

_MASK = 2**64 - 1
_EPOCHS_CACHED = 2
"""Around an epoch's end, groups of two epochs are in flight."""
_PROMPTS_CACHED = 1024
"""A group asks for its prompt twice a rollout, to request it and to grade it, and template and tokenizer take a third
of a millisecond each time. A prompt of 1000 tokens is 36 kB."""


def accept_any(_: Problem) -> str:
    """The judge of those that grade nothing."""
    return ""


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


@dataclass(frozen=True)
class Sources:
    """The problems that a run trains on, and those that it validates on."""

    training: ProblemSource
    validation: ProblemSource | None


def open_sources(spec: RunSpec) -> Sources:
    """Read the run's problems. Paths in `spec` are absolute, as `load_spec` leaves them.

    Raises DatasetInvalid for malformed records, unless they may be skipped (`left_out` of the source), and when a file
    for validation holds problems that the run trains on.
    """
    training = _open_training(spec)
    if spec.validation is None:
        return Sources(training, None)
    trained = frozenset(training.problem(index).question for index in range(len(training)))
    return Sources(training, open_source(spec.validation.source, trained, keeps_rows=_keeps_rows(spec)))


def _open_training(spec: RunSpec) -> ProblemSource:
    return open_source(spec.prompts.source, keeps_rows=_keeps_rows(spec))


def _keeps_rows(spec: RunSpec) -> bool:
    """No other verifier looks at them."""
    return spec.rewards.python is not None


def load_prompts(spec: RunSpec, source: ProblemSource | None = None, judge: Judge = accept_any) -> PromptStream:
    """The run's prompts, every one of them checked. source: its problems, where they have been read before.

    Raises DatasetInvalid for prompts longer than `prompts.maxTokens` and for problems that `judge` refuses, unless they
    may be skipped (`left_out` of the source); CheckpointInvalid for the policy's tokenizer; without a source, what
    `open_sources` raises. All prompts are tokenized once for that: GSM8K's 7,473 took 2.4 s on two busy cores.
    """
    template = PromptTemplate(spec.prompts, spec.model.path)
    source = _open_training(spec) if source is None else source
    source = _fitting(source, template, spec.prompts.max_tokens, judge)
    return PromptStream(source, template, spec.prompts.shuffle_seed)


def load_validation(spec: RunSpec, source: ProblemSource | None = None, judge: Judge = accept_any) -> list[Prompt]:
    """The first `validation.limit` problems of the validation source, formatted like the run's prompts; [] without one.

    `position` is the problem's place in its source. Raises as `load_prompts` does.
    """
    if spec.validation is None:
        return []
    source = open_sources(spec).validation if source is None else source
    assert source is not None, "a run with validation has a source for it"
    template = PromptTemplate(spec.prompts, spec.model.path)
    limit = spec.validation.limit
    source = _fitting(source, template, spec.prompts.max_tokens, judge, limit)
    return [_prompt(source, template, index, index, prefix="v") for index in range(min(limit, len(source)))]


def _prompt(source: ProblemSource, template: PromptTemplate, index: int, position: int, prefix: str = "p") -> Prompt:
    """prompt_id: the problem's place in its source and a digest of its content, the same in every epoch and run."""
    problem = source.problem(index)
    content = xxhash.xxh3_64_hexdigest(f"{problem.question}\0{problem.answer}".encode())
    text = template.format(problem.question)
    token_ids, row = template.tokenize(text), problem.row or {}
    return Prompt(f"{prefix}{index}-{content[:8]}", position, token_ids, text, problem.answer, row)


def _fitting(
    source: ProblemSource, template: PromptTemplate, max_tokens: int, judge: Judge, limit: int | None = None
) -> ProblemSource:
    """The source without the problems that are too long or that `judge` refuses, where they may be skipped.

    limit: only so many problems will be asked for. Raises DatasetInvalid.
    """
    checked = [source.problem(index) for index in range(len(source) if limit is None else min(limit, len(source)))]
    texts = [template.format(problem.question) for problem in checked]
    lengths = [len(token_ids) for token_ids in template.tokenize_all(texts)]
    wrong: dict[int, str] = {}
    for index, (problem, length) in enumerate(zip(checked, lengths, strict=True)):
        if not 1 <= length <= max_tokens:
            rule = f"{length} tokens, which must be 1 to {max_tokens} (prompts.maxTokens)"
            wrong[index] = f"{rule}; raise it to {max(lengths)}"
        elif refusal := judge(problem):
            wrong[index] = refusal
    if wrong:
        # With a limit, others take the place of those that are left out, and must fit, too.
        return _fitting(source.without(wrong), template, max_tokens, judge, limit)
    left_out = source.left_out
    if left_out.skipped:
        log.warning("problems_skipped", count=len(left_out.skipped), first=left_out.skipped[:SHOWN])
        metrics.FILES_PASSED_OVER.labels("prompt").inc(len(left_out.skipped))
    if left_out.repeated:
        log.warning("problems_repeated", count=left_out.repeated)
    return source
