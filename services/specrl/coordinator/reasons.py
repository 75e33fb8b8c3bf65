"""Why things failed, counted by reason. However many different reasons there are, the first are kept by name.

A reason is one line for people. It quotes neither prompt nor completion: it is shown on terminals and in reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

REASONS_KEPT = 8
"""A verifier that fails has one reason, or a few; one that names its input in each would have thousands."""
LONGEST_REASON = 200
"""Letters; the log has the rest."""
REASONS_SHOWN = 3
OTHERS = "other reasons"


class Reasons:
    """How often something failed for which reason, in the order in which reasons appeared."""

    def __init__(self, reasons: Iterable[str] = ()) -> None:
        self._counts: dict[str, int] = {}
        for reason in reasons:
            self.add(reason)

    def add(self, reason: str, count: int = 1) -> None:
        """Count failures for one reason."""
        line = " ".join(reason.split())[:LONGEST_REASON] or "no reason given"
        name = line if line in self._counts or len(self._counts) < REASONS_KEPT else OTHERS
        self._counts[name] = self._counts.get(name, 0) + count

    @property
    def total(self) -> int:
        return sum(self._counts.values())

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)


def given_up_in_words(reasons: Mapping[str, int]) -> str:
    """`2 prompts given up: KeyError at my_rewards.py:12 (2)`."""
    count = sum(reasons.values())
    return f"{count} prompt{'s' if count != 1 else ''} given up: {reasons_in_words(reasons)}"


def reasons_in_words(counts: Mapping[str, int]) -> str:
    """`KeyError at my_rewards.py:12 (2), ValueError at my_rewards.py:20 (1)`; the first few by name."""
    named = [reason for reason in counts if reason != OTHERS][:REASONS_SHOWN]
    words = [f"{reason} ({counts[reason]})" for reason in named]
    others = sum(counts.values()) - sum(counts[reason] for reason in named)
    return ", ".join(words + [f"{OTHERS} ({others})"] * (others > 0))
