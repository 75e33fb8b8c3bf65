"""The verifiers of a run: the only one, or several whose rewards are weighted and added.

`choice` builds the set. `pool.VerifierPool` grades with it, and `checks` tries every verifier in it. Pure.
Invariant: which rewards apply to a prompt depends on its source and its record alone, so all rollouts of a group are
graded by the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from specrl.records import NamedReward, Reward
from specrl.rewards.verifier import SandboxChoice, Verifier, WorkerSetup

_SHOWN_REASON = 1000
"""Characters of the joined reasons that are kept with a rollout."""


@dataclass(frozen=True)
class WeightedVerifier:
    """A verifier, and what it is used for.

    path: of its section in the run file. name, weight: of the reward in the sum; the only reward of a run has no name.
    sources, column: what the reward is restricted to (`RewardTerm` of the run file).
    """

    verifier: Verifier
    path: str = "rewards"
    name: str = ""
    weight: float = 1.0
    sources: tuple[str, ...] = ()
    column: str | None = None

    def applies_to(self, source: str, row: Mapping[str, Any]) -> bool:
        """Whether the reward applies to a record without a fault. source: name of the source that it is of."""
        if self.sources and source not in self.sources:
            return False
        return self.column is None or self.name in (_read_names(row[self.column]) or ())


@dataclass(frozen=True)
class VerifierSet(WorkerSetup):
    """All verifiers of a run, at least one."""

    terms: tuple[WeightedVerifier, ...]

    @property
    def preloads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module for term in self.terms for module in term.verifier.preloads))

    def settle_on_machine(self) -> Self:
        settled = tuple(replace(term, verifier=term.verifier.settle_on_machine()) for term in self.terms)
        return replace(self, terms=settled)

    def list_sandboxes(self) -> tuple[SandboxChoice, ...]:
        return tuple(choice for term in self.terms for choice in term.verifier.list_sandboxes())

    def prepare_worker(self) -> None:
        for term in self.terms:
            term.verifier.prepare_worker()

    @property
    def is_sum(self) -> bool:
        """Whether rewards have names and are added. False: there is one verifier, whose reward is the rollout's."""
        return bool(self.terms[0].name)

    def select_terms(self, source: str, row: Mapping[str, Any]) -> tuple[WeightedVerifier, ...]:
        """Return the verifiers that apply to a record without a fault."""
        return tuple(term for term in self.terms if term.applies_to(source, row))

    def find_fault(self, source: str, row: Mapping[str, Any] | None) -> str:
        """Return why the rewards of a record cannot be told; "" if they can. row: None if it has no columns."""
        for column in dict.fromkeys(term.column for term in self._list_terms_of(source)):
            if column is not None and (fault := self._find_column_fault(source, column, row)):
                return fault
        if not self.select_terms(source, row or {}):
            return f"a reward must apply to every problem, got none for this one of source {source}; add one that does"
        return ""

    def _list_terms_of(self, source: str) -> list[WeightedVerifier]:
        return [term for term in self.terms if not term.sources or source in term.sources]

    def _find_column_fault(self, source: str, column: str, row: Mapping[str, Any] | None) -> str:
        if row is None:
            return f"field {column!r} must name the problem's rewards, got a generated problem; leave column out"
        if column not in row:
            there = ", ".join(sorted(row)) or "none"
            return f"field {column!r} must name the record's rewards, got fields {there}; correct the reward's column"
        named = _read_names(row[column])
        if named is None:
            return f"field {column!r} must be a reward's name or a list of them, got {row[column]!r:.80}; correct it"
        known = [term.name for term in self._list_terms_of(source) if term.column == column]
        unknown = [name for name in named if name not in known]
        if unknown:
            rule = f"must name rewards of rewards.sum.terms, which are {', '.join(known)}, got {', '.join(unknown):.80}"
            return f"field {column!r} {rule}; add the reward, or correct the record"
        return ""


def _read_names(value: object) -> list[str] | None:
    """Read the names of rewards in a record. None if the value is no such thing; null names none."""
    if value is None:
        return []
    given: list[Any] = value if isinstance(value, list) else [value]
    return given if all(isinstance(name, str) for name in given) else None


def add_rewards(terms: Sequence[WeightedVerifier], rewards: Sequence[Reward]) -> Reward:
    """Add the rewards of one rollout, each with its weight. It is ungraded if any of them is.

    The sum has an error if any of them has one. It lacks an answer if a verifier that looked for one found none.
    """
    named = tuple(NamedReward(term.name, term.weight, reward) for term, reward in zip(terms, rewards, strict=True))
    ungraded = next((it for it in named if it.reward.value is None), None)
    if ungraded is not None:
        return Reward(None, f"{ungraded.name}: {ungraded.reward.failure}", named=named)
    total = math.fsum(it.weight * (it.reward.value or 0.0) for it in named)
    error = next((f"{it.name}: {it.reward.error}" for it in named if it.reward.error), "")
    with np.errstate(over="ignore"):
        is_finite = bool(np.isfinite(np.float32(total)))
    return Reward(
        total if is_finite else 0.0,
        extracted=next((it.reward.extracted for it in named if it.reward.extracted), ""),
        reason="; ".join(map(_describe_reward, named))[:_SHOWN_REASON],
        lacks_answer=any(it.reward.lacks_answer for it in named),
        error=error or ("" if is_finite else "the weighted sum is not finite in float32"),
        named=named,
    )


def _describe_reward(named: NamedReward) -> str:
    value = f"{named.name} {named.reward.value:.4g}"
    return f"{value} ({named.reward.reason})" if named.reward.reason else value


def average_named_rewards(rewards: Sequence[Reward]) -> dict[str, float]:
    """Average each named reward, before weighting, over the rollouts that it applies to. Ungraded ones count as 0."""
    found: dict[str, list[float]] = {}
    for reward in rewards:
        for it in reward.named:
            found.setdefault(it.name, []).append(it.reward.value or 0.0)
    return {name: math.fsum(values) / len(values) for name, values in found.items()}
