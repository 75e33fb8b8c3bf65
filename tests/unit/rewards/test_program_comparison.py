"""Printed and returned results are compared by the rules of docs/rewards.md; integers must be exact."""

from __future__ import annotations

import json

import pytest

from specrl.rewards.code.result_comparison import is_same_text, is_same_value
from specrl.rewards.sandbox.inside.codec import encode


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("1 2\n", "1 2"),
        ("1 2  \n3\n\n\n", "1 2\n3"),
        ("\n 1\n2", "1\n2\n"),
        ("  *\n ***", "*\n***"),
        ("", "\n"),
        ("3.0", "3"),
        ("3", "3.0"),
        ("0.5 yes", "0.50 yes"),
        ("1  2", "1 2"),
        ("0.33333333", "0.333333333333"),
        ("0.3333333333333", "0.333333"),
        ("2.00000000001", "2.0"),
        ("1e3", "1000.0"),
        (".5", "0.5"),
        ("-0.0", "0.0"),
        ("0.0000001", "0.000000"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("YES", "YES"),
    ],
)
def test_a_printed_number_equal_to_the_expected_one_is_right(printed: str, expected: str) -> None:
    assert is_same_text(printed, expected)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("1 2", "1 3"),
        ("1\n2", "1 2"),
        ("1\n\n2", "1\n2"),
        ("1 2", "1"),
        ("12", "1 2"),
        ("yes", "YES"),
        ("123456789012345678901234567891", "123456789012345678901234567890"),
        ("1000000007123.9", "1000000007123"),
        ("50000000000000001", "50000000000000000"),
        ("1.00000000001e12", "1000000000000"),
        ("2.0000000001", "2"),
        ("101", "0101"),
        ("0101", "101"),
        ("+3", "3"),
        ("0.333", "0.333333333333"),
        ("2.54", "2.5"),
        ("0.0", "1e-10"),
        ("0", "0.001"),
        ("nan", "1.0"),
        ("1e9999", "1.0"),
        ("1e99999", "1.0"),
        (".", "0.0"),
        ("e5", "0.0"),
        ("9" * 10**6, "9" * 10**6 + "8"),
        ("٣", "3"),
    ],
)
def test_a_different_printed_number_is_wrong(printed: str, expected: str) -> None:
    assert not is_same_text(printed, expected)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (3, 3),
        (3.0, 3),
        (3, 3.0),
        (0.1 + 0.2, 0.3),
        (-0.0, 0),
        ((1, 2), [1, 2]),
        ([(1, "a"), (2, "b")], [[1, "a"], [2, "b"]]),
        ({1: 7}, {"1": 7}),
        ({"a": (1,)}, {"a": [1]}),
        ({None: 1, 2.5: 2, True: 3}, {"None": 1, "2.5": 2, "True": 3}),
        (2**100, 2**100),
        ("", ""),
        (None, None),
        (True, True),
        ([], []),
        ((), []),
        ({}, {}),
    ],
)
def test_a_result_equal_to_the_expected_json_is_right(returned: object, expected: object) -> None:
    assert is_same_value(json.loads(json.dumps(encode(returned))), json.loads(json.dumps(expected)))


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (1000000007123.9, 1000000007123),
        (2880067194370816120, 2880067194370816121),
        (2880067194370816000.0, 2880067194370816120),
        (2.0**60, 2**60 + 1),
        (10**9 + 0.5, 10**9),
        (0.0, 1e-10),
        (1e-10, 0.0),
        (float("nan"), 0.0),
        (float("inf"), 1e308),
        ({1: 7, "1": 5}, {"1": 5}),
        ({"1": 5, 1: 5}, {"1": 5}),
        ({1: 5, "1": 5}, {"1": 5, "2": 5}),
        (True, 1),
        (1, True),
        (0, False),
        (0, None),
        ("3", 3),
        ({1, 2}, [1, 2]),
        (frozenset(), []),
        (b"a", "a"),
        (3 + 0j, 3),
        ([1, 2], [1, 2, 3]),
        ([1, 2, 3], [1, 2]),
        ([1], {"0": 1}),
        ({}, []),
        (2**100, 2**100 + 1),
        ({10**5000: 1}, {"1": 1}),
    ],
)
def test_a_different_result_is_wrong(returned: object, expected: object) -> None:
    """Integers used to be compared as floats: fib(90) by Binet's formula was accepted, and so was / instead of //."""
    assert not is_same_value(json.loads(json.dumps(encode(returned))), json.loads(json.dumps(expected)))
