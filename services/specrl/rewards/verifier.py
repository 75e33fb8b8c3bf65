"""The protocol of a verifier and the verdict that it returns. `pool.VerifierPool` calls verifiers in worker processes.

Invariant: an answer cannot avoid its grade. A verifier first reads the reference without the answer; if that fails, the
reference is at fault. After that, every failure counts against the answer and gives reward 0. `Ungraded` is reserved
for failures that no answer can cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from specrl.spec.data import Isolation


@dataclass(frozen=True)
class Verdict:
    """The grade of one completion. Raises ValueError for a reward that is not finite in float32."""

    reward: float
    """Finite in float32, since advantages are computed in that type."""
    extracted: str | None = None
    """The answer found in the completion. None if no answer was found (the reward is 0), or if the verifier grades the
    whole completion and does not look for one."""
    reason: str = ""
    """One line that explains the reward. It is shown beside the completion and may quote it."""
    error: str = ""
    """Type and location of the exception that the answer caused: `KeyError at my_rewards.py:12`. The reward is 0 then.
    It becomes a log field and a count, so it never quotes the completion."""

    def __post_init__(self) -> None:
        with np.errstate(over="ignore"):  # 1e39 overflows to inf, which the next line reports
            is_finite = np.isfinite(np.float32(self.reward))
        if not is_finite:
            raise ValueError(f"a reward must be finite in float32, got {self.reward}")


NO_ANSWER = Verdict(0.0, None, "no answer found")
"""The completion has no answer that the verifier understands. Each step reports the share of such rollouts."""


class Ungraded(Exception):
    """Raised by a verifier or tool that cannot work for a reason that no answer can cause, such as a judge being down.

    The rollout is sampled again. The message is logged, so it must not quote prompts or completions.
    """


@dataclass(frozen=True)
class SandboxChoice:
    """The isolation of one sandbox.

    path: its section in the run file. reason: why `isolation: Auto` did not take Namespaces; "" if it did, or if the
    run file names the isolation.
    """

    path: str
    isolation: Isolation
    reason: str = ""

    def describe_notice(self) -> str:
        """Describe a choice that a user should know of; "" for others."""
        if not self.reason:
            return ""
        return f"{self.path} runs programs with isolation: {self.isolation}, the weaker one, since {self.reason}"


class WorkerSetup(Protocol):
    """How to set up a worker of a pool: verifiers and tools implement it. Instances must pickle."""

    @property
    def preloads(self) -> tuple[str, ...]:
        """Modules that are slow to import. The fork server imports them once for all workers of a pool."""
        return ()

    def settle_on_machine(self) -> Self:
        """Return the same work, with the choices made that depend on the machine. Called once, in a worker.

        Raises SpecInvalid if it cannot work on this machine.
        """
        return self

    def list_sandboxes(self) -> tuple[SandboxChoice, ...]:
        """List the sandboxes that it runs programs in."""
        return ()

    def prepare_worker(self) -> None:
        """Prepare a worker before its first question. Raises SpecInvalid if it cannot work on this machine."""
        return


class Verifier(WorkerSetup, Protocol):
    """Grades completions. Instances must hash, since caches key on them.

    Implemented by the modules of `math`, `text` and `code`, and by `custom` for a user's function.
    """

    extracts: ClassVar[bool] = True
    """Whether the verifier looks for an answer in the completion. If so, a verdict without one counts as "no answer
    found"."""
    checks_references: ClassVar[bool] = True
    """Whether the verifier can tell from a reference alone that no completion can be graded with it."""

    def check_reference(self, reference: str) -> None:
        """Check that completions can be compared with this reference. Raises VerifierFailed if not.

        This is the only check of the reference: whatever `grade` raises later is attributed to the answer.
        """
        return

    def try_reference(self, reference: str, solution: str | None) -> None:
        """Run the checks that are too slow for `check_reference`, such as running tests. Called once, before the run.

        solution: the data set's own solution, which must get reward 1; None if the data set has none.
        Raises VerifierFailed if the reference or the solution fails, Ungraded if the machine is at fault.
        """
        return

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        """Grade one completion.

        row: the other columns of the prompt's record, and `prompt`, the text that the policy was given.
        Raises Ungraded if it cannot grade for a reason that no answer can cause. `judging.judge_completion` turns every
        other exception into reward 0.
        """
        raise NotImplementedError

    def compute_reward(self, reference: str, completion: str) -> float:
        """Grade a completion of a record without other columns, and return only the reward."""
        return self.grade(reference, completion, {}).reward
