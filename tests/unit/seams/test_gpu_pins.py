"""`make check` reports, without network, a wheel of gpu.lock that was not compared with our code."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from tools import gpu_pins
from tools.seam_reader import NotFound, Reader, WheelFiles

from specrl.seams.versions import GPU_SEAMS

LOCK = gpu_pins.LOCK.read_text(encoding="utf-8")


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GPU_SEAMS.read_text(encoding="utf-8"))
    return found


def test_all_wheels_of_the_lock_were_compared() -> None:
    assert gpu_pins.unread_pins(LOCK, committed()) == []


@pytest.mark.parametrize("package", ["vllm", "torch", "megatron-core"])
def test_another_version_in_the_lock_is_reported(package: str) -> None:
    version, _ = gpu_pins.locked_hashes(LOCK, package)
    lock = LOCK.replace(f"\n{package}=={version} ", f"\n{package}==99.0 ")
    assert gpu_pins.unread_pins(lock, committed()) == [f"{package}==99.0 has no entry"]


@pytest.mark.parametrize("package", ["vllm", "torch", "megatron-core"])
def test_another_wheel_of_the_same_version_is_reported(package: str) -> None:
    _, hashes = gpu_pins.locked_hashes(LOCK, package)
    lock = LOCK.replace(hashes[0], "0" * 64)
    (told,) = gpu_pins.unread_pins(lock, committed())
    assert "has 1 new hashes, among them 0000" in told


def test_a_wheel_that_is_no_longer_in_the_lock_is_reported() -> None:
    pins = committed()
    (key,) = (key for key in pins if key.startswith("torch=="))
    pins[key]["sha256"] = "0" * 64
    (told,) = gpu_pins.unread_pins(LOCK, pins)
    assert told == f"{key}: {pins[key]['wheel']}, which was read, is no longer in the lock"


def test_a_cached_wheel_is_used_if_its_hash_matches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path))
    content = b"a wheel"
    sha256 = hashlib.sha256(content).hexdigest()
    wheel = tmp_path / "wheels" / sha256 / "thing-1-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(content)
    fetched: list[str] = []

    def fetch(package: str, _version: str, _hashes: list[str], folder: Path) -> None:
        fetched.append(package)
        (folder / wheel.name).write_bytes(content)

    monkeypatch.setattr(gpu_pins, "_download", fetch)
    assert gpu_pins._wheel("thing", "1", [sha256]) == wheel
    assert fetched == []
    wheel.write_bytes(b"half a")
    assert gpu_pins._wheel("thing", "1", [sha256]) == wheel
    assert fetched == ["thing"]
    assert wheel.read_bytes() == content
    with pytest.raises(SystemExit, match="must have a sha256 of"):
        gpu_pins._wheel("thing", "1", ["0" * 64])


def test_names_are_followed_inside_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "thing.whl"
    with zipfile.ZipFile(wheel, "w") as content:
        content.writestr("thing/__init__.py", "import os\nfrom .deep import *\nfrom .deep.base import Base as Shown\n")
        content.writestr("thing/deep/__init__.py", "from ..wide import function\nfrom thing._C import compiled\n")
        content.writestr("thing/deep/base.py", "class Base:\n    def __init__(self, a):\n        self.held = a\n")
        content.writestr(
            "thing/wide.py", "if 1:\n    def function(a, /, b=1, *c, d, **e): ...\nelse:\n    function = 1\n"
        )
        content.writestr("thing/_C/__init__.pyi", "def compiled(x: int) -> int: ...\ndef compiled(x, y=...): ...\n")
        content.writestr(
            "thing/data.py",
            "from dataclasses import dataclass\nfrom thing import Shown\n\n"
            "@dataclass\nclass Data(Shown):\n    left: int\n    right: int = 3\n\nclass Heir(Shown): ...\n",
        )
    reader = Reader(WheelFiles(wheel), "thing")
    found = {
        name: (row.kind, row.signature)
        for name in (
            "function", "compiled", "Shown", "os", "data.Data", "data.Heir", "data.Heir.held", "data.Data.right",
        )
        for row in (reader.find(f"thing.{name}"),)
    }  # fmt: skip
    assert found == {
        "function": ("function", "a, /, b=1, *c, d, **e"),
        "compiled": ("function", "x | x, y=..."),
        "Shown": ("class", "self, a"),
        "os": ("import", "os"),
        "data.Data": ("class", "self, a, left, right=3"),
        "data.Heir": ("class", "self, a"),
        "data.Heir.held": ("attribute", ""),
        "data.Data.right": ("attribute", ""),
    }
    assert reader.find("thing.function", only=("d", "b", "z")).signature == "b, d"
    for name in ("thing.gone", "thing.Shown.gone", "thing.function.inner", "other.function"):
        with pytest.raises(NotFound):
            reader.find(name)
