"""Verifier `code`: the answer's program, run with the prompt's tests where it can do no harm and tell no lies.

Stage 3 of the loop; `pool.VerifierPool` calls `Code.grade` in its workers. Invariants (docs/decisions/0008): what was
expected never enters the process that the answer runs in, and what that process writes is a claim to be compared, never
a verdict. An answer that breaks a limit, crashes or says nothing is wrong (0). A sandbox that cannot be made, tests
that cannot judge, or a machine too busy to tell are VerifierFailed. When `grade` returns, nothing that it started
lives. Its own time limit ends it before the pool's would.

The forms of a reference are in `references`, what is taken for the answer in `answers`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrl.errors import VerifierFailed
from specrl.rewards.code.answers import answer_code
from specrl.rewards.code.comparison import same_text
from specrl.rewards.code.machine_check import check_machine
from specrl.rewards.code.references import FunctionTests, ProgramTests, read_tests
from specrl.rewards.code.trial import Sandbox, Trial
from specrl.rewards.sandbox.confine import CannotConfine
from specrl.rewards.verifier import NO_ANSWER, Ungraded, Verdict, Verifier
from specrl.spec.data import CodeVerifier


@dataclass(frozen=True)
class Code(Verifier):
    """1 for an answer that passes all of its prompt's tests."""

    sandbox: Sandbox

    @classmethod
    def of(cls, section: CodeVerifier) -> Code:
        return cls(Sandbox.of(section, "rewards.code"))

    def ready(self) -> None:
        check_machine(self.sandbox)

    def check_reference(self, reference: str) -> None:
        read_tests(reference)

    def try_reference(self, reference: str, solution: str | None) -> None:
        """Load the tests in the sandbox without an answer, and judge the data's own solution if there is one.

        Costs a start of the sandbox or more. Raises VerifierFailed with a sentence when the reference or the solution
        is at fault, and Ungraded when the machine is.
        """
        self.check_reference(reference)
        if solution is not None and self.grade(reference, solution, {}).reward != 1.0:
            raise VerifierFailed("the data's own solution must pass its tests, got a failure; correct the data set")

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        tests, answer = read_tests(reference), answer_code(completion)
        if not answer.strip():
            return NO_ANSWER
        trial = Trial(self.sandbox)
        try:
            if isinstance(tests, ProgramTests):
                passed = all(same_text(trial.output(answer, given), out) for given, out in tests.cases)
            elif isinstance(tests, FunctionTests):
                passed = trial.call_function(answer, tests)
            else:
                passed = trial.run_tests(answer, tests)
            return Verdict(float(passed), answer, "passes its tests" if passed else "fails a test")
        except CannotConfine as error:
            raise Ungraded(f"the sandbox must start, got {error}") from error
