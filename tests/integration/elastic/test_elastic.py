"""Replicas come, go, hang and wake while a run goes on. Real processes, real signals; see cluster.py.

A cluster costs four process starts or more, so that what can happen to one run happens to one run.
"""

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
    assert summary["unaccountedRollouts"] == 0
    assert status["counters"]["poisoned"] == 0


def a_run_of(steps: int) -> dict[str, Any]:
    """Sections of a run of so many steps."""
    return RUN | {"schedule": RUN["schedule"] | {"steps": steps}}


def test_joiners_catch_up_while_the_others_go_on_and_those_that_leave_finish_what_they_have(tmp_path: Path) -> None:
    """One of the first two is told to stop, the other is dismissed; the joiners carry the run to its end."""

    async def dismiss(name: str) -> None:
        async with CoordinatorClient(f"127.0.0.1:{cluster.port}", token=cluster.token) as client:
            await client.dismiss_replica(name)

    first = ("gen-0", "gen-1")
    joiners = ("gen-2", "gen-3")
    # A busy machine must not make a replica look lost: its rollouts would be generated again.
    patient = {"weights": {"timeoutS": 60}, "telemetry": {"heartbeatS": 4}}
    # A replica leaves with its next heartbeats, so the run must last some of them.
    with Cluster(tmp_path, a_run_of(48) | patient, token_seconds=0.02) as cluster:
        cluster.start("coordinator", "trainer", *first)
        cluster.until(lambda: cluster.status().get("step", 0) >= 1)
        moved = {name: len(cluster.moves(name)) for name in first}
        cluster.start(*joiners)
        cluster.until(lambda: all(cluster.replica(name).get("state") == "serving" for name in joiners))
        for name, before in moved.items():
            others = cluster.moves(name)[before:]
            assert set(others) <= {"serving", "updating"}, "no more than an ordinary update asks of them"
            assert cluster.replica(name)["state"] in ("serving", "updating")

        cluster.until(lambda: cluster.replica("gen-1").get("liveRollouts", 0) >= 2)
        cluster.signal("gen-1", signal.SIGTERM)
        assert cluster.processes["gen-1"].wait(PATIENCE_S) == 0

        cluster.until(lambda: cluster.replica("gen-0").get("liveRollouts", 0) >= 2)
        with pytest.raises(VersionConflict, match="gen-9"):
            asyncio.run(dismiss("gen-9"))
        asyncio.run(dismiss("gen-0"))
        assert cluster.replica("gen-0").get("state", "draining") == "draining"
        assert cluster.processes["gen-0"].wait(PATIENCE_S) == 0

        status = cluster.finish()
        check_all_trained(cluster, status)
        assert status["counters"]["requeued"] == 0, cluster.log("coordinator").read_text()[-6000:]
        for name in first:
            assert cluster.moves(name)[-2:] == ["draining", "dead"]
        left = [line for line in cluster.events("coordinator", "replica_state_changed") if line["after"] == "dead"]
        assert [line["reason"] for line in left] == ["it left with 0 unfinished rollouts"] * 2
        assert status["replicaTransitions"]["draining -> dead"] == 2
        for name in joiners:
            assert cluster.moves(name)[:2] == ["catchingUp", "serving"]
            assert cluster.replica(name)["policyVersion"] == cluster.spec.schedule.steps


def test_a_replica_that_is_still_for_a_moment_goes_on_and_one_that_hangs_is_left_behind_until_it_wakes(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, a_run_of(24), token_seconds=0.03) as cluster:
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.status().get("step", 0) >= 1)
        cluster.until(lambda: cluster.replica("gen-1").get("liveRollouts", 0) >= 1)
        cluster.signal("gen-1", signal.SIGSTOP)
        cluster.until(lambda: cluster.replica("gen-1").get("state") == "suspect")
        cluster.signal("gen-1", signal.SIGCONT)
        cluster.until(lambda: cluster.replica("gen-1").get("state") not in ("suspect", None))
        assert "dead" not in cluster.moves("gen-1")
        assert cluster.status()["counters"]["requeued"] == 0, "its streams lived on"

        cluster.signal("gen-1", signal.SIGSTOP)
        cluster.until(lambda: not cluster.replica("gen-1"))
        step = cluster.status()["step"]
        assert cluster.moves("gen-1")[-2:] == ["suspect", "dead"]
        cluster.until(lambda: cluster.status()["step"] >= step + 2)
        cluster.signal("gen-1", signal.SIGCONT)
        cluster.until(lambda: cluster.replica("gen-1").get("state") == "serving")
        moves = cluster.moves("gen-1")
        assert moves[moves.index("dead") + 1 :][:2] == ["catchingUp", "serving"]
        assert cluster.processes["gen-1"].poll() is None, "the same process"
        status = cluster.finish()
        check_all_trained(cluster, status)


def test_a_replica_whose_drain_takes_too_long_leaves_and_the_rest_is_generated_elsewhere(tmp_path: Path) -> None:
    changes = a_run_of(2) | {"generation": RUN["generation"] | {"drainS": 1}}
    with Cluster(tmp_path, changes, token_seconds=0.1) as cluster:  # four seconds a rollout
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.replica("gen-1").get("liveRollouts", 0) >= 4)
        cluster.signal("gen-1", signal.SIGTERM)
        assert cluster.processes["gen-1"].wait(PATIENCE_S) == 0
        assert cluster.events("coordinator", "drain_cut_short")
        status = cluster.finish()
        check_all_trained(cluster, status)
        assert status["counters"]["requeued"] >= 4


def test_a_replica_waits_for_its_rollouts_neither_when_interrupted_nor_when_the_coordinator_is_gone(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, RUN, token_seconds=60.0) as cluster:  # forty minutes a rollout: no drain is finished
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        for name in ("gen-0", "gen-1"):
            cluster.until(lambda name=name: cluster.replica(name).get("liveRollouts", 0) >= 1)
        cluster.signal("gen-1", signal.SIGINT)
        assert cluster.processes["gen-1"].wait(PATIENCE_S) == 0
        assert not cluster.events("gen-1", "drain_begun")
        cluster.kill("coordinator")
        cluster.signal("gen-0", signal.SIGTERM)
        assert cluster.processes["gen-0"].wait(PATIENCE_S) == 0
        assert cluster.events("gen-0", "drain_failed")
