"""Serve prompts by position from an endless, shuffled stream.

The coordinator asks for one position after another. After a restart it continues from a stored position; the stream has
no other state. Invariants: a prompt is a pure function of (data set, tokenizer, spec, position). Every epoch of a
source contains each of its problems exactly once, in its own order. `mixing` distributes positions over the sources.

The order of epoch e sorts problems by a random key. The key of problem i is output i of the counter-based generator
Philox4x64 with the key (shuffleSeed, e). numpy guarantees a bit generator's raw output across versions (NEP 19), but
not the result of its shuffles. Sorting integers gives the same order everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache

import structlog
import xxhash

from specrl.errors import DatasetInvalid
from specrl.prompts.columns import DatasetProblem
from specrl.prompts.mixing import SourceMix, epoch_order
from specrl.prompts.sources import SHOWN_FAULTS, ProblemSource, open_problem_source
from specrl.prompts.templates import PromptTemplate
from specrl.records import Prompt
from specrl.spec import RunSpec
from specrl.spec.data import ONLY_SOURCE
from specrl.telemetry import metrics

log = structlog.get_logger(__name__)

ProblemJudge = Callable[[DatasetProblem, str], str]
"""Returns why a problem of the source of this name must not be used, or "" if it may. It must always return the same
for the same problem."""

SourceReporter = Callable[[ProblemSource], None]
"""Told of each source whose problems have been checked, without those that are left out."""

_EPOCHS_CACHED = 2
"""Epochs of each source whose order is kept. Around the end of an epoch, groups of two epochs are in flight."""

_PROMPTS_CACHED = 1024
"""Prompts that are kept. A group needs its prompt twice per rollout, to request and to grade it, and formatting and
tokenizing take 0.3 ms each time. A prompt of 1000 tokens takes 36 kB."""


def accept_any_problem(_: DatasetProblem, _source: str) -> str:
    """Accept every problem, for callers that do not grade."""
    return ""


@dataclass(frozen=True)
class NamedProblems:
    """The problems of one source of a run, with the source's name and weight."""

    source: ProblemSource
    name: str = ONLY_SOURCE
    weight: int = 1


@dataclass(frozen=True)
class SourceIdentity:
    """What decides which problems a source gives, and how often.

    problems: their number. digest: of all of them, in their order. rows: digest of their other columns; empty unless a
    verifier may read them.
    """

    name: str
    weight: int
    revision: str
    problems: int
    digest: str
    rows: str = ""


