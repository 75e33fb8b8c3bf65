"""Verifiers `exact` and `math`: which answers count as equal to the reference."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import VerifierFailed
from specrl.rewards.choice import verifier_for
from specrl.rewards.code import Code
from specrl.rewards.code.sandbox_runner import SandboxOptions
from specrl.rewards.custom import Custom, UserFunction
from specrl.rewards.math import Math
from specrl.rewards.text.exact import Exact
from specrl.rewards.text.final_answer import find_marked_answer, normalise_answer
from specrl.rewards.text.formats import Pattern, Tags, ValidJson
from specrl.rewards.text.json_answers import JsonPlace
from specrl.rewards.text.patterns import JsonSchema, Regex
from specrl.spec.data import (
    CodeVerifier,
    ExactVerifier,
    JsonSchemaVerifier,
    Match,
    MathVerifier,
    PatternVerifier,
    PythonVerifier,
    RegexVerifier,
    Rewards,
    TagsVerifier,
    ValidJsonVerifier,
)
from specrl.spec.data import JsonPlace as Place

EXACT = Exact("####")
MATH = Math("####")
SOLUTION = "She has 16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $<<9*2=18>>18.\n#### 18"


@pytest.mark.parametrize("verifier", [EXACT, MATH])
@pytest.mark.parametrize(
    ("reference", "completion"),
    [
        (SOLUTION, SOLUTION),
        (SOLUTION, "#### 18"),
        ("18", "so it is\n####18"),
        ("#### 18", "####   $18.  \nand more words"),
        ("#### 18", "#### 17\nno, wait\n#### 18"),
        ("#### 18", "####\n18"),
        ("#### 1,000", "#### 1000"),
        ("#### 1000", "#### $1,000."),
        ("#### 1234567", "#### 1,234,567"),
        ("#### -5", "#### -$5"),
        ("#### 70,000", r"#### \$70,000"),
        ("#### 5", "#### 5€"),
    ],
)
def test_the_right_answer_scores_one(verifier: Exact | Math, reference: str, completion: str) -> None:
    assert verifier.compute_reward(reference, completion) == 1.0


@pytest.mark.parametrize("verifier", [EXACT, MATH])
@pytest.mark.parametrize(
    "completion",
    [
        "",
        "####",
        "#### ",
        "#### 17",
        "#### 1",
        "#### 8",
        "#### 181",
        "#### -18",
        "#### 1,8",
        "#### 0.18",
        "#### 17 18",
        "#### 3 15",
        "#### 17 or 18",
        "#### 1 2 3 18",
        "#### eighteen",
        "#### 18\n#### 17",
        "#### $$$",
        "#### \\frac{1}{0}",
        "#### ((((",
        "#### 18}{",
        "#### \x00",
        "#### " + "9" * 5000,
        "18 eggs #### ",
    ],
)
def test_a_wrong_answer_scores_zero(verifier: Exact | Math, completion: str) -> None:
    assert verifier.compute_reward(SOLUTION, completion) == 0.0


def test_exact_needs_the_mark_and_math_reads_the_last_boxed_expression_or_number() -> None:
    assert EXACT.compute_reward(SOLUTION, "it is 18") == 0.0
    assert EXACT.compute_reward(SOLUTION, "18") == 0.0
    assert MATH.compute_reward(SOLUTION, "from 17 it is 18 eggs.") == 1.0
    assert MATH.compute_reward(SOLUTION, "first 18, then 17.") == 0.0
    assert MATH.compute_reward(SOLUTION, r"it is \boxed{18}, of 25.") == 1.0
    assert MATH.compute_reward(SOLUTION, r"\boxed{18} or rather \boxed{\frac{34}{2}}") == 0.0
    assert MATH.compute_reward(SOLUTION, r"\boxed{18") == 0.0


@pytest.mark.parametrize(
    ("reference", "completion"),
    [
        ("#### 0.5", "#### 1/2"),
        ("#### 1/2", r"#### \frac{1}{2}"),
        ("#### 3 1/2", "#### 3.5"),
        ("#### 3.5", "#### 3 1/2"),
        ("#### 18", "#### 18.00"),
        ("#### 18", "#### 18 dollars"),
        ("#### 18", r"#### $18\text{ dollars}$"),
        ("#### 50%", "#### 0.5"),
        (r"#### 2\sqrt{3}", r"#### $\sqrt{12}$"),
        ("#### x^2 - 1", "#### (x-1)(x+1)"),
        ("#### 18", r"#### \boxed{18}"),
    ],
)
def test_math_compares_values(reference: str, completion: str) -> None:
    assert MATH.compute_reward(reference, completion) == 1.0
    assert EXACT.compute_reward(reference, completion) == 0.0


def test_a_mixed_number_is_not_its_whole_part() -> None:
    assert MATH.compute_reward("#### 3", "#### 3 1/2") == 0.0
    assert MATH.compute_reward("#### 1", "#### 3 1/2") == 0.0
    assert MATH.compute_reward("#### 10", "#### 10:30") == 0.0


def test_exact_compares_words_with_white_space_collapsed() -> None:
    assert EXACT.compute_reward("New York", "####  New   York.") == 1.0
    assert EXACT.compute_reward("New York", "#### NewYork") == 0.0
    assert EXACT.compute_reward("(1,200)", "#### (1,200)") == 1.0


@pytest.mark.parametrize("mark", ["####", "Answer:", ""])
def test_the_run_file_sets_the_mark(mark: str) -> None:
    assert Exact(mark).compute_reward("18", f"{mark} 18") == 1.0
    assert Math(mark).compute_reward("18", f"{mark} 18") == 1.0


@given(text=st.text(), mark=st.text(max_size=4))
def test_grading_never_raises_on_any_text(text: str, mark: str) -> None:
    find_marked_answer(text, mark)
    assert normalise_answer(normalise_answer(text)) is not None
    assert Exact("####").compute_reward("18", text) in (0.0, 1.0)


@given(value=st.integers(-(10**9), 10**9), wrong=st.integers(-(10**9), 10**9))
def test_numbers_equal_themselves_in_every_spelling_and_no_other(value: int, wrong: int) -> None:
    for verifier in (EXACT, MATH):
        for spelling in (f"{value}", f"{value:,}", f"${value}", f" {value}. "):
            assert verifier.compute_reward(f"#### {value}", f"work\n#### {spelling}") == 1.0
        assert verifier.compute_reward(f"#### {value}", f"#### {wrong}") == float(value == wrong)


@pytest.mark.parametrize("verifier", [Exact("<answer>"), Math("<answer>")])
@pytest.mark.parametrize(
    "completion",
    [
        "<answer>18</answer>",
        "<think>9 * 2</think>\n<answer>\n18\n</answer>\n",
        "<answer>17</answer> no: <answer>18</answer> That is it.",
        "<answer>18",
    ],
)
def test_an_answer_after_a_tag_ends_at_its_closing_tag(verifier: Exact | Math, completion: str) -> None:
    """`exact` took `18</answer>` for the answer, and `math` could not read `18</answer> That is it.`."""
    assert verifier.compute_reward("18", completion) == 1.0
    assert verifier.compute_reward("17", completion) == 0.0


def test_an_unreadable_reference_gives_no_verdict() -> None:
    for verifier, reference in [(EXACT, "####"), (MATH, "####"), (MATH, "#### Monday"), (MATH, "#### ((")]:
        with pytest.raises(VerifierFailed, match="the reference must"):
            verifier.compute_reward(reference, "#### 18")


def test_references_without_an_answer_are_refused_before_the_run_starts() -> None:
    for reference in (SOLUTION, "Monday"):
        EXACT.check_reference(reference)
    for reference in (SOLUTION, r"\boxed{7}"):
        MATH.check_reference(reference)
    with pytest.raises(VerifierFailed, match="the reference must be one mathematical value"):
        MATH.check_reference("#### Monday")
    with pytest.raises(VerifierFailed, match="the reference must have a final answer"):
        EXACT.check_reference("worked ####")


def test_the_runs_verifier_is_built_and_pickles() -> None:
    for section, expected in [
        (Rewards(math=MathVerifier(answer_after="=>")), Math("=>")),
        (Rewards(exact=ExactVerifier()), EXACT),
        (Rewards(regex=RegexVerifier()), Regex("####", is_whole=True)),
        (Rewards(regex=RegexVerifier(answer_after="", match=Match.ANYWHERE)), Regex("", is_whole=False)),
        (Rewards(json_schema=JsonSchemaVerifier()), JsonSchema(JsonPlace())),
        (Rewards(json_schema=JsonSchemaVerifier(place=Place.FENCED_BLOCK)), JsonSchema(JsonPlace("", in_block=True))),
        (Rewards(pattern=PatternVerifier(expression="a+")), Pattern("a+", is_whole=True, path="rewards.pattern")),
        (Rewards(tags=TagsVerifier()), Tags(("think", "answer"), first_is_open=False)),
        (
            Rewards(valid_json=ValidJsonVerifier(place=Place.FENCED_BLOCK)),
            ValidJson(JsonPlace("", in_block=True), None, "rewards.validJson"),
        ),
        (Rewards(code=CodeVerifier()), Code(SandboxOptions.from_section(CodeVerifier(), "rewards.code"))),
        (Rewards(python=PythonVerifier(function="a.b:c")), Custom(UserFunction("a.b:c", None, "rewards.python"))),
    ]:
        assert pickle.loads(pickle.dumps(verifier_for(section))) == expected  # noqa: S301 - our own bytes
