"""What an answer can be: the values that `reading.py` makes of text and `comparison.py` compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Unreadable(ValueError):
    """Text that is not understood as one mathematical value; the message says why, in a few words."""


@dataclass(frozen=True)
class Expression:
    """Numbers and letters joined by operations: a SymPy tree as the parser built it, not evaluated."""

    tree: Any

    @property
    def letters(self) -> frozenset[str]:
        """Its variables."""
        return frozenset(symbol.name for symbol in self.tree.free_symbols)


@dataclass(frozen=True)
class Quantity:
    """A value and its units in the order of the text, as `units.canonical_unit` spells them; "%" for a percentage."""

    value: Value
    units: tuple[str, ...]


@dataclass(frozen=True)
class Collection:
    """Entries between brackets: a tuple, an interval or a set. opening "" is a list without brackets."""

    opening: str
    closing: str
    entries: tuple[Value, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of entries. kind: "matrix", "vmatrix" for a determinant, "cases" for equations under a brace."""

    kind: str
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Relation:
    """`terms[0] operators[0] terms[1] ...`; names[i] is the text of a term that names a quantity, as x or f(x)."""

    terms: tuple[Value | None, ...]
    operators: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Union:
    """Sets joined by a union sign."""

    members: tuple[Value, ...]


@dataclass(frozen=True)
class Choice:
    """The letter of an option, in upper case."""

    letter: str


@dataclass(frozen=True)
class Ratio:
    """Numbers between colons: a ratio or a time of day."""

    terms: tuple[Value, ...]


@dataclass(frozen=True)
class Numeral:
    """Digits with the base as their subscript."""

    digits: str
    base: int


@dataclass(frozen=True)
class SpecialSet:
    """A set that has a sign of its own: the empty set, the reals."""

    name: str


Value = Expression | Quantity | Collection | Matrix | Relation | Union | Choice | Ratio | Numeral | SpecialSet