class PromptStream:
    """An endless stream of prompts by position, from 0."""

    def __init__(self, sources: Sequence[NamedProblems], template: PromptTemplate, shuffle_seed: int) -> None:
        self.sources = tuple(sources)  # each in the order of its file
        self._template = template
        self._shuffle_seed = shuffle_seed
        self._mix = SourceMix([source.weight for source in sources], shuffle_seed)
        # Caches per instance, which are freed with it. A decorated method would keep every stream alive.
        self._order = lru_cache(_EPOCHS_CACHED * len(sources))(
            lambda number, epoch: epoch_order(len(sources[number].source), shuffle_seed, epoch, number)
        )
        self._made = lru_cache(_PROMPTS_CACHED)(self._make_prompt)

    def __len__(self) -> int:
        """Return the number of problems of all sources. With a single source it is the number of prompts per epoch."""
        return sum(len(named.source) for named in self.sources)

    @property
    def skipped(self) -> int:
        """Number of records that were left out."""
        return sum(len(named.source.skipped) for named in self.sources)

    @property
    def repeated(self) -> int:
        """Number of problems that repeat the question of an earlier one of their source."""
        return sum(named.source.repeated for named in self.sources)

    def identity(self) -> str:
        """Return a digest of all sources and their order: weights, revisions, problems and the seed.

        It does not depend on names, templates, tokenizer and verifier. Streams with the same identity have the same
        problem at every position. A checkpoint stores it, so that a run never continues with other prompts.
        """
        return self._computed_identity

    @cached_property
    def _computed_identity(self) -> str:
        nameless = [asdict(replace(source, name="", rows="")) for source in self.identify_sources()]
        return xxhash.xxh3_128_hexdigest(json.dumps([self._shuffle_seed, nameless]).encode())

    def identify_sources(self) -> list[SourceIdentity]:
        """Return the identity of each source, for a message that says which one has changed."""
        return [
            SourceIdentity(
                it.name, it.weight, it.source.revision, len(it.source), it.source.digest, it.source.rows_digest
            )
            for it in self.sources
        ]

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at a position. Positions may be asked for in any order."""
        if position < 0:
            raise IndexError(f"position must be >= 0, got position={position}; streams start at 0")
        return self._made(position)

    def _make_prompt(self, position: int) -> Prompt:
        number, asked = self._mix.locate_position(position)
        named = self.sources[number]
        epoch, place = divmod(asked, len(named.source))
        index = int(self._order(number, epoch)[place])
        return _build_prompt(named, self._template, index, position, self._prefix(named))

    def _prefix(self, named: NamedProblems) -> str:
        return "p" if len(self.sources) == 1 else f"{named.name}-p"


@dataclass(frozen=True)
class ProblemSources:
    """The problems that a run trains on, and those that it validates on."""

    training: tuple[NamedProblems, ...]
    validation: tuple[NamedProblems, ...] = ()


def open_sources(spec: RunSpec) -> ProblemSources:
    """Read the run's problems. Paths in `spec` must be absolute, as `load_spec` returns them.

    Raises DatasetInvalid for malformed records that may not be skipped, and if a validation file contains questions
    that the run trains on. The message has the faults of all sources.
    """
    training = _open_training(spec)
    if spec.validation is None:
        return ProblemSources(training)
    # Compared by question alone: the same question with another answer would still leak.
    trained = frozenset(problem.question for named in training for problem in named.source.problems)
    faults = _FaultCollector()
    validation: list[NamedProblems] = []
    for given in spec.validation.all_sets:
        with faults:
            problems = open_problem_source(given.source, trained, keeps_rows=_keeps_rows(spec))
            validation.append(NamedProblems(problems, given.name))
    faults.raise_all()
    return ProblemSources(training, tuple(validation))


def _open_training(spec: RunSpec) -> tuple[NamedProblems, ...]:
    faults = _FaultCollector()
    found: list[NamedProblems] = []
    for given in spec.prompts.all_sources:
        with faults:
            problems = open_problem_source(given.source, keeps_rows=_keeps_rows(spec))
            found.append(NamedProblems(problems, given.name, given.weight))
    faults.raise_all()
    return tuple(found)


class _FaultCollector:
    """Collects the faults of several sources, so that one message has all of them. Used in a `with` statement."""

    def __init__(self) -> None:
        self._faults: list[DatasetInvalid] = []

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, DatasetInvalid):
            return False
        self._faults.append(error)
        return True

    def raise_all(self) -> None:
        """Raise DatasetInvalid with all faults, if there are any."""
        if self._faults:
            raise DatasetInvalid("\n".join(map(str, self._faults))) from self._faults[0]


def _keeps_rows(spec: RunSpec) -> bool:
    """Whether problems keep all columns: a function may ask for them, and a column may name a record's rewards."""
    return spec.rewards.needs_rows


def log_left_out(source: ProblemSource) -> None:
    """Log and count problems of a source that are left out, and those that repeat a question."""
    if source.skipped:
        log.warning("problems_skipped", count=len(source.skipped), first=source.skipped[:SHOWN_FAULTS])
        metrics.FILES_SKIPPED.labels("prompt").inc(len(source.skipped))
    if source.repeated:
        log.warning("problems_repeated", count=source.repeated)


