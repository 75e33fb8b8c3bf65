"""Precision and recall of graders: what is counted, and that one bad pair does not stop the table."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.answer_accuracy import Grader, GraderFailed, Outcome, Pair, Tally, tally
from benchmarks.answer_graders import bare_answer, make_math_verify, make_ours, makers

RIGHT = Pair("boxed", "18", r"so \boxed{18}", 1)
WRONG = Pair("boxed", "18", r"so \boxed{19}", 0)


def make_difficult() -> Grader:
    """Does what the completion says."""

    def grade(reference: str, completion: str, mark: str) -> float | None:
        if completion == "hang":
            while True:
                pass
        if completion == "end":
            os._exit(1)
        if completion == "raise":
            raise ZeroDivisionError
        return None if completion == "refuse" else 1.0

    return grade


def make_nothing() -> Grader:
    raise ModuleNotFoundError("no module named x")


def test_mistakes_of_both_kinds_are_counted() -> None:
    counted = Tally([Outcome(RIGHT, 1.0), Outcome(RIGHT, 0.0), Outcome(WRONG, 1.0), Outcome(WRONG, 0.0)])
    assert (counted.precision, counted.recall) == (0.5, 0.5)
    assert counted.figures()["false 1s"] == counted.figures()["false 0s"] == {"boxed": 1}
    counted = Tally([Outcome(RIGHT, 1.0), Outcome(RIGHT, None), Outcome(WRONG, None)])
    assert (counted.precision, counted.recall) == (1.0, 0.5)
    assert counted.figures()["pairs whose reference was refused"] == 2


def test_a_pair_that_hangs_raises_or_ends_the_process_is_a_zero_and_the_next_is_graded() -> None:
    pairs = [Pair("x", "18", text, 1) for text in ("hang", "end", "raise", "refuse", "go on")]
    counted = tally(pairs, make_difficult, limit_s=0.5)
    assert [outcome.reward for outcome in counted.outcomes] == [0.0, 0.0, 0.0, None, 1.0]
    assert [outcome.fault for outcome in counted.outcomes] == ["time-out", "process ended", "ZeroDivisionError", "", ""]


def test_a_grader_that_cannot_be_made_says_why() -> None:
    with pytest.raises(GraderFailed, match="ModuleNotFoundError: no module named x"):
        tally([RIGHT], make_nothing, limit_s=1)


def test_boxed_answers_after_a_mark_are_not_counted_as_boxed() -> None:
    after_mark = Pair("mark", "18", r"#### \boxed{18}", 1)
    counted = Tally([Outcome(RIGHT, 1.0), Outcome(after_mark, 0.0)])
    assert (counted.recall, counted.boxed().recall) == (0.5, 1.0)


def test_graders_that_are_installed_know_right_from_wrong() -> None:
    for make in (make_ours, make_math_verify):
        grade = make()
        assert [grade(pair.reference, pair.completion, pair.mark) for pair in (RIGHT, WRONG)] == [1.0, 0.0]


def test_verl_is_left_out_without_its_folder() -> None:
    assert [name for name in makers(None) if "verl" in name] == []
    assert len([name for name in makers(Path("folder")) if "verl" in name]) == 6


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("18", "18"),
        ("9 * 2 = 18\n#### 18", "18"),
        (r"So the root is $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
    ],
)
def test_answer_of_a_worked_solution_is_taken_out_for_graders_that_want_it_bare(reference: str, answer: str) -> None:
    assert bare_answer(reference) == answer
