"""The number of Prometheus series of a large run is a constant plus a few per replica."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from prometheus_client import REGISTRY
from tests.integration.coordinator.small_run import Run, a_spec

from specrl.spec.run import Transport

REPLICAS = 64
OF_A_REPLICA = 2
"""Series per replica at the coordinator: live rollouts and policy version."""
OF_A_RUN = 600
"""At most, whatever its size: histograms, of seven phases and of the operations of the store, are most of them."""


async def test_a_run_of_64_replicas_has_few_series_and_drops_those_of_lost_replicas(tmp_path: Path) -> None:
    name = "wide"
    spec = a_spec(tmp_path, steps=2, promptsPerStep=16)
    weights = spec.weights.model_copy(update={"transport": Transport.CHECKPOINT})  # no mesh of 65 in one process
    spec = spec.model_copy(update={"name": name, "weights": weights})
    async with Run(tmp_path, spec) as run:
        for number in range(2, REPLICAS):
            await run.start_replica(f"gen-{number}")
        await run.finish()
        run.observer.build_status()
        of_replicas, of_the_run = series_of(name)
        assert sorted(of_replicas) == sorted(f"gen-{number}" for number in range(REPLICAS))
        assert set(of_replicas.values()) == {OF_A_REPLICA}
        assert 100 < of_the_run <= OF_A_RUN

        await run.replicas["gen-7"].kill()
        await run.until(lambda: "gen-7" not in run.registry.replicas)
        run.observer.build_status()
        left, _ = series_of(name)
        assert left == {replica: count for replica, count in of_replicas.items() if replica != "gen-7"}


def series_of(run: str) -> tuple[Counter[str], int]:
    """Count the run's series of each replica, and those that belong to no single replica."""
    found = [
        sample.labels.get("replica")
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.labels.get("rljob") == run
    ]
    return Counter(replica for replica in found if replica is not None), found.count(None)
