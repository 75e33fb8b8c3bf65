"""A cache of reference checks on disk, so that each reference is checked only once per verifier.

    $SPECRL_CACHE_DIR/references/DIGEST.jsonl      one line per reference: [key, why it is refused or ""]

The digest covers the verifier's section, its limits, the code and libraries that grade, and the files of the packages
that programs may import. So a file never holds results of another verifier or version. Each reference has its own
entry: after a corrected record or an interrupted check, only the missing references are checked.
Invariant: the cache may be deleted at any time, and I/O errors only make it smaller. Several processes may append to
one file, since each batch is a single write.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import structlog

from specrl.files import JSON_BYTES, cache_folder, make_private_folder, read_bytes
from specrl.spec.data import RewardPool, VerifierSection

_LIBRARIES = ("latex2sympy2-extended", "sympy", "google-re2", "jsonschema-rs")
"""Libraries whose version affects which references a verifier accepts. Every installation has them."""

log = structlog.get_logger(__name__)


class ReferenceCache:
    """The cached results of one verifier."""

    def __init__(self, section: VerifierSection, limits: RewardPool) -> None:
        """Read the file of this verifier, if it exists."""
        self._path = cache_folder() / "references" / f"{_digest_verifier(section, limits)}.jsonl"
        self.refusals = read_refusals(self._path)
        """Maps the key of a reference to the reason why it is refused, "" if it is accepted."""

    def add_refusals(self, refusals: Mapping[str, str]) -> None:
        """Add results to memory and append them to the file. A failed write is logged and otherwise ignored."""
        self.refusals.update(refusals)
        # One unbuffered write to a file opened with O_APPEND, so that lines of several processes do not mix.
        content = "".join(json.dumps(item) + "\n" for item in refusals.items()).encode()
        try:
            make_private_folder(self._path.parent)  # reasons quote references
            with self._path.open("ab", buffering=0) as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(content)
        except OSError as error:
            log.debug("references_not_cached", path=str(self._path), reason=str(error))


def read_refusals(path: Path) -> dict[str, str]:
    """Read a cache file. Skips malformed lines: a kill or a full disk may have cut one off."""
    try:
        lines = read_bytes(path, JSON_BYTES).splitlines()
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


def _digest_verifier(section: VerifierSection, limits: RewardPool) -> str:
    package = Path(__file__).parents[1]  # all of `rewards`, since any of its modules may change a result
    known = hashlib.sha256()
    known.update(
        f"{section.model_dump_json(exclude={'sum'})}\0{limits.timeout_s}\0{limits.memory_mib}\0{sys.version}".encode()
    )
    for source in sorted(package.rglob("*.py")):
        known.update(f"\0{source.relative_to(package)}\0".encode() + source.read_bytes())
    for library in _LIBRARIES:
        known.update(f"\0{library} {metadata.version(library)}".encode())
    if section.code is not None and section.code.packages is not None:
        for path in sorted(Path(section.code.packages).rglob("*")):
            with suppress(OSError):
                found = path.lstat()
                known.update(f"\0{path}\0{found.st_size}\0{found.st_mtime_ns}".encode(errors="surrogateescape"))
    return known.hexdigest()[:32]
