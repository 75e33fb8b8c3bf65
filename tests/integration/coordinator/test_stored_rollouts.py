"""A restarted coordinator compares stored rollouts with the policy, as it compares those that replicas return."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import structlog
from tests.integration.coordinator.small_run import VOCAB, RecordingBackend, Run, a_spec
from tests.run_files import CONFIG, a_model_folder, a_run

from specrl.coordinator.ledger import SqliteStore, StoredRollout, make_claim
from specrl.coordinator.main import _read_policy
from specrl.coordinator.schedule.scheduler import SlotId
from specrl.errors import RecordInvalid
from specrl.launcher import run_directory
from specrl.records import Batch, FinishReason, GradedRollout, Reward, Rollout, VersionSpan, wire
from specrl.spec import parse_spec

PATIENCE_S = 120.0  # generous, because the machine may be busy


def a_stored_rollout(slot: SlotId, token: int) -> StoredRollout:
    """Make a graded rollout of one token, sampled under version 0."""
    rollout = Rollout(
        rollout_id=str(slot),
        group_id=slot.group_id,
        sample_index=slot.sample,
        token_ids_T=np.array([token], dtype=np.int32),
        sampler_logprobs_T=np.array([-1.0], dtype=np.float32),
        versions=(VersionSpan(0, 0, 1),),
        finish_reason=FinishReason.STOP,
        replica_id="gen-0",
        text="",
        seconds=0.0,
    )
    data = wire.graded_to_bytes(GradedRollout(rollout, Reward(1.0)))
    return StoredRollout(slot.step, slot.index, slot.sample, slot.attempt, data)


async def test_stored_rollouts_of_another_model_are_sampled_again(tmp_path: Path) -> None:
    """An earlier version of the coordinator had stored them. The trainer refused their batch at each resume."""
    async with Run(tmp_path, a_spec(tmp_path, steps=3), started=()) as run:
        await run.kill_coordinator()
        with closing(SqliteStore(tmp_path / "store.db")) as store:
            store.put_rollouts([a_stored_rollout(SlotId(1, 1, 0), 3), a_stored_rollout(SlotId(2, 1, 0), VOCAB)])
        with structlog.testing.capture_logs() as lines:
            await run.start_coordinator()
            await run.start_replica("gen-0")
            await run.start_replica("gen-1")
            await run.finish()
        assert run.context.outcomes["restored"] == 1
        assert run.observer.build_status().counters["unaccountedRollouts"] == 0
        assert [len(batch.rollouts) for batch in run.trained] == [12, 12, 12]
    (refused,) = [line for line in lines if line["event"] == "stored_rollout_refused"]
    assert refused["slot"] == str(SlotId(2, 1, 0))
    assert "token ids must be < 32, got 32" in refused["reason"]


async def test_a_stored_rollout_of_a_fixed_batch_stays(tmp_path: Path) -> None:
    """The batch has its advantage, so no other rollout may take its place. The trainer refuses the batch."""
    has_step_2 = threading.Event()
    may_train = threading.Event()

    class Waiting(RecordingBackend):
        def train_step(self, batch: Batch):  # type: ignore[no-untyped-def]
            if batch.step == 2:
                has_step_2.set()
                may_train.wait(PATIENCE_S)
            return super().train_step(batch)

    async with Run(tmp_path, a_spec(tmp_path), make_backend=Waiting) as run:
        await run.until(has_step_2.is_set)
        await run.kill_coordinator()
        may_train.set()
        await run.restart_trainer()
        with closing(SqliteStore(tmp_path / "store.db")) as store:
            row = next(row for row in store.read_rollouts() if row.step == 2)
            graded = wire.graded_from_bytes(row.data)
            foreign = replace(graded.rollout, token_ids_T=np.full_like(graded.rollout.token_ids_T, VOCAB))
            row = replace(row, data=wire.graded_to_bytes(GradedRollout(foreign, graded.reward)))
            store.put_rollouts([row])
        await run.start_coordinator()
        with pytest.raises(RecordInvalid, match="token ids must be < 32, got 32"):
            await run.finish()
        assert row in run.store.read_rollouts()


def test_the_process_compares_rollouts_with_the_policys_folder(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    directory = run_directory.create_run(tmp_path / "runs", parse_spec(a_run(tmp_path)))
    with closing(SqliteStore(directory.path / "store.db", make_claim(directory.path))) as store:
        store.put_batch(1, b"", [])  # so that the stored rollouts are read before a trainer registers
        store.put_rollouts([a_stored_rollout(SlotId(2, 0, 0), CONFIG["vocab_size"])])
    command = [sys.executable, "-m", "specrl.coordinator.main", "--run-directory", str(directory.path)]
    log = directory.path / "coordinator.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=output, stderr=output)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while "stored_rollout_refused" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    assert "token ids must be < 264, got 264" in log.read_text()


def test_a_policy_that_cannot_be_read_is_logged(tmp_path: Path) -> None:
    """The coordinator did not say that it no longer compared rollouts with the policy."""
    spec = parse_spec(a_run(tmp_path))
    with structlog.testing.capture_logs() as lines:
        assert _read_policy(spec) is None
    assert [(line["event"], line["log_level"]) for line in lines] == [("policy_not_read", "warning")]
    a_model_folder(tmp_path / "model")
    policy = _read_policy(spec)
    assert policy is not None
    assert policy.vocab_size == CONFIG["vocab_size"]
