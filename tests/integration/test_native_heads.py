"""Runs with the policy's own heads: initialised alone, trained with the policy, killed and resumed, exported.

That an exported head drafts in vLLM as trained is tested by tests/integration/trainer/test_heads_in_vllm.py; that all
layouts train the same head, by test_layouts.py beside it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fork_server import ForkServer
from tests.integration.box_runs import a_box_run, make_box_policy, train_to_end, write_questions
from tests.integration.forked_run import ForkedRun
from tests.tiny_models import add_mtp_head

from specrl.cli.drafter import keep_only_initialisation
from specrl.spec import parse_spec
from specrl.trainer.checkpointing import checkpoints

pytestmark = pytest.mark.slow

HEAD = "model.mtp_layers.0."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A MiMo that answers 3 as often as 4, with a head that is noise."""
    path = make_box_policy(tmp_path_factory.mktemp("policy") / "policy", family="mimo")
    add_mtp_head(path, noise=0.3)
    return path


def a_run(policy: Path, questions: Path) -> dict[str, Any]:
    """A run of four steps, with a checkpoint after each."""
    run = a_box_run(policy, questions, {"mtp": {"numDraftTokens": 2}})
    run["trainer"]["drafter"] = {"initialisation": {"prompts": 8, "maxPrompts": 8, "samplesPerPrompt": 8, "epochs": 6}}
    run["schedule"]["steps"] = 4
    return run | {"name": "native", "checkpoint": {"everySteps": 1}}


def changed(before: Path, after: Path) -> set[str]:
    one, other = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert one.keys() == other.keys()
    return {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}


@pytest.mark.timeout(1800)
def test_native_heads_are_initialised_trained_resumed_and_exported(
    source: Path, ranks: ForkServer, tmp_path: Path
) -> None:
    questions = write_questions(tmp_path)

    # As `specrl drafter init` does it: the policy stays, its head learns.
    only_heads = keep_only_initialisation(parse_spec(a_run(source, questions)))
    run = train_to_end(tmp_path / "init", only_heads.model_dump(mode="json", by_alias=True, exclude_none=True), ranks)
    policy = run.directory.path / "export" / "policy"
    names = set(load_file(policy / "model.safetensors"))
    heads = {name for name in names if name.startswith(HEAD)}
    assert changed(source, policy) == heads
    start = json.loads(run.directory.status_file.read_text())["summary"]["drafterStart"]
    assert start["trainedAcceptedPerPosition"][0] > 0.3

    # A run from there. All of its processes die after the second step; a second replica joins it.
    run = ForkedRun(tmp_path / "rl", a_run(policy, questions), ranks)
    try:
        run.wait_for_steps(2)
        run.restart(ranks, ["gen-0", "gen-1"])
        run.finish()
    finally:
        run.stop()
    reports = run.reports()
    assert [report["policyVersion"] for report in reports] == [1, 2, 3, 4]
    assert len({report["checksum"] for report in reports}) == 4
    for report in reports:
        assert report["canaryMaxAbs"] < 1e-3
        assert report["mismatchMaxAbs"] < 1e-3
        assert report["drafterVersion"] == -1, "the heads have the policy's version"
        assert len(report["drafterAcceptance"]) == 2, "as many passes as draft tokens"
    # The third step generates nothing if its rollouts were stored before the processes died.
    generated = [report for report in reports if report["acceptanceLength"] is not None]
    assert [report["step"] for report in generated] in ([1, 2, 3, 4], [1, 2, 4])
    for report in generated:
        # What the engine accepts is what the trainer computes, up to the few drafts of a step.
        estimate = 1 + report["drafterAcceptance"][0] * (1 + report["drafterAcceptance"][1])
        assert report["acceptanceLength"] == pytest.approx(estimate, rel=0.25)
    exported = run.directory.path / "export" / "policy"
    assert changed(policy, exported) == names
    assert json.loads((exported / "config.json").read_text())["num_nextn_predict_layers"] == 1
    joined = (run.directory.logs_folder / "gen-1.log").read_text()
    assert [version for version in range(5) if f'"policy_version": {version}' in joined] == [2, 3, 4]
    saved = load_file(checkpoints.step_directory(run.directory.path, 4) / "drafter.safetensors")
    tensors = load_file(exported / "model.safetensors")
    assert all(torch.equal(saved[f"head.{name}"], tensors[name]) for name in heads)
