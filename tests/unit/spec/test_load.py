"""Loading a file reports all of its problems at once, and no others."""

from __future__ import annotations

import copy
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from tests.rljob_admission import admit
from tests.rljob_cases import a_job, manifest_of

from specrl.errors import SpecInvalid
from specrl.spec import RunSpec, digest_spec, dump_spec, load_spec, parse_rljob, parse_spec
from specrl.spec.base import Section, walk_section_types
from specrl.spec.run import Schedule

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
    """Build a valid run file with values at paths (`model__path`); `...` removes a field."""
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


def test_a_valid_file_loads_with_defaults() -> None:
    spec = parse_spec(SOUND)
    assert spec.schedule.max_policy_lag == 1
    assert spec.generation.speculation.kind == "none"


RULES = {
    "prompts.source": a_run(prompts__source={"jsonl": {"path": "a"}, "parquet": {"path": "b"}}),
    "rewards": a_run(rewards={"math": {}, "exact": {}}),
    "generation.speculation": a_run(generation__speculation={}),
    "store": a_run(store={}),
    "store.redis.addresses": a_run(store={"redis": {"addresses": ["redis:6379", "user:secret@redis:6379"]}}),
    "store.redis.username": a_run(store={"redis": {"addresses": ["redis:1"], "username": {"environment": "WHO"}}}),
    "store.redis.password": a_run(
        store={"redis": {"addresses": ["[::1]:1"], "password": {"environment": "SECRET", "file": "secret"}}}
    ),
    "store.redis.tls": a_run(store={"redis": {"addresses": ["redis:1"], "tls": {"certFile": "client.pem"}}}),
    "store.redis.keyPrefix": a_run(store={"redis": {"addresses": ["redis:1"], "keyPrefix": "all*"}}),
    "store.redis.sentinel": a_run(
        store={"redis": {"addresses": ["redis:1"], "sentinel": {"addresses": ["watch:1"], "masterName": "main"}}}
    ),
    "store.redis.sentinel.addresses": a_run(
        store={"redis": {"sentinel": {"addresses": ["watch"], "masterName": "main"}}}
    ),
    "store.redis.sentinel.password": a_run(
        store={"redis": {"sentinel": {"addresses": ["watch:1"], "masterName": "main", "password": {}}}}
    ),
    "validation.source": a_run(validation__source={"jsonl": {"path": "train.jsonl"}}),
    "generation.sampling.temperature": a_run(generation__sampling__temperature="0"),
    "generation.sampling.topP": a_run(generation__sampling__topP="1.1"),
    "generation.sampling.topK": a_run(generation__sampling__topK=1),
    "model.maxLength": a_run(model__maxLength=512 + 64),
    "trainer.optimizer.learningRate": a_run(trainer__optimizer__learningRate="0"),
    "trainer.optimizer.beta2": a_run(trainer__optimizer__beta2="1"),
    "trainer.optimizer.weightDecay": a_run(trainer__optimizer__weightDecay="-0.1"),
    "trainer.loss.clipLow": a_run(trainer__loss__clipLow="0"),
    "trainer.drafter.clipNorm": a_run(trainer__drafter__clipNorm="-1"),
    "generation.speculation.ngram.lookupMin": a_run(generation__speculation={"ngram": {"lookupMin": 4}}),
    "rewardPool.timeoutS": a_run(rewards={"code": {"wallS": 10}}),
    "rewards.python.function": a_run(rewards={"python": {"function": "my_rewards.grade"}}),
    "prompts.template": a_run(prompts__template="no question"),
    "validation.sampling.samplesPerPrompt": a_run(
        validation={"source": {"jsonl": {"path": "t"}}, "sampling": {"samplesPerPrompt": 2}}
    ),
}


@pytest.mark.parametrize("path", RULES)
def test_a_broken_rule_is_the_only_problem(path: str) -> None:
    assert list(problems(RULES[path])) == [path]


