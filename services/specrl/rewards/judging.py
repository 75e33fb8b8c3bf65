"""Grade one completion in a worker, and decide whether the reference or the answer is at fault when grading fails.

Invariant: an answer cannot avoid its grade. An exception while the reference is read alone is the reference's fault.
Any later exception is the answer's fault and gives reward 0. `pool.VerifierPool` calls this module in its workers. The
pool applies the same rule to answers that time out or crash their worker.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from specrl.rewards.verifier import Ungraded, Verdict, Verifier

_PACKAGE = str(Path(__file__).parents[1])  # services/specrl, to tell our stack frames from the user's

_LONGEST_ERROR = 120
"""Characters of an exception's type and location. The text labels a count per step, so it must stay short."""

_LONGEST_MESSAGE = 300
"""Characters kept of an exception's message, which may quote a whole completion."""


@lru_cache(maxsize=1024)  # the rollouts of a group share their reference, and so do epochs of a small data set
def read_reference_alone(verifier: Verifier, reference: str) -> None:
    """Check the reference without an answer. Raises what the verifier raises, usually VerifierFailed."""
    verifier.check_reference(reference)


def judge_completion(verifier: Verifier, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
    """Grade one completion. If the verifier raises while it reads the answer, the verdict is 0 and has an `error`.

    Raises whatever reading the reference alone raises, and Ungraded if the verifier raises it. MemoryError passes
    through as well: earlier answers may have used the memory of this process, so this answer may not be at fault.
    """
    read_reference_alone(verifier, reference)  # type: ignore[arg-type] # the protocol requires verifiers to hash
    try:
        return verifier.grade(reference, completion, row)
    except Ungraded as error:
        raise Ungraded(str(error)) from None  # a user's subclass could not be unpickled in the coordinator
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - an answer may cause SystemExit and panics of Rust code, too
        fault = describe_exception(error)
        return Verdict(0.0, reason=f"{fault}: {read_message(error)}", error=fault)


def describe_exception(error: BaseException) -> str:
    """Format an exception as `Type at file.py:line`, without its message, which may quote a prompt or completion.

    The location is in the first file outside this package on the stack, at its deepest frame. If a user's function
    calls a library that raises, this is the user's line, not the library's.
    """
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    called = next((file for file, _ in lines if not file.startswith(_PACKAGE)), None)
    file, line = next((place for place in reversed(lines) if place[0] == called), lines[-1])
    return f"{type(error).__name__} at {Path(file).name}:{line}"[:_LONGEST_ERROR]


def read_message(error: BaseException) -> str:
    """Return the first characters of an exception's message, in one line."""
    try:
        return " ".join(str(error)[:_LONGEST_MESSAGE].split())
    except Exception:  # noqa: BLE001 - __str__ of a user's exception may raise
        return ""
