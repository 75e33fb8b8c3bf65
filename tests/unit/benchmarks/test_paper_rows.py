"""Rows of the paper's table, from the reports of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.paper_policies import name_jsonl
from benchmarks.paper_rows import (
    BASE,
    CONFIGURATIONS,
    LONG,
    NAMES,
    PUBLISHED,
    QUICK,
    REASONING,
    SHORT,
    TOY_WORKLOADS,
    WEAK,
    Steps,
    list_unmeasured,
    plan,
    published_shares,
    ratio,
    read_steps,
    relative_error,
    rows_of,
)

from specrl.formats.reports import PhaseSeconds, StepReport
from specrl.spec.yaml_input import parse_yaml


def a_report(step: int, **changes: Any) -> StepReport:
    """Make a step with 2 s of generation and 1 s of training; keywords replace fields."""
    phases = changes.get("phases", PhaseSeconds(generation=2.0, train=1.0))
    numbers = dict.fromkeys(name for name, field in StepReport.model_fields.items() if field.is_required())
    fields: dict[str, Any] = dict.fromkeys(numbers, 0) | {
        "step": step,
        "rollouts": 8,
        "tokens": 80,
        "acceptance_length": None,
        "phases": phases,
        "exposed_generation": phases.generation,
    }
    return StepReport.model_validate(fields | changes)


def steps_of(*seconds: float, acceptance_length: float | None = None) -> Steps:
    """Make a round whose steps generate for so many seconds and train for one."""
    return {
        ("here", 1, step): a_report(
            step, phases=PhaseSeconds(generation=value, train=1.0), acceptance_length=acceptance_length
        )
        for step, value in enumerate(seconds, 2)
    }


def test_first_step_of_a_run_warms_up_and_is_left_out() -> None:
    lines = "".join(a_report(step).model_dump_json(by_alias=True) + "\n" for step in (1, 2, 3))
    assert list(read_steps(lines, "here", 4)) == [("here", 4, 2), ("here", 4, 3)]


def test_ratio_is_the_median_of_the_ratios_of_like_steps_and_its_range_their_middle_half() -> None:
    found = ratio(steps_of(2, 4, 6, 8, 10), steps_of(2, 2, 2, 2, 2), lambda report: report.phases.generation)
    assert found is not None
    assert (found.value, found.low, found.high) == (3.0, 2.0, 4.0)
    assert str(found) == "3.00x (2.00-4.00)"


def test_ratio_lies_within_its_own_range_although_prompts_differ_much() -> None:
    """The ratio of the medians, 1.01 of steps that were 0.86 to 0.96 times as fast, was published."""
    found = ratio(steps_of(1, 5, 5.5), steps_of(1.1, 4.95, 7), lambda report: report.phases.generation)
    assert found is not None
    assert found.value == pytest.approx(1 / 1.1)
    assert found.low <= found.value <= found.high


def test_steps_that_only_one_of_the_two_has_do_not_count() -> None:
    found = ratio(steps_of(2, 2, 1000), steps_of(1, 1), lambda report: report.phases.generation)
    assert found is not None
    assert found.value == 2.0


@pytest.mark.parametrize("own", [steps_of(0, 1), steps_of(1), {}])
def test_nothing_to_divide_by_gives_no_ratio(own: Steps) -> None:
    assert ratio(steps_of(2, 2), own, lambda report: report.phases.generation) is None


def test_row_holds_ratios_shares_and_the_papers_figures() -> None:
    found = {"none": steps_of(3, 3, 3), "eagle3:3": steps_of(1, 1, 1, acceptance_length=2.5)}
    none, eagle3 = rows_of(BASE, found)
    assert none.generation is not None
    assert none.generation.value == 1.0
    assert none.acceptance_length is None
    assert none.exposed_share == 0.75
    assert eagle3.generation is not None
    assert eagle3.step is not None
    assert (eagle3.generation.value, eagle3.step.value, eagle3.acceptance_length) == (3.0, 2.0, 2.5)
    assert (eagle3.phases["generation"], eagle3.phases["train"], eagle3.phases["total"]) == (0.25, 0.25, 0.5)
    assert (eagle3.mean_length, eagle3.published.step) == (10.0, 1.41)


def test_row_of_one_round_is_compared_with_that_round_alone() -> None:
    """It was divided by the steps of all rounds, which have other prompts: here it would be twice as fast as itself."""
    later = {("here", 2, step): a_report(step, phases=PhaseSeconds(generation=15.0, train=1.0)) for step in range(2, 7)}
    none, ngram = rows_of(BASE, {"none": steps_of(3, 3, 3) | later, "ngram": steps_of(3, 3, 3)})
    assert (none.steps, ngram.steps) == (8, 3)
    assert (ngram.phases["generation"], ngram.phases["total"]) == (0.75, 1.0)
    assert (none.step_s, ngram.step_s) == (pytest.approx((3 * 4 + 5 * 16) / 8), 4.0)
    assert rows_of(BASE, {"none": later, "ngram": steps_of(3, 3)})[1:] == []


def test_step_without_tokens_has_no_time_of_a_token() -> None:
    """It ended the table with a traceback."""
    silent = steps_of(3, 3, 3) | {("here", 1, 4): a_report(4, tokens=0, rollouts=0)}
    for found, speed in (
        ({"none": silent, "ngram": steps_of(1, 1, 1)}, 3.0),
        ({"none": steps_of(3, 3, 3), "ngram": silent}, 1.0),
    ):
        _, ngram = rows_of(BASE, found)
        assert ngram.steps == 3
        assert ngram.per_token is not None
        assert ngram.per_token.value == pytest.approx(speed)
    (alone,) = rows_of(BASE, {"none": {place: a_report(4, tokens=0, rollouts=0) for place in silent}})
    assert (alone.per_token, alone.mean_length) == (None, 0)


def test_row_with_policy_lag_compares_means_of_whole_steps_and_gives_exposed_generation_as_a_share() -> None:
    lagged = {"none-lag1": steps_of(0, 2, 2), "adaptive-lag1": steps_of(0, 0, 1)}
    none, adaptive = rows_of(REASONING, lagged)
    assert adaptive.generation is None
    assert adaptive.per_token is None
    assert adaptive.step is not None
    assert adaptive.step.value == pytest.approx(7 / 4)
    assert none.exposed_share == pytest.approx(4 / 7)
    assert adaptive.exposed_share == 0.25
    assert (none.exposed_s, adaptive.exposed_s) == (pytest.approx(4 / 3), pytest.approx(1 / 3))
    assert adaptive.phases["total"] == pytest.approx(4 / 7)


def test_row_is_left_out_when_it_or_its_reference_was_not_measured() -> None:
    found = {"none": steps_of(3, 3), "adaptive-lag1": steps_of(1, 1), "ngram": {}}
    assert [row.name for row in rows_of(BASE, found)] == ["none"]


def test_every_published_row_has_a_line_that_says_if_it_was_not_measured() -> None:
    for workload in TOY_WORKLOADS:
        published = {name for which, name in PUBLISHED if which == workload.beside}
        assert published <= set(workload.rows), "it is measured by default"
        assert {c.name for c in list_unmeasured(workload, [])} == published
        measured = rows_of(workload, {"none": steps_of(3, 3), "ngram": steps_of(3, 3)})
        assert {c.name for c in list_unmeasured(workload, measured)} == published - {"ngram"}


def test_a_real_models_drafter_of_general_chat_text_stands_beside_the_papers() -> None:
    for workload in (SHORT, LONG):
        assert workload.find_published("chat") == PUBLISHED[workload.beside, "weak"]
        assert workload.find_published("weak-online") is None
        published = {name for which, name in PUBLISHED if which == workload.beside}
        assert len(list_unmeasured(workload, [])) == len(published)


def test_only_the_most_important_rows_have_several_rounds() -> None:
    order = plan(LONG.rows, 3, LONG.once)
    assert len([c for _, c in order if c.name == "weak-online"]) == 3
    assert len([c for _, c in order if c.name == "suffix"]) == 1
    assert {c.name for number, c in order if number == 1} == set(LONG.rows)


def test_error_is_relative_to_the_published_figure() -> None:
    assert relative_error(1.5, 2.0) == -0.25


def test_every_round_runs_everything_once_and_begins_with_another() -> None:
    order = plan(QUICK, 2)
    by_round = [[configuration.name for number, configuration in order if number == wanted] for wanted in (1, 2)]
    assert all(sorted(names) == sorted(QUICK) for names in by_round)
    assert by_round[0] != by_round[1]


def test_papers_phases_and_speeds_agree_with_each_other() -> None:
    for workload in TOY_WORKLOADS:
        plain, speculated = published_shares(workload)
        figures = PUBLISHED[workload.beside, "eagle3:3"]
        assert plain["total"] == pytest.approx(1.0)
        assert plain["generation"] / speculated["generation"] == pytest.approx(figures.generation)
        assert 1 / speculated["total"] == pytest.approx(figures.step, abs=0.01)


def test_rows_have_names_of_their_own_and_references_among_them() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert {configuration.reference for configuration in CONFIGURATIONS} <= set(NAMES)
    assert {name for _, name in PUBLISHED} <= set(NAMES)


def test_overrides_are_yaml_that_names_the_workloads_drafter(tmp_path: Path) -> None:
    configuration = next(c for c in CONFIGURATIONS if c.name == "weak-online")
    found = configuration.overrides({WEAK: tmp_path / "other"})
    fields = {path: yaml.safe_load(text) for path, text in found.items()}
    assert fields["generation.speculation"] == {"eagle3": {"numDraftTokens": 3, "path": str(tmp_path / "other")}}
    assert (fields["generation.draftLength"], fields["trainer.drafter.online"]) == ("Fixed", True)


@pytest.mark.parametrize("folder", ["/runs/\U0001f600", "/runs/a: b, {c}"])
def test_a_drafters_folder_may_have_any_name(folder: str) -> None:
    """YAML read a character above U+FFFF, which JSON escapes as two halves, as another path."""
    weak = next(configuration for configuration in CONFIGURATIONS if configuration.drafter == WEAK)
    speculation = parse_yaml(weak.overrides({WEAK: Path(folder)})["generation.speculation"])
    assert speculation["eagle3"]["path"] == folder
    assert parse_yaml(name_jsonl(Path(folder))) == {"jsonl": {"path": folder}}
