"""Verifier `math`: which text it takes as the answer, and which values it calls equal to the reference."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specrl.errors import VerifierFailed
from specrl.rewards.math import Math

DATA = Path(__file__).parents[2] / "data"
MATH = Math("####")
SOLUTION = "She makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


def labelled(name: str) -> list[dict[str, object]]:
    """Read a labelled set of pairs (tests/data/README.md)."""
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["math_answers.jsonl", "math_conventions.jsonl"])
def test_every_labelled_answer_gets_its_label(name: str) -> None:
    wrong = []
    for row in labelled(name):
        verdict = Math(str(row.get("mark", "####"))).grade(str(row["reference"]), str(row["completion"]), {})
        if verdict.reward != row["reward"]:
            wrong.append((row["form"], row["reference"], row["completion"], verdict))
    assert wrong == []


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [
        (r"\boxed{17} or \boxed{19}, so \boxed{18}", 1.0),
        (r"\boxed{18}, no: \boxed{17}", 0.0),
        (r"\boxed{18} \boxed{", 0.0),
        (r"\boxed{\boxed{18}}", 1.0),
        (r"\boxed{17, 18}", 0.0),
        (r"\boxed{18 or 17}", 0.0),
        (r"\boxed{\text{18 or 17}}", 0.0),
        (r"\boxed{x = 18}", 1.0),
        (r"\boxed{18 = 17}", 0.0),
        (r"#### \boxed{17} 18", 0.0),
        ("#### 18\n#### ", 0.0),
        ("#### 18 #### 17", 0.0),
        ("the answer is one of 1 2 3 18", 0.0),
        ("#### \uff11\uff18", 1.0),
        ("#### \u0661\u0668", 1.0),
        ("#### 18\u200b", 0.0),
        ("#### \u221218", 0.0),
        ("#### 18\u202e", 0.0),
        (r"#### \int_0^{18} 1 dx", 0.0),
        (r"#### \{18\}", 1.0),  # a set of one is its member
        (r"\boxed{18 \pm 0}", 0.0),  # two values
        (r"\boxed{18^{\circ}}", 0.0),
        ("#### [17, 18]", 0.0),
        ("#### 18 < x", 0.0),
        ("#### oo", 0.0),
        ("#### True", 0.0),
        ("#### " + "(" * 300 + "18" + ")" * 300, 0.0),
        ("#### " + "1+" * 200 + "x", 0.0),
    ],
)
def test_math_finds_the_final_answer_among_distractions(completion: str, verdict: float) -> None:
    assert MATH.compute_reward(SOLUTION, completion) == verdict


REFERENCES = (DATA / "math_references.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_reference_equals_itself_in_every_answer_format(reference: str) -> None:
    MATH.check_reference(reference)
    places = [r"#### {}", r"\boxed{{{}}}", "The answer is {}", "**Answer:** {}"]
    places += ["$${}$$", "#### ${}$"] if not reference.startswith("$") else []
    assert [place for place in places if MATH.compute_reward(reference, place.format(reference)) != 1.0] == []


@pytest.mark.parametrize(
    "reference",
    [
        r"4\text{ m}\cdot\text{s}^{-1}",
        "Friday",
        "No",
        "She has 18 eggs",
        "Yes",
        r"\text{Yes}",
        r"\text{odd}",
        "abc",
        r"n \equiv 3 \pmod 5",
        "no solution",
        "twelve",
        "####",
        "",
        "((",
        "Monday",
        "1/0",
        r"\frac{1}{0}",
        r"\sqrt{",
        "17 18",
        r"\unknown{2}",
        "9!!",
        "x" * 1001,
    ],
)
def test_a_reference_that_is_not_one_value_is_refused_before_the_run(reference: str) -> None:
    with pytest.raises(VerifierFailed, match="the reference must be one mathematical value"):
        MATH.check_reference(reference)


ENDLESS = {
    "power tower": "9^{9^{9^{9}}}",
    "factorials": "9!!!!",
    "large factorial": "100000000!",
    "large exponent": "10^{10^{10}}",
    "small exponent": "2^{-10^{10}}",
    "nested exponentials": "e^{e^{e^{e^{9}}}}",
    "large binomial": r"\binom{10^9}{5}",
    "digits": "9" * 20_000,
    "scientific notation": "1e999999",
    "fractions": r"\frac{" * 300 + "1",
    "parentheses": "(" * 300 + "18" + ")" * 300,
    "powers": "x^{" * 12 + "2" + "}" * 12,
    "operators": "1+" * 400 + "x",
    "percent signs": "%" * 900,
    "minus signs": "-" * 900 + "3",
    "commas": "1," * 400,
    "an integral": r"\int_0^1 x^x dx",
    "half a surrogate pair": "\ud800",
    "bars": "12b|" * 125,
    "integrals": r"\int_0^1 [9]" * 90,
    "functions without brackets": r"\exp" * 15 + "1",
    "gamma functions": " e!" * 330,
    "indices": "b_" * 250,
    "ratios": ":99is^99" * 120,
    "currencies": r"\$" * 400,
    "nested sets": "[" * 400 + "]" * 400,
    "relations": r"\sin2^0.5>" * 90,
}


@pytest.mark.parametrize("expression", ENDLESS.values(), ids=ENDLESS)
def test_an_answer_that_cannot_be_computed_is_wrong(expression: str) -> None:
    """These answers used to keep SymPy busy beyond the time limit, which left the rollout ungraded."""
    for place in ("#### {}", r"\boxed{{{}}}", "The answer is {}", "$${}$$", "{}"):
        assert MATH.compute_reward("18", place.format(expression)) == 0.0


LONG = ["9", "(", "[", "\\boxed{", "\\boxed{1} or ", "$$", r"\[", r"\begin{align}", "answer is ", "answer ", " ", "*"]


@pytest.mark.parametrize("repeated", LONG)
def test_a_completion_of_a_megabyte_is_graded(repeated: str) -> None:
    assert MATH.compute_reward("18", repeated * (10**6 // len(repeated))) == 0.0
    assert MATH.compute_reward("18", repeated * (10**6 // len(repeated)) + "\n#### 18") == 1.0


HOSTILE = [
    "__import__('os')",
    "'a'.__class__",
    "(lambda: 1)()",
    "[i for i in (1,)]",
    "f(x)",
    "exec",
    ";",
    '"',
    "'",
    "\n",
]
LATEX = [
    "7",
    "1.5e3",
    "x_{",
    "}",
    "\\text{",
    "\\mathrm{",
    "\\frac{1}{2}",
    "\\boxed{",
    "\\{",
    "\\}",
    "+",
    "=",
    ",",
    "^",
    "%",
]


@given(st.lists(st.sampled_from(HOSTILE + LATEX), min_size=1, max_size=6).map("".join))
@example("__import__('os')")
@example("\\text{__import__('os')}")
def test_sympy_evaluates_only_numbers_and_names_of_an_answer_as_python(answer: str) -> None:
    """SymPy parses numbers with `eval`. Only text that math-verify's grammar has accepted may reach it."""
    MATH.prepare_worker()
    evaluate = builtins.eval  # noqa: S307 - what SymPy calls, watched below
    evaluated = []

    def noted(code: object, *scope: object) -> object:
        evaluated.append(code)
        return evaluate(code, *scope)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "eval", noted)
        MATH.compute_reward("#### 7", f"#### {answer}")
    harmless = re.compile(r"(Integer|Float|Rational|Symbol) \('?[\w. +-]*'? ?\)|[A-Z] ")
    assert [code for code in evaluated if not harmless.fullmatch(str(code))] == []
