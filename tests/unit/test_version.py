"""The commit that specrl reports."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from specrl import version
from specrl.coordinator.observe.origin import collect_origin


def git(checkout: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(checkout), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The package's folder in a checkout with one commit."""
    package = tmp_path / "services" / "specrl"
    package.mkdir(parents=True)
    (package / "code.py").write_text("1\n")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "one")
    return package


def test_a_checkout_has_its_commit_and_whether_it_was_modified(package: Path, tmp_path: Path) -> None:
    commit = git(tmp_path, "rev-parse", "HEAD")[:12]
    (package / "untracked.py").write_text("2\n")
    assert version.read_commit(package) == commit
    (package / "code.py").write_text("3\n")
    assert version.read_commit(package) == f"{commit}, modified"


def test_a_build_has_the_commit_that_it_was_built_from(package: Path) -> None:
    (package / version.COMMIT_FILE).write_text("0123456789ab\n")
    assert version.read_commit(package) == "0123456789ab"


def test_a_source_tree_inside_another_project_has_no_commit(package: Path) -> None:
    """`git rev-parse` would answer with the other project's commit."""
    inner = package / "vendor" / "services" / "specrl"
    inner.mkdir(parents=True)
    assert version.read_commit(inner) is None


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff"])
def test_without_a_commit_only_the_version_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    (tmp_path / version.COMMIT_FILE).write_bytes(content)
    monkeypatch.setattr(version.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(version.metadata, "version", lambda _: "1.2.3")
    assert version.describe_version() == "1.2.3"


def test_a_machine_without_git_has_no_commit(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert version.read_commit(package) is None


def test_a_runs_origin_names_the_version_as_the_command_line_does() -> None:
    assert collect_origin()["specrl"] == version.describe_version()
