"""Wheel and sdist, built and installed outside the checkout: the commands that need no engine, and what the others say.

tests/integration/test_demo.py makes the demo's policy from the wheel, with the engines.

Unproven here: that the declared dependencies suffice, and that a package registry has them. An environment of these
tests has no package of its own but specrl. It borrows the running environment's packages through a folder of links,
without specrl, and without the engines unless a test asks for them.
"""

from __future__ import annotations

import json
import shlex
import tarfile
from pathlib import Path

import pytest
import yaml
from tests.integration.packages.installation import ROOT, Installation, build, install
from tests.unit.simulator.scenarios import a_mapping

from specrl import version
from specrl.seams.versions import supported_versions

ENGINES = ("torch", "torchgen", "vllm", "megatron")
LOCKS = ("cpu", "torch-cpu", "torch-cuda")

HELP_OF_EVERY_COMMAND = """
import typer.main
from typer.testing import CliRunner
from specrl.cli import app

def commands(command, path):
    yield path
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, [*path, name])

for path in commands(typer.main.get_command(app), []):
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0 and "Usage:" in result.stdout, (path, result.output)
    print(" ".join(path))
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("sdist"), "sdist")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """specrl from the wheel, without engines and without the packages of the extra `operator`."""
    return install(wheel, tmp_path_factory.mktemp("installed"), (*ENGINES, "kubernetes"))


@pytest.fixture(scope="module")
def installed_sdist(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """The same from the sdist, of which the installer builds a wheel."""
    return install(sdist, tmp_path_factory.mktemp("installed-sdist"), (*ENGINES, "kubernetes"))


def commit_shown() -> str:
    """What `specrl --version` prints of this checkout. A checkout without git has no commit."""
    commit = version.ask_git(ROOT)
    return "specrl 0.1.0\n" if commit is None else f"specrl 0.1.0 (commit {commit})\n"


def test_specrl_comes_from_the_package_and_there_are_no_engines(installed: Installation) -> None:
    program = "import specrl, specrl_operator as o, sys; print(*sys.path, specrl.__file__, o.__file__, sep='\\n')"
    *paths, services, operators = installed.output("python", "-c", program).splitlines()
    assert Path(services).is_relative_to(installed.environment)
    assert Path(operators).is_relative_to(installed.environment)
    assert not [path for path in paths if Path(path).is_relative_to(ROOT / "services")]
    program = f"import importlib.util as u; print([n for n in {ENGINES} if u.find_spec(n)])"
    assert installed.output("python", "-c", program) == "[]\n"


def test_version_names_the_commit_that_was_built(installed: Installation) -> None:
    assert installed.output("specrl", "--version") == commit_shown()


def test_an_sdist_installs_the_files_of_the_wheel(installed: Installation, installed_sdist: Installation) -> None:
    """Its wheel is built outside the checkout and without git: examples, locks and the commit are in the sdist."""
    assert packaged_files(installed_sdist) == packaged_files(installed)
    assert installed_sdist.output("specrl", "--version") == commit_shown()
    text = installed_sdist.output("specrl", "simulate", "paper-8b-zero-sync", "--json", "--set", "schedule.steps=4")
    assert json.loads(text)["phaseSeconds"]["generation"] > 0


def packaged_files(installed: Installation) -> dict[str, bytes]:
    """Content of every installed file of specrl and its operator, by path."""
    (packages,) = installed.environment.glob("lib/python3*/site-packages")
    return {
        str(file.relative_to(packages)): file.read_bytes()
        for name in ("specrl", "specrl_operator")
        for file in (packages / name).rglob("*")
        if file.is_file() and file.suffix != ".pyc"
    }


def test_every_command_explains_itself(installed: Installation) -> None:
    commands = installed.output("python", "-c", HELP_OF_EVERY_COMMAND).splitlines()
    assert {"demo", "engines", "drafter init", "store inspect", "spec check"} <= set(commands)
    for program in ("coordinator", "generation", "trainer", "operator"):
        assert "usage:" in installed.output(f"specrl-{program}", "--help")
    refused = installed.run("specrl-operator")
    assert refused.returncode == 2
    assert refused.stderr.startswith("specrl-operator: the Python package kubernetes is not installed")


def test_bundled_scenarios_are_simulated(installed: Installation) -> None:
    scenarios = sorted(file.stem for file in (ROOT / "examples" / "plan").glob("*.yaml"))
    unknown = installed.run("specrl", "simulate", "none")
    assert unknown.returncode == 2
    assert f"the scenarios are {', '.join(scenarios)}" in unknown.stderr
    text = installed.output("specrl", "simulate", "paper-8b-zero-sync", "--json", "--set", "schedule.steps=4")
    assert json.loads(text)["phaseSeconds"]["generation"] > 0


def test_a_scenario_file_is_planned(installed: Installation) -> None:
    small = a_mapping(workload={"medianTokens": 100, "maxTokens": 400})
    (installed.work / "small.yaml").write_text(json.dumps(small))
    assert json.loads(installed.output("specrl", "plan", "small.yaml", "--json"))["gain"] >= 1


def test_run_files_are_checked_and_the_schema_is_printed(installed: Installation) -> None:
    (installed.work / "job.yaml").write_text((ROOT / "examples" / "rljob-local.yaml").read_text())
    assert "is valid" in installed.output("specrl", "spec", "check", "job.yaml")
    assert yaml.safe_load(installed.output("specrl", "crd"))["kind"] == "CustomResourceDefinition"
    assert "wheels" in installed.output("specrl", "families")


@pytest.mark.parametrize(
    "command",
    [
        "specrl demo",
        "specrl run -f run.yaml",
        "specrl sft -f run.yaml --out policy",
        "specrl drafter init -f run.yaml --out drafter",
        "specrl drafter import head --policy policy --out drafter",
        "specrl checkpoint export --out policy",
        "specrl-generation --spec run.yaml --replica-id gen-0 --coordinator 127.0.0.1:1",
        "specrl-trainer --spec run.yaml --run-directory run --coordinator 127.0.0.1:1",
    ],
)
def test_commands_that_need_engines_say_how_to_get_them(installed: Installation, command: str) -> None:
    file = installed.work / "run.yaml"
    file.write_text((ROOT / "examples" / "demo" / "run.yaml").read_text())
    before = sorted(installed.work.iterdir())
    done = installed.run(*command.split())
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (message,) = [line for line in done.stderr.splitlines() if "the engines must be installed, got no torch" in line]
    assert "`specrl engines` prints the commands that install them" in message
    assert "Traceback" not in done.stderr
    assert sorted(installed.work.iterdir()) == before


def test_locks_of_the_engines_are_in_the_package(installed: Installation) -> None:
    found = set()
    for options in ((), ("--registry-torch",)):
        comment, *commands = installed.output("specrl", "engines", *options).splitlines()
        assert comment.startswith("# ")
        for command in map(shlex.split, commands):
            assert {"--no-deps", "--require-hashes"} < set(command)
            assert str(installed.environment / "bin" / "python") in command
            lock = Path(command[-1])
            assert lock.is_relative_to(installed.environment)
            assert lock.read_bytes() == (ROOT / "requirements" / lock.name).read_bytes()
            found.add(lock.stem)
    assert found == set(LOCKS)


def test_the_versions_that_were_read_are_in_the_package(installed: Installation) -> None:
    found = installed.output("python", "-c", "from specrl.seams.versions import supported_versions as s; print(s())")
    assert found.strip() == str(supported_versions())


def test_an_sdist_has_every_file_once_and_no_links(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    names = [Path(member.name) for member in members]
    assert not [member.name for member in members if member.issym() or member.islnk()]
    assert len([name for name in names if name.name == "make_policy.py"]) == 1
    assert len([name for name in names if name.name == "cpu.lock"]) == 1
    assert not [name for name in names if "tests" in name.parts]
