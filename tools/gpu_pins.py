"""Compares what our code assumes of vllm, torch and megatron-core with the wheels of requirements/gpu.lock.

    make check-gpu-pins   python -m tools.gpu_pins              download, compare, write requirements/gpu-seams.json
    make check            python -m tools.gpu_pins --check      check that this file matches gpu.lock, without network
    make seams            python -m tools.gpu_pins --installed  write services/specrl/seams/expected.json from .venv

The wheels are those of the images: Linux on aarch64, Python 3.12. Their sources are read inside the zip, so nothing is
imported and no GPU is needed. The wheels stay in $SPECRL_CACHE_DIR/wheels/SHA256 (default: below ~/.cache/specrl), and
their sha256 is compared with the lock each time. vllm and torch have about 800 MB.

gpu-seams.json has one entry per NAME==VERSION: the wheel's name and sha256, all hashes of that version in gpu.lock, and
the kind, signature and (if its body matters) hash of each name in `seam_table.py`. Names that differ from the
versions that the tests run with are printed. docs/seams.md must explain each of them, which a test checks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from tools.seam_reader import Files, NotFound, Reader, WheelFiles, installed_files
from tools.seam_table import SEAMS, Seam

from specrl.files import cache_folder
from specrl.seams.versions import DISTRIBUTIONS, installed_version

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "gpu.lock"
GPU_SEAMS = ROOT / "requirements" / "gpu-seams.json"
EXPECTED = ROOT / "services" / "specrl" / "seams" / "expected.json"
MODULES = {"vllm": "vllm", "megatron": "megatron-core", "torch": "torch"}
"""Distribution of each importable name."""
IMPORTED = {package: name for name, package in MODULES.items()}
PYTHON = "3.12"
# Wheel tags that pip may download: glibc 2.17 to 2.39, the newest first.
TAGS = (*(f"manylinux_2_{glibc}_aarch64" for glibc in range(39, 16, -1)), "manylinux2014_aarch64")

Row = dict[str, str]
Pins = dict[str, dict[str, Any]]


def describe_seams(reader: Reader) -> dict[str, Row]:
    """Describe each seam of the reader's package, by dotted name: kind, signature and hash of its body."""
    return {
        seam.name: _row(reader, seam) for seam in SEAMS if seam.package_name == reader.package and not seam.unchecked
    }


def _row(reader: Reader, seam: Seam) -> Row:
    try:
        found = reader.find(seam.name, seam.only)
    except NotFound:
        return {"kind": "absent"}
    row = {"kind": found.kind}
    if found.signature:
        row["signature"] = found.signature
    if seam.body:
        row["body"] = found.body
    return row


def find_differences(expected: Mapping[str, Row], found: Mapping[str, Row]) -> dict[str, str]:
    """Describe in words what differs from the expected rows, by name."""
    told: dict[str, str] = {}
    for name, row in expected.items():
        other = found.get(name, {"kind": "absent"})
        parts = [_part(kind, row.get(kind), other.get(kind)) for kind in ("kind", "signature", "body")]
        if row != other:
            told[name] = "; ".join(filter(None, parts))
    return told


def _part(kind: str, before: str | None, after: str | None) -> str:
    if before == after:
        return ""
    if kind == "body":
        return "another body"
    return f"{kind}: {before or 'none'} -> {after or 'none'}"


def locked_hashes(lock: str, package: str) -> tuple[str, list[str]]:
    """Return the version that a lock pins, and the sha256 of all files of that version."""
    match = re.search(rf"^{re.escape(package)}==(\S+) \\\n((?:    --hash=sha256:\w+(?: \\)?\n)+)", lock, re.MULTILINE)
    if match is None:
        raise SystemExit(f"{LOCK.name} must pin {package} with hashes, got no such pin; run `make lock`")
    return match[1], sorted(re.findall(r"sha256:(\w+)", match[2]))