@pytest.mark.parametrize("path", [path for path in RULES if path != "trainer.optimizer.learningRate"])
def test_rules_are_checked_only_when_every_field_parses(path: str) -> None:
    raw = RULES[path]
    broken = {**raw, "name": "Not A Name", "schedule": {"groupSize": "many"}, "extra": 1}
    broken["trainer"] = {**broken["trainer"], "optimizer": {**broken["trainer"]["optimizer"], "learningRate": "x"}}
    assert list(problems(broken)) == [
        "name",
        "trainer.optimizer.learningRate",
        "schedule.steps",
        "schedule.promptsPerStep",
        "schedule.groupSize",
        "extra",
    ], "all malformed fields at once, and no rule"


@pytest.mark.parametrize("section", ["model", "prompts", "rewards", "generation", "trainer", "schedule"])
@pytest.mark.parametrize("value", [..., 5, "text", None, [1]])
def test_rules_about_an_absent_section_do_not_apply(section: str, value: Any) -> None:
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
        ("trainer__optimizer__beta1", [0.9]),
        ("trainer__loss__advantages", "maybe"),
        ("telemetry__httpPort", 70000),
        ("generation__speculation", {"eagle3": {"numDraftTokens": 0}}),
        ("generation__speculation", {"ngram": {"lookupMin": "x"}}),
        ("validation__sampling", {"temperature": "x", "samplesPerPrompt": 4}),
    ],
)
def test_a_malformed_field_is_the_only_problem_of_an_otherwise_valid_file(path: str, value: Any) -> None:
    raw = a_run(**{path: value})
    if "validation" in raw:
        raw["validation"]["source"] = {"parquet": {"path": "t"}}
    (named,) = problems(raw)
    assert named.startswith(path.replace("__", "."))


def test_two_missing_sources_are_not_reported_as_equal() -> None:
    raw = a_run(prompts__source=..., validation={"limit": 5})
    assert list(problems(raw)) == ["prompts.source", "validation.source"]


def test_unknown_fields_come_with_a_suggestion() -> None:
    found = problems(a_run(schedule__maxPolicyLg=2, generation__sampling__maxToken=5, zzz=1))
    assert found["schedule.maxPolicyLg"].endswith("did you mean maxPolicyLag?")
    assert found["generation.sampling.maxToken"].endswith("did you mean maxTokens?")
    assert found["zzz"].endswith("remove it")


def test_names_of_other_frameworks_come_with_the_field_that_they_stand_for() -> None:
    """The advice for `lr` was to remove it."""
    found = problems(
        a_run(
            trainer__optimizer__lr=1e-5,
            schedule__num_generations=8,
            max_steps=5,
            model__dtyp="x",
            trainer__optimizer__beta=1,
        )
    )
    assert found["trainer.optimizer.lr"].endswith("did you mean trainer.optimizer.learningRate?")
    assert found["schedule.num_generations"].endswith("did you mean schedule.groupSize?")
    assert found["trainer.optimizer.beta"].endswith("did you mean trainer.loss.referenceKl.coefficient or beta2?")
    assert found["max_steps"].endswith("did you mean schedule.steps?")
    assert found["model.dtyp"].endswith("did you mean dtype?")


def test_only_the_name_of_a_run_gets_advice_about_names() -> None:
    """A URL that did not match its pattern came with advice about lower-case letters and dashes."""
    found = problems(a_run(name="Not-A-Name", checkpoint={"mirror": "nowhere"}))
    assert found["name"].endswith("; use at most 34 lower-case letters, digits and dashes")
    assert found["checkpoint.mirror"].endswith("; see docs/run-file.md")


def test_names_in_snake_case_are_refused_with_the_name_of_the_field() -> None:
    """Beside the field itself, such a name was once ignored."""
    found = problems(a_run(schedule__max_policy_lag=3, schedule__maxPolicyLag=2, trainer__learningRate=1))
    assert found["schedule.max_policy_lag"] == "is not a field here; did you mean maxPolicyLag?"
    assert "did you mean trainer.optimizer.learningRate or " in found["trainer.learningRate"]
    alone = problems(a_run(schedule__max_policy_lag=3))
    assert alone == {"schedule.max_policy_lag": "is not a field here; did you mean maxPolicyLag?"}
    elsewhere = problems(a_run(trainer__learning_rate=1))
    assert "did you mean trainer.optimizer.learningRate or " in elsewhere["trainer.learning_rate"]


