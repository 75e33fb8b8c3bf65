"""Fixtures: one real cluster for the whole session. Where containers are not permitted the tier is skipped."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.cluster.harness import packages
from tests.cluster.harness.cluster import Cluster
from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.node import Node
from tests.cluster.harness.pods import create_restricted_namespace
from tests.cluster.harness.registry import Registry
from tests.cluster.programs.build import find_unbuilt
from tests.cluster.story.log import FILE, StoryLog
from tests.e2e import binaries
from tests.e2e.harness.api import Api
from tests.requirements import CLUSTER_PROGRAMS, CONTAINERS, HELM, KUBECTL

NAMES = itertools.count()
PASSED: list[str] = []
"""Names of the tests that have passed."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note which tests have passed."""
    if report.when == "call" and report.passed:
        PASSED.append(report.nodeid.rpartition("::")[2])


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Shows a line while a test runs that takes longer than ten seconds."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def show(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(line, flush=True)

    return show


@pytest.fixture(scope="session")
def cluster(say: Callable[[str], None]) -> Iterator[Cluster]:
    """A running cluster. Its start is shown line by line."""
    if why := packages.why_not_here():
        CONTAINERS.skip(why)
    if unbuilt := find_unbuilt():
        CLUSTER_PROGRAMS.skip(f"{', '.join(unbuilt)} not built")
    started = Cluster(say)
    started.start()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def jobset(cluster: Cluster) -> None:
    """JobSet's controller, which trainers need."""
    cluster.install("jobset")


@pytest.fixture(scope="session")
def whole_log(say: Callable[[str], None]) -> StoryLog:
    """The record of all runs of the session."""
    return StoryLog(say)


@pytest.fixture(scope="module")
def log(request: pytest.FixtureRequest, whole_log: StoryLog) -> Iterator[StoryLog]:
    """The record of the runs. After each module it is written to SPECRL_CLUSTER_LOG, if no test has failed."""
    yield whole_log
    if FILE and whole_log.product is not None and not request.session.testsfailed:
        whole_log.write(Path(FILE), PASSED)


@pytest.fixture(scope="session")
def admin(cluster: Cluster) -> Api:
    """An administrator's client."""
    return cluster.admin


@pytest.fixture(scope="session")
def node(cluster: Cluster) -> Node:
    """The cluster's node."""
    assert cluster.node is not None
    return cluster.node


@pytest.fixture(scope="session")
def registry(cluster: Cluster) -> Registry:
    """The cluster's registry."""
    assert cluster.registry is not None
    return cluster.registry


@pytest.fixture
def namespace(admin: Api) -> Iterator[str]:
    """A namespace that admits only pods of the restricted profile."""
    name = f"test-{next(NAMES)}"
    create_restricted_namespace(admin, name)
    yield name
    admin.delete("v1/namespaces", name)


@pytest.fixture(scope="session")
def kubectl(cluster: Cluster) -> Kubectl:
    """Runs kubectl as the administrator."""
    KUBECTL.require()
    return Kubectl(cluster.kubeconfig)


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Path:
    """helm."""
    HELM.require()
    return binaries.find("helm")
