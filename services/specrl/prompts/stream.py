"""The stream of prompts: endless, shuffled, and seekable.

Stage 1 of the loop; the coordinator asks for position after position and after a restart goes on where it was, with
nothing but a number stored. Invariants: a prompt is a pure function of (data set, tokenizer, spec, position); every
epoch holds each problem exactly once, in an order of its own.

The order of epoch e is the sort order of the problems' keys, problem i's key being output i of the counter-based
generator Philox4x64 under the key (shuffleSeed, e). numpy promises that a bit generator's raw output never changes
(NEP 19), which it does not for its shuffles; sorting integers is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from specrl.errors import DatasetInvalid
from specrl.prompts.sources import ProblemSource, open_source, summarise
from specrl.prompts.templates import PromptTemplate
from specrl.records import Prompt
from specrl.spec import RunSpec

_MASK = 2**64 - 1
_EPOCHS_CACHED = 2
"""Around an epoch's end, groups of two epochs are in flight."""


def epoch_order(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """[count] int64: which problem stands at each place of an epoch. Uniform over permutations (128-bit key)."""
    key = np.array([seed & _MASK, epoch & _MASK], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


class PromptStream:
    """Prompts by position, 0, 1, 2, ... without end; position p lies in epoch p // len(stream)."""

    def __init__(self, source: ProblemSource, template: PromptTemplate, shuffle_seed: int) -> None:
        self._source = source
        self._template = template
        # Bound to this stream, and freed with it.
        self._order = lru_cache(_EPOCHS_CACHED)(lambda epoch: epoch_order(len(source), shuffle_seed, epoch))

    def __len__(self) -> int:
        """Prompts in one epoch: the problems of the source."""
        return len(self._source)

    @property
    def source(self) -> ProblemSource:
        """The problems, in the order of the file."""
        return self._source

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position, in any order of asking."""
        if position < 0:
            raise IndexError(f"position must be >= 0, got position={position}; streams start at 0")
        epoch, place = divmod(position, len(self._source))
        return _prompt(self._source, self._template, int(self._order(epoch)[place]), position)


def load_prompts(spec: RunSpec) -> PromptStream:
    """Open the run's prompts and check every one of them. Paths in `spec` are absolute, as `load_spec` leaves them.

    Raises DatasetInvalid for malformed records and for prompts longer than `prompts.maxTokens`, CheckpointInvalid for
    the policy's tokenizer. All prompts are tokenized once for that: GSM8K's 7,473 took 2.4 s on two busy cores.
    """
    source = open_source(spec.prompts.source)
    template = PromptTemplate(spec.prompts, spec.model.path)
    _check_lengths(source, template, range(len(source)), spec.prompts.max_tokens)
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
    source = open_source(spec.validation.source, exclude=trained)
    template = PromptTemplate(spec.prompts, spec.model.path)
    chosen = range(min(spec.validation.limit, len(source)))
    _check_lengths(source, template, chosen, spec.prompts.max_tokens)
    return [_prompt(source, template, index, index, prefix="v") for index in chosen]


def _prompt(source: ProblemSource, template: PromptTemplate, index: int, position: int, prefix: str = "p") -> Prompt:
    """prompt_id: the problem's place in its source and a digest of its content, the same in every epoch and run."""
    problem = source.problem(index)
    content = xxhash.xxh3_64_hexdigest(f"{problem.question}\0{problem.answer}".encode())
    text = template.format(problem.question)
    return Prompt(f"{prefix}{index}-{content[:8]}", position, template.tokenize(text), text, problem.answer)


def _check_lengths(source: ProblemSource, template: PromptTemplate, chosen: Sequence[int], max_tokens: int) -> None:
    texts = [template.format(source.problem(index).question) for index in chosen]
    lengths = [len(token_ids) for token_ids in template.tokenize_all(texts)]
    wrong = [
        f"{source.place(index)}: {length} tokens"
        for index, length in zip(chosen, lengths, strict=True)
        if not 1 <= length <= max_tokens
    ]
    if wrong:
        raise DatasetInvalid(
            summarise(
                f"prompts must be 1 to {max_tokens} tokens long (prompts.maxTokens)",
                wrong,
                f"raise it to {max(lengths)}, or drop these problems",
            )
        )