def test_a_field_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    """The last value won without a word."""
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(SOUND) + "name: other\n", encoding="utf-8")
    with pytest.raises(SpecInvalid, match="name twice in one section, again in line"):
        load_spec(file)


def test_all_broken_rules_are_reported_at_once() -> None:
    raw = a_run(prompts__template="none", rewards={"math": {}, "exact": {}}, model__maxLength=512 + 64, store={})
    assert set(problems(raw)) == {"prompts.template", "rewards", "model.maxLength", "store"}


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.8", "0.8"), ("1", "1"), ("1.0", "1.0"), ("1.0e-5", "0.00001"), ("1e-4", "0.0001"), ('"0.70"', "0.70")],
)
def test_numbers_are_written_as_numbers(tmp_path: Path, text: str, value: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(SOUND).replace("'1e-5'", "1e-5").replace("1e-5", text), encoding="utf-8")
    for spec in (load_spec(file), load_spec(file, [f"trainer.optimizer.learningRate={text}"])):
        assert spec.trainer.optimizer.learning_rate == Decimal(value)


@pytest.mark.parametrize("value", [True, None, float("nan"), float("inf"), 1e300, "a", "1e", [1]])
def test_what_is_no_number_is_refused(value: Any) -> None:
    found = problems(a_run(trainer__optimizer__learningRate=value))
    assert found["trainer.optimizer.learningRate"].startswith("must be a number, as in 0.7 or 1e-5, got ")


WHOLE_NUMBERS = [
    (section, alias)
    for section in sorted({section for _, section in walk_section_types(RunSpec)}, key=lambda it: it.__name__)
    for alias, schema in section.model_json_schema().get("properties", {}).items()
    if "integer" in {schema.get("type"), *(option.get("type") for option in schema.get("anyOf", []))}
]
"""Every field of a run file that is a whole number: its section, and its name in files."""


@pytest.mark.parametrize(("section", "name"), WHOLE_NUMBERS)
@pytest.mark.parametrize("value", ["100", 100.0, True])
def test_whole_numbers_are_written_without_quotes(section: type[Section], name: str, value: Any) -> None:
    """`groupSize: "8"` was accepted, and `steps: "6"` was refused."""
    with pytest.raises(ValidationError) as caught:
        section.model_validate({name: value})
    (kind,) = [error["type"] for error in caught.value.errors() if error["loc"] == (name,)]
    assert kind == "int_type"


def test_a_whole_number_in_quotes_comes_with_its_remedy() -> None:
    assert len(WHOLE_NUMBERS) > 50
    found = problems(a_run(schedule__steps="6", schedule__groupSize="many"))
    assert found["schedule.steps"] == "must be a valid integer, got '6'; leave out the quotes"
    assert found["schedule.groupSize"] == "must be a valid integer, got 'many'; write a whole number"


def test_an_rljob_has_its_fractions_in_quotes() -> None:
    """The API server refuses a number there, since the CRD has text."""
    job = a_job({"trainer.optimizer.learningRate": 0.5})
    with pytest.raises(SpecInvalid, match=r'must be in quotes in an RLJob, as in "0\.5"'):
        parse_rljob(job)


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
    again.write_text(dump_spec(spec))
    assert load_spec(again) == spec
    assert digest_spec(load_spec(again)) == digest_spec(spec)


