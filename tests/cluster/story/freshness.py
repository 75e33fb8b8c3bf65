"""Whether docs/cluster-log.md still describes this tree: a hash of deploy/, operators/ and the locks.

    python -m tests.cluster.story.freshness      prints the hash, and says what to do if the log is old

The log names the hash of the tree that it ran with. A later tree has another one. Then the tier runs again, or a line
of the log waives the new hash with a reason. tests/unit/docs/test_cluster_log.py fails otherwise.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LOG = ROOT / "docs" / "cluster-log.md"
SOURCES = ("deploy", "operators", "requirements/*.lock")
IMAGE_SOURCES = (*SOURCES, "services", "pyproject.toml", "tools/setup.py")
"""What images are made of, beside the chart."""
DIGEST = re.compile(rb'digest: "sha256:[0-9a-f]{64}"')
"""Digests that `make images` writes into the chart's values. They change with every build."""
HASH_LINE = "Hash of `deploy/`, `operators/` and the locks: `{hash}`"
WAIVER = re.compile(r"^- waived: `([0-9a-f]{12})`: (\S.*)$", re.MULTILINE)


def hash_sources(root: Path = ROOT) -> str:
    """Hash paths and contents of the files that git knows below SOURCES."""
    digest = hashlib.sha256()
    for name in _run_git(root, "ls-files", "--", *SOURCES).splitlines():
        file = root / name
        if file.is_file():
            content = DIGEST.sub(b'digest: ""', file.read_bytes())
            digest.update(f"{name}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:12]


def find_problem(page: str, current: str) -> str:
    """Return what is to be done about a log. Empty if it names the current hash, or waives it with a reason."""
    said = re.search(re.escape(HASH_LINE).replace(r"\{hash\}", "([0-9a-f]{12})"), page)
    if said is None:
        return f"docs/cluster-log.md must have a line `{HASH_LINE}`, got none; run `make test-cluster FULL=1`"
    if current == said[1] or current in dict(WAIVER.findall(page)):
        return ""
    return (
        f"docs/cluster-log.md must be of this tree, whose hash is {current}, got {said[1]}; run `make test-cluster "
        f"FULL=1`, or add a line `- waived: `{current}`: why the run would tell the same`"
    )


def list_changes(commit: str, root: Path = ROOT) -> list[str]:
    """List files that images are made of, and that differ between the tree and what the images say of their commit."""
    if "modified" in commit:
        return [commit]
    return _run_git(root, "diff", "--name-only", commit, "--", *IMAGE_SOURCES, ":!deploy/helm/values.yaml").splitlines()


def _run_git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", root, *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.stdout.write(f"{hash_sources()}\n")
    sys.exit(find_problem(LOG.read_text(encoding="utf-8"), hash_sources()) or None)
