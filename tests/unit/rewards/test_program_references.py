"""Tests of programs are read in the formats of published data sets; other references are refused with a message."""

# ruff: noqa: E501 - a reference is read best on one line

from __future__ import annotations

import json

import pytest

from specrl.errors import VerifierFailed
from specrl.rewards.choice import verifier_for
from specrl.rewards.code.reference_tests import FunctionTests, ProgramTests, PythonTests, read_tests
from specrl.spec.data import CodeVerifier, Rewards

STDIN = {"inputs": ["1\n"], "outputs": ["2"]}
CALLS = {"fn_name": "f", "inputs": [[1, [2]]], "outputs": [4]}
PUBLIC = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
PRIVATE = [{"input": "3\n", "output": "4\n", "testtype": "stdin"}]
FUNCTIONAL = [{"input": '[1, 2]\n"a"', "output": "[3]", "testtype": "functional"}]


@pytest.mark.parametrize(
    ("reference", "cases"),
    [
        (STDIN, (("1\n", "2"),)),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, (("1\n2", "3"),)),
        (STDIN | {"fn_name": None}, (("1\n", "2"),)),
        (json.dumps(STDIN), (("1\n", "2"),)),
        ({"input_output": json.dumps(STDIN)}, (("1\n", "2"),)),
        ({"input_output": STDIN, "difficulty": "EASY"}, (("1\n", "2"),)),
        (PUBLIC, (("1\n", "2\n"),)),
        (json.dumps(PUBLIC), (("1\n", "2\n"),)),
        ({"public_test_cases": PUBLIC, "private_test_cases": PRIVATE}, (("1\n", "2\n"), ("3\n", "4\n"))),
        (
            {"public_test_cases": json.dumps(PUBLIC), "private_test_cases": json.dumps(PRIVATE), "metadata": "{}"},
            (("1\n", "2\n"), ("3\n", "4\n")),
        ),
        ({"public_test_cases": PUBLIC, "private_test_cases": []}, (("1\n", "2\n"),)),
        ({"tests": json.dumps(STDIN)}, (("1\n", "2"),)),
        ([{"input": "1", "output": "2"}], (("1", "2"),)),
    ],
)
def test_program_tests_are_read_in_every_format(reference: object, cases: tuple[tuple[str, str], ...]) -> None:
    assert read_tests(json.dumps(reference)) == ProgramTests(cases)


@pytest.mark.parametrize(
    ("reference", "tests"),
    [
        (CALLS, FunctionTests("f", (([1, [2]], 4),))),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], [4]]}, FunctionTests("f", (([1], [3]), ([2], [4])), True)),
        ({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], []]}, FunctionTests("f", (([1], [3]), ([2], [])))),
        ({"fn_name": "f", "inputs": [[{"1": "a", "-2": 0}]], "outputs": [0]}, FunctionTests("f", (([{1: "a", -2: 0}], 0),))),
        ({"fn_name": "f", "inputs": [[{"1": 0, "a": 0}]], "outputs": [0]}, FunctionTests("f", (([{"1": 0, "a": 0}], 0),))),
        ({"fn_name": "f", "inputs": [[{"01": 0}]], "outputs": [0]}, FunctionTests("f", (([{"01": 0}], 0),))),
        ({"fn_name": "f", "inputs": ['[1, 2]\n"a"'], "outputs": ["[3]"]}, FunctionTests("f", (([[1, 2], "a"], [3]),))),
        ({"public_test_cases": FUNCTIONAL, "metadata": {"func_name": "f"}}, FunctionTests("f", (([[1, 2], "a"], [3]),))),
        (
            {"public_test_cases": json.dumps(FUNCTIONAL), "metadata": '{"func_name": "f"}', "private_test_cases": ""},
            FunctionTests("f", (([[1, 2], "a"], [3]),)),
        ),
    ],
)  # fmt: skip
def test_function_tests_are_read_in_every_format(reference: object, tests: FunctionTests) -> None:
    assert read_tests(json.dumps(reference)) == tests


@pytest.mark.parametrize(
    ("reference", "names"),
    [
        ("import math\ndef check(f):\n    near = math.pi\n    assert f(near) == g\ncheck(add)\n", ("add", "g")),
        (json.dumps(["assert add(1, 2) == 3", "assert add(0, 0) == 0"]), ("add",)),
        (json.dumps({"test_list": ["assert add(1, x) == 3"], "test_setup_code": "x = 2"}), ("add",)),
        (json.dumps({"test": "def check(candidate):\n    assert candidate(1) == 1", "entry_point": "same"}), ("same",)),
        (json.dumps({"test": "def check(f):\n    assert f(1)", "entry_point": "Solution().same"}), ("Solution",)),
        ("from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n", ("add",)),
        ("from solution import (\n    add as plus,\n    sub,\n)\nassert plus(1, 2) == sub(4, 1)\n", ("add", "sub")),
        ("def test_add():\n    from solution import add\n    assert add(1, 2) == 3\n", ("add",)),
        ('"""Tests of add."""\nassert add(1, 2) == 3', ("add",)),
        ("[check(add) for check in (print,)]", ("add",)),
    ],
)
def test_tests_in_python_name_what_the_answer_must_define(reference: str, names: tuple[str, ...]) -> None:
    tests = read_tests(reference)
    assert isinstance(tests, PythonTests)
    assert tests.required_names == names


@pytest.mark.parametrize(
    "reference",
    [
        "{",
        "{}",
        "[]",
        "[1]",
        '"{"',
        '{"inputs": [], "outputs": []}',
        '{"inputs": ["1"], "outputs": []}',
        '{"inputs": ["1"]}',
        '{"inputs": [1], "outputs": [1]}',
        '{"inputs": "1", "outputs": "1"}',
        '{"fn_name": "f", "inputs": [1], "outputs": [1]}',
        '{"fn_name": 1, "inputs": [[1]], "outputs": [1]}',
        '{"fn_name": "f()", "inputs": [[1]], "outputs": [1]}',
        '{"fn_name": "f", "inputs": ["1"], "outputs": ["one"]}',
        '{"public_test_cases": "eJxr", "private_test_cases": "eJxr"}',
        '{"public_test_cases": [{"input": "1", "output": "1", "testtype": "functional"}]}',
        '{"public_test_cases": [{"input": "1"}]}',
        '{"metadata": 3, "tests": [{"input": "1", "output": "1"}]}',
        '{"input_output": null}',
        '{"test": "def check(f): pass", "entry_point": "os.system(1)"}',
        '{"test_list": [1]}',
        "assert f(",
        "assert 1 == 1",
        "import os\nassert os.sep",
        "\x00",
        "def f(): pass\nassert f() is None",
        "assert apply(lambda x: x, 3) == 3",
        "assert total(x for x in (1, 2)) == 3",
        "def key(x): return -x\nassert arrange([1, 2], key=key) == [2, 1]",
        "[" * 5000,
        '{"inputs": ' + "[" * 5000,
    ],
)
def test_a_reference_without_tests_is_refused_before_the_run(reference: str) -> None:
    with pytest.raises(VerifierFailed, match="correct the data set"):
        read_tests(reference)
    with pytest.raises(VerifierFailed, match="correct the data set"):
        verifier_for(Rewards(code=CodeVerifier())).check_reference(reference)
