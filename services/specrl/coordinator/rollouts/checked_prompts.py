"""Loads the run's prompts and checks that answers to them can be graded.

A reference is the expected answer of a problem. The check has the verifier try every reference, and leaves out problems
whose reference it refuses. The launcher runs the check before a run starts, so that users see faults within seconds.
The coordinator runs it when it starts.

Invariant: a run leaves out the same problems at every start. A trial may fail on a busy machine. So the first decision
is stored in the run's folder, and is used as long as the data do not change. Conclusive results are also
cached for other runs (`rewards/checks/reference_cache.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import structlog
import xxhash

from specrl.errors import CheckpointInvalid, DatasetInvalid
from specrl.files import read_object, write_text
from specrl.prompts import (
    DatasetProblem,
    ProblemSource,
    ProblemSources,
    PromptStream,
    PromptTemplate,
    load_prompts,
    load_validation,
    open_sources,
)
from specrl.prompts.stream import SourceReporter
from specrl.records import Prompt
from specrl.rewards.checks.reference_cache import ReferenceCache
from specrl.rewards.checks.references import CheckedReference, ReferenceFinding, ReferencePool
from specrl.rewards.checks.trials import TRIAL_PROMPTS, try_verifiers
from specrl.rewards.choice import verifiers_for
from specrl.rewards.verifier_set import WeightedVerifier
from specrl.spec import RunSpec

DECISION_FILE = "references.json"

MAX_TRIED_PROMPTS = 512
"""Prompts among which a trial looks for some that a reward applies to. Tokenizing them takes 0.2 s."""

ProgressCallback = Callable[[int, int], None]
"""Called with the number of references that are checked, and the number of all."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReferenceDecision:
    """The references that a run leaves out. digest: of the data. refused: reason by key of the reference."""

    digest: str
    refused: Mapping[str, str]

    def write_file(self, folder: Path) -> None:
        """Store the decision in the run's folder. Raises OSError."""
        content = {"digest": self.digest, "refused": dict(self.refused)}
        write_text(folder / DECISION_FILE, json.dumps(content, indent=1) + "\n", is_synced=True)


@dataclass(frozen=True)
class CheckedPrompts:
    """The prompts of a run, after the check.

    sources: of training and validation, without the problems that are left out. untried: number of references that
    could not be tried on this machine; they are assumed to be good. failures: messages about verifiers that failed on
    made-up completions, or tell none apart. They may quote the data.
    """

    stream: PromptStream
    validation: list[Prompt]
    decision: ReferenceDecision
    sources: tuple[ProblemSource, ...] = ()
    untried: int = 0
    failures: tuple[str, ...] = ()


class _AskedReference(NamedTuple):
    """A reference and a verifier that needs it."""

    term: WeightedVerifier
    reference: CheckedReference

    @property
    def key(self) -> str:
        """Identifies both in the run's decision. A reference may be good for one reward and not for another."""
        name = f"{self.term.name}:" if self.term.name else ""
        return name + self.reference.cache_key


class _ReferenceJudge:
    """Knows which references are refused, and collects those that are not checked yet.

    Passed to `load_prompts` as the function that refuses problems.
    """

    def __init__(self, spec: RunSpec, decided: ReferenceDecision | None) -> None:
        self._verifiers = verifiers_for(spec.rewards)
        self._is_decided = decided is not None
        sections = zip(self._verifiers.terms, spec.rewards.verifiers, strict=True)
        # A stored decision asks no cache.
        self._caches = {
            term: ReferenceCache(section, spec.reward_pool)
            for term, section in sections
            if decided is None and term.verifier.checks_references
        }
        self._known = dict(decided.refused) if decided is not None else {}
        self._asked: set[str] = set()
        self.unknown: dict[str, _AskedReference] = {}
        self.untried = 0

    def __call__(self, problem: DatasetProblem, source: str) -> str:
        """Return why a problem cannot be graded; empty if it can, or if its reference is not checked yet."""
        if fault := self._verifiers.find_fault(source, problem.row):
            return fault
        refusals = [self._judge_reference(asked) for asked in self._list_references(problem, source)]
        return next(filter(None, refusals), "")

    def _list_references(self, problem: DatasetProblem, source: str) -> list[_AskedReference]:
        """List the references of a problem without a fault: one for each verifier that applies and can check it."""
        reference = CheckedReference(problem.answer, problem.solution)
        terms = self._verifiers.select_terms(source, problem.row or {})
        return [_AskedReference(term, reference) for term in terms if term.verifier.checks_references]

    def _judge_reference(self, asked: _AskedReference) -> str:
        self._asked.add(asked.key)
        if asked.key not in self._known and not self._is_decided:
            cached = self._caches[asked.term].refusals.get(asked.reference.cache_key)
            if cached is None:
                self.unknown[asked.key] = asked
                return ""
            self._known[asked.key] = cached
        return self._known.get(asked.key, "")

    async def check_unknown(self, pool: ReferencePool, progress: ProgressCallback) -> None:
        """Check all references that are not known, and empty that list."""
        waiting: dict[WeightedVerifier, list[CheckedReference]] = {}
        for asked in self.unknown.values():
            waiting.setdefault(asked.term, []).append(asked.reference)
        total = len(self.unknown)
        done = 0
        self.unknown.clear()
        for term, references in waiting.items():

            def add_findings(
                findings: Sequence[tuple[CheckedReference, ReferenceFinding]], term: WeightedVerifier = term
            ) -> None:
                nonlocal done
                self._known |= {_AskedReference(term, it).key: finding.refusal for it, finding in findings}
                certain = {it.cache_key: finding.refusal for it, finding in findings if finding.is_certain}
                self._caches[term].add_refusals(certain)
                self.untried += sum(not finding.is_certain and not finding.refusal for _, finding in findings)
                done += len(findings)
                progress(done, total)

            await pool.check_all(references, term.verifier, add_findings)

    @property
    def refused_references(self) -> dict[str, str]:
        """Reasons of the refused references by key, of those that this run has."""
        return {key: self._known[key] for key in sorted(self._asked) if self._known.get(key)}


