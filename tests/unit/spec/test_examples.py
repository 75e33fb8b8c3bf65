"""Every run file and RLJob that users are told to copy is one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.rljob_admission import admit
from typer.testing import CliRunner

from specrl.cli import app
from specrl.spec import load_spec
from specrl.spec.base import OnCluster
from specrl.spec.run import RunSpec

FOLDER = Path(__file__).parents[3] / "examples"
EXAMPLES = sorted(set(FOLDER.rglob("*.yaml")) - set(FOLDER.glob("plan/*.yaml")))  # those: tests/unit/simulator
RLJOBS = sorted(FOLDER.glob("rljob-*.yaml"))


def the_rljob(file: Path) -> dict[str, Any]:
    (job,) = (it for it in yaml.safe_load_all(file.read_text(encoding="utf-8")) if it["kind"] == "RLJob")
    return dict(job)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_example_is_a_run_file(file: Path) -> None:
    assert load_spec(file).name
    assert CliRunner().invoke(app, ["spec", "check", str(file)]).exit_code == 0


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5
    assert [file.name for file in RLJOBS] == ["rljob-local.yaml", "rljob-qwen3-8b-gb200.yaml"]


@pytest.mark.parametrize("file", RLJOBS, ids=lambda file: file.name)
def test_every_rljob_is_admitted(file: Path) -> None:
    assert admit(the_rljob(file))[1] == []


def test_the_local_rljob_is_the_demo() -> None:
    def run(file: str) -> dict[str, Any]:
        fields = load_spec(FOLDER / file).model_dump(by_alias=True)
        for field in RunSpec.model_fields.values():
            if OnCluster.ONLY in field.metadata:
                del fields[str(field.alias)]
        del fields["name"], fields["model"]["path"], fields["checkpoint"]["claimName"]
        return fields

    assert run("rljob-local.yaml") == run("demo/run.yaml")


def test_the_gb200_example_is_the_papers_layout_and_scales_as_its_comments_say() -> None:
    job = the_rljob(FOLDER / "rljob-qwen3-8b-gb200.yaml")
    spec = load_spec(FOLDER / "rljob-qwen3-8b-gb200.yaml")
    nodes = spec.generation.replicas * spec.generation.gpus_per_replica // spec.placement.gpus_per_node
    assert (nodes, spec.trainer.num_nodes, spec.schedule.max_policy_lag) == (12, 4, 1)
    stored, _ = admit(job)
    scaled = copy.deepcopy(stored)
    scaled["spec"]["generation"]["replicas"] = 16
    assert admit(scaled, stored)[1] == []
    for replicas, refused in ((14, []), (15, ["spec.placement.layout"])):
        same_domain = copy.deepcopy(job)
        same_domain["spec"]["placement"]["layout"] = "SameDomain"
        same_domain["spec"]["generation"]["replicas"] = replicas
        assert [refusal.path for refusal in admit(same_domain)[1]] == refused


def test_an_rljob_runs_here_or_is_refused_with_words(tmp_path: Path) -> None:
    text = (FOLDER / "rljob-local.yaml").read_text(encoding="utf-8")
    file = tmp_path / "job.yaml"
    file.write_text(text.replace("/opt/specrl/demo-policy", "policy"))
    refused = CliRunner().invoke(app, ["run", "-f", str(file)])
    assert refused.exit_code == 2
    assert "model.path: must be an absolute path in an RLJob, got 'policy'" in refused.output
    found = CliRunner().invoke(app, ["spec", "show", str(file), "--set", f"model.path={tmp_path}/policy"])
    assert found.exit_code == 0
    run = yaml.safe_load(found.output)
    assert (run["name"], run["model"]["path"]) == ("local", f"{tmp_path}/policy")
    assert "claimName" not in run["checkpoint"], "what only a cluster reads is no part of the run"