def test_a_name_on_the_hub_stays_unless_it_is_a_folder(tmp_path: Path) -> None:
    file = write(tmp_path, a_run(model__path="Qwen/Qwen3-0.6B"))
    assert load_spec(file).model.path == "Qwen/Qwen3-0.6B"
    (tmp_path / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    assert load_spec(file).model.path == str(tmp_path / "Qwen/Qwen3-0.6B")


@pytest.mark.parametrize(
    "path", ["./team/tiny", "~/team/tiny", "/team/tiny", "tiny", "a/b/c", "team/../tiny", "../tiny"]
)
def test_other_paths_are_always_folders(tmp_path: Path, path: str) -> None:
    found = load_spec(write(tmp_path, a_run(model__path=path))).model.path
    assert Path(found).is_absolute()


def test_paths_of_drafters_are_relative_to_the_file(tmp_path: Path) -> None:
    for kind in ("eagle3", "draft_model"):
        raw = a_run(generation__speculation={to_camel(kind): {"path": "small"}})
        found = getattr(load_spec(write(tmp_path, raw)).generation.speculation, kind)
        assert found.path == str(tmp_path / "small")


def test_paths_of_verifiers_are_relative_to_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, a_run(rewards={"python": {"function": "mine:grade", "folder": "rewards"}}))
    python = load_spec(file).rewards.python
    assert python is not None
    assert python.folder == str(tmp_path / "rewards")
    code = load_spec(write(tmp_path, a_run(rewards={"code": {"packages": "packages"}}))).rewards.code
    assert code is not None
    assert code.packages == str(tmp_path / "packages")
    assert load_spec(write(tmp_path, a_run(rewards={"jsonSchema": {}}))).rewards.json_schema is not None


def with_tools(**changes: Any) -> dict[str, Any]:
    return a_run(tools={"answeredBy": {"code": {}}, "maxOutputTokens": 4} | changes)


def test_tools_are_read_and_their_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    tools = load_spec(write(tmp_path, with_tools(answeredBy={"code": {"packages": "packages"}}))).tools
    assert tools is not None
    assert tools.answered_by.code is not None
    assert tools.answered_by.code.packages == str(tmp_path / "packages")
    assert (tools.call_start, tools.call_end, tools.max_turns) == ("<tool>", "</tool>", 4)
    python = {"function": "mine:answer", "folder": "tools"}
    tools = load_spec(write(tmp_path, with_tools(answeredBy={"python": python}))).tools
    assert tools is not None
    assert tools.answered_by.python is not None
    assert tools.answered_by.python.folder == str(tmp_path / "tools")
    assert parse_spec(SOUND).tools is None


@pytest.mark.parametrize(
    ("changes", "path", "said"),
    [
        ({"answeredBy": {}}, "tools.answeredBy", "exactly one of code, python, got none"),
        ({"answeredBy": {"python": {"function": "mine"}}}, "tools.answeredBy.python.function", "as in my_tools:answer"),
        ({"callEnd": ""}, "tools.callEnd", "must have at least 1 character"),
        ({"outputStart": ""}, "tools.outputStart", "must have at least 1 character"),
        ({"callStart": "|", "callEnd": "|"}, "tools.callEnd", "must not be part of callStart"),
        ({"maxTurns": 1}, "tools.maxTurns", "greater than or equal to 2"),
        ({"maxOutputTokens": 10**6}, "tools.maxOutputTokens", "must be < generation.sampling.maxTokens"),
        ({"pool": {"timeoutS": 8}}, "tools.pool.timeoutS", "must be > tools.answeredBy.code.wallS, got 8 <= 8"),
    ],
)
def test_tools_that_cannot_work_are_refused(changes: dict[str, Any], path: str, said: str) -> None:
    found = problems(with_tools(**changes))
    assert list(found) == [path]
    assert said in found[path]


def test_a_stop_string_must_not_end_calls() -> None:
    for stop in ("</tool>", "</", "so</tool>then"):
        raw = with_tools()
        raw["generation"] = {**raw["generation"], "sampling": {**raw["generation"]["sampling"], "stop": [stop]}}
        assert "is a stop string already" in problems(raw)["tools.callEnd"]


@pytest.mark.parametrize("name", ["a:b", "a.b_c:d"])
def test_functions_of_modules_can_be_named(name: str) -> None:
    assert parse_spec(a_run(rewards={"python": {"function": name}})).rewards.python is not None