def unread_pins(lock: str, seams: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """List packages of the lock that gpu-seams.json does not describe, one line each."""
    told = []
    for package in DISTRIBUTIONS:
        version, hashes = locked_hashes(lock, package)
        known = seams.get(f"{package}=={version}")
        if known is None:
            told.append(f"{package}=={version} has no entry")
            continue
        new = sorted(set(hashes) - set(known["locked"]))
        if new:
            told.append(f"{package}=={version} has {len(new)} new hashes, among them {new[0]}")
        elif known["sha256"] not in hashes:
            told.append(f"{package}=={version}: {known['wheel']}, which was read, is no longer in the lock")
    return told


def read_pins(lock: str) -> Pins:
    """Download the wheels if needed, and describe their seams."""
    found: Pins = {}
    for package in DISTRIBUTIONS:
        version, hashes = locked_hashes(lock, package)
        wheel = _wheel(package, version, hashes)
        print(f"reading {wheel.name}")
        found[f"{package}=={version}"] = {
            "wheel": wheel.name,
            "sha256": wheel.parent.name,
            "locked": hashes,
            "seams": describe_seams(Reader(WheelFiles(wheel), IMPORTED[package])),
        }
    return found


def _wheel(package: str, version: str, hashes: list[str]) -> Path:
    """Return the wheel for Python 3.12 on aarch64, from the cache or the index. Its folder's name is its sha256."""
    cache = cache_folder() / "wheels"
    for sha256 in hashes:
        for wheel in (cache / sha256).glob("*.whl"):
            if _sha256(wheel) == sha256:
                return wheel
            print(f"{wheel} is damaged; downloading it again")
            wheel.unlink()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        _download(package, version, hashes, Path(scratch))
        (found,) = Path(scratch).glob("*.whl")
        sha256 = _sha256(found)
        if sha256 not in hashes:
            raise SystemExit(f"{found.name} must have a sha256 of {LOCK.name}, got {sha256}; run `make lock`")
        (cache / sha256).mkdir(exist_ok=True)
        return found.rename(cache / sha256 / found.name)


def _download(package: str, version: str, hashes: list[str], folder: Path) -> None:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{package}=={version} " + " ".join(f"--hash=sha256:{item}" for item in hashes) + "\n")
    tags = [item for tag in TAGS for item in ("--platform", tag)]
    print(f"downloading {package}=={version} for {PYTHON} on aarch64")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir", "--dest", str(folder)]
    of_python = ["--implementation", "cp", "--python-version", PYTHON]
    command = [sys.executable, "-m", "pip", "download", *options, *of_python, *tags, "--requirement", str(requirement)]
    subprocess.run(command, check=True)


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def installed_readers() -> dict[str, Reader]:
    """Make a reader of each installed package, by importable name."""
    return {
        IMPORTED[package]: Reader(next(filter(None, map(_installed, distributions))), IMPORTED[package])
        for package, distributions in DISTRIBUTIONS.items()
    }


def _installed(distribution: str) -> Files | None:
    try:
        return installed_files(distribution)
    except PackageNotFoundError:
        return None


def read_installed(readers: Mapping[str, Reader]) -> Pins:
    """Describe the seams of the installed packages."""
    return {
        f"{package}=={installed_version(package)}": {"seams": describe_seams(readers[IMPORTED[package]])}
        for package in DISTRIBUTIONS
    }


def group_by_package(pins: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, dict[str, Row]]]:
    """Return (NAME==VERSION, rows) by package name."""
    return {key.partition("==")[0]: (key, value["seams"]) for key, value in pins.items()}


def changed_names() -> dict[str, dict[str, str]]:
    """Return the differences between the GPU pins and the versions that the tests run with, by NAME==VERSION."""
    expected, found = (group_by_package(_read(file)) for file in (EXPECTED, GPU_SEAMS))
    return {key: find_differences(expected[package][1], rows) for package, (key, rows) in found.items()}


def _read(file: Path) -> Pins:
    found: Pins = json.loads(file.read_text(encoding="utf-8"))
    return found


def _write(file: Path, pins: Pins) -> None:
    file.write_text(json.dumps(pins, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {file.relative_to(ROOT)}")


def main() -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare our seams with the wheels of requirements/gpu.lock.")
    parser.add_argument("--check", action="store_true", help="only check that gpu-seams.json matches the lock")
    parser.add_argument("--installed", action="store_true", help="write expected.json from the installed packages")
    arguments = parser.parse_args()
    lock = LOCK.read_text(encoding="utf-8")
    if arguments.check:
        told = unread_pins(lock, _read(GPU_SEAMS))
        for line in told:
            print(f"{GPU_SEAMS.relative_to(ROOT)} is outdated: {line}; run `make check-gpu-pins` and commit it")
        return 1 if told else 0
    if arguments.installed:
        _write(EXPECTED, read_installed(installed_readers()))
        return 0
    _write(GPU_SEAMS, read_pins(lock))
    for key, told_of in changed_names().items():
        print(f"\n{key}: {len(told_of)} names differ from the versions that the tests run with")
        for name, text in told_of.items():
            print(f"  {name}\n      {text}")
    print("explain each difference in docs/seams.md, or change our code")
    return 0


if __name__ == "__main__":
    sys.exit(main())
