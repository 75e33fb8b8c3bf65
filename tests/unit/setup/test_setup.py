"""tools/setup.py and tools/interpreters.py: which Python is chosen, and the messages of failures.

Interpreters are shell scripts that answer like real ones. uv and its check of hashes are real.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.small_disk import mount_small_disk

ROOT = Path(__file__).resolve().parents[3]
UV = Path(sys.executable).with_name("uv")


@pytest.fixture
def interpreters(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import interpreters

    return interpreters


@pytest.fixture
def setup(interpreters: ModuleType) -> ModuleType:
    import setup

    return setup


Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without Python. Calling it puts an interpreter at a place below the home folder."""
    home = tmp_path / "home"
    (home / "path").mkdir(parents=True)
    for name in ("UV_CACHE_DIR", "PYENV_ROOT", "CONDA_EXE", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(home / "path"))
    monkeypatch.setattr(sys, "executable", str(home / "nowhere" / "python3"))

    def put(place: str, version: str, *missing: str, implementation: str = "cpython", threads: bool = False) -> Path:
        answer = {
            "version": [int(part) for part in version.split(".")],
            "implementation": implementation,
            "free_threaded": threads,
            "missing": missing,
        }
        return write_script(home / place, f"[ $1 != -c ] || echo '{json.dumps(answer)}'")

    return put