@pytest.mark.parametrize("name", ["", ":", "a", "a:", ":b", "a:b:c", "a b:c", "../a:b", "a..b:c"])
def test_a_malformed_function_name_is_refused(name: str) -> None:
    assert list(problems(a_run(rewards={"python": {"function": name}}))) == ["rewards.python.function"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wirft.py.zahl", "write wirft:zahl"),
        ("rewards/wirft.py:zahl", "write wirft:zahl, with folder: rewards"),
        ("wirft.py", "write wirft:FUNCTION"),
        ("wirft.zahl", "as in my_rewards:grade"),
    ],
)
def test_a_file_instead_of_a_module_comes_with_what_to_write(name: str, said: str) -> None:
    """The message named the form alone: `must be module:function, got 'wirft.py.zahl'`."""
    found = problems(a_run(rewards={"python": {"function": name}}))
    assert found["rewards.python.function"] == f"must be module:function, got {name!r}; {said}"


def test_the_digest_ignores_what_may_change_during_a_run() -> None:
    spec = parse_spec(SOUND)
    assert digest_spec(parse_spec(a_run(generation__replicas=5))) == digest_spec(spec)
    assert digest_spec(parse_spec(a_run(generation__kvCacheMib=5))) == digest_spec(spec)
    assert digest_spec(parse_spec(a_run(schedule__seed=5))) != digest_spec(spec)


def test_a_field_that_a_newer_version_adds_changes_no_digest() -> None:
    """Without JobSet a newer operator restarts the trainer with a newer image, which the coordinator refused."""

    class NewerSchedule(Schedule):
        new_field: int = 1

    class NewerRun(RunSpec):
        schedule: NewerSchedule

    newer = NewerRun.model_validate(a_run(), by_alias=True, by_name=False)
    assert digest_spec(newer) == digest_spec(parse_spec(a_run()))
    other = NewerRun.model_validate(a_run(schedule__newField=2), by_alias=True, by_name=False)
    assert digest_spec(other) != digest_spec(newer)


def test_overrides_are_applied_and_fractions_stay_text(tmp_path: Path) -> None:
    overrides = ["generation.replicas=2", "trainer.optimizer.learningRate=0.001", "rewards={exact: {}}"]
    spec = load_spec(write(tmp_path, a_run(rewards=...)), overrides)
    assert spec.generation.replicas == 2
    assert str(spec.trainer.optimizer.learning_rate) == "0.001"
    assert spec.rewards.kind == "exact"


def test_an_override_changes_an_item_of_a_list(tmp_path: Path) -> None:
    """The list became a mapping: the other items were lost, and the message was about a type."""
    terms = [{"name": name, "verifier": {"exact": {}}} for name in ("first", "second")]
    file = write(tmp_path, a_run(rewards={"sum": {"terms": terms}}))
    spec = load_spec(file, ["rewards.sum.terms.1.weight=0.5", "rewards.sum.terms.0.verifier={math: {}}"])
    assert spec.rewards.sum is not None
    first, second = spec.rewards.sum.terms
    assert (first.name, first.weight, first.verifier.kind) == ("first", 1, "math")
    assert (second.name, str(second.weight), second.verifier.kind) == ("second", "0.5", "exact")
    for wrong in ("2", "x", "-1"):
        with pytest.raises(SpecInvalid, match="must name an item of a list of 2 by its number, from 0, got"):
            load_spec(file, [f"rewards.sum.terms.{wrong}.weight=0.5"])


def test_paths_of_items_of_a_list_are_relative_to_the_file(tmp_path: Path) -> None:
    verifier = {"python": {"function": "my_rewards:grade", "folder": "mine"}}
    spec = load_spec(write(tmp_path, a_run(rewards={"sum": {"terms": [{"name": "own", "verifier": verifier}]}})))
    assert spec.rewards.sum is not None
    python = spec.rewards.sum.terms[0].verifier.python
    assert python is not None
    assert python.folder == str(tmp_path / "mine")


def test_all_malformed_overrides_are_reported_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpecInvalid) as caught:
        load_spec(write(tmp_path, SOUND), ["noequals", "a.b=[", "=3", "a..b=1"])
    assert len(caught.value.problems) == 4


def test_a_manifest_is_read_as_its_run(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, a_job(name="x")), ["generation.replicas=2"])
    assert (spec.name, spec.model.path, spec.generation.replicas) == ("x", "/models/policy", 2)


