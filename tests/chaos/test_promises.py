"""The check of a chaos run: a run that kept its promises passes, and each broken promise is named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.chaos.promises import Evidence, evidence, violations
from tests.run_files import a_run

from specrl.coordinator.ledger import open_store
from specrl.coordinator.ledger.contract import Claim
from specrl.records import Batch, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec import dump_spec, parse_spec


def a_rollout(group: str, sample: int, version: int) -> TrainRollout:
    rollout = Rollout(
        rollout_id=f"{group}-{sample}",
        group_id=group,
        sample_index=sample,
        token_ids_T=np.arange(4, dtype=np.int32),
        sampler_logprobs_T=np.zeros(4, dtype=np.float32),
        versions=(VersionSpan(version, 0, 4),),
        finish_reason=FinishReason.STOP,
        replica_id="gen-0",
        text="3",
        seconds=0.1,
    )
    return TrainRollout((1, 2), rollout, 0.5)


def a_batch(step: int, groups: list[str], positions: list[int], version: int | None = None) -> Batch:
    version = step - 1 if version is None else version
    rollouts = tuple(a_rollout(group, sample, version) for group in groups for sample in range(2))
    return Batch(step, rollouts, tuple(positions))


def a_sound_run(folder: Path) -> Evidence:
    """Two steps of two prompts in groups of two; the last prompt failed; step 2 was trained again after a crash."""
    spec = parse_spec(a_run(folder, schedule={"steps": 2, "promptsPerStep": 2, "groupSize": 2, "maxPolicyLag": 1}))
    second = a_batch(2, ["000002-00000"], [2, 3], version=0)
    reports = [{"step": 1, "policyLagMax": 0}, {"step": 2, "policyLagMax": 1}]
    return Evidence(
        spec=spec,
        trained=[a_batch(1, ["000001-00000", "000001-00001"], [0, 1]), second, second],
        failed={"000002-00001": "the verifier crashed"},
        reports=reports,
        lines=reports,
        status={"summary": {"unaccountedRollouts": 0}},
    )


def test_a_run_that_kept_its_promises_passes(tmp_path: Path) -> None:
    assert violations(a_sound_run(tmp_path)) == []


def with_batches(*batches: Batch) -> Callable[[Evidence], Evidence]:
    return lambda run: replace(run, trained=[run.trained[0], *batches])


def with_fields(**fields: Any) -> Callable[[Evidence], Evidence]:
    return lambda run: replace(run, **fields)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (with_batches(a_batch(2, ["000001-00001"], [1, 3])), "prompt 1 was settled 2 times"),
        (with_batches(a_batch(2, ["000001-00001"], [1, 3])), "prompt 2 was settled 0 times"),
        (with_batches(a_batch(2, ["000001-00001"], [2, 3])), "rollout ('000001-00001', 0) was trained 2 times"),
        (with_batches(a_batch(2, [], [2, 3])), "000002-00000 must be trained whole or failed with a reason"),
        (with_batches(a_batch(2, ["000002-00000"], [2, 3, 9])), "prompt 9 is none of this run's"),
        (
            with_batches(a_batch(2, ["000002-00000"], [2, 3]), a_batch(2, ["000002-00000"], [2, 3], version=0)),
            "step 2 was trained on 2 different batches",
        ),
        (with_batches(a_batch(2, ["000002-00000"], [2, 3], version=-1)), "with lag 2, the bound is 1"),
        (with_batches(a_batch(2, ["000002-00000"], [2, 3])), "the report of step 2 says lag 1, its batch 0"),
        (with_fields(failed={}), "000002-00001 must be trained whole or failed with a reason"),
        (with_fields(failed={"000002-00001": ""}), "000002-00001 must be trained whole or failed with a reason"),
        (
            with_fields(failed={"000002-00001": "crashed", "000001-00000": "crashed"}),
            "000001-00000 must be trained whole or failed with a reason",
        ),
        (with_fields(status={"summary": {"unaccountedRollouts": 3}}), "3 graded rollouts are unaccounted for"),
        (with_fields(lines=[{"step": 1}, {"step": 1}, {"step": 2}]), "metrics.jsonl must report steps 1 to 2"),
        (with_fields(reports=[{"step": 1, "policyLagMax": 0}]), "the store must report steps 1 to 2"),
    ],
)
def test_a_broken_promise_is_named(tmp_path: Path, spoil: Callable[[Evidence], Evidence], words: str) -> None:
    found = violations(spoil(a_sound_run(tmp_path)))
    assert any(words in line for line in found), found


def test_the_failed_prompts_of_trained_and_untrained_steps_are_read(tmp_path: Path) -> None:
    """Only the facts were read, which have those of untrained steps alone: at a run's end none."""
    spec = parse_spec(a_run(tmp_path))
    (tmp_path / "run.yaml").write_text(dump_spec(spec))
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "status.json").write_text("{}")
    with closing(open_store(spec, tmp_path, Claim())) as store:
        store.set_fact("failedPrompts", {"p-2": "the verifier failed"})
        store.finish_step(1, {"step": 1, "failed": {"p-1": "every rollout was refused"}})
    found = evidence(tmp_path, tmp_path / "ledger")
    assert found.failed == {"p-1": "every rollout was refused", "p-2": "the verifier failed"}
