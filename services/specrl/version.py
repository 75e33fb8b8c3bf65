"""Which specrl this is: its version, and the commit that it was built from.

Wheels and sdists carry the commit in commit.txt, which tools/build_hook.py adds when they are built. A checkout has no
such file, and git is asked. This module needs the standard library alone: the build hook runs it before specrl is
installed.
"""

from __future__ import annotations

import subprocess
from importlib import metadata, resources
from pathlib import Path

COMMIT_FILE = "commit.txt"
GIT_TIMEOUT_S = 5.0
"""`git status` of this project takes 20 ms. A file system that hangs must not hold up the start of a run."""


def describe_version() -> str:
    """Version and commit, such as `0.1.0 (commit 1fb07bf5c0de)`. Without a known commit, the version alone."""
    try:
        version = metadata.version("specrl")
    except metadata.PackageNotFoundError:  # imported from a source tree that was never installed
        version = "unknown version"
    commit = read_commit(Path(str(resources.files("specrl"))))
    return version if commit is None else f"{version} (commit {commit})"


def read_commit(package: Path) -> str | None:
    """The commit that the package in this folder comes from. None where neither a build nor git recorded one."""
    try:
        return (package / COMMIT_FILE).read_text(encoding="ascii").strip() or None
    except (OSError, ValueError):
        return ask_git(package.parent.parent)


def ask_git(checkout: Path) -> str | None:
    """The commit of a checkout; `, modified` follows it where tracked files differ. None where git does not answer."""
    # Git also looks in the folders above. A source tree that lies inside another project has not that one's commit.
    if not (checkout / ".git").exists():
        return None
    try:
        commit = _git(checkout, "rev-parse", "--short=12", "HEAD")
        changes = _git(checkout, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):  # no git, no commit yet, or a checkout of another user
        return None
    return f"{commit}, modified" if changes else commit


def _git(checkout: Path, *arguments: str) -> str:
    # Without optional locks, so that processes which start together do not get in each other's way.
    command = ["git", "--no-optional-locks", "-C", str(checkout), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=GIT_TIMEOUT_S)
    return done.stdout.strip()
