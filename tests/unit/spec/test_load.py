"""One run of the command names everything that is wrong with a file, and nothing that is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic.alias_generators import to_camel

from specrl.errors import SpecInvalid
from specrl.spec import digest, dump, load_spec, parse_spec

SOUND: dict[str, Any] = {
    "name": "run",
    "model": {"path": "policy"},
    "prompts": {"source": {"jsonl": {"path": "train.jsonl"}}},
    "rewards": {"math": {}},
    "generation": {"sampling": {"maxTokens": 64}},
    "trainer": {"optimizer": {"learningRate": "1e-5"}},
    "schedule": {"steps": 3, "promptsPerStep": 2, "groupSize": 4},
}


def a_run(**changes: Any) -> dict[str, Any]:
    """A sound run file with values at dotted paths (`model__path`); `...` takes a field out."""
    raw = copy.deepcopy(SOUND)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = raw
        for part in parents:
            place = place.setdefault(part, {})
        if value is ...:
            del place[last]
        else:
            place[last] = value
    return raw


def problems(raw: dict[str, Any]) -> dict[str, str]:
    with pytest.raises(SpecInvalid) as caught:
        parse_spec(raw)
    paths = [problem.path for problem in caught.value.problems]
    assert len(paths) == len(set(paths)), "each path is named once"
    assert all(problem.remedy for problem in caught.value.problems)
    return {problem.path: f"{problem.rule}; {problem.remedy}" for problem in caught.value.problems}


def test_a_sound_file_loads_with_defaults() -> None:
    spec = parse_spec(SOUND)
    assert spec.schedule.max_policy_lag == 1
    assert spec.generation.speculation.kind == "none"


RULES = {
    "prompts.source": a_run(prompts__source={"jsonl": {"path": "a"}, "parquet": {"path": "b"}}),
    "rewards": a_run(rewards={"math": {}, "exact": {}}),
    "generation.speculation": a_run(generation__speculation={}),
    "store": a_run(store={}),
    "validation.source": a_run(validation__source={"jsonl": {"path": "train.jsonl"}}),
    "generation.sampling.temperature": a_run(generation__sampling__temperature="0"),
    "generation.sampling.topP": a_run(generation__sampling__topP="0.9"),
    "generation.sampling.topK": a_run(generation__sampling__topK=5),
    "model.maxLength": a_run(model__maxLength=512 + 64),
    "trainer.optimizer.learningRate": a_run(trainer__optimizer__learningRate="0"),
    "trainer.optimizer.beta2": a_run(trainer__optimizer__beta2="1"),
    "trainer.optimizer.weightDecay": a_run(trainer__optimizer__weightDecay="-0.1"),
    "trainer.loss.clipLow": a_run(trainer__loss__clipLow="0"),
    "trainer.drafter.clipNorm": a_run(trainer__drafter__clipNorm="-1"),
    "generation.speculation.ngram.lookupMin": a_run(generation__speculation={"ngram": {"lookupMin": 4}}),
    "prompts.template": a_run(prompts__template="no question"),
    "validation.sampling.samplesPerPrompt": a_run(
        validation={"source": {"jsonl": {"path": "t"}}, "sampling": {"samplesPerPrompt": 2}}
    ),
}


@pytest.mark.parametrize("path", RULES)
def test_a_broken_rule_is_named_alone(path: str) -> None:
    assert list(problems(RULES[path])) == [path]


@pytest.mark.parametrize("path", [path for path in RULES if path != "trainer.optimizer.learningRate"])
def test_a_rule_is_still_tried_when_required_fields_are_missing(path: str) -> None:
    raw = RULES[path]
    broken = {**raw, "name": "Not A Name", "schedule": {"groupSize": "many"}, "extra": 1}
    broken["trainer"] = {**broken["trainer"], "optimizer": {**broken["trainer"]["optimizer"], "learningRate": 0.1}}
    assert list(problems(broken)) == [
        "name",
        "trainer.optimizer.learningRate",
        "schedule.steps",
        "schedule.promptsPerStep",
        "schedule.groupSize",
        "extra",
        path,
    ]


@pytest.mark.parametrize("section", ["model", "prompts", "rewards", "generation", "trainer", "schedule"])
@pytest.mark.parametrize("value", [..., 5, "text", None, [1]])
def test_rules_about_a_section_that_is_not_there_are_not_made_up(section: str, value: Any) -> None:
    raw = a_run(**{section: value}, validation={"source": {"parquet": {"path": "t"}}})
    assert list(problems(raw)) == [section]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("generation__sampling__maxTokens", "x"),
        ("generation__sampling__temperature", "hot"),
        ("generation__sampling__stop", ["a", 1]),
        ("prompts__maxTokens", 0),
        ("prompts__template", 7),
        ("prompts__format", "Poem"),
        ("prompts__source", "train.jsonl"),
        ("model__maxLength", None),
        ("model__dtype", "int4"),
        ("trainer__optimizer__beta1", 0.9),
        ("trainer__loss__normaliseAdvantages", "maybe"),
        ("telemetry__httpPort", 70000),
        ("generation__speculation", {"eagle3": {"numDraftTokens": 0}}),
        ("generation__speculation", {"ngram": {"lookupMin": "x"}}),
        ("validation__sampling", {"temperature": "x", "samplesPerPrompt": 4}),
    ],
)
def test_a_malformed_field_is_the_only_problem_of_a_sound_file(path: str, value: Any) -> None:
    raw = a_run(**{path: value})
    if "validation" in raw:
        raw["validation"]["source"] = {"parquet": {"path": "t"}}
    (named,) = problems(raw)
    assert named.startswith(path.replace("__", "."))


def test_two_missing_sources_are_not_said_to_be_equal() -> None:
    raw = a_run(prompts__source=..., validation={"limit": 5})
    assert list(problems(raw)) == ["prompts.source", "validation.source"]


def test_unknown_fields_come_with_a_suggestion() -> None:
    found = problems(a_run(schedule__maxPolicyLg=2, generation__sampling__maxToken=5, zzz=1))
    assert found["schedule.maxPolicyLg"].endswith("did you mean maxPolicyLag?")
    assert found["generation.sampling.maxToken"].endswith("did you mean maxTokens?")
    assert found["zzz"].endswith("remove it")


def test_python_names_are_read_too_and_their_errors_do_not_hide_the_rules() -> None:
    assert parse_spec(a_run(schedule__max_policy_lag=3)).schedule.max_policy_lag == 3
    found = problems(a_run(generation__sampling={"max_tokens": "x"}, prompts__template="none"))
    assert list(found) == ["generation.sampling.max_tokens", "prompts.template"]


def test_floats_are_refused_with_the_spelling_that_works() -> None:
    found = problems(a_run(trainer__optimizer__learningRate=1e-5))
    assert 'must be a decimal in quotes, as in "0.7"' in found["trainer.optimizer.learningRate"]


names = st.sampled_from([*SOUND, "validation", "path", "source", "sampling", "maxTokens", "steps", "junk"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=4),
    max_leaves=8,
)


@given(changes=st.dictionaries(names, values, max_size=4))
def test_any_mapping_loads_or_is_refused_with_problems(changes: dict[str, Any]) -> None:
    try:
        parse_spec(SOUND | changes)
    except SpecInvalid as error:
        assert error.problems  # noqa: PT017 - most mappings are refused, a few load


def write(tmp_path: Path, raw: Any) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def test_paths_are_relative_to_the_file_and_dump_reads_back(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, a_run(model__path="../policy")))
    assert spec.model.path == str(tmp_path.parent / "policy")
    assert spec.prompts.source.jsonl is not None
    assert spec.prompts.source.jsonl.path == str(tmp_path / "train.jsonl")
    again = tmp_path / "elsewhere" / "run.yaml"
    again.parent.mkdir()
    again.write_text(dump(spec))
    assert load_spec(again) == spec
    assert digest(load_spec(again)) == digest(spec)


def test_paths_of_drafters_are_relative_to_the_file(tmp_path: Path) -> None:
    for kind in ("eagle3", "draft_model"):
        raw = a_run(generation__speculation={to_camel(kind): {"path": "small"}})
        found = getattr(load_spec(write(tmp_path, raw)).generation.speculation, kind)
        assert found.path == str(tmp_path / "small")


def test_the_digest_leaves_out_what_may_change_in_a_run() -> None:
    spec = parse_spec(SOUND)
    assert digest(parse_spec(a_run(generation__replicas=5))) == digest(spec)
    assert digest(parse_spec(a_run(schedule__seed=5))) != digest(spec)


def test_overrides_are_applied_and_fractions_stay_text(tmp_path: Path) -> None:
    overrides = ["generation.replicas=2", "trainer.optimizer.learningRate=0.001", "rewards={exact: {}}"]
    spec = load_spec(write(tmp_path, a_run(rewards=...)), overrides)
    assert spec.generation.replicas == 2
    assert str(spec.trainer.optimizer.learning_rate) == "0.001"
    assert spec.rewards.kind == "exact"


def test_all_malformed_overrides_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid) as caught:
        load_spec(write(tmp_path, SOUND), ["noequals", "a.b=[", "=3", "a..b=1"])
    assert len(caught.value.problems) == 4


def test_the_spec_of_a_manifest_is_read(tmp_path: Path) -> None:
    manifest = {"apiVersion": "specrl.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "x"}, "spec": SOUND}
    assert load_spec(write(tmp_path, manifest)).name == "run"


@pytest.mark.parametrize(
    ("content", "said"), [("a: [", "must be YAML"), ("- 1", "mapping of sections"), (b"\xff\xfe\xfd", "must be YAML")]
)
def test_a_file_that_is_no_run_file_is_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SpecInvalid, match=said):
        load_spec(path)
    with pytest.raises(SpecInvalid, match="must be a readable file"):
        load_spec(tmp_path / "none.yaml")
