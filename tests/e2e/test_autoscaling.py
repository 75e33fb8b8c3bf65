"""The control plane's own HPA controller scales an RLJob on exposed generation, through the external metrics API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, wait_until
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.external_metrics import ExternalMetrics
from tests.e2e.harness.release import Release
from tests.e2e.jobs import build_claim, cpu_job, describe_job, pods_of, until_condition
from tests.requirements import NAMESPACES

from specrl.coordinator.observe.exposure import DemandMeter
from specrl_operator.children.autoscaler import METRIC

AUTOSCALERS = "autoscaling/v2/horizontalpodautoscalers"


@pytest.fixture
def metrics(control_plane: ControlPlane, admin: Api, tmp_path: Path) -> Iterator[ExternalMetrics]:
    """The stub of the external metrics API, behind the API server's aggregation."""
    if control_plane.network is None:
        NAMESPACES.skip("no address for an endpoint")
    stub = ExternalMetrics(control_plane.network.gateway, tmp_path)
    stub.start(admin)
    yield stub
    stub.stop(admin)


def measure_demand(replicas: int, train_s: float, exposed_s: float) -> float:
    """Return what the coordinator exports after a step in which training waited `exposed_s` seconds for rollouts."""
    meter = DemandMeter()
    phases = SimpleNamespace(wall_seconds=train_s + exposed_s, generation=exposed_s)
    report = SimpleNamespace(phases=phases, generation_under_way=train_s + exposed_s)
    meter.add_step(report, replicas)  # type: ignore[arg-type]  # of a report, only these fields
    assert meter.demand is not None
    return meter.demand


def test_the_hpa_controller_scales_an_rljob_on_exposed_generation(
    admin: Api, release: Release, namespace: str, metrics: ExternalMetrics
) -> None:
    """Autoscaling was YAML that nothing acted on, for a metric that nothing exported."""
    admin.create(build_claim("runs", namespace))
    wanted = {"minReplicas": 1, "maxReplicas": 8, "targetExposedPercent": 20}
    job = admin.create(cpu_job("scales", namespace, **{"generation.autoscaling": wanted}))
    until_condition(admin, job, "Ready")

    def autoscaler() -> Object:
        found: Object = admin.get(AUTOSCALERS, "scales-generation", namespace)
        return found

    def replicas() -> int:
        return int(admin.get(RLJOBS, "scales", namespace)["spec"]["generation"]["replicas"])

    def explain() -> str:
        return f"{describe_job(admin, job)}\n{autoscaler().get('status')}\nasked: {metrics.asked}"

    # Without data nothing is scaled, and the autoscaler says so.
    asked = (namespace, METRIC, "rljob=scales")
    wait_until(
        lambda: find_condition(autoscaler(), "ScalingActive").get("reason") == "FailedGetExternalMetric",
        "an autoscaler without data",
        explain=explain,
    )
    assert asked in metrics.asked, metrics.asked
    assert replicas() == 1

    # Training waits for half of the step: generation takes twice as long. Two replicas are added at first.
    metrics.values[asked] = measure_demand(1, 100.0, 100.0)
    wait_until(lambda: replicas() == 2, "2 replicas", timeout_s=300, explain=explain)
    wait_until(lambda: len(pods_of(admin, job, "generation")) == 2, "2 pods", explain=explain)

    # Now the trainer waits for a tenth only, as allowed.
    metrics.values[asked] = measure_demand(2, 100.0, 0.0)
    wait_until(
        lambda: autoscaler()["status"].get("currentMetrics", [{}])[0].get("external", {}).get("current"),
        "the autoscaler reads the metric",
        explain=explain,
    )
    assert find_condition(autoscaler(), "ScalingActive")["status"] == "True"
