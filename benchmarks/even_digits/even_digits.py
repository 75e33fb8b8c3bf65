"""A reward that has nothing to do with a problem, so that learning it changes what a policy writes."""

from __future__ import annotations


def compute_reward(_reference: str, completion: str) -> float:
    """Return the share of even digits among the completion's digits; 0 if it has none."""
    digits = [int(character) for character in completion if character in "0123456789"]
    return sum(digit % 2 == 0 for digit in digits) / max(len(digits), 1)
