"""`specrl doctor`: what each probe makes of good and bad machines. No probe can end the examination."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from specrl.cli.doctor import WIDTH, render_report
from specrl.formats.doctor_report import DoctorReport, Finding, FindingState
from specrl.launcher.doctor import gpus, run_file, software, surroundings
from specrl.launcher.doctor.examination import examine

GOOD = Finding(name="torch", state=FindingState.OK, value="2.13.0")
TOPOLOGY = """\
\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tPIX\t0-15\t0
GPU1\tNV18\t X \tSYS\t0-15\t0
NIC0\tPIX\tSYS\t X

Legend:
  X    = Self
"""


def test_a_probe_that_raises_becomes_a_finding_and_the_others_run() -> None:
    def break_down() -> Iterator[Finding]:
        yield GOOD
        raise ZeroDivisionError("no such card")

    found = examine([("GPUs", break_down), ("torch", lambda: [GOOD])]).findings
    assert found[0] == found[2] == GOOD
    assert found[1].name == "GPUs"
    assert found[1].state is FindingState.WARNING
    assert "ZeroDivisionError: no such card" in found[1].value


@pytest.mark.parametrize(("version", "state"), [("580.95.05", FindingState.OK), ("575.57.08", FindingState.PROBLEM)])
def test_a_driver_must_be_new_enough_for_the_lock(version: str, state: FindingState) -> None:
    found = gpus.judge_driver(version)
    assert found.state is state
    assert ("580 or newer" in found.remedy) is (state is FindingState.PROBLEM)


@pytest.mark.parametrize(
    "kernel_module", ["NVIDIA UNIX x86_64 Kernel Module", "NVIDIA UNIX Open Kernel Module for x86_64"]
)
def test_the_driver_is_read_from_the_kernels_file(
    kernel_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    file.write_text(f"NVRM version: {kernel_module}  550.54.15  Release Build\nGCC version:  gcc 11.4.0\n")
    monkeypatch.setattr(gpus, "DRIVER_FILE", file)
    (found,) = gpus.probe_driver()
    assert (found.value, found.state) == ("550.54.15", FindingState.PROBLEM)


def test_a_card_that_others_use_is_a_warning() -> None:
    idle, busy = gpus.read_cards("0, NVIDIA H100 80GB HBM3, 81559, 4\n1, NVIDIA H100 80GB HBM3, 81559, 40000\n")
    assert (idle.name, idle.state, idle.remedy) == ("GPU 0", FindingState.OK, "")
    assert (busy.name, busy.state) == ("GPU 1", FindingState.WARNING)
    assert "40000 MiB" in busy.value
    assert "CUDA_VISIBLE_DEVICES" in busy.remedy


def test_links_between_cards_are_read_from_the_topology() -> None:
    assert list(gpus.read_links(TOPOLOGY)) == [("GPU0", "GPU1 NV18"), ("GPU1", "GPU0 NV18")]


def test_an_engine_that_is_missing_or_of_another_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_version(name: str) -> str:
        if name.startswith("vllm"):
            raise metadata.PackageNotFoundError
        return "1.0.0+cu130"

    monkeypatch.setattr(metadata, "version", read_version)
    found = {finding.name: finding for finding in software.probe_engines()}
    assert found["vllm"].state is FindingState.PROBLEM
    assert "`specrl engines`" in found["vllm"].remedy
    assert (found["torch"].value, found["torch"].state) == ("1.0.0", FindingState.PROBLEM)
    monkeypatch.setenv("SPECRL_UNREAD_VERSIONS", "warn")
    found = {finding.name: finding for finding in software.probe_engines()}
    assert found["torch"].state is FindingState.WARNING


def test_only_extras_whose_packages_are_all_installed_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["pydantic>=2", "scipy>=1.17; extra == 'plan'", 'no-such-package; extra == "s3"', 'scipy; extra == "s3"']
    monkeypatch.setattr(metadata, "requires", lambda _: needs)
    (found,) = software.probe_extras()
    assert found.value == "plan"


def test_a_limit_of_locked_memory_matters_only_beside_rdma_devices_and_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    (without,) = surroundings.probe_locked_memory(tmp_path)
    assert without.state is FindingState.OK
    (tmp_path / "mlx5_0").mkdir()
    (beside,) = surroundings.probe_locked_memory(tmp_path)
    assert beside.state is FindingState.WARNING
    assert "8192 KiB" in beside.value


def test_dockers_default_of_shared_memory_is_a_warning() -> None:
    found = surroundings.judge_shared_memory(Path("/dev/shm"), 64 << 20)  # noqa: S108 - not opened
    assert found.state is FindingState.WARNING
    assert "--shm-size" in found.remedy
    assert surroundings.judge_shared_memory(Path("/dev/shm"), 2 << 30).state is FindingState.OK  # noqa: S108


def test_a_folder_that_cannot_be_made_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = surroundings.judge_folder("cache", tmp_path / "file" / "specrl")
    assert found.state is FindingState.PROBLEM
    assert "SPECRL_CACHE_DIR" in found.remedy
    assert surroundings.judge_folder("runs", tmp_path / "new" / "runs").state is not FindingState.PROBLEM


def test_a_run_file_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    (found,) = run_file.probe_run_file(tmp_path / "none.yaml")
    assert found.state is FindingState.PROBLEM
    assert "none.yaml" in found.value


def test_text_has_two_columns_and_fits_into_eighty() -> None:
    long = Finding(name="shared memory", state=FindingState.WARNING, value="too small " * 20, remedy="make room " * 20)
    lines = list(render_report(DoctorReport(findings=[GOOD, long])))
    assert lines[0] == "torch          2.13.0"
    assert lines[1].startswith("shared memory  warning: too small")
    assert max(map(len, lines)) <= WIDTH
    assert lines[-1] == "0 problems, 1 warning"