def load_prompts(
    spec: RunSpec,
    sources: Sequence[NamedProblems] | None = None,
    judge: ProblemJudge = accept_any_problem,
    report: SourceReporter = log_left_out,
) -> PromptStream:
    """Load the run's prompts, and check every one.

    sources: the run's problems, if they have been read before. judge: says which problems must not be used.
    report: is told of each source.

    Raises DatasetInvalid for prompts longer than `prompts.maxTokens` and for problems that `judge` refuses, unless they
    may be skipped. Raises CheckpointInvalid if the policy's tokenizer is unusable. Without sources, also raises what
    `open_sources` raises. The check tokenizes all prompts: GSM8K's 7,473 take 2.4 s on two busy cores.
    """
    template = PromptTemplate(spec.prompts, spec.model.path)
    checker = _PromptChecker(template, spec.prompts.max_tokens, judge, report)
    faults = _FaultCollector()
    fit: list[NamedProblems] = []
    for named in _open_training(spec) if sources is None else sources:
        with faults:
            fit.append(checker.leave_out_unfit(named))
    faults.raise_all()
    return PromptStream(fit, template, spec.prompts.shuffle_seed)


def load_validation(
    spec: RunSpec,
    sources: Sequence[NamedProblems],
    judge: ProblemJudge = accept_any_problem,
    report: SourceReporter = log_left_out,
) -> list[Prompt]:
    """Load the first prompts of each validation source, as many as its limit. [] if the run has no validation.

    sources: `ProblemSources.validation`. report: is told of each of them. The prompts are formatted like those of the
    training source of the same name; `position` is the prompt's place in the list. Raises what `load_prompts` raises
    for sources that it is given.
    """
    if spec.validation is None:
        return []
    template = PromptTemplate(spec.prompts, spec.model.path)
    checker = _PromptChecker(template, spec.prompts.max_tokens, judge, report)
    limits = {given.name: given.limit for given in spec.validation.all_sets}
    faults = _FaultCollector()
    found: list[Prompt] = []
    for named in sources:
        with faults:
            fit = checker.leave_out_unfit(named, limits[named.name])
            count = min(limits[named.name], len(fit.source))
            prefix = "v" if len(sources) == 1 else f"{named.name}-v"
            first = len(found)
            found += [_build_prompt(fit, template, index, first + index, prefix) for index in range(count)]
    faults.raise_all()
    return found


def _build_prompt(named: NamedProblems, template: PromptTemplate, index: int, position: int, prefix: str) -> Prompt:
    """Build a prompt. Its id has the problem's index and a digest of its content: the same in every epoch and run."""
    problem = named.source.problems[index]
    content = xxhash.xxh3_64_hexdigest(f"{problem.question}\0{problem.answer}".encode())
    text = template.format_problem(problem, named.name)
    token_ids = template.tokenize_text(text)
    row = problem.row or {}
    return Prompt(f"{prefix}{index}-{content[:8]}", position, token_ids, text, problem.answer, row, named.name)


@dataclass(frozen=True)
class _PromptChecker:
    """Leaves out problems whose prompts do not fit, or that `judge` refuses."""

    template: PromptTemplate
    max_tokens: int
    judge: ProblemJudge
    report: SourceReporter

    def leave_out_unfit(self, named: NamedProblems, limit: int | None = None) -> NamedProblems:
        """Return the source without such problems.

        limit: how many problems will be used; None for all. Raises DatasetInvalid if problems may not be skipped.
        """
        source = named.source
        while wrong := self._find_unfit(replace(named, source=source), limit):
            # With a limit, later problems replace those that are left out, and must be checked, too.
            source = source.without_problems(wrong)
        self.report(source)
        return replace(named, source=source)

    def _find_unfit(self, named: NamedProblems, limit: int | None) -> dict[int, str]:
        """Return why problems must not be used, by their index."""
        checked = named.source.problems[:limit]
        wrong = {index: fault for index, problem in enumerate(checked) if (fault := self.template.find_fault(problem))}
        sound = [index for index in range(len(checked)) if index not in wrong]
        texts = self.template.format_all([checked[index] for index in sound], named.name)
        lengths = [len(token_ids) for token_ids in self.template.tokenize_all(texts)]
        for index, length in zip(sound, lengths, strict=True):
            if not 1 <= length <= self.max_tokens:
                rule = f"the prompt must have 1 to {self.max_tokens} tokens (prompts.maxTokens), got {length}"
                wrong[index] = f"{rule}; raise prompts.maxTokens to {max(lengths)}"
            elif refusal := self.judge(checked[index], named.name):
                wrong[index] = refusal
        return wrong