def write_script(path: Path, line: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("name", ["setup.py", "interpreters.py"])
def test_setup_parses_as_python_3_8(name: str) -> None:
    ast.parse((ROOT / "tools" / name).read_text(), feature_version=(3, 8))


def test_python_3_12_is_taken_before_3_13_wherever_they_are(machine: Machine, interpreters: ModuleType) -> None:
    newer = machine("path/python3.13", "3.13")
    assert interpreters.find_python(interpreters.PYTHON_VERSIONS) == str(newer)
    older = machine(".pyenv/versions/3.12.7/bin/python3.12", "3.12")
    assert interpreters.find_python(interpreters.PYTHON_VERSIONS) == str(older)
    assert interpreters.find_python([(3, 13)]) == str(newer)


@pytest.mark.parametrize(
    "place",
    ["path/python3", "path/python", ".pyenv/versions/3.12.11/bin/python3.12", "miniforge3/envs/rl/bin/python3.12"],
)
def test_an_interpreter_is_found_on_path_in_pyenv_and_in_conda(
    place: str, machine: Machine, interpreters: ModuleType
) -> None:
    machine("path/python3.12", "3.11")  # a name with another version
    wanted = machine(place, "3.12")
    assert interpreters.find_python(interpreters.PYTHON_VERSIONS) == str(wanted)


def test_an_interpreter_of_uv_is_found(machine: Machine, interpreters: ModuleType, tmp_path: Path) -> None:
    wanted = machine(".local/share/uv/python/cpython-3.12/bin/python3.12", "3.12")
    write_script(
        tmp_path / "home/.local/bin/uv",
        f'case "$*" in "python find --system"*" 3.12") echo {wanted};; *) exit 2;; esac',
    )
    assert interpreters.find_python(interpreters.PYTHON_VERSIONS) == str(wanted)


def test_the_newest_of_pyenv_is_taken(machine: Machine, interpreters: ModuleType) -> None:
    machine(".pyenv/versions/3.12.9/bin/python3.12", "3.12")
    newest = machine(".pyenv/versions/3.12.11/bin/python3.12", "3.12")
    assert interpreters.find_python(interpreters.PYTHON_VERSIONS) == str(newest)


def test_interpreters_that_cannot_be_used_are_passed_over_and_named(
    machine: Machine, interpreters: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    machine("path/python3.12", "3.12", "sqlite3", "ctypes")
    machine("path/python3", "3.11")
    write_script(machine("path/python", "3.12"), "echo 'pyenv: python: command not found' >&2; exit 127")
    machine(".pyenv/versions/3.12.3/bin/python3.12", "3.12", implementation="pypy")
    machine("miniconda3/bin/python3.12", "3.12", threads=True)
    wanted = machine("miniconda3/envs/good/bin/python3.12", "3.12")
    assert interpreters.find_python(interpreters.PYTHON_VERSIONS) == str(wanted)
    said = capsys.readouterr().out
    assert "path/python3.12: it lacks sqlite3, ctypes" in said
    assert "path/python: it does not run" in said
    assert "3.12.3/bin/python3.12: it runs pypy" in said
    assert "miniconda3/bin/python3.12: it is built without the GIL" in said
    assert "3.11" not in said  # another version is not reported


def test_without_an_interpreter_one_message_names_what_was_found_and_what_to_install(
    machine: Machine, interpreters: ModuleType
) -> None:
    machine("path/python3", "3.11")
    machine("path/python3.13", "3.13", "ensurepip")
    with pytest.raises(interpreters.SetupFailed) as failed:
        interpreters.find_python(interpreters.PYTHON_VERSIONS)
    message = str(failed.value)
    for words in ("needs CPython 3.12 or 3.13", "path/python3: is 3.11", "path/python3.13: lacks ensurepip"):
        assert words in message
    for system in ("Ubuntu 22.04", "Ubuntu 24.04", "Debian 12", "Debian 13", "Fedora"):
        assert system in message
    assert "uv python install 3.12" in message


def test_without_an_interpreter_an_older_environment_is_left_as_it_was(
    machine: Machine, setup: ModuleType, tmp_path: Path
) -> None:
    python = machine("clone/.venv/bin/python", "3.11")
    environment = setup.Environment(tmp_path / "home/clone/.venv", "control")
    with pytest.raises(setup.SetupFailed, match=r"needs CPython 3\.12"):
        environment.create(setup.PYTHON_VERSIONS)
    assert python.exists()


@pytest.mark.parametrize("broken", ["python 3.11", "no pip", "a dead link", "a file"])
def test_an_environment_that_cannot_be_used_is_rebuilt_without_asking(
    broken: str, machine: Machine, setup: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "home/clone/.venv"
    python = machine("clone/.venv/bin/python", "3.11" if broken == "python 3.11" else "3.12")
    if broken == "a dead link":
        python.unlink()
        python.symlink_to(tmp_path / "gone")
    if broken == "a file":
        python.unlink()
        python.parent.rmdir()
        folder.rmdir()
        folder.write_text("")
    wanted = machine(".pyenv/versions/3.12.3/bin/python3.12", "3.12")
    with wanted.open("a") as script:
        script.write(f'if [ "$2" = venv ]; then /bin/mkdir -p {folder}; : > {folder}/created; fi\n')
    setup.Environment(folder, "control").create(setup.PYTHON_VERSIONS)
    assert (folder / "created").exists()
    reason = {"python 3.11": "is 3.11", "no pip": "has no pip"}.get(broken, "does not run")
    assert f"its Python {reason}" in capsys.readouterr().out


@pytest.mark.parametrize(("system", "way"), [("Darwin", "Linux container"), ("Windows", "WSL 2")])
def test_other_systems_are_told_that_the_engines_run_on_linux_only(system: str, way: str, setup: ModuleType) -> None:
    with pytest.raises(setup.SetupFailed, match=f"run on Linux only.*{way}"):
        setup.check_platform(system, "arm64")
    with pytest.raises(setup.SetupFailed, match="x86_64 or aarch64, got Linux on riscv64"):
        setup.check_platform("Linux", "riscv64")


def test_a_full_disk_is_named_before_anything_is_built(setup: ModuleType, tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "8m") as disk:
        with pytest.raises(setup.SetupFailed, match=r"must have 0\.8 GB free, got 0\.0 GB; free some space"):
            setup.Environment(disk / ".venv", "control").create(setup.PYTHON_VERSIONS)
        assert not (disk / ".venv").exists()


def test_a_disk_that_fills_during_setup_is_named(setup: ModuleType, tmp_path: Path) -> None:
    with mount_small_disk(tmp_path / "disk", "8m") as disk:
        environment = setup.Environment(disk / ".venv", "control")
        with pytest.raises(setup.SetupFailed, match=f"exit status 3; the disk of {disk} is full"):
            environment.run(["sh", "-c", "exit 3"])


@pytest.fixture
def offline(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An environment with the real uv, and `folder` to install wheels from."""
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    environment = setup.Environment(tmp_path / ".venv", "control")
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, environment.folder], check=True, timeout=60)
    environment.uv = UV
    return environment


def write_wheel(folder: Path, number: int = 1) -> Path:
    """Make the smallest wheel that uv installs."""
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", f"number = {number}\n")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    return wheel


def write_lock(wheel: Path) -> Path:
    lock = wheel.with_name("tiny.lock")
    lock.write_text(f"tiny==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return lock


@pytest.mark.parametrize("change", ["on the way", "by its author"])
def test_a_wheel_with_one_changed_byte_is_refused_with_its_name(
    change: str, offline: Any, setup: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wheel = write_wheel(tmp_path)
    lock = write_lock(wheel)
    if change == "on the way":
        wheel.write_bytes(wheel.read_bytes().replace(b"number = 1", b"number = 2"))
    else:
        write_wheel(tmp_path, number=2)
    options = ["--no-index", "--find-links", str(tmp_path)]
    with pytest.raises(setup.SetupFailed, match="failed with exit status"):
        offline.install(lock, options)
    said = capfd.readouterr().err
    assert "tiny-1.0-py3-none-any.whl" in said if change == "on the way" else "Hash mismatch for `tiny==1.0`" in said
    write_wheel(tmp_path)  # unchanged but for the time in the archive
    offline.install(write_lock(wheel), options)


def test_a_package_without_a_hash_is_refused(
    offline: Any, setup: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path)
    (tmp_path / "tiny.lock").write_text("tiny==1.0\n")
    with pytest.raises(setup.SetupFailed):
        offline.install(tmp_path / "tiny.lock", ["--no-index", "--find-links", str(tmp_path)])
    assert "tiny==1.0" in capfd.readouterr().err


def test_a_wheel_that_cannot_be_had_is_one_message(
    offline: Any, setup: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.lock").write_text(f"tiny==1.0 \\\n    --hash=sha256:{'0' * 64}\n")
    with pytest.raises(setup.SetupFailed, match="run `make setup` again"):
        offline.install(tmp_path / "tiny.lock", ["--no-index", "--find-links", str(tmp_path)])
    assert "tiny" in capfd.readouterr().err


@pytest.fixture
def recording(setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An environment of Python 3.12 without torch, whose uv writes its arguments to `asked`."""
    monkeypatch.setattr(setup, "TORCH_CPU_INDEX", "http://127.0.0.1:1")  # no index answers
    environment = setup.Environment(tmp_path / ".venv", "cpu")
    answer = {"version": [3, 12], "implementation": "cpython", "free_threaded": False, "missing": []}
    write_script(environment.python, f"case \"$2\" in *torch*) exit 1;; esac; echo '{json.dumps(answer)}'")
    write_script(environment.uv, f'echo "$@" >> {tmp_path}/asked')
    return environment


def test_torch_comes_from_a_folder_that_has_its_cpu_build(recording: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "wheels").mkdir()
    version = (ROOT / "requirements" / "torch-cuda.in").read_text().split("torch==")[-1].strip()
    (tmp_path / "other" / f"torch-{version}+cpu-cp313-cp313-manylinux_2_28_x86_64.whl").write_text("")
    (tmp_path / "wheels" / f"torch-{version}+cpu-cp312-cp312-manylinux_2_28_x86_64.whl").write_text("")
    recording.install_torch([str(tmp_path / name) for name in ("empty", "other", "wheels")], [])
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert f"--no-index --find-links {tmp_path}/wheels --no-deps --require-hashes" in asked
    assert asked.endswith("requirements/torch-cpu.lock")


def test_torch_is_the_registrys_where_there_is_no_cpu_build(
    recording: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording.install_torch([str(tmp_path / "missing")], [])
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert asked.endswith("--no-deps --require-hashes --requirement " + str(ROOT / "requirements/torch-cuda.lock"))
    assert "found no CPU build of torch" in capsys.readouterr().out
