"""A run with each mechanism of speculation: a real replica, a real trainer, and two steps.

The weights that the first step trained generate the second.

That drafts change no distribution is tested by tests/integration/generation; that versions arrive whole, there and by
the canary, which compares the log-probabilities of replica and trainer at every version.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.fork_server import ForkServer
from tests.integration.box_runs import a_box_run, train_to_end, write_questions
from tests.integration.forked_run import ForkedRun
from tests.requirements import SUFFIX
from tests.tiny_models import add_heads

pytestmark = pytest.mark.slow

POLICY = "the policy's folder"  # stands for its path: it drafts for itself, until training has changed it
RUNS: dict[str, dict[str, Any]] = {
    "ngram": {"numDraftTokens": 3},
    "suffix": {"numDraftTokens": 4},
    "draftModel": {"numDraftTokens": 3, "path": POLICY},
}


def train_with(kind: str, policy: Path, ranks: ForkServer, folder: Path) -> ForkedRun:
    """Train with one mechanism."""
    section = {name: str(policy) if value == POLICY else value for name, value in RUNS.get(kind, {}).items()}
    run = a_box_run(policy, write_questions(folder), {kind: section})
    # A number of tokens: a draft model as large as the policy gets none of its share of operations.
    run["trainer"]["drafter"]["tokenBudget"] = 64
    return train_to_end(folder, run, ranks)


def check_reports(run: ForkedRun, *, drafts: bool = True, trains_drafter: bool) -> None:
    """Check that both steps trained the policy, that replicas and trainer agree, and that drafts were accepted."""
    first, second = run.reports()
    assert [report["policyVersion"] for report in (first, second)] == [1, 2]
    assert first["checksum"] != second["checksum"], "the policy was trained and published"
    for report in (first, second):
        assert report["canaryTokens"] > 0
        assert report["canaryMaxAbs"] < 1e-3
        assert report["mismatchMaxAbs"] < 1e-3
        if drafts:
            assert report["acceptanceLength"] > 1
        else:
            assert report["acceptanceLength"] is None
        assert report["drafterVersion"] == (report["policyVersion"] if trains_drafter else -1)


def check_export(run: ForkedRun, policy: Path, *, has_drafter: bool) -> None:
    """Check that the export has a trained policy, and a drafter if one was trained."""
    export = run.directory.path / "export"
    assert read_weights(export / "policy") != read_weights(policy)
    assert (export / "drafter").exists() == has_drafter


def read_weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("kind", ["ngram", pytest.param("suffix", marks=pytest.mark.needs(SUFFIX))])
@pytest.mark.timeout(1200)
def test_a_policy_is_trained_with(kind: str, box_policy: Path, ranks: ForkServer, tmp_path: Path) -> None:
    run = train_with(kind, box_policy, ranks, tmp_path)
    check_reports(run, trains_drafter=False)
    check_export(run, box_policy, has_drafter=False)


@pytest.mark.timeout(1200)
def test_a_policy_is_trained_with_a_draft_model(box_policy: Path, ranks: ForkServer, tmp_path: Path) -> None:
    run = train_with("draftModel", box_policy, ranks, tmp_path)
    check_reports(run, trains_drafter=True)
    check_export(run, box_policy, has_drafter=True)
    drafter = run.directory.path / "export" / "drafter"
    assert read_weights(drafter) != read_weights(box_policy), "the policy of the first step, trained as a drafter"


@pytest.mark.timeout(1200)
def test_a_policy_is_trained_with_eagle3(box_policy: Path, synchronous_run: ForkedRun) -> None:
    check_reports(synchronous_run, trains_drafter=True)
    check_export(synchronous_run, box_policy, has_drafter=True)


@pytest.mark.timeout(1200)
def test_without_drafts_heads_that_a_run_does_not_train_are_kept(
    box_policy: Path, ranks: ForkServer, tmp_path: Path
) -> None:
    """vLLM refuses tensors that its Qwen3 does not have, and exports had no heads although config.json named them."""
    with_heads = tmp_path / "policy"
    shutil.copytree(box_policy, with_heads)
    heads = add_heads(with_heads, "mtp.layers.0.", mtp_num_hidden_layers=1)
    run = train_with("none", with_heads, ranks, tmp_path)
    check_reports(run, drafts=False, trains_drafter=False)
    check_export(run, with_heads, has_drafter=False)
    exported = run.directory.path / "export" / "policy"
    found = load_file(exported / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in heads.items())
    assert json.loads((exported / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert "they go stale" in (exported / "README.md").read_text()
    (notice,) = json.loads(run.directory.status_file.read_text())["notices"]
    assert "are not trained" in notice
    assert "native_heads_not_trained" in run.log("rank-0")
