"""Replicas come, go, hang and wake while a run goes on. Real processes, real signals; see cluster.py."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.integration.elastic.cluster import PATIENCE_S, Cluster

from specrl.errors import VersionConflict
from specrl.rpc.clients import CoordinatorClient

RUN: dict[str, Any] = {
    "schedule": {"steps": 4, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 1},
    "generation": {"replicas": 2, "maxLiveRollouts": 8, "sampling": {"maxTokens": 40}},
    "weights": {"timeoutS": 4},
}


def check_all_trained(cluster: Cluster, status: dict[str, Any]) -> None:
    """Every prompt once, within the lag bound, nothing aged out."""
    schedule = cluster.spec.schedule
    summary = status["summary"]
    assert summary["promptsTrained"] == schedule.steps * schedule.prompts_per_step
    assert summary["policyLagMax"] <= schedule.max_policy_lag
    assert summary["discardedForAge"] == 0
    assert status["counters"]["poisoned"] == 0


def test_a_replica_that_is_told_to_stop_finishes_what_it_has_and_leaves(tmp_path: Path) -> None:
    with Cluster(tmp_path, RUN, token_seconds=0.05) as cluster:
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.replica("gen-1").get("liveRollouts", 0) >= 4)
        cluster.signal("gen-1", signal.SIGTERM)
        assert cluster.processes["gen-1"].wait(PATIENCE_S) == 0
        assert cluster.moves("gen-1")[-2:] == ["draining", "dead"]
        (left,) = [line for line in cluster.events("coordinator", "replica_moved") if line["after"] == "dead"]
        assert left["reason"] == "it left with 0 rollouts under way"
        status = cluster.finish()
        check_all_trained(cluster, status)
        assert status["counters"]["requeued"] == 0, "what it had was finished, not generated again"
        assert status["replicaTransitions"]["draining -> dead"] == 1


def test_a_replica_whose_drain_takes_too_long_leaves_and_the_rest_is_generated_elsewhere(tmp_path: Path) -> None:
    changes = RUN | {"generation": RUN["generation"] | {"drainS": 1}}
    with Cluster(tmp_path, changes, token_seconds=0.1) as cluster:  # four seconds a rollout
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.replica("gen-1").get("liveRollouts", 0) >= 4)
        cluster.signal("gen-1", signal.SIGTERM)
        assert cluster.processes["gen-1"].wait(PATIENCE_S) == 0
        assert cluster.events("coordinator", "drain_cut_short")
        status = cluster.finish()
        check_all_trained(cluster, status)
        assert status["counters"]["requeued"] >= 4


def test_a_dismissed_replica_drains_and_its_process_ends(tmp_path: Path) -> None:
    async def dismiss(name: str) -> None:
        async with CoordinatorClient(f"127.0.0.1:{cluster.port}") as client:
            await client.dismiss(name)

    with Cluster(tmp_path, RUN, token_seconds=0.05) as cluster:
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.replica("gen-0").get("liveRollouts", 0) >= 4)
        with pytest.raises(VersionConflict, match="gen-9"):
            asyncio.run(dismiss("gen-9"))
        asyncio.run(dismiss("gen-0"))
        assert cluster.replica("gen-0").get("state", "draining") == "draining"
        assert cluster.processes["gen-0"].wait(PATIENCE_S) == 0
        status = cluster.finish()
        check_all_trained(cluster, status)
        assert status["counters"]["requeued"] == 0


def test_interrupting_a_replica_does_not_wait_for_its_rollouts(tmp_path: Path) -> None:
    with Cluster(tmp_path, RUN, token_seconds=5.0) as cluster:  # more than three minutes a rollout
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.replica("gen-1").get("state") in ("serving", "updating"))
        cluster.until(lambda: cluster.replica("gen-1").get("liveRollouts", 0) >= 1)
        cluster.signal("gen-1", signal.SIGINT)
        assert cluster.processes["gen-1"].wait(60) == 0


def test_a_replica_does_not_drain_for_a_coordinator_that_is_gone(tmp_path: Path) -> None:
    with Cluster(tmp_path, RUN, token_seconds=5.0) as cluster:
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.replica("gen-1").get("liveRollouts", 0) >= 1)
        cluster.kill("coordinator")
        cluster.signal("gen-1", signal.SIGTERM)
        assert cluster.processes["gen-1"].wait(60) == 0
        assert cluster.events("gen-1", "drain_broken_off")


def test_a_hung_replica_is_left_behind_within_one_deadline_and_catches_up_when_it_wakes(tmp_path: Path) -> None:
    schedule = RUN["schedule"] | {"steps": 40}
    with Cluster(tmp_path, RUN | {"schedule": schedule}) as cluster:
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.status().get("step", 0) >= 2)
        cluster.signal("gen-1", signal.SIGSTOP)
        cluster.until(lambda: not cluster.replica("gen-1"))
        step = cluster.status()["step"]
        assert cluster.moves("gen-1")[-2:] == ["suspect", "dead"]
        cluster.until(lambda: cluster.status()["step"] >= step + 2)
        cluster.signal("gen-1", signal.SIGCONT)
        cluster.until(lambda: cluster.replica("gen-1").get("state") == "serving")
        assert cluster.moves("gen-1")[-2:] == ["catchingUp", "serving"]
        assert cluster.processes["gen-1"].poll() is None, "the same process"
        status = cluster.finish()
        check_all_trained(cluster, status)


def test_a_replica_that_was_still_for_a_moment_is_suspected_and_goes_on(tmp_path: Path) -> None:
    with Cluster(tmp_path, RUN | {"schedule": RUN["schedule"] | {"steps": 12}}, token_seconds=0.2) as cluster:
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.replica("gen-1").get("liveRollouts", 0) >= 1)
        cluster.signal("gen-1", signal.SIGSTOP)
        cluster.until(lambda: cluster.replica("gen-1").get("state") == "suspect")
        cluster.signal("gen-1", signal.SIGCONT)
        cluster.until(lambda: cluster.replica("gen-1").get("state") != "suspect")
        assert "dead" not in cluster.moves("gen-1")
        assert cluster.status()["counters"]["requeued"] == 0, "its streams lived on"


def test_joiners_catch_up_while_the_others_go_on_generating(tmp_path: Path) -> None:
    steps = 32  # a busy machine takes longer to start a process than for some of them
    with Cluster(tmp_path, RUN | {"schedule": RUN["schedule"] | {"steps": steps}}, token_seconds=0.05) as cluster:
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.status().get("step", 0) >= 1)
        cluster.start("gen-2", "gen-3")
        moved = {name: len(cluster.moves(name)) for name in ("gen-0", "gen-1")}
        cluster.until(lambda: cluster.replica("gen-2").get("state") == "serving")
        for name, before in moved.items():
            others = cluster.moves(name)[before:]
            assert set(others) <= {"serving", "updating"}, "no more than an ordinary update asks of them"
            assert cluster.replica(name)["state"] in ("serving", "updating")
        status = cluster.finish()
        check_all_trained(cluster, status)
        assert status["counters"]["requeued"] == 0, "what they had under way went on"
        for name in ("gen-2", "gen-3"):
            assert cluster.moves(name)[:2] == ["catchingUp", "serving"]
            assert cluster.replica(name)["policyVersion"] == steps
