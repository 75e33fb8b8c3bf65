"""Every example of docs/extending.md applies to the tree as it is, and its own test passes there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "extending.md"
FENCE = re.compile(r"^```(diff|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The examples' tests read these. Links of services/specrl point to two of these folders.
TREE = ("services", "operators", "tests", "tools", "examples", "requirements", "protos", "pyproject.toml")
FAMILIES = "tests/integration/trainer/test_families.py"
TESTS = {
    "A verifier": ("tests/unit/rewards/test_approximate.py",),
    "A tool": ("tests/unit/agent_tools/test_lookup.py",),
    "A loss": ("tests/unit/trainer/test_sapo.py",),
    "A drafter": ("tests/unit/drafting/test_medusa.py",),
    "A model family": ("tests/unit/models/test_mistral.py", FAMILIES),
    "A metric": ("tests/unit/telemetry/test_perplexity.py",),
}
CHOSEN = "not test_families or (mistral and not rotary)"
"""Of the families, which the product has, too, only the example's is tested."""


@dataclass(frozen=True)
class Example:
    """The blocks of one section. files: text of new files by path. patch: the diffs of existing files."""

    files: dict[str, str]
    patch: str


def read_examples() -> dict[str, Example]:
    """Read the page's examples by the title of their section."""
    examples: dict[str, Example] = {}
    _, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for section in sections:
        title, _, text = section.partition("\n")
        files: dict[str, str] = {}
        patch = ""
        for language, block in FENCE.findall(text):
            if language == "diff":
                patch += block
            else:
                path, _, content = block.partition("\n")
                files[path.removeprefix("# ")] = content
        examples[title] = Example(files, patch)
    return examples


def copy_tree(target: Path) -> None:
    for name in TREE:
        if (ROOT / name).is_dir():
            # What Python has compiled is copied, too: compiling the tree again would take longer than the tests.
            shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("mutants"))
        else:
            shutil.copy(ROOT / name, target / name)


def apply_patch(patch: str, tree: Path, *options: str) -> None:
    """Apply a patch. Line numbers may have moved, context may not have changed."""
    # Without the limit, git would take the tree for a part of a checkout above it.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    applied = subprocess.run(
        ["git", "apply", "--verbose", *options, "-"],
        cwd=tree, env=environment, input=patch, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert applied.returncode == 0, f"renew the diff in docs/extending.md: {applied.stderr}"


def test_every_section_has_an_example_with_a_diff() -> None:
    examples = read_examples()
    assert examples.keys() == TESTS.keys()
    assert all(example.patch for example in examples.values())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as it is."""
    found = tmp_path_factory.mktemp("extending") / "tree"
    found.mkdir()
    copy_tree(found)
    return found


@pytest.mark.parametrize("title", TESTS)
def test_an_example_applies_to_the_tree_as_it_is(title: str, tree: Path) -> None:
    example = read_examples()[title]
    assert not [path for path in example.files if (tree / path).exists()], "choose another example"
    apply_patch(example.patch, tree, "--check")


def test_every_example_passes_its_own_test(tree: Path) -> None:
    """In one tree with all examples, so that one process imports torch and Megatron for all of them."""
    for example in read_examples().values():
        for path, content in example.files.items():
            (tree / path).parent.mkdir(exist_ok=True)
            (tree / path).write_text(content, encoding="utf-8")
        apply_patch(example.patch, tree)
    paths = [str(tree / "services"), str(tree / "operators"), str(tree)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    tests = [test for of_example in TESTS.values() for test in of_example]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-q", "-p", "no:cacheprovider", *tests, "-k", CHOSEN],
        cwd=tree, env=environment, text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for test in tests:
        assert re.search(rf"^PASSED {re.escape(test)}", done.stdout, re.MULTILINE), done.stdout


def test_new_files_are_formatted_and_free_of_lint(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    for example in read_examples().values():
        for path, content in example.files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(content, encoding="utf-8")
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        # isort tells our packages from others by the folders of the tree.
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", 'lint.isort.known-first-party=["specrl"]', "."],
            cwd=tmp_path, text=True, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
