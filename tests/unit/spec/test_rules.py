"""Every rule alone decides one case, in Python and in CEL, with the same message at the same path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rljob_admission import Refusal, admit
from tests.rljob_cases import CASES, Case, Changes, a_job

from specrl.errors import SpecInvalid, SpecProblem
from specrl.spec import parse_rljob, parse_spec
from specrl.spec.rljob.manifest import extract_run_fields
from specrl.spec.rules.cluster_rules import CLUSTER_RULES
from specrl.spec.rules.rule import Rule, find_broken_rules
from specrl.spec.rules.run_rules import RULES
from specrl.spec.run import RunSpec

ALL = (*RULES, *CLUSTER_RULES)
IDS = [f"{case.path}-{case.must}-{number}" for number, case in enumerate(CASES)]


def problems(changes: Changes) -> list[SpecProblem]:
    try:
        parse_rljob(a_job(changes))
    except SpecInvalid as error:
        return list(error.problems)
    return []


def rules_against(changes: Changes) -> list[Rule]:
    """Return the rules that a valid job with these changes breaks."""
    spec = RunSpec.model_validate(extract_run_fields(a_job(changes)))
    return [rule for rule in ALL if list(find_broken_rules(spec, [rule]))]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_broken_rule_is_the_only_finding_in_python_and_in_cel(case: Case) -> None:
    (problem,) = problems(case.refused)
    assert problem.path.startswith(case.path)
    assert problem.rule.startswith(case.must)
    (rule,) = rules_against(case.refused)
    assert (problem.rule.partition(", got ")[0], problem.remedy) == (rule.must, rule.remedy)
    _, refusals = admit(a_job(case.refused))
    assert refusals == [Refusal(f"spec.{problem.path}", rule.api_message)]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_rule_accepts_a_corrected_run(case: Case) -> None:
    assert problems(case.accepted) == []
    stored, refusals = admit(a_job(case.accepted))
    assert refusals == []
    assert parse_rljob(stored) == parse_rljob(a_job(case.accepted)), "defaults are the same in both"


def test_every_rule_has_a_case() -> None:
    decided = [rule for case in CASES for rule in rules_against(case.refused)]
    assert [f"{rule.on.__name__}.{rule.field} {rule.must}" for rule in ALL if rule not in decided] == []


@given(
    st.lists(st.sampled_from([it for case in CASES for it in (case.refused, case.accepted)]), min_size=2, max_size=4)
)
def test_both_forms_agree_on_any_mixture_of_cases(mixture: list[Changes]) -> None:
    job = a_job({path: value for changes in mixture for path, value in changes.items()})
    spec = RunSpec.model_validate(extract_run_fields(job))
    found = [
        Refusal(f"spec.{it.path}", f"{it.rule.partition(', got ')[0]}; {it.remedy}")
        for it in find_broken_rules(spec, ALL)
    ]
    assert set(found) == set(admit(job)[1])


def test_cluster_rules_do_not_apply_to_local_runs() -> None:
    fields = a_job({"model.path": "policy", "placement": {"nvlink": "Required"}, "checkpoint": {}})["spec"]
    assert parse_spec({"name": "local", **fields}).model.path == "policy"


def test_messages_of_rules_have_the_form_of_the_style_guide() -> None:
    for rule in ALL:
        assert rule.must.startswith("must ")
        assert rule.remedy
        assert not rule.remedy.endswith(".")
