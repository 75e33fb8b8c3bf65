"""Counts failures by reason, in bounded memory: the first REASONS_KEPT reasons by name, all others together.

A reason is one line of text for terminals and reports, so it never quotes a prompt or a completion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

REASONS_KEPT = 8
"""A broken verifier fails for one or a few reasons. One that puts its input into each message would give thousands."""
LONGEST_REASON = 200
"""In characters. The log has the full text."""
REASONS_SHOWN = 3  # in one line of text
OTHERS = "other reasons"


class ReasonCounts:
    """Counts by reason, in the order in which the reasons first appeared."""

    def __init__(self, reasons: Iterable[str] = ()) -> None:
        self._counts: dict[str, int] = {}
        for reason in reasons:
            self.add_failures(reason)

    def add_failures(self, reason: str, count: int = 1) -> None:
        """Count `count` failures for one reason. The reason is reduced to one line of LONGEST_REASON characters."""
        line = " ".join(reason.split())[:LONGEST_REASON] or "no reason given"
        # A known reason keeps its name; a new one gets a name while there is room.
        name = line if line in self._counts or len(self._counts) < REASONS_KEPT else OTHERS
        self._counts[name] = self._counts.get(name, 0) + count

    @property
    def total_failures(self) -> int:
        """Number of all failures."""
        return sum(self._counts.values())

    @property
    def by_reason(self) -> dict[str, int]:
        """Number of failures by reason; reasons without a name of their own count under OTHERS."""
        return dict(self._counts)


def format_given_up(reasons: Mapping[str, int]) -> str:
    """Format prompts that were given up: `2 prompts given up: KeyError at my_rewards.py:12 (2)`."""
    count = sum(reasons.values())
    return f"{count} prompt{'s' if count != 1 else ''} given up: {format_reasons(reasons)}"


def format_reasons(counts: Mapping[str, int]) -> str:
    """Format counted reasons: `KeyError at my_rewards.py:12 (2), ValueError at my_rewards.py:20 (1)`.

    Only the first REASONS_SHOWN have their names.
    """
    named = [reason for reason in counts if reason != OTHERS][:REASONS_SHOWN]
    words = [f"{reason} ({counts[reason]})" for reason in named]
    others = sum(counts.values()) - sum(counts[reason] for reason in named)
    return ", ".join(words + [f"{OTHERS} ({others})"] * (others > 0))
