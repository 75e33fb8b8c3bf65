"""Decide whether an answer equals the reference, by the conventions of docs/rewards.md ("What is equal").

Called by `grading.py`. Pure functions. Each rule covers one kind of value, or a pair of kinds. Values of two kinds
without a rule differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from sympy import Add, Mul, Rational, oo

from specrl.rewards.math.evaluation import are_equal, are_proportional, real_value
from specrl.rewards.math.units import DEGREE, PERCENT, is_known_unit
from specrl.rewards.math.values import (
    Collection,
    Expression,
    Matrix,
    Numeral,
    Quantity,
    Ratio,
    Relation,
    SetUnion,
    SpecialSet,
    Value,
)

# _FLIPPED: the operator of a relation that is read from right to left. _OPEN: whether a bound excludes its value.
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne"}
_OPEN = {"<": True, r"\le": False}


def is_equal_value(reference: Value, answer: Value) -> bool:
    """Whether the answer equals the reference. Raises Unreadable if that cannot be computed."""
    # `x = 1/3 \approx 0.33` offers two values, of which one must be right.
    alternatives = _list_approximations(answer)
    if alternatives is not None:
        return any(is_equal_value(reference, alternative) for alternative in alternatives)

    # One side names the value: `y = 8` equals 8, and `x > 5` equals (5, \infty).
    if isinstance(reference, Relation) != isinstance(answer, Relation):
        named, other = (reference, answer) if isinstance(reference, Relation) else (answer, reference)
        assert isinstance(named, Relation), "one of the two is"
        value = _build_interval(named)
        if value is None or not isinstance(other, Collection | SetUnion | SpecialSet):
            value = _find_named_value(named)
        if value is None:
            return False
        return is_equal_value(value, answer) if named is reference else is_equal_value(reference, value)

    if isinstance(reference, Quantity) or isinstance(answer, Quantity):
        return _same_quantities(reference, answer)
    return _is_equal_kind(reference, answer)


def _is_equal_kind(reference: Value, answer: Value) -> bool:
    """Compare values without units; a relation is compared only with a relation."""
    if isinstance(reference, Expression) and isinstance(answer, Expression):
        return are_equal(reference.tree, answer.tree)
    if isinstance(reference, Collection) or isinstance(answer, Collection):
        return _same_collections(reference, answer)
    if isinstance(reference, Relation) and isinstance(answer, Relation):
        return _same_relations(reference, answer)
    if isinstance(reference, Matrix) and isinstance(answer, Matrix):
        # The order of equations under a brace does not matter.
        expected, given = ([Collection("row", "row", row) for row in side.rows] for side in (reference, answer))
        return reference.kind == answer.kind and _same_entries(expected, given, is_ordered=reference.kind != "cases")
    if isinstance(reference, SetUnion) and isinstance(answer, SetUnion):
        return _same_entries(reference.members, answer.members, is_ordered=False)
    if isinstance(reference, Numeral) and isinstance(answer, Expression):
        return answer.tree.is_Integer and str(answer.tree) == reference.digits
    if isinstance(reference, Ratio) and isinstance(answer, Ratio):
        return _same_entries(reference.terms, answer.terms, is_ordered=True)
    return reference == answer


def _same_quantities(reference: Value, answer: Value) -> bool:
    expected, expected_units = _split_units(reference)
    given, given_units = _split_units(answer)
    # Degrees may be missing in the answer, but not be added to it. Other units may be missing on either side.
    if given_units[:1] == (DEGREE,) and expected_units[:1] != (DEGREE,):
        return False
    if PERCENT in (expected_units[:1] + given_units[:1]):
        return _same_percentages((expected, expected_units), (given, given_units))
    if expected_units and given_units and not _same_units(expected_units, given_units):
        return False
    return is_equal_value(expected, given)


def _same_units(expected: tuple[str, ...], given: tuple[str, ...]) -> bool:
    """Whether units agree. An unknown single unit, such as "apples", may stand anywhere among the answer's words.

    A known unit, or several, must be the first of the answer's words.
    """
    if is_known_unit(expected[0]) or len(expected) > 1:
        return given[: len(expected)] == expected
    return expected[0] in given


def _same_percentages(expected: tuple[Value, tuple[str, ...]], given: tuple[Value, tuple[str, ...]]) -> bool:
    """Whether values are equal when at least one is a percentage: 40 % equals 40 %, 40 and 0.4, on either side."""
    if expected[1][:1] == given[1][:1]:
        return is_equal_value(expected[0], given[0])
    (percentage, _), (number, units) = (expected, given) if expected[1][:1] == (PERCENT,) else (given, expected)
    if units or not isinstance(percentage, Expression) or not isinstance(number, Expression):
        return False
    return are_equal(percentage.tree, number.tree) or are_equal(_divide_by_hundred(percentage.tree), number.tree)


def _divide_by_hundred(tree: Any) -> Any:
    return Mul(Rational(1, 100), tree, evaluate=False)  # evaluating an answer may take unbounded time


def _split_units(value: Value) -> tuple[Value, tuple[str, ...]]:
    return (value.value, value.units) if isinstance(value, Quantity) else (value, ())


def _same_collections(reference: Value, answer: Value) -> bool:
    # Equations under a brace equal a list of the same equations.
    for matrix, collection in ((reference, answer), (answer, reference)):
        if isinstance(matrix, Matrix) and matrix.kind == "cases" and isinstance(collection, Collection):
            entries = [entry for row in matrix.rows for entry in row]
            return collection.opening == "" and _same_entries(entries, collection.entries, is_ordered=False)

    # A set or list of one entry equals that entry.
    if not isinstance(reference, Collection) or not isinstance(answer, Collection):
        alone, other = (reference, answer) if isinstance(reference, Collection) else (answer, reference)
        assert isinstance(alone, Collection), "one of the two is"
        return alone.opening in ("{", "") and len(alone.entries) == 1 and is_equal_value(alone.entries[0], other)

    # Which pairs of brackets may be equal, and whether the order of the entries counts then.
    kinds = {(reference.opening, reference.closing), (answer.opening, answer.closing)}
    if len(kinds) == 1:
        is_ordered = kinds not in ({("", "")}, {("{", "}")})
    elif kinds == {("", ""), ("{", "}")}:
        is_ordered = False
        names = {name.partition("_")[0] for name in _list_entry_names(reference, answer)}
        if len(names) > 1:  # `x = 2, y = 3` is not {2, 3}
            return False
    elif kinds == {("", ""), ("(", ")")}:
        is_ordered = True
        in_order = _list_entry_names(reference, answer)
        if in_order != sorted(in_order):  # `y = 3, x = 4` is not (3, 4)
            return False
    elif ("langle", "rangle") in kinds and ("(", ")") in kinds:
        is_ordered = True
    else:
        return False
    return _same_entries(reference.entries, answer.entries, is_ordered=is_ordered)


def _list_entry_names(*collections: Collection) -> list[str]:
    """List the left-hand sides of those entries that are equations."""
    return [entry.names[0] for side in collections for entry in side.entries if isinstance(entry, Relation)]


def _same_entries(expected: Sequence[Value], given: Sequence[Value], *, is_ordered: bool) -> bool:
    """Compare entries one by one. Without an order, match each with the first equal one that is still unmatched."""
    if len(expected) != len(given):
        return False
    if is_ordered:
        return all(is_equal_value(a, b) for a, b in zip(expected, given, strict=True))
    left = list(given)
    for entry in expected:
        match = next((place for place, other in enumerate(left) if is_equal_value(entry, other)), None)
        if match is None:
            return False
        del left[match]
    return True


def _find_named_value(value: Relation) -> Value | None:
    """Return the value that an equation such as `x = 8` or `3 + 5 = 8` gives; None if it gives none.

    A numeric chain gives its last term, provided that all of its other terms equal it.
    """
    if set(value.operators) != {"="}:
        return None
    last = value.terms[-1]
    others = value.terms[:-1]
    first_is_name = bool(value.names[0]) or value.terms[0] is None
    if isinstance(last, Matrix | Collection | SetUnion) and len(value.terms) == 2:
        return last  # a list, matrix or union on the right is a value, whatever stands on the left
    # `8 = x` is `x = 8`.
    if not first_is_name and value.names[-1] and len(value.terms) == 2 and not _list_letters(value.terms[0]):
        return value.terms[0]
    for place, other in enumerate(others):
        if first_is_name and (place == 0 or _list_letters(other)):
            continue
        if other is None or last is None or not is_equal_value(other, last):
            return None
    return last


def _list_letters(value: Value | None) -> frozenset[str]:
    """Return the variables of an expression, with or without a unit. Lists and matrices count as having none."""
    value = _split_units(value)[0] if value is not None else None
    return value.letters if isinstance(value, Expression) else frozenset()


def _list_approximations(answer: Value) -> list[Value] | None:
    """Return the values that a relation with `\\approx` offers; None if the answer is not such a relation.

    `x = 1/3 \\approx 0.33` offers the exact value and its rounding. The list is empty if the rounding is wrong.
    """
    if not isinstance(answer, Relation) or r"\approx" not in answer.operators:
        return None
    place = answer.operators.index(r"\approx")
    if len(answer.operators) > place + 1 or set(answer.operators[:place]) - {"="}:
        return []
    rounded = answer.terms[-1]
    if place == 0 and (answer.names[0] or answer.terms[0] is None):
        return [rounded] if rounded is not None else []

    # The terms before the sign are one value, or an equation that gives one.
    exact: Value | None = answer.terms[0]
    if place:
        exact = _find_named_value(Relation(answer.terms[:-1], answer.operators[:-1], answer.names[:-1]))
    if exact is None or rounded is None or not _is_rounding_of(_split_units(exact)[0], _split_units(rounded)[0]):
        return []
    return [exact, rounded]


def _is_rounding_of(exact: Value, rounded: Value) -> bool:
    if not isinstance(exact, Expression) or not isinstance(rounded, Expression):
        return False
    value = real_value(exact.tree)
    near = real_value(rounded.tree)
    if value is None or near is None:
        return False
    places = _count_decimal_places(near)
    # An exact value that is itself a decimal has no rounding: 0.5 \approx 0.51 is wrong.
    if places is None or (exact.tree.is_Rational and _count_decimal_places(value) is not None):
        return False
    return abs(value - near) <= Fraction(1, 2 * 10**places)


def _count_decimal_places(value: Fraction) -> int | None:
    """Return the number of decimal places; None if fewer than 30 places cannot write the value exactly."""
    return next((places for places in range(30) if (10**places) % value.denominator == 0), None)


def _same_relations(reference: Relation, answer: Relation) -> bool:
    # Equal term by term, in either direction.
    for other in (answer, _flip_relation(answer)):
        if other.operators == reference.operators and all(
            _same_terms(reference, other, place) for place in range(len(reference.terms))
        ):
            return True

    # Two equations are equal if one is a multiple of the other: compare left side minus right side.
    if reference.operators == answer.operators == ("=",):
        sides = [_subtract_sides(relation) for relation in (reference, answer)]
        return sides[0] is not None and sides[1] is not None and are_proportional(sides[0], sides[1])

    # Inequalities about one variable are equal if they describe the same set.
    first = _build_interval(reference)
    second = _build_interval(answer)
    return (
        first is not None
        and second is not None
        and _join_variable_names(reference) == _join_variable_names(answer)
        and is_equal_value(first, second)
    )


def _flip_relation(relation: Relation) -> Relation:
    """Read a relation from right to left. Operators without a counterpart become "", which equals no operator."""
    operators = tuple(_FLIPPED.get(operator, "") for operator in relation.operators[::-1])
    return Relation(relation.terms[::-1], operators, relation.names[::-1])


def _same_terms(reference: Relation, answer: Relation, place: int) -> bool:
    """Compare terms at one place. A first term that is only a name may differ if one side leaves it out."""
    expected = reference.terms[place]
    given = answer.terms[place]
    if expected is None or given is None:
        return (expected is given and reference.names[place] == answer.names[place]) or (
            place == 0 and (not reference.names[0] or not answer.names[0])
        )
    return is_equal_value(expected, given)


def _subtract_sides(relation: Relation) -> Any:
    left, right = relation.terms
    if not isinstance(left, Expression) or not isinstance(right, Expression):
        return None
    return Add(left.tree, Mul(-1, right.tree, evaluate=False), evaluate=False)


def _join_variable_names(relation: Relation) -> str:
    return "".join(name for name in relation.names if name)


def _build_interval(value: Relation) -> Value | None:
    """Return the set that `x > 5`, `2 \\le x < 7`, `x \\in S` and the like describe; None for other relations."""
    if value.operators == (r"\in",):
        return value.terms[1] if value.names[0] or value.terms[0] is None else None
    if all(op in (">", r"\ge") for op in value.operators):
        value = _flip_relation(value)  # `7 > x \ge 2` becomes `2 \le x < 7`
    operators = value.operators
    terms = value.terms
    names = value.names
    if not all(op in _OPEN for op in operators):
        return None
    if len(operators) == 2 and names[1]:
        low = terms[0]
        high = terms[2]
        opens = operators
    elif len(operators) == 1 and names[0] and not _list_letters(terms[1]):
        low = Expression(-oo)
        high = terms[1]
        opens = ("<", operators[0])
    elif len(operators) == 1 and names[1] and not _list_letters(terms[0]):
        low = terms[0]
        high = Expression(oo)
        opens = (operators[0], "<")
    else:
        return None
    if low is None or high is None:
        return None
    return Collection("(" if _OPEN[opens[0]] else "[", ")" if _OPEN[opens[1]] else "]", (low, high))
