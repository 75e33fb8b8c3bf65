"""What was found of references before, so that a data set is checked once.

    $SPECRL_CACHE_DIR/references/DIGEST.jsonl      [key of a reference, why it is refused], a line each

The digest is that of the verifier's section, its limits and the grader's code, so that a file says what this grader
would find today. References are found one by one: whoever corrects a line, or stops a check, does not begin anew.
Invariant: the cache may be deleted at any time. What cannot be read or written is not there, and no error. Several
processes may add to a file; a line is written at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import structlog

from specrl.files import cache_folder
from specrl.spec.data import RewardPool, Rewards

_LIBRARIES = ("math-verify", "latex2sympy2-extended", "sympy", "google-re2", "jsonschema-rs")
"""Whose versions decide what a verifier can read."""

log = structlog.get_logger(__name__)


class ReferenceCache:
    """The findings of one verifier."""

    def __init__(self, rewards: Rewards, limits: RewardPool) -> None:
        """Read what there is."""
        self._path = cache_folder() / "references" / f"{_digest(rewards, limits)}.jsonl"
        self.refusals = read_refusals(self._path)
        """Key of a reference to why it is refused; empty for one that is sound."""

    def add(self, refusals: Mapping[str, str]) -> None:
        """Keep these findings, too."""
        self.refusals.update(refusals)
        content = "".join(json.dumps(item) + "\n" for item in refusals.items()).encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                os.write(handle, content)
            finally:
                os.close(handle)
        except OSError as error:
            log.debug("references_not_cached", path=str(self._path), reason=str(error))


def read_refusals(path: Path) -> dict[str, str]:
    """What the file holds; lines that cannot be read are left out, as one that was cut off by a kill or a full disk."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return {}
    refusals: dict[str, str] = {}
    for line in lines:
        try:
            key, refusal = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        refusals[str(key)] = str(refusal)
    return refusals


def _digest(rewards: Rewards, limits: RewardPool) -> str:
    package = Path(__file__).parent
    known = hashlib.sha256()
    known.update(f"{rewards.model_dump_json()}\0{limits.timeout_s}\0{limits.memory_mib}\0{sys.version}".encode())
    for source in sorted(package.rglob("*.py")):
        known.update(f"\0{source.relative_to(package)}\0".encode() + source.read_bytes())
    for library in _LIBRARIES:
        known.update(f"\0{library} {metadata.version(library)}".encode())
    return known.hexdigest()[:32]
