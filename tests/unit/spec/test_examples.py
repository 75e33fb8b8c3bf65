"""Every example is a valid run file or RLJob."""

from __future__ import annotations

import copy
import re
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
RLJOBS = sorted(FOLDER.rglob("rljob-*.yaml"))
LADDER = sorted(FOLDER.glob("0*/"))


def the_rljob(file: Path) -> dict[str, Any]:
    (job,) = (it for it in yaml.safe_load_all(file.read_text(encoding="utf-8")) if it["kind"] == "RLJob")
    return dict(job)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_every_example_is_a_run_file(file: Path) -> None:
    assert load_spec(file).name
    assert CliRunner().invoke(app, ["spec", "check", str(file)]).exit_code == 0


@pytest.mark.parametrize("page", ["README.md", "docs/first-run.md"])
def test_the_run_file_of_a_page_is_valid(page: str, tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", (FOLDER.parent / page).read_text(encoding="utf-8"), re.M | re.S)
    file = tmp_path / "run.yaml"
    file.write_text(shown, encoding="utf-8")
    assert CliRunner().invoke(app, ["spec", "check", str(file)]).exit_code == 0


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 5
    names = [str(file.relative_to(FOLDER)) for file in RLJOBS]
    assert names == [
        *("07-gb200/rljob-qwen3-235b.yaml", "07-gb200/rljob-qwen3-8b.yaml"),
        *(f"rljob-{name}.yaml" for name in ("8xh100", "gb200", "local", "one-gpu-node")),
    ]


@pytest.mark.parametrize("name", ["one-gpu-node", "8xh100", "gb200"])
def test_the_smallest_rljobs_are_short_and_fit_their_nodes(name: str) -> None:
    file = FOLDER / f"rljob-{name}.yaml"
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 25
    job = the_rljob(file)
    assert admit(job)[1] == []
    spec = load_spec(file)
    nodes = {"one-gpu-node": 1, "8xh100": 1, "gb200": 4}[name]
    gpus = spec.trainer.num_nodes * spec.trainer.gpus_per_node
    gpus += spec.generation.replicas * spec.generation.gpus_per_replica
    assert gpus == {"one-gpu-node": 2, "8xh100": 8, "gb200": 16}[name]
    assert gpus <= nodes * spec.placement.node_gpus


def test_the_ladder_has_seven_steps_and_the_readme_shows_each() -> None:
    assert [folder.name[:3] for folder in LADDER] == [f"{number:02}-" for number in range(1, 8)]
    readme = (FOLDER.parent / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[^]]+\]\(examples/(0[^/]+)/README\.md\)", readme, re.M)
    assert rows == [folder.name for folder in LADDER]


@pytest.mark.parametrize("folder", LADDER, ids=lambda folder: folder.name)
def test_the_page_of_an_example_says_what_a_user_needs(folder: Path) -> None:
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {folder.name[:2]}: ")
    parts = ["**Purpose.**", "**Command.**", "**Time and hardware.**", "**Expected output.**"]
    places = [page.find(part) for part in parts]
    assert -1 not in places, f"{folder.name} lacks one of {parts}"
    assert places == sorted(places)


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
    job = the_rljob(FOLDER / "07-gb200" / "rljob-qwen3-8b.yaml")
    spec = load_spec(FOLDER / "07-gb200" / "rljob-qwen3-8b.yaml")
    nodes = spec.generation.replicas * spec.generation.gpus_per_replica // spec.placement.node_gpus
    assert (nodes, spec.trainer.num_nodes, spec.schedule.max_policy_lag) == (12, 4, 1)
    stored, _ = admit(job)
    scaled = copy.deepcopy(stored)
    scaled["spec"]["generation"]["replicas"] = 14
    assert admit(scaled, stored)[1] == []
    scaled["spec"]["generation"]["replicas"] = 15
    assert [refusal.path for refusal in admit(scaled, stored)[1]] == ["spec.placement.layout"]


def test_the_large_gb200_example_has_the_nodes_that_its_comments_name() -> None:
    spec = load_spec(FOLDER / "07-gb200" / "rljob-qwen3-235b.yaml")
    nodes = spec.generation.replicas * spec.generation.gpus_per_replica // spec.placement.node_gpus
    assert (nodes, spec.trainer.num_nodes, spec.schedule.max_policy_lag) == (32, 32, 1)
    assert spec.trainer.parallelism.world_size == spec.trainer.num_nodes * spec.trainer.gpus_per_node
    heads, kv_heads, layers, experts = 64, 4, 94, 128  # Qwen3-235B-A22B's config.json
    parallel = spec.trainer.parallelism
    assert not any((heads % parallel.tensor, kv_heads % parallel.tensor, layers % parallel.pipeline))
    assert not any((experts % parallel.expert, kv_heads % spec.generation.tensor_parallel))


def test_an_rljob_runs_locally_or_is_refused_with_a_reason(tmp_path: Path) -> None:
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
