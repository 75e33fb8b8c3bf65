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
from tests.rljob_admission import admit
from tests.rljob_cases import a_job

from specrl.errors import SpecInvalid
from specrl.spec import digest, dump, load_spec, parse_rljob, parse_spec
from specrl.spec.rljob import manifest_of

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
    "generation.sampling.topP": a_run(generation__sampling__topP="0.9"),
    "generation.sampling.topK": a_run(generation__sampling__topK=5),
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
        ("trainer__loss__advantages", "maybe"),
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
        assert "is one already" in problems(raw)["tools.callEnd"]


@pytest.mark.parametrize("name", ["a:b", "a.b_c:d"])
def test_functions_of_modules_can_be_named(name: str) -> None:
    assert parse_spec(a_run(rewards={"python": {"function": name}})).rewards.python is not None


@pytest.mark.parametrize("name", ["", ":", "a", "a:", ":b", "a:b:c", "a b:c", "../a:b", "a..b:c"])
def test_what_names_no_function_is_refused(name: str) -> None:
    assert list(problems(a_run(rewards={"python": {"function": name}}))) == ["rewards.python.function"]


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


def test_a_manifest_is_read_as_the_run_that_it_stands_for(tmp_path: Path) -> None:
    spec = load_spec(write(tmp_path, a_job(name="x")), ["generation.replicas=2"])
    assert (spec.name, spec.model.path, spec.generation.replicas) == ("x", "/models/policy", 2)


def test_a_manifest_and_its_run_can_be_made_of_each_other() -> None:
    decimals = {"learningRate": "0.001", "epsilon": "0.001"}  # written as Python writes them
    template = {"spec": {"tolerations": [{"key": "gpu"}], "hostIPC": False}}
    job = a_job({"trainer.optimizer": decimals, "placement.rdma": {}, "generation.podTemplate": template})
    spec = parse_rljob(job)
    assert parse_rljob(manifest_of(spec)) == spec
    assert manifest_of(spec, "team")["metadata"] == {"name": "job", "namespace": "team"}
    stored, refusals = admit(job)
    assert refusals == []
    assert stored == manifest_of(spec), "an API server fills in the same defaults"


def test_a_manifest_is_held_to_the_rules_of_clusters_and_a_run_file_is_not(tmp_path: Path) -> None:
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
def test_what_is_wrong_around_a_manifests_spec_is_named(changes: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecInvalid) as caught:
        parse_rljob(a_job() | changes)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_a_manifest_with_a_wrong_name_or_too_many_volumes_says_so_in_its_own_terms(tmp_path: Path) -> None:
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
        with pytest.raises(SpecInvalid, match=f"must hold one RLJob, got {count}"):
            load_spec(path)


def test_what_only_a_cluster_reads_is_accepted_and_changes_neither_run_nor_digest(tmp_path: Path) -> None:
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
    assert digest(load_spec(file)) == digest(load_spec(write(tmp_path, SOUND)))
    assert dump(parse_spec(raw)) == dump(parse_spec(SOUND))


def test_what_is_wrong_in_a_list_of_sections_is_named_with_its_place() -> None:
    found = problems(a_run(volumes=[{"claimName": "", "mountPath": "/models"}, {"claimNam": "b"}], zzz=1))
    wrong = [f"volumes.{place}" for place in ("0.claimName", "1.claimName", "1.mountPath", "1.claimNam")]
    assert list(found) == [*wrong, "zzz"]
    assert found["volumes.1.claimNam"].endswith("did you mean claimName?")


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
    assert parse_spec(yaml.safe_load(dump(spec))) == spec


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
