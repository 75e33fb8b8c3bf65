"""The version of specrl, and the commit that it was built from.

Wheels and sdists have the commit in commit.txt, which tools/build_hook.py adds. In a checkout git is asked. This module
may import only the standard library, because the build hook runs it before specrl is installed.
"""

from __future__ import annotations

import subprocess
from importlib import metadata, resources
from pathlib import Path

COMMIT_FILE = "commit.txt"
GIT_TIMEOUT_S = 5.0
"""`git status` of this project takes 20 ms. A hanging file system must not delay the start of a run for longer."""


def describe_version() -> str:
    """Return version and commit, such as `0.1.0 (commit 1fb07bf5c0de)`, or the version if the commit is unknown."""
    try:
        version = metadata.version("specrl")
    except metadata.PackageNotFoundError:  # imported from a source tree that was never installed
        version = "unknown version"
    commit = read_commit(Path(str(resources.files("specrl"))))
    return version if commit is None else f"{version} (commit {commit})"


def read_commit(package: Path) -> str | None:
    """Return the commit of the package in this folder; None if neither a build nor git recorded one."""
    try:
        return (package / COMMIT_FILE).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return ask_git(package.parent.parent)


def ask_git(checkout: Path) -> str | None:
    """Return the commit of a checkout, with `, modified` if tracked files differ. None if git does not answer."""
    # Git also searches the parent folders. A source tree inside another project must not get that project's commit.
    if not (checkout / ".git").exists():
        return None
    try:
        commit = _run_git(checkout, "rev-parse", "--short=12", "HEAD")
        changes = _run_git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, no commit yet, or a checkout of another user
        return None
    return f"{commit}, modified" if changes else commit


def _run_git(checkout: Path, *arguments: str) -> str:
    # Without optional locks, so that processes that start together do not block each other.
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    return done.stdout.strip()
