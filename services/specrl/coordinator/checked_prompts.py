"""The run's prompts, read and checked: what the policy is asked, and that its answers can be judged.

Called by the coordinator when it starts, and by the launcher before that, so that a user learns of faults in seconds.
Invariant: one run leaves out the same problems at every start. A reference is tried, and a trial may fail on a busy
machine; so what was found first lies in the run's folder, and counts as long as the data stay as they were. What is
certain is also kept for other runs (`rewards/reference_cache.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
import xxhash

from specrl.errors import CheckpointInvalid, DatasetInvalid
from specrl.files import read_object, write_text
from specrl.prompts import (
    Problem,
    ProblemSource,
    PromptStream,
    PromptTemplate,
    Sources,
    load_prompts,
    load_validation,
    open_sources,
)
from specrl.records import Prompt
from specrl.rewards import verifier_for
from specrl.rewards.reference_cache import ReferenceCache
from specrl.rewards.references import Finding, Reference, ReferencePool
from specrl.rewards.trials import TRIED, try_verifier
from specrl.spec import RunSpec

DECISION_FILE = "references.json"

Progress = Callable[[int, int], None]
"""Told how many references are checked, and of how many."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Decision:
    """Which references a run does without. digest: of its data. refused: key of each reference to the reason."""

    digest: str
    refused: Mapping[str, str]

    def write(self, folder: Path) -> None:
        """Keep it with the run. Raises OSError."""
        content = {"digest": self.digest, "refused": dict(self.refused)}
        write_text(folder / DECISION_FILE, json.dumps(content, indent=1) + "\n", is_synced=True)


@dataclass(frozen=True)
class CheckedPrompts:
    """What a run asks.

    untried: references that could not be tried on this machine, and are taken for sound. failures: of the verifier, for
    made-up completions, in words that may quote the data.
    """

    stream: PromptStream
    validation: list[Prompt]
    decision: Decision
    untried: int = 0
    failures: tuple[str, ...] = ()


class _Judge:
    """What is known of the run's references, and which are asked for and not known yet."""

    def __init__(self, spec: RunSpec, decided: Decision | None) -> None:
        # A function of the user's has no opinion of a reference alone.
        self._is_settled = decided is not None or spec.rewards.python is not None
        self._cache = ReferenceCache(spec.rewards, spec.reward_pool)
        self._known = dict(decided.refused) if decided is not None else self._cache.refusals.copy()
        self._asked: set[str] = set()
        self.unknown: dict[str, Reference] = {}
        self.untried = 0

    def __call__(self, problem: Problem) -> str:
        """Why a problem's reference cannot be used; empty when it can, or is not known yet."""
        reference = Reference(problem.answer, problem.solution)
        key = reference.key
        self._asked.add(key)
        refusal = self._known.get(key, "" if self._is_settled else None)
        if refusal is None:
            self.unknown[key] = reference
        return refusal or ""

    async def find_out(self, pool: ReferencePool, progress: Progress) -> None:
        """Check what is not known."""
        waiting, done = list(self.unknown.values()), 0
        self.unknown.clear()

        def found(findings: Sequence[tuple[Reference, Finding]]) -> None:
            nonlocal done
            self._known |= {reference.key: finding.refusal for reference, finding in findings}
            self._cache.add({reference.key: finding.refusal for reference, finding in findings if finding.is_certain})
            self.untried += sum(not finding.is_certain and not finding.refusal for _, finding in findings)
            done += len(findings)
            progress(done, len(waiting))

        await pool.check(waiting, found)

    @property
    def refused(self) -> dict[str, str]:
        """Of those asked for."""
        return {key: self._known[key] for key in sorted(self._asked) if self._known.get(key)}


