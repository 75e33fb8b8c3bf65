"""The kinds of values that an answer can have. `reading.py` creates them from text, `comparison.py` compares them.

Values are immutable and hashable. They keep the structure of the text: nothing is simplified or evaluated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class Unreadable(ValueError):
    """The text is not understood as one mathematical value. The message gives the reason in a few words."""


@dataclass(frozen=True)
class Expression:
    """Numbers and variables joined by operations: the SymPy tree that the parser built, not evaluated."""

    tree: Any

    @property
    def letters(self) -> frozenset[str]:
        """The names of the variables, `i` included even where it is the imaginary unit."""
        return frozenset(symbol.name for symbol in self.tree.free_symbols)


@dataclass(frozen=True)
class Quantity:
    """A value with units, in the order of the text and as `units.canonical_unit` spells them; "%" for a percentage."""

    value: Value
    units: tuple[str, ...]


@dataclass(frozen=True)
class Collection:
    """Entries between brackets: a tuple, an interval or a set. In a list without brackets both brackets are ""."""

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
    """An equation, inequality or chain of them: `terms[0] operators[0] terms[1] ...`.

    names[i]: the text of term i if it names a quantity, such as x or f(x), else "". A term is None if it is only a
    name, or if nothing stands there.
    """

    terms: tuple[Value | None, ...]
    operators: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class SetUnion:
    """Sets joined by a union sign."""

    members: tuple[Value, ...]


@dataclass(frozen=True)
class OptionLetter:
    """The letter of a multiple-choice option, in upper case."""

    letter: str


@dataclass(frozen=True)
class Ratio:
    """Numbers between colons: a ratio or a time of day."""

    terms: tuple[Value, ...]


@dataclass(frozen=True)
class Numeral:
    """Digits with a base, written as a subscript: 101_2."""

    digits: str
    base: int


@dataclass(frozen=True)
class SpecialSet:
    """A set with a symbol of its own, such as the empty set or the integers, as its LaTeX command."""

    name: str


Value = Expression | Quantity | Collection | Matrix | Relation | SetUnion | OptionLetter | Ratio | Numeral | SpecialSet
