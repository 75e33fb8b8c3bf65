"""A coordinator that is killed and started again takes up what the replicas went on with. Real processes, SIGKILL."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.integration.elastic.cluster import Cluster

from specrl.rpc.clients import GenerationClient

RUN: dict[str, Any] = {
    "schedule": {"steps": 3, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 1},
    "generation": {"replicas": 2, "maxLiveRollouts": 16, "sampling": {"maxTokens": 40}},
    "weights": {"timeoutS": 4},
    "canary": {"everySteps": 0},  # its tokens are nobody's rollout; versions are proved without it
}


def replicas(cluster: Cluster) -> list[str]:
    """Names of its replicas."""
    return [f"gen-{number}" for number in range(cluster.spec.generation.replicas)]


def generated_tokens(cluster: Cluster) -> int:
    """Tokens that the replicas computed, from their start on."""

    async def ask(address: str) -> int:
        async with GenerationClient(address, token=cluster.token) as client:
            return (await client.get_status()).speculation.generated_tokens

    addresses = [cluster.events(name, "generation_served")[-1]["address"] for name in replicas(cluster)]
    return sum(asyncio.run(ask(address)) for address in addresses)


def trained_tokens(cluster: Cluster) -> int:
    """Tokens of the rollouts that were trained on."""
    return sum(report["tokens"] for report in cluster.reports())


def kill_in_the_middle_of_generation(cluster: Cluster) -> None:
    """SIGKILL the coordinator when all of its rollouts are under way, and some tokens of them are computed."""
    cluster.until(lambda: sum(r["liveRollouts"] for r in cluster.status().get("replicas", ())) >= 16)
    computed = generated_tokens(cluster)
    cluster.until(lambda: generated_tokens(cluster) >= computed + 32)
    cluster.kill("coordinator")


def check_no_prompt_was_lost(cluster: Cluster, status: dict[str, Any]) -> None:
    schedule = cluster.spec.schedule
    assert status["summary"]["promptsTrained"] == schedule.steps * schedule.prompts_per_step
    assert status["summary"]["policyLagMax"] <= schedule.max_policy_lag
    assert status["counters"]["poisoned"] == status["counters"]["unaccountedRollouts"] == 0


def test_no_token_is_computed_twice_when_the_coordinator_is_killed_in_the_middle_of_generation(tmp_path: Path) -> None:
    with Cluster(tmp_path, RUN, token_seconds=0.15) as cluster:  # six seconds a rollout
        cluster.start("coordinator", "trainer", *replicas(cluster))
        resumed = 0
        for _ in range(2):
            kill_in_the_middle_of_generation(cluster)
            cluster.start("coordinator")
            cluster.until(lambda: cluster.status().get("counters", {}).get("resumed", 0) >= 1)
            resumed += cluster.status()["counters"]["resumed"]
        status = cluster.finish()
        check_no_prompt_was_lost(cluster, status)
        assert resumed >= 16, "what was under way was taken up"
        assert status["counters"]["requeued"] == 0
        assert generated_tokens(cluster) == trained_tokens(cluster)


def test_what_nobody_takes_up_in_time_is_generated_anew(tmp_path: Path) -> None:
    changes = RUN | {"generation": RUN["generation"] | {"replicas": 1, "reattachS": 0}}
    with Cluster(tmp_path, changes, token_seconds=0.1) as cluster:
        cluster.start("coordinator", "trainer", *replicas(cluster))
        kill_in_the_middle_of_generation(cluster)
        cluster.start("coordinator")
        status = cluster.finish()
        check_no_prompt_was_lost(cluster, status)
        assert status["counters"]["resumed"] == 0
        assert generated_tokens(cluster) > trained_tokens(cluster)