def test_a_manifest_and_its_run_can_be_converted_into_each_other() -> None:
    decimals = {"learningRate": "0.001", "epsilon": "0.001"}  # as Python prints decimals
    template = {"spec": {"tolerations": [{"key": "gpu"}], "hostIPC": False}}
    job = a_job({"trainer.optimizer": decimals, "placement.rdma": {}, "generation.podTemplate": template})
    spec = parse_rljob(job)
    assert parse_rljob(manifest_of(spec)) == spec
    assert manifest_of(spec, "team")["metadata"] == {"name": "job", "namespace": "team"}
    stored, refusals = admit(job)
    assert refusals == []
    assert stored == manifest_of(spec), "an API server fills in the same defaults"


def test_cluster_rules_apply_to_a_manifest_and_not_to_a_run_file(tmp_path: Path) -> None:
    job = a_job({"model.path": "policy"})
    with pytest.raises(SpecInvalid, match="must be an absolute path in an RLJob, got 'policy'"):
        load_spec(write(tmp_path, job))
    assert load_spec(write(tmp_path, {"name": "local", **job["spec"]})).model.path == str(tmp_path / "policy")


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"apiVersion": "specrl.dev/v1"}, "apiVersion"),
        ({"metadata": {}}, "metadata.name"),
        ({"spec": None}, "spec"),
        ({"spec": SOUND | {"name": "x"}}, "spec.name"),
    ],
)
def test_problems_of_a_manifests_envelope_are_reported(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_rljob(a_job() | changes)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_problems_of_a_manifest_are_reported_by_the_manifests_paths(tmp_path: Path) -> None:
    volumes = [{"claimName": "a", "mountPath": f"/{number}"} for number in range(17)]
    with pytest.raises(SpecInvalid) as caught:
        load_spec(write(tmp_path, a_job({"volumes": volumes}, name="Not-A-Name")))
    name, many = caught.value.problems
    assert (name.path, many.path) == ("metadata.name", "volumes")
    assert many.rule.startswith("must have at most 16 items")


def test_the_one_rljob_of_a_file_is_read_and_two_are_refused(tmp_path: Path) -> None:
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "run"}}
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump_all([claim, a_job(), None]))
    assert load_spec(path).name == "job"
    for documents, count in (([a_job(), a_job()], 2), ([claim, SOUND], 0)):
        path.write_text(yaml.safe_dump_all(documents))
        with pytest.raises(SpecInvalid, match=f"must contain exactly one RLJob, got {count}"):
            load_spec(path)


def test_cluster_fields_are_accepted_and_change_neither_run_nor_digest(tmp_path: Path) -> None:
    raw = a_run(
        suspend=True,
        placement={"profile": "GB200"},
        volumes=[{"claimName": "models", "mountPath": "/models"}],
        generation__gpusPerReplica=4,
        trainer__podTemplate={"spec": {"nodeSelector": {"pool": "gpu"}}},
        checkpoint={"claimName": "runs"},
    )
    file = write(tmp_path, raw)
    assert load_spec(file).generation.gpus_per_replica == 4
    assert digest_spec(load_spec(file)) == digest_spec(load_spec(write(tmp_path, SOUND)))
    assert dump_spec(parse_spec(raw)) == dump_spec(parse_spec(SOUND))


def test_problems_in_a_list_of_sections_are_reported_with_their_index() -> None:
    found = problems(a_run(volumes=[{"claimName": "", "mountPath": "/models"}, {"claimNam": "b"}], zzz=1))
    wrong = [f"volumes.{place}" for place in ("0.claimName", "1.mountPath", "1.claimNam")]
    assert list(found) == [*wrong, "zzz"]
    assert found["volumes.1.claimNam"].endswith("did you mean claimName?")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "must be YAML"),
        ("a: {b: 1\nc: 2", "must be YAML, got expected ',' or '}', but got ':' in line 2, column 2, while parsing"),
        ("- 1", "mapping of sections"),
        (b"\xff\xfe\xfd", "must be YAML"),
    ],
)
def test_a_file_that_is_not_a_run_file_is_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(SpecInvalid, match=said):
        load_spec(path)
    with pytest.raises(SpecInvalid, match="must be a readable file"):
        load_spec(tmp_path / "none.yaml")