async def load_checked_prompts(
    spec: RunSpec, folder: Path | None, progress: Progress, *, workers: int, tries_verifier: bool
) -> CheckedPrompts:
    """Read the run's prompts, and check every reference that it may ask for.

    folder: the run's, where it has one. workers: processes of the check. tries_verifier: have it grade made-up
    completions. Raises DatasetInvalid for all of the data at once, and what `load_prompts` and `try_verifier` raise.
    """
    sources = _open_sources(spec)
    digest = _digest(spec, sources)
    judge = _Judge(spec, read_decision(folder, digest))
    pool = ReferencePool(verifier_for(spec.rewards), spec.reward_pool.model_copy(update={"workers": workers}))
    try:
        _ask_for_all(spec, sources, judge)
        # Of ours, what was found of the references says that it works; a function may have been changed since.
        tries_verifier = tries_verifier and (bool(judge.unknown) or spec.rewards.python is not None)
        while True:
            if judge.unknown:
                progress(0, len(judge.unknown))
                await pool.start()
                await judge.find_out(pool, progress)
            stream, validation = _load(spec, sources, judge)
            if not judge.unknown:  # where validation leaves out a problem, the next one takes its place
                break
        failures = list[str]()
        if tries_verifier:
            await pool.start()
            first = [stream.prompt(position) for position in range(min(TRIED, len(stream)))]
            failures = await try_verifier(pool, spec.rewards, first)
    finally:
        await pool.close()
    if judge.untried:
        log.warning("references_untried", count=judge.untried)
    return CheckedPrompts(stream, validation, Decision(digest, judge.refused), judge.untried, tuple(failures))


def load_decided_prompts(spec: RunSpec, folder: Path) -> PromptStream:
    """What the run in `folder` asks, without the references that it has refused; nothing is checked.

    For those who look at a run. Raises what `load_prompts` raises.
    """
    sources = open_sources(spec)
    decision = read_decision(folder, _digest(spec, sources))
    refused = decision.refused if decision is not None else {}
    return load_prompts(
        spec, sources.training, lambda problem: refused.get(Reference(problem.answer, problem.solution).key, "")
    )


def _open_sources(spec: RunSpec) -> Sources:
    """Read the run's problems. Raises for them and for the policy's tokenizer at once."""
    try:
        PromptTemplate(spec.prompts, spec.model.path)
    except CheckpointInvalid as no_tokenizer:
        try:
            open_sources(spec)
        except DatasetInvalid as no_problems:
            raise CheckpointInvalid(f"{no_tokenizer}\n{no_problems}") from no_tokenizer
        raise
    return open_sources(spec)


def _ask_for_all(spec: RunSpec, sources: Sources, judge: _Judge) -> None:
    for source, limit in _limited(spec, sources):
        for index in range(min(limit, len(source))):
            judge(source.problem(index))


def _load(spec: RunSpec, sources: Sources, judge: _Judge) -> tuple[PromptStream, list[Prompt]]:
    """Raises DatasetInvalid for what is wrong with either source."""
    wrong = []
    try:
        stream = load_prompts(spec, sources.training, judge)
    except DatasetInvalid as error:
        wrong.append(str(error))
    try:
        validation = load_validation(spec, sources.validation, judge)
    except DatasetInvalid as error:
        wrong.append(str(error))
    if wrong:
        raise DatasetInvalid("\n".join(wrong))
    return stream, validation


def _limited(spec: RunSpec, sources: Sources) -> Iterator[tuple[ProblemSource, int]]:
    """The run's sources, and how many problems of each may be asked."""
    yield sources.training, len(sources.training)
    if spec.validation is not None and sources.validation is not None:
        yield sources.validation, spec.validation.limit


def _digest(spec: RunSpec, sources: Sources) -> str:
    """Of the verifier and of all references that it may be asked about, in their order."""
    digest = xxhash.xxh3_128(spec.rewards.model_dump_json().encode())
    for source in filter(None, (sources.training, sources.validation)):
        for index in range(len(source)):
            problem = source.problem(index)
            digest.update(Reference(problem.answer, problem.solution).key.encode())
    return digest.hexdigest()


def read_decision(folder: Path | None, digest: str) -> Decision | None:
    """The run's own, unless it has none or its data are others now."""
    if folder is None:
        return None
    try:
        found = read_object(folder / DECISION_FILE)
        decision = Decision(str(found["digest"]), {str(key): str(why) for key, why in found["refused"].items()})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, AttributeError) as error:
        log.warning("references_decision_ignored", path=str(folder / DECISION_FILE), reason=str(error))
        return None
    return decision if decision.digest == digest else None
