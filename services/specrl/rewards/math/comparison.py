"""Whether an answer is the reference's value, by the conventions of docs/rewards.md.

Called by `verifier.Math`. Pure. Each rule is about one kind of value; two values of kinds that no rule joins differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from sympy import Add, Mul, Rational, oo

from specrl.rewards.math.evaluation import are_equal, are_proportional, real_value
from specrl.rewards.math.units import DEGREE, PERCENT, is_known
from specrl.rewards.math.values import (
    Collection,
    Expression,
    Matrix,
    Numeral,
    Quantity,
    Ratio,
    Relation,
    SpecialSet,
    Union,
    Value,
)

_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_OPEN = {"<": True, r"\le": False}


def is_same(reference: Value, answer: Value) -> bool:
    """Whether the answer is right. Raises Unreadable when that cannot be computed."""
    alternatives = _approximations(answer)
    if alternatives is not None:
        return any(is_same(reference, alternative) for alternative in alternatives)
    if isinstance(reference, Relation) != isinstance(answer, Relation):
        named, other = (reference, answer) if isinstance(reference, Relation) else (answer, reference)
        assert isinstance(named, Relation), "one of the two is"
        value = _interval(named)
        if value is None or not isinstance(other, Collection | Union | SpecialSet):
            value = _named_value(named)
        if value is None:
            return False
        return is_same(value, answer) if named is reference else is_same(reference, value)
    if isinstance(reference, Quantity) or isinstance(answer, Quantity):
        return _same_quantities(reference, answer)
    return _same_kind(reference, answer)


def _same_kind(reference: Value, answer: Value) -> bool:
    if isinstance(reference, Expression) and isinstance(answer, Expression):
        return are_equal(reference.tree, answer.tree)
    if isinstance(reference, Collection) or isinstance(answer, Collection):
        return _same_collections(reference, answer)
    if isinstance(reference, Relation) and isinstance(answer, Relation):
        return _same_relations(reference, answer)
    if isinstance(reference, Matrix) and isinstance(answer, Matrix):
        if reference.kind == answer.kind == "cases":
            expected, given = ([Collection("row", "row", row) for row in side.rows] for side in (reference, answer))
            return _same_entries(expected, given, is_ordered=False)
        return reference.kind == answer.kind and _same_rows(reference.rows, answer.rows)
    if isinstance(reference, Union) and isinstance(answer, Union):
        return _same_entries(reference.members, answer.members, is_ordered=False)
    if isinstance(reference, Numeral) and isinstance(answer, Expression):
        return answer.tree.is_Integer and str(answer.tree) == reference.digits
    if isinstance(reference, Ratio) and isinstance(answer, Ratio):
        return _same_entries(reference.terms, answer.terms, is_ordered=True)
    return reference == answer


def _same_quantities(reference: Value, answer: Value) -> bool:
    expected, expected_units = _parts(reference)
    given, given_units = _parts(answer)
    if given_units[:1] == (DEGREE,) and expected_units[:1] != (DEGREE,):
        return False
    if PERCENT in (expected_units[:1] + given_units[:1]):
        return _same_percentages((expected, expected_units), (given, given_units))
    if expected_units and given_units and not _same_units(expected_units, given_units):
        return False
    return is_same(expected, given)


def _same_units(expected: tuple[str, ...], given: tuple[str, ...]) -> bool:
    """Whether the words behind the answer begin with the reference's unit, or hold it where it is a thing counted."""
    if is_known(expected[0]) or len(expected) > 1:
        return given[: len(expected)] == expected
    return expected[0] in given


def _same_percentages(expected: tuple[Value, tuple[str, ...]], given: tuple[Value, tuple[str, ...]]) -> bool:
    """`40 %` is 40 %, 40 and 0.4, whichever of the two is the reference; and nothing else."""
    if expected[1][:1] == given[1][:1]:
        return is_same(expected[0], given[0])
    (percentage, _), (number, units) = (expected, given) if expected[1][:1] == (PERCENT,) else (given, expected)
    if units or not isinstance(percentage, Expression) or not isinstance(number, Expression):
        return False
    return are_equal(percentage.tree, number.tree) or are_equal(_hundredth(percentage.tree), number.tree)


