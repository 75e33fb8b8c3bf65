"""One verdict, in a worker: the reference is read first, and then whatever the answer causes is a verdict of 0.

Invariant: an answer cannot choose whether it is graded. The fault is the reference's only while the reference is read
alone; later it is the answer's, whatever is raised. `pool.VerifierPool` calls this in its workers, and does the same
for an answer that takes too long or ends its worker.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from specrl.rewards.verifier import Ungraded, Verdict, Verifier

_PACKAGE = str(Path(__file__).parents[1])
_LONGEST_ERROR = 120
"""Letters of a type and a place, which label a metric."""
_LONGEST_WORDS = 300
"""Letters of an exception's message, which may quote a whole completion."""


@lru_cache(maxsize=1024)  # the rollouts of a group share their reference, and so do epochs of a small data set
def read_reference(verifier: Verifier, reference: str) -> None:
    """Read the reference without an answer. Raises what the verifier raises, as a rule VerifierFailed."""
    verifier.check_reference(reference)


def judge(verifier: Verifier, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
    """The verdict on one completion. It has an `error` when the verifier raised something while it read the answer.

    Raises what reading the reference alone raises; Ungraded when the verifier does; and MemoryError, which may be for
    what earlier answers have left in this process.
    """
    read_reference(verifier, reference)  # type: ignore[arg-type] # the interface asks that verifiers hash
    try:
        return verifier.grade(reference, completion, row)
    except Ungraded as error:
        raise Ungraded(str(error)) from None  # a subclass of the user's could not be unpickled elsewhere
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - an answer may cause any: SystemExit too, and the panics of Rust
        return Verdict(0.0, reason=f"{raised(error)}: {_words(error)}", error=raised(error))


def raised(error: BaseException) -> str:
    """What was raised, and where: not its words, which may quote a prompt or a completion.

    The place is the last line of the file that was called from this package: a user's own line, where that line calls a
    library which raises.
    """
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    called = next((file for file, _ in lines if not file.startswith(_PACKAGE)), None)
    file, line = next((place for place in reversed(lines) if place[0] == called), lines[-1])
    return f"{type(error).__name__} at {Path(file).name}:{line}"[:_LONGEST_ERROR]


def _words(error: BaseException) -> str:
    try:
        return " ".join(str(error)[:_LONGEST_WORDS].split())
    except Exception:  # noqa: BLE001 - a class of the user's may fail even here
        return ""
