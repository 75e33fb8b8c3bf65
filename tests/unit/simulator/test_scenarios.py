"""Scenarios, their files, and what is refused: with every problem at once, and with a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.simulator.scenarios import a_mapping, a_scenario
from typer.testing import CliRunner

from specrl.cli import app
from specrl.errors import SpecInvalid
from specrl.simulator.costs.memory import estimate_gpu_memory
from specrl.simulator.scenarios.hardware import GPUS
from specrl.simulator.scenarios.models import MODELS
from specrl.simulator.scenarios.scenario_file import list_scenario_names, parse_scenario, read_mapping
from specrl.simulator.simulate import prepare_scenario

KEYS = {"rolloutSpeedup", "stepSpeedup", "notes", "stepSeconds", "exposedGenerationSeconds", "phaseSeconds"}


def specrl(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(SpecInvalid) as caught:
        prepare_scenario(a_scenario(*overrides))
    return {problem.path: str(problem) for problem in caught.value.problems}


@pytest.mark.parametrize("name", list_scenario_names())
def test_a_named_scenario_prints_one_object_with_the_promised_keys(name: str) -> None:
    few = ("--set", "schedule.steps=4", "--set", "schedule.promptsPerStep=32")
    code, out, _ = specrl("simulate", name, "--json", *few)
    found = json.loads(out)
    assert code == 0
    assert set(found) == KEYS
    assert list(found["phaseSeconds"]) == ["data", "prepare", "generation", "logprob", "train"]
    assert sum(found["phaseSeconds"].values()) == pytest.approx(found["stepSeconds"])
    assert found["exposedGenerationSeconds"] == found["phaseSeconds"]["generation"]


def test_the_named_scenarios_are_those_of_the_documentation() -> None:
    assert list_scenario_names() == [
        "paper-235b-async-2048",
        "paper-235b-sync-512",
        "paper-8b-think-async",
        "paper-8b-think-sync",
        "paper-8b-zero-sync",
    ]


def test_all_problems_of_a_scenario_are_reported_at_once() -> None:
    found = problems("cluster.gpu=H1000", "schedule.maxPolicyLag=7", "speculation.acceptanceLength=9")
    assert "did you mean H100?" in found["cluster.gpu"]
    assert "must be more than maxPolicyLag + 1 = 8" in found["schedule.steps"]
    assert "must be from 1 to k + 1 = 4, got 9" in found["speculation.acceptanceLength"]


def test_an_unknown_path_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(SpecInvalid) as caught:
        a_scenario("speculation.acceptancelength=3", "schedule.maxLag=1", "schedule.steps=-1")
    told = str(caught.value)
    assert "did you mean acceptanceLength?" in told
    assert "schedule.maxLag: is not a field here" in told
    assert "schedule.steps: must be greater than or equal to 1, got -1" in told


def test_a_scenario_is_refused_with_the_same_messages_as_a_run_file() -> None:
    """Scenarios used to have messages of their own, without a remedy, that took a list index for a field."""
    with pytest.raises(SpecInvalid) as caught:
        a_scenario("schedule.steps=x", "model=8b", "failures=[{replica: 0, atS: 1, backAfter: 2}]")
    found = {problem.path: f"{problem.rule}; {problem.remedy}" for problem in caught.value.problems}
    assert found["schedule.steps"].endswith("got 'x'; write a whole number")
    assert found["model"].endswith("got '8b'; write a mapping of its fields")
    assert found["failures.0.backAfter"] == "is not a field here; did you mean backAfterS?"


def test_all_malformed_overrides_of_a_scenario_are_named_at_once() -> None:
    with pytest.raises(SpecInvalid) as caught:
        a_scenario("noequals", "speculation.k=[", "=3", "name.x=1", "speculation.kk=1")
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["--set", "--set speculation.k", "--set", "name", "speculation.kk"]


@pytest.mark.parametrize("content", ["", "- 1", "a: 1\n---\nb: 2\n"])
def test_a_file_that_is_not_one_mapping_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "scenario.yaml"
    file.write_text(content)
    with pytest.raises(SpecInvalid, match="must be one mapping of sections; see examples/plan/"):
        read_mapping(file)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (("model.name=qwen3-235b-a22b",), "memory.generation"),
        (("model.name=llama-3.1-70b", "layout.tensorParallel=8"), "memory.training"),
        (("layout.generationGpus=12",), "layout"),
        (("layout.tensorParallel=3", "layout.generationGpus=6"), "layout.tensorParallel"),
        (("layout.colocated=true",), "schedule.maxPolicyLag"),
        (("workload.named=chat",), "workload"),
        (("workload.medianTokens=5000",), "workload.medianTokens"),
        (("workload.groups=[[10, 20]]",), "workload"),
        (
            ("workload.groups=[[10, 20], [5, 2001]]", "workload.medianTokens=null", "workload.sigma=null"),
            "workload.groups",
        ),
        (("cluster.gpu=A100", "model.precision=fp8"), "model.precision"),
        (("cluster.gpu=null",), "cluster.gpu"),
        (("speculation.k=0",), "speculation.k"),
    ],
)
def test_impossible_or_contradictory_scenarios_are_refused(overrides: tuple[str, ...], path: str) -> None:
    assert path in problems(*overrides)


def test_a_refusal_is_one_message_and_exit_code_two() -> None:
    code, out, error = specrl("simulate", "paper-8b-zero-sync", "--set", "cluster.gpu=GX1", "--json")
    assert (code, out) == (2, "")
    assert "must be one of GB200, B200, H200, H100, A100, got 'GX1'" in error
    code, _, error = specrl("simulate", "paper-8b-zero-sink")
    assert code == 2
    assert "did you mean paper-8b-zero-sync?" in error
    code, _, error = specrl("simulate", "paper-8b-zero-sync", "--calibration", "/nowhere/calibration.json")
    assert code == 2
    assert "a run writes it after every step" in error


def test_speculation_has_the_short_forms_of_run_files() -> None:
    short = a_scenario("speculation=ngram", "speculation.acceptanceLength=2.4").speculation
    union = parse_scenario(a_mapping() | {"speculation": {"ngram": {"k": 3, "acceptanceLength": 2.4}}}).speculation
    assert short == union
    assert short.mechanism == "ngram"


def test_more_draft_tokens_leave_less_memory_for_the_kv_cache() -> None:
    few = a_scenario()
    many = a_scenario("speculation.k=8", "speculation.acceptanceLength=4")
    memories = [estimate_gpu_memory(scenario, MODELS["qwen3-8b"], GPUS["H100"], 300) for scenario in (few, many)]
    assert memories[0].sampler < memories[1].sampler
    assert memories[0].max_live > memories[1].max_live


def test_figures_and_pages_are_written(tmp_path: Path) -> None:
    code, _, error = specrl("simulate", str(a_file(tmp_path)), "--out", str(tmp_path / "out"))
    assert code == 0, error
    files = {file.name: file.read_text() for file in (tmp_path / "out").iterdir()}
    assert set(files) == {"report.md", "report.html", "report.json", "timeline.svg", "acceptance.svg", "split.svg"}
    assert files["report.html"].count("<svg") == 3
    assert files["acceptance.svg"].count("<rect") == 1 + 64  # the background, and a cell for each (k, acceptance)
    assert set(json.loads(files["report.json"])) == KEYS


def test_a_plan_is_no_slower_than_today_and_names_the_bottleneck(tmp_path: Path) -> None:
    code, out, error = specrl("plan", str(a_file(tmp_path)), "--json")
    assert code == 0, error
    found = json.loads(out)
    assert found["gain"] >= 1
    assert found["gainP10"] <= found["gainP90"]
    assert found["binds"] in ("trainer", "generation", "sync", "memory")
    assert found["maxPolicyLag"] <= 1
    assert found["draftLengths"][0]["from"] == 1


def test_a_prediction_for_a_gpu_that_was_never_compared_says_so(tmp_path: Path) -> None:
    """Only the table of `simulate` did: neither --json nor `plan` gave a warning."""
    for command in ("simulate", "plan"):
        code, out, error = specrl(command, str(a_file(tmp_path)), "--set", "cluster.gpu=H200", "--json")
        assert code == 0, error
        assert "no published run on H200 was compared" in json.loads(out)["notes"][0]


def a_file(folder: Path) -> Path:
    file = folder / "small.yaml"
    file.write_text(json.dumps(a_mapping(workload={"medianTokens": 100, "maxTokens": 400})))
    return file