def _hundredth(tree: Any) -> Any:
    return Mul(Rational(1, 100), tree, evaluate=False)


def _parts(value: Value) -> tuple[Value, tuple[str, ...]]:
    return (value.value, value.units) if isinstance(value, Quantity) else (value, ())


def _same_collections(reference: Value, answer: Value) -> bool:
    for matrix, collection in ((reference, answer), (answer, reference)):
        if isinstance(matrix, Matrix) and matrix.kind == "cases" and isinstance(collection, Collection):
            entries = [entry for row in matrix.rows for entry in row]
            return collection.opening == "" and _same_entries(entries, collection.entries, is_ordered=False)
    if not isinstance(reference, Collection) or not isinstance(answer, Collection):
        alone, other = (reference, answer) if isinstance(reference, Collection) else (answer, reference)
        assert isinstance(alone, Collection), "one of the two is"
        return alone.opening in ("{", "") and len(alone.entries) == 1 and is_same(alone.entries[0], other)
    kinds = {(reference.opening, reference.closing), (answer.opening, answer.closing)}
    if len(kinds) == 1:
        is_ordered = kinds not in ({("", "")}, {("{", "}")})
    elif kinds == {("", ""), ("{", "}")}:
        is_ordered = False
        if len({name.partition("_")[0] for name in _names(reference, answer)}) > 1:  # `x = 2, y = 3` is not {2, 3}
            return False
    elif kinds == {("", ""), ("(", ")")}:
        is_ordered = True
        names = _names(reference, answer)
        if names != sorted(names):  # `y = 3, x = 4` is not (3, 4)
            return False
    elif ("langle", "rangle") in kinds and ("(", ")") in kinds:
        is_ordered = True
    else:
        return False
    return _same_entries(reference.entries, answer.entries, is_ordered=is_ordered)


def _names(*collections: Collection) -> list[str]:
    """The left sides of equations that are entries."""
    return [entry.names[0] for side in collections for entry in side.entries if isinstance(entry, Relation)]


