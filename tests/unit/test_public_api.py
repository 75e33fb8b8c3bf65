"""docs/python-api.md lists exactly the names that users may import, and its examples work."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import specrl
from specrl.agent_tools.tool import Tool, tool_for
from specrl.errors import ERRORS_BY_NAME
from specrl.rewards import Ungraded
from specrl.rewards.choice import verifier_for
from specrl.rewards.verifier import Verifier
from specrl.spec.data import PythonVerifier, Rewards
from specrl.spec.tools import AnsweredBy, PythonTool, Tools

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "python-api.md"
NAME = re.compile(r"^\| `(specrl\.[\w.]+)` \|", re.MULTILINE)
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def listed_names() -> dict[str, set[str]]:
    """The public names of each module, as the page lists them."""
    names: dict[str, set[str]] = defaultdict(set)
    for path in NAME.findall(PAGE.read_text(encoding="utf-8")):
        module, _, name = path.rpartition(".")
        names[module].add(name)
    return names


def page_examples() -> list[str]:
    return FENCE.findall(PAGE.read_text(encoding="utf-8"))


def user_sources() -> Iterator[tuple[Path, str]]:
    """Python that users copy: the files in examples/, and the code blocks of README and docs."""
    for file in sorted((ROOT / "examples").rglob("*.py")):
        yield file, file.read_text(encoding="utf-8")
    # The blocks of extending.md are patches of specrl itself.
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "extending.md"}
    for page in [ROOT / "README.md", *sorted(pages)]:
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            yield page, block


def imported_names(source: str) -> Iterator[tuple[str, str]]:
    """Each (module, name) that the source imports from specrl; the name is "" for `import specrl.x`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "specrl":
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.partition(".")[0] == "specrl")


@pytest.fixture
def example_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's reward function and tool, as modules `example_0` and `example_1` in a folder."""
    for number, source in enumerate(page_examples()):
        (tmp_path / f"example_{number}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def example_verifier(folder: Path) -> Verifier:
    return verifier_for(Rewards(python=PythonVerifier(function="example_0:grade", folder=str(folder))))


def example_tool(folder: Path) -> Tool:
    python = PythonTool(function="example_1:answer", folder=str(folder))
    return tool_for(Tools(answered_by=AnsweredBy(python=python)))


def test_the_page_lists_names() -> None:
    assert listed_names()["specrl.rewards"] == {"Ungraded"}
    assert listed_names()["specrl"] == {"load_report", "run"}
    assert len(page_examples()) == 3


@pytest.mark.parametrize("module", sorted(listed_names().keys() - {"specrl.errors"}))
def test_a_public_module_exports_exactly_the_names_on_the_page(module: str) -> None:
    exported = importlib.import_module(module).__all__
    assert sorted(exported) == sorted(listed_names()[module])


def test_every_listed_error_is_one_that_specrl_raises() -> None:
    """The page has those that a caller usually tells apart; docs/errors.md has all."""
    assert listed_names()["specrl.errors"] <= {"SpecInvalid", "SpecrlError", *ERRORS_BY_NAME}


def test_importing_specrl_loads_none_of_its_modules() -> None:
    """Every process of a run imports the package. The public functions are loaded when they are first used."""
    code = "import sys, specrl; print(sorted(name for name in sys.modules if name.startswith('specrl.')), dir(specrl))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("[] ")
    assert "load_report" in done.stdout, "dir() has the public names for completion"
    with pytest.raises(AttributeError, match="module 'specrl' has no attribute 'trian'"):
        specrl.trian  # noqa: B018 - a misspelt name


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in sorted(listed_names().items()) for n in names])
def test_a_public_name_is_importable_and_has_a_docstring(module: str, name: str) -> None:
    public: Any = getattr(importlib.import_module(module), name)
    assert inspect.getdoc(public)
    assert public.__doc__, "a docstring of its own, not one of a base class"


def test_examples_and_docs_import_only_public_names() -> None:
    public = listed_names()
    internal = [
        f"{file.relative_to(ROOT)}: {module} {name}"
        for file, source in user_sources()
        for module, name in imported_names(source)
        if name not in public.get(module, set()) and (module, name) != ("specrl", "")
    ]
    assert not internal


def test_the_search_for_imports_finds_every_form() -> None:
    source = "import specrl.rewards\nfrom specrl.rewards import Ungraded as U\ndef f():\n    from specrl import spec\n"
    assert set(imported_names(source)) == {
        ("specrl.rewards", ""),
        ("specrl.rewards", "Ungraded"),
        ("specrl", "spec"),
    }


def test_the_example_of_a_reward_function_grades(example_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = example_verifier(example_modules)
    assert verifier.grade("7", "It is 7.", {"points": 3}).reward == 3.0
    assert verifier.grade("7", "It is 8.", {}).reward == 0.0
    monkeypatch.setattr("example_0.JUDGE_IS_UP", False)
    with pytest.raises(Ungraded, match="the judge does not respond"):
        verifier.grade("7", "It is 7.", {})


@pytest.mark.parametrize(("call", "output"), [("5", "too low"), ("9", "too high"), ("7", "correct")])
def test_the_example_of_a_tool_answers(example_modules: Path, call: str, output: str) -> None:
    assert example_tool(example_modules).answer_call("7", f"<tool>{call}</tool>", call) == output


def test_the_example_of_problem_families_runs() -> None:
    exec(compile(page_examples()[2], str(PAGE), "exec"), {})  # noqa: S102 - the page's own code
