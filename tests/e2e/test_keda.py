"""The real KEDA scales an RLJob by its scale subresource, by what Prometheus answers. docs/deploy.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.controllers.keda import Keda, StubPrometheus
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, wait_until
from tests.e2e.harness.control_plane import ControlPlane
from tests.e2e.harness.release import Release
from tests.e2e.harness.workloads import Workloads
from tests.e2e.jobs import cpu_job, describe_job, make_place, pods_of, until_condition
from tests.e2e.test_autoscaling import AUTOSCALERS, measure_demand

from specrl_operator.children.autoscaler import METRIC


@pytest.fixture(scope="module")
def keda(control_plane: ControlPlane) -> Iterator[Keda]:
    """KEDA, installed for these tests alone."""
    installed = Keda(control_plane)
    installed.install()
    yield installed
    installed.uninstall()


@pytest.fixture
def prometheus(keda: Keda, release: Release) -> Iterator[StubPrometheus]:
    """The Prometheus of the operator's flag."""
    stub = StubPrometheus()
    release.upgrade(integrations={"keda": True}, monitoring={"prometheusUrl": stub.url})
    yield stub
    release.upgrade()
    stub.stop()


def test_keda_scales_an_rljob_on_exposed_generation(
    admin: Api, keda: Keda, prometheus: StubPrometheus, namespace: str, jobset: Workloads
) -> None:
    """The ScaledObject was YAML that nothing had read."""
    place = make_place(admin, namespace)
    wanted = {"minReplicas": 1, "maxReplicas": 8, "targetExposedPercent": 20, "by": "KEDA"}
    job = admin.create(cpu_job("scales", place, **{"generation.autoscaling": wanted}))
    until_condition(admin, job, "Ready")

    def replicas() -> int:
        return int(admin.get(RLJOBS, "scales", place)["spec"]["generation"]["replicas"])

    def scaled() -> Object:
        return keda.read_scaled_object("scales-generation", place)

    def explain() -> str:
        return f"{describe_job(admin, job)}\n{scaled().get('status')}\nasked: {prometheus.asked}\n{keda.describe()}"

    # Without data nothing is scaled, and the ScaledObject says so.
    query = f'max({METRIC}{{namespace="{place}",rljob="scales"}})'
    wait_until(lambda: query in prometheus.asked, "Prometheus is asked", explain=explain)
    wait_until(
        lambda: find_condition(scaled(), "Ready").get("status"), "the ScaledObject has a status", explain=explain
    )
    assert replicas() == 1

    # Training waits for half of the step: generation takes twice as long. Two replicas are added at first.
    prometheus.value = measure_demand(1, 100.0, 100.0)
    wait_until(lambda: replicas() == 2, "2 replicas", timeout_s=300, explain=explain)
    wait_until(lambda: len(pods_of(admin, job, "generation")) == 2, "2 pods", explain=explain)
    (autoscaler,) = admin.list(AUTOSCALERS, place)
    assert autoscaler["spec"]["scaleTargetRef"]["kind"] == "RLJob", "KEDA's own, for the RLJob"
    assert find_condition(scaled(), "Ready")["status"] == "True"

    # The job's end removes it, and KEDA's autoscaler with it.
    admin.patch(RLJOBS, "scales", {"spec": {"suspend": True}}, place)
    wait_until(lambda: not admin.list(AUTOSCALERS, place), "no autoscaler is left", explain=explain)
