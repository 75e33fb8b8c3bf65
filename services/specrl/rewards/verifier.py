"""What a verifier is, and what it says: called by `pool.VerifierPool`, in processes that it can kill.

Invariant: an answer cannot choose whether it is graded. Fault is decided by the reference. Once the reference has been
read without the answer, whatever the answer causes is a verdict of 0. `Ungraded` is for what no answer can cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np


@dataclass(frozen=True)
class Verdict:
    """A verifier's verdict on one completion. Raises ValueError for a reward that is not finite in float32."""

    reward: float
    """Finite in float32, the type that advantages are computed in."""
    extracted: str | None = None
    """The answer that was found in the completion. None: none was found, and the reward is 0; or the verifier judges
    the whole completion."""
    reason: str = ""
    """Why the reward is what it is, for people who see the completion, too: one line."""
    error: str = ""
    """What was raised while the answer was read, by type and place: `KeyError at my_rewards.py:12`. The reward is 0
    then. Counted and logged, so it quotes no completion."""

    def __post_init__(self) -> None:
        with np.errstate(over="ignore"):
            is_finite = np.isfinite(np.float32(self.reward))
        if not is_finite:
            raise ValueError(f"a reward must be finite in float32, got {self.reward}")


NO_ANSWER = Verdict(0.0, None, "no answer found")
"""The completion has no answer that the verifier understands. Its share is counted per step."""


class Ungraded(Exception):
    """Raised by a verifier when there is no verdict for a reason that no answer can cause, as a judge that is away.

    The rollout is sampled again. The message is logged, so it must not quote prompts or completions.
    """


class Verifier(Protocol):
    """Grades completions. Instances hash, and pickle: they run in other processes."""

    preloads: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to load; the pool loads them once for all of its workers."""
    extracts: ClassVar[bool] = True
    """Whether it looks for an answer in the completion. A verdict that has none then counts as "no answer found"."""

    def ready(self) -> None:
        """Prepare a worker before its first verdict. Raises SpecInvalid when it cannot work on this machine."""
        return

    def check_reference(self, reference: str) -> None:
        """Raise VerifierFailed when no completion could be compared with this reference.

        Nobody looks for a fault of the reference later: what `grade` raises is the answer's doing.
        """
        return

    def try_reference(self, reference: str, solution: str | None) -> None:
        """Raise VerifierFailed when the reference fails where it is tried: for what takes more than reading it.

        solution: the data's own, which must be right; None where it has none. Called once before the run, after
        `check_reference`. Raises Ungraded when it cannot be tried for a reason that is not the reference's.
        """
        return

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        """The verdict on one completion.

        row: the other columns of the prompt's record, and `prompt`, the text that the policy was given. Raises Ungraded
        when there is no verdict for a reason that no answer can cause. What else it raises is a verdict of 0
        (`judging.judge`).
        """
        raise NotImplementedError

    def reward(self, reference: str, completion: str) -> float:
        """The reward alone, of a completion of a record without other columns."""
        return self.grade(reference, completion, {}).reward
