"""Runs tests that routine runs leave out, because their result depends on a few files that seldom change.

    python tools/recorded_tests.py check         list records that are older than their files; exit status 1 if any is
    python tools/recorded_tests.py check deep    the same for one record
    python tools/recorded_tests.py run deep      run the tests; if they pass, write the record

`py313` has the unit and contract tests on Python 3.13, and depends on the installed packages. `deep` has the tests
marked `deep`: their statistical power, and further layouts of the trainer, are needed after a change of a sampler, a
scheduler, the trainer, the control image or a lock. A record holds a hash of the files and the result of the last run.
`make check` reads the records, and `.ci/run` runs outdated ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Locks of environments that no test uses: the documentation site's, and those of images, which are part of cpu.lock.
UNTESTED = {ROOT / "requirements" / f"{name}.lock" for name in ("docs", "cpu-runtime", "control-runtime")}

TRAINER_HELPERS = ("conftest", "layout_worker", "reference", "runs", "worker", "worker_group")
"""Modules of tests/integration/trainer that its deep tests use."""


def packages_inputs() -> Iterator[tuple[str, bytes]]:
    """Yield what decides which packages are installed: locks, tables of pyproject.toml that name packages, setup."""
    yield from _files("requirements/*.lock", "tools/setup.py", "tools/interpreters.py")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    yield "pyproject.toml", json.dumps([project["build-system"], project["project"]], sort_keys=True).encode()


def deep_inputs() -> Iterator[tuple[str, bytes]]:
    """Yield samplers, schedulers, the trainer, the control image, locks, and the deep tests with their helpers."""
    yield from _files(
        "requirements/*.lock",
        "services/specrl/generation/vllm_backend/**/*.py",
        "services/specrl/generation/draft_lengths/*.py",
        *(f"services/specrl/coordinator/schedule/{name}.py" for name in ("scheduler", "restart")),
        *(f"services/specrl/coordinator/members/{name}.py" for name in ("registry", "replica_states")),
        "services/specrl/trainer/megatron_backend/**/*.py",
        "services/specrl/trainer/losses/**/*.py",
        "services/specrl/weights/**/*.py",
        "deploy/docker/Dockerfile",
        "tests/sampling_lab.py",
        "tests/enumeration.py",
        "tests/unit/coordinator/world.py",
        "tests/chaos/**/*.py",
        *(f"tests/integration/trainer/{name}.py" for name in TRAINER_HELPERS),
    )
    for name, content in _files("tests/**/test_*.py"):
        if b"pytest.mark.deep" in content:
            yield name, content


def _files(*patterns: str) -> Iterator[tuple[str, bytes]]:
    for pattern in patterns:
        found = sorted(path for path in ROOT.glob(pattern) if path not in UNTESTED)
        if not found:
            sys.exit(f"{pattern} must match a file; correct it in {Path(__file__).name}")
        for path in found:
            yield str(path.relative_to(ROOT)), path.read_bytes()


@dataclass(frozen=True)
class Record:
    """A group of tests and its recorded result.

    inputs: yields names and contents of the files that the result depends on. changed: what these are, for messages.
    """

    name: str
    inputs: Callable[[], Iterator[tuple[str, bytes]]]
    pytest_arguments: tuple[str, ...]
    changed: str

    @property
    def file(self) -> Path:
        """File with the last result."""
        return ROOT / "tests" / f"{self.name}.json"

    def digest(self) -> str:
        """Compute a hash of names and contents of all inputs."""
        total = hashlib.sha256()
        for name, content in self.inputs():
            total.update(f"{name}\n{hashlib.sha256(content).hexdigest()}\n".encode())
        return total.hexdigest()

    def is_current(self) -> bool:
        """Whether the tests have passed with the present files."""
        if not self.file.is_file():
            return False
        recorded: object = json.loads(self.file.read_text(encoding="utf-8")).get("tested")
        return recorded == self.digest()


RECORDS = {
    record.name: record
    for record in (
        Record("py313", packages_inputs, ("tests/unit", "tests/contract"), "locks or setup"),
        Record(
            "deep",
            deep_inputs,
            ("tests", "--deep"),
            "a sampler, a scheduler, the trainer, the image, a lock or a deep test",
        ),
    )
}


def check_records(records: list[Record]) -> int:
    """Print every record that is older than its files. Returns the exit status."""
    old = [record for record in records if not record.is_current()]
    for record in old:
        path = record.file.relative_to(ROOT)
        print(f"{path} is outdated: {record.changed} changed since; run `make test-{record.name}` and commit the file")
    return 1 if old else 0


def run_tests(record: Record) -> int:
    """Run the tests, and write the record if they pass. Returns pytest's exit status."""
    digest = record.digest()  # before the tests: a file that changes while they run was not tested
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        command = [sys.executable, "-m", "pytest", *record.pytest_arguments, "--costs", str(costs)]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status != 0:
            return status
        found = json.loads(costs.read_text(encoding="utf-8"))
    content = {"tested": digest, "passed": found["passed"], "cpu_minutes": round(found["cpu_s"] / 60, 1)}
    record.file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {record.file.relative_to(ROOT)}; commit it")
    return 0


def main() -> int:
    """Run the command. Returns the exit status."""
    parser = argparse.ArgumentParser(description="Tests that a routine run leaves out, and when they last passed.")
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="say which records are older than the files that they depend on")
    checking.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECORDS)} (default: all)")
    running = commands.add_parser("run", help="run the tests of one record, and write it where they pass")
    running.add_argument("name", choices=RECORDS)
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run_tests(RECORDS[arguments.name])
    unknown = [name for name in arguments.names if name not in RECORDS]
    if unknown:
        parser.error(f"NAME must be one of {', '.join(RECORDS)}, got {', '.join(unknown)}")
    return check_records([RECORDS[name] for name in arguments.names or RECORDS])


if __name__ == "__main__":
    sys.exit(main())