async def load_checked_prompts(
    spec: RunSpec, folder: Path | None, progress: ProgressCallback, *, workers: int, tries_verifier: bool
) -> CheckedPrompts:
    """Load the run's prompts, and check every reference that it may use.

    folder: the run's folder, None before it exists. workers: processes of the check. tries_verifier: also grade made-up
    completions. Raises DatasetInvalid with all faults of the data at once, and what `load_prompts` and `try_verifiers`
    raise.
    """
    sources = _open_all_sources(spec)
    digest = _digest_references(spec, sources)
    judge = _ReferenceJudge(spec, read_decision(folder, digest))  # a stored decision is final: nothing is checked again
    pool = ReferencePool(verifiers_for(spec.rewards), spec.reward_pool.model_copy(update={"workers": workers}))
    try:
        # Collects all unknown references first, so that one pass of the pool checks the whole data set.
        _judge_all_references(spec, sources, judge)
        # If all references are known, specrl's own verifiers have run on them. A user's function may have changed.
        has_function = any(verifier.python is not None for verifier in spec.rewards.verifiers)
        tries_verifier = tries_verifier and (bool(judge.unknown) or has_function)
        while True:
            if judge.unknown:
                progress(0, len(judge.unknown))
                await pool.start()
                await judge.check_unknown(pool, progress)
            checked = list[ProblemSource]()
            stream, validation = _load_sources(spec, sources, judge, checked.append)
            # Validation replaces refused problems by the next ones, which may not be checked yet: then check again.
            if not judge.unknown:
                break
        failures = list[str]()
        if tries_verifier:
            await pool.start()
            # With several rewards, the first prompts of all may have none of those that one reward applies to.
            count = TRIAL_PROMPTS if spec.rewards.sum is None else MAX_TRIED_PROMPTS
            first = [stream.prompt(position) for position in range(min(count, len(stream)))]
            failures = await try_verifiers(pool, first)
    finally:
        await pool.close()
    decision = ReferenceDecision(digest, judge.refused_references)
    return CheckedPrompts(stream, validation, decision, tuple(checked), judge.untried, tuple(failures))


def load_decided_prompts(spec: RunSpec, folder: Path) -> PromptStream:
    """Load the prompts of the run in `folder` with its stored decision. Checks nothing.

    For tools that read a run. Raises what `load_prompts` raises.
    """
    sources = open_sources(spec)
    digest = _digest_references(spec, sources)
    decision = read_decision(folder, digest) or ReferenceDecision(digest, {})
    return load_prompts(spec, sources.training, _ReferenceJudge(spec, decision))


def _open_all_sources(spec: RunSpec) -> ProblemSources:
    """Open the run's data sets. Reports faults of the policy's tokenizer and of the data together."""
    try:
        PromptTemplate(spec.prompts, spec.model.path)
    except CheckpointInvalid as no_tokenizer:
        try:  # read the data all the same, so that the user learns of both faults at once
            open_sources(spec)
        except DatasetInvalid as no_problems:
            raise CheckpointInvalid(f"{no_tokenizer}\n{no_problems}") from no_tokenizer
        raise
    return open_sources(spec)


def _judge_all_references(spec: RunSpec, sources: ProblemSources, judge: _ReferenceJudge) -> None:
    for named in sources.training:
        for problem in named.source.problems:
            judge(problem, named.name)
    validated = spec.validation.all_sets if spec.validation is not None else ()
    for given, named in zip(validated, sources.validation, strict=True):
        for problem in named.source.problems[: given.limit]:
            judge(problem, named.name)


def _load_sources(
    spec: RunSpec, sources: ProblemSources, judge: _ReferenceJudge, report: SourceReporter
) -> tuple[PromptStream, list[Prompt]]:
    """Load training and validation prompts. Raises DatasetInvalid with the faults of both."""
    try:
        stream = load_prompts(spec, sources.training, judge, report)
    except DatasetInvalid as training_faults:
        try:  # read the other data set all the same, so that the user learns of the faults of both at once
            load_validation(spec, sources.validation, judge, report)
        except DatasetInvalid as validation_faults:
            raise DatasetInvalid(f"{training_faults}\n{validation_faults}") from training_faults
        raise
    return stream, load_validation(spec, sources.validation, judge, report)


def _digest_references(spec: RunSpec, sources: ProblemSources) -> str:
    """Return a digest of the verifier's settings and of all references, in order."""
    digest = xxhash.xxh3_128(spec.rewards.model_dump_json().encode())  # another verifier may refuse other references
    for named in (*sources.training, *sources.validation):
        for problem in named.source.problems:
            digest.update(CheckedReference(problem.answer, problem.solution).cache_key.encode())
    return digest.hexdigest()


def read_decision(folder: Path | None, digest: str) -> ReferenceDecision | None:
    """Read the decision of the run in `folder`. None if there is none, or if its data have changed since."""
    if folder is None:
        return None
    try:
        found = read_object(folder / DECISION_FILE)
        refused = {str(key): str(why) for key, why in found["refused"].items()}
        decision = ReferenceDecision(str(found["digest"]), refused)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, AttributeError) as error:
        log.warning("references_decision_ignored", path=str(folder / DECISION_FILE), reason=str(error))
        return None
    return decision if decision.digest == digest else None