def test_paths_of_the_stores_secrets_and_certificates_are_relative_to_the_file(tmp_path: Path) -> None:
    redis = {
        "addresses": ["redis-0.redis:6379", "[fd00::1]:6380"],
        "username": {"environment": "STORE_USER"},
        "password": {"file": "secrets/password"},
        "tls": {"caFile": "ca.pem", "certFile": "/etc/client.pem", "keyFile": "client.key"},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(a_run(store={"redis": redis})))
    spec = load_spec(file)
    loaded = spec.store.redis
    assert loaded is not None
    assert loaded.password is not None
    assert loaded.tls is not None
    assert loaded.password.file == str(tmp_path / "secrets" / "password")
    assert loaded.username is not None
    assert loaded.username.environment == "STORE_USER"
    assert (loaded.tls.ca_file, loaded.tls.cert_file) == (str(tmp_path / "ca.pem"), "/etc/client.pem")
    assert parse_spec(yaml.safe_load(dump_spec(spec))) == spec


def test_the_path_of_the_sentinels_password_is_relative_to_the_file_too(tmp_path: Path) -> None:
    sentinel = {"addresses": ["watch:26379"], "masterName": "main", "password": {"file": "watching"}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(a_run(store={"redis": {"sentinel": sentinel}})))
    redis = load_spec(file).store.redis
    assert redis is not None
    assert redis.sentinel is not None
    assert redis.sentinel.password is not None
    assert redis.sentinel.password.file == str(tmp_path / "watching")


@pytest.mark.parametrize(
    "address", ["redis", "redis:", ":6379", "redis:0", "redis:65536", "rediss://redis:6379", "a b:1"]
)
def test_an_address_of_the_store_is_host_and_port(address: str) -> None:
    found = problems(a_run(store={"redis": {"addresses": [address]}}))
    assert list(found) == ["store.redis.addresses"]
    assert repr(address) in found["store.redis.addresses"]


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        ({"spec": {"containers": ["trainer"]}}, "podTemplate.spec.containers.0 must be a mapping, got str"),
        ({"spec": {"containers": [{"image": "x"}]}}, "podTemplate.spec.containers.0.name must be given, got none"),
        ({"spec": {"volumes": [{"name": ""}]}}, "podTemplate.spec.volumes.0.name must not be empty"),
        ({"spec": []}, "podTemplate.spec must be a mapping, got list"),
        ({"spec": {"containers": [{"name": "x", "ports": [80]}]}}, "containers.0.ports.0 must be a mapping, got int"),
        (
            {"spec": {"containers": [{"name": "x", "ports": [None]}]}},
            "containers.0.ports.0 must be a mapping, got None",
        ),
        (
            {"spec": {"containers": [{"name": "x", "resources": {"claims": ["imex"]}}]}},
            "resources.claims.0 must be a mapping, got str",
        ),
        (
            {"spec": {"containers": [{"name": "x", "resources": {"requests": "4"}}]}},
            "resources.requests must be a mapping, got str",
        ),
        ({"metadata": {"namespace": "kube-system"}}, "podTemplate.metadata.namespace is not a field here"),
        ({"metadata": {"labels": {"team": 1}}}, "podTemplate.metadata.labels.team must be text, got int"),
    ],
)
def test_a_pod_template_that_could_not_be_merged_is_refused_with_its_place(part: object, rule: str) -> None:
    """The operator failed on it at every reconciliation, and the status stayed empty."""
    with pytest.raises(SpecInvalid, match=re.escape(rule)):
        parse_rljob(a_job({"trainer.podTemplate": part}))


def test_a_pod_template_may_have_any_other_field_and_null_removes_one() -> None:
    part = {"spec": {"hostIPC": True, "tolerations": None, "containers": [{"name": "trainer", "lifecycle": {}}]}}
    assert parse_rljob(a_job({"trainer.podTemplate": part})).trainer.pod_template == part