def _same_entries(expected: Sequence[Value], given: Sequence[Value], *, is_ordered: bool) -> bool:
    """One by one; without an order, each with one that no other has been matched with."""
    if len(expected) != len(given):
        return False
    if is_ordered:
        return all(is_same(a, b) for a, b in zip(expected, given, strict=True))
    left = list(given)
    for entry in expected:
        match = next((place for place, other in enumerate(left) if is_same(entry, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _same_rows(expected: tuple[tuple[Value, ...], ...], given: tuple[tuple[Value, ...], ...]) -> bool:
    return [len(row) for row in expected] == [len(row) for row in given] and all(
        is_same(a, b) for row, other in zip(expected, given, strict=True) for a, b in zip(row, other, strict=True)
    )


def _named_value(value: Relation) -> Value | None:
    """What `x = 8` or `3 + 5 = 8` gives; None for an equation that gives no value."""
    if set(value.operators) != {"="}:
        return None
    last, others = value.terms[-1], value.terms[:-1]
    first_is_name = bool(value.names[0]) or value.terms[0] is None
    if isinstance(last, Matrix | Collection | Union) and len(value.terms) == 2:
        return last  # nothing on the left could be solved for it
    if not first_is_name and value.names[-1] and len(value.terms) == 2 and not _letters(value.terms[0]):
        return value.terms[0]
    for place, other in enumerate(others):
        if first_is_name and (place == 0 or _letters(other)):
            continue
        if other is None or last is None or not is_same(other, last):
            return None
    return last


def _letters(value: Value | None) -> frozenset[str]:
    """Those of an expression, with a unit or without; a list or a matrix counts as having none."""
    value = _parts(value)[0] if value is not None else None
    return value.letters if isinstance(value, Expression) else frozenset()


def _approximations(answer: Value) -> list[Value] | None:
    """Of `x = 1/3 \\approx 0.33`, the exact value and its rounding, if it is one; None where nothing is approximate."""
    if not isinstance(answer, Relation) or r"\approx" not in answer.operators:
        return None
    place = answer.operators.index(r"\approx")
    if len(answer.operators) > place + 1 or set(answer.operators[:place]) - {"="}:
        return []
    rounded = answer.terms[-1]
    if place == 0 and (answer.names[0] or answer.terms[0] is None):
        return [rounded] if rounded is not None else []
    exact: Value | None = answer.terms[0]
    if place:
        exact = _named_value(Relation(answer.terms[:-1], answer.operators[:-1], answer.names[:-1]))
    if exact is None or rounded is None or not _rounds_to(_parts(exact)[0], _parts(rounded)[0]):
        return []
    return [exact, rounded]


def _rounds_to(exact: Value, rounded: Value) -> bool:
    if not isinstance(exact, Expression) or not isinstance(rounded, Expression):
        return False
    value, near = real_value(exact.tree), real_value(rounded.tree)
    if value is None or near is None:
        return False
    places = _decimal_places(near)
    if places is None or (exact.tree.is_Rational and _decimal_places(value) is not None):
        return False
    return abs(value - near) <= Fraction(1, 2 * 10**places)


def _decimal_places(value: Fraction) -> int | None:
    """How many digits it has behind the point; None for one that no decimal of 30 digits is equal to."""
    return next((places for places in range(30) if (10**places) % value.denominator == 0), None)


def _same_relations(reference: Relation, answer: Relation) -> bool:
    flipped = Relation(
        answer.terms[::-1], tuple(_FLIPPED.get(op, "") for op in answer.operators[::-1]), answer.names[::-1]
    )
    for other in (answer, flipped):
        if other.operators == reference.operators and all(
            _same_terms(reference, other, place) for place in range(len(reference.terms))
        ):
            return True
    if reference.operators == answer.operators == ("=",):
        sides = [_difference(relation) for relation in (reference, answer)]
        return sides[0] is not None and sides[1] is not None and are_proportional(sides[0], sides[1])
    first, second = _interval(reference), _interval(answer)
    return (
        first is not None
        and second is not None
        and _variable(reference) == _variable(answer)
        and is_same(first, second)
    )


def _same_terms(reference: Relation, answer: Relation, place: int) -> bool:
    expected, given = reference.terms[place], answer.terms[place]
    if expected is None or given is None:
        return (expected is given and reference.names[place] == answer.names[place]) or (
            place == 0 and (not reference.names[0] or not answer.names[0])
        )
    return is_same(expected, given)


def _difference(relation: Relation) -> Any:
    left, right = relation.terms
    if not isinstance(left, Expression) or not isinstance(right, Expression):
        return None
    return Add(left.tree, Mul(-1, right.tree, evaluate=False), evaluate=False)


def _variable(relation: Relation) -> str:
    return "".join(name for name in relation.names if name)


def _interval(value: Relation) -> Value | None:
    """The set of `x > 5`, `2 \\le x < 7`, `x \\in S` and their kin; None for other relations."""
    operators, terms, names = value.operators, value.terms, value.names
    if operators == (r"\in",):
        return terms[1] if value.names[0] or terms[0] is None else None
    if all(op in (">", r"\ge") for op in operators):
        operators, terms, names = tuple(_FLIPPED[op] for op in operators[::-1]), terms[::-1], names[::-1]
    if not all(op in _OPEN for op in operators):
        return None
    if len(operators) == 2 and names[1]:
        low, high, opens = terms[0], terms[2], operators
    elif len(operators) == 1 and names[0] and not _letters(terms[1]):
        low, high, opens = Expression(-oo), terms[1], ("<", operators[0])
    elif len(operators) == 1 and names[1] and not _letters(terms[0]):
        low, high, opens = terms[0], Expression(oo), (operators[0], "<")
    else:
        return None
    if low is None or high is None:
        return None
    return Collection("(" if _OPEN[opens[0]] else "[", ")" if _OPEN[opens[1]] else "]", (low, high))
