"""Verifier `code`: the answer's program, run with the prompt's tests where it can do no harm and tell no lies.

Stage 3 of the loop; `pool.VerifierPool` calls `Code.grade` in its workers. Invariants (docs/decisions/0008): what was
expected never enters the process that the answer runs in, and what that process writes is a claim to be compared, never
a verdict. Fault is decided by the reference. It is read, and tests in Python are loaded, without an answer. From there
on an answer that breaks a limit, crashes, lies or says nothing is wrong (0). Ungraded are a sandbox that does not start
and a machine that is too busy, which no answer can cause. When `grade` returns, nothing that it started lives. Its own
time limit ends it before the pool's would.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specrl.errors import VerifierFailed
from specrl.rewards import question_time
from specrl.rewards.code.answers import program_blocks
from specrl.rewards.code.machine_check import check_machine
from specrl.rewards.code.references import FunctionTests, ProgramTests, PythonTests, Tests, read_tests
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
        tests = read_tests(reference)
        fault = _fault(self.sandbox, tests)
        if fault:
            raise VerifierFailed(fault)
        if solution is not None:
            verdict = self.grade(reference, solution, {})
            if verdict.reward != 1.0:
                rule = f"the data's own solution must pass its tests, got: {verdict.reason}"
                raise VerifierFailed(f"{rule}; correct the data set")

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        tests = read_tests(reference)
        fault = _fault(self.sandbox, tests)
        if fault:
            raise Ungraded(fault)
        blocks = program_blocks(completion)
        if not blocks:
            return NO_ANSWER
        try:
            trial = Trial(self.sandbox)
            program = blocks[0] if len(blocks) == 1 else trial.choose(blocks, tests.names)
            reason = _judge(trial, program, tests)
        except CannotConfine as error:
            raise Ungraded(f"the sandbox must start, got {error}") from error
        return Verdict(0.0 if reason else 1.0, program, reason or "passes its tests")


def _judge(trial: Trial, program: str, tests: Tests) -> str:
    if isinstance(tests, ProgramTests):
        return trial.run_program(program, tests)
    if isinstance(tests, FunctionTests):
        return trial.call_function(program, tests)
    return trial.run_tests(program, tests)


def _fault(sandbox: Sandbox, tests: Tests) -> str:
    """Why the tests cannot judge any answer; empty when they can."""
    return _fault_of_python(sandbox, tests) if isinstance(tests, PythonTests) else ""


@lru_cache(maxsize=1024)  # the rollouts of a group share their tests, and each worker loads them once
def _fault_of_python(sandbox: Sandbox, tests: PythonTests) -> str:
    """Load them without an answer. The time for it is not the answer's."""
    began = time.monotonic()
    try:
        reason = Trial(sandbox).load_tests(tests)
    except CannotConfine as error:
        raise Ungraded(f"the sandbox must start, got {error}") from error
    finally:
        question_time.add_waiting(time.monotonic() - began)
    if not reason:
        return ""
    return f"the tests must load and use the answer, got {' '.join(reason.split())[:300]}; correct the data set"
