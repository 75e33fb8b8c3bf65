"""Verifier `code`: runs the answer's program against the prompt's tests in a sandbox.

`pool.VerifierPool` calls `Code.grade` in its workers. Invariants (docs/decisions/0008):

- Expected results never enter the process that runs the answer. The output of that process is compared, never trusted.
- The reference is read, and tests in Python are loaded, without an answer first. After that, an answer that breaks a
  limit, crashes, forges a reply or returns nothing gets 0.
- A rollout is ungraded only if the sandbox does not start or the machine is too busy, which no answer can cause.
- When `grade` returns, every process that it started has ended. Its own time limit fires before the pool's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Self

from specrl.errors import SpecInvalid, VerifierFailed
from specrl.rewards import question_time
from specrl.rewards.code.answers import find_program_blocks
from specrl.rewards.code.machine_check import check_machine, describe_choice, settle_isolation
from specrl.rewards.code.reference_tests import FunctionTests, ProgramTests, PythonTests, Tests, read_tests
from specrl.rewards.code.sandbox_runner import SandboxOptions, SandboxRunner
from specrl.rewards.sandbox.confine import CannotConfine
from specrl.rewards.verifier import NO_ANSWER, SandboxChoice, Ungraded, Verdict, Verifier


@dataclass(frozen=True)
class Code(Verifier):
    """Gives 1 to an answer that passes all of its prompt's tests, else 0."""

    sandbox: SandboxOptions

    def settle_on_machine(self) -> Self:
        return replace(self, sandbox=settle_isolation(self.sandbox))

    def list_sandboxes(self) -> tuple[SandboxChoice, ...]:
        return (describe_choice(self.sandbox),)

    def prepare_worker(self) -> None:
        check_machine(self.sandbox)

    def check_reference(self, reference: str) -> None:
        read_tests(reference)

    def try_reference(self, reference: str, solution: str | None) -> None:
        """Load the tests in the sandbox without an answer, and run the data set's own solution if there is one.

        Raises VerifierFailed if the reference or the solution is at fault, and Ungraded if the machine is.
        """
        tests = read_tests(reference)
        fault = _find_fault(_settle(self.sandbox), tests)
        if fault:
            raise VerifierFailed(fault)
        if solution is not None:
            verdict = self.grade(reference, solution, {})
            if verdict.reward != 1.0:
                rule = f"the data's own solution must pass its tests, got: {verdict.reason}"
                raise VerifierFailed(f"{rule}; correct the data set")

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        tests = read_tests(reference)
        sandbox = _settle(self.sandbox)
        fault = _find_fault(sandbox, tests)
        if fault:
            raise Ungraded(fault)
        blocks = find_program_blocks(completion)
        if not blocks:
            return NO_ANSWER
        try:
            trial = SandboxRunner(sandbox)
            program = blocks[0] if len(blocks) == 1 else trial.choose_block(blocks, tests.required_names)
            reason = _run_tests(trial, program, tests)
        except CannotConfine as error:
            raise Ungraded(f"the sandbox must start, got {error}") from error
        return Verdict(0.0 if reason else 1.0, program, reason or "passes its tests")


def _settle(sandbox: SandboxOptions) -> SandboxOptions:
    """Choose the isolation if nobody has yet. A pool has: then this returns at once."""
    try:
        return settle_isolation(sandbox)
    except SpecInvalid as error:
        raise Ungraded(f"the sandbox must start, got {error}") from error


def _run_tests(trial: SandboxRunner, program: str, tests: Tests) -> str:
    if isinstance(tests, ProgramTests):
        return trial.run_program(program, tests)
    if isinstance(tests, FunctionTests):
        return trial.call_function(program, tests)
    return trial.run_tests(program, tests)


def _find_fault(sandbox: SandboxOptions, tests: Tests) -> str:
    """Return why the tests cannot test any answer, or "" if they can. Only tests in Python need to be loaded for it."""
    return _find_python_fault(sandbox, tests) if isinstance(tests, PythonTests) else ""


@lru_cache(maxsize=1024)  # the rollouts of a group share their tests, and each worker loads them once
def _find_python_fault(sandbox: SandboxOptions, tests: PythonTests) -> str:
    """Load tests in Python without an answer, and return why they cannot test any, or ""."""
    began = time.monotonic()
    try:
        reason = SandboxRunner(sandbox).load_tests(tests)
    except CannotConfine as error:
        raise Ungraded(f"the sandbox must start, got {error}") from error
    finally:
        # Loading the tests must not use up the time of the answer that happens to be first.
        question_time.add_waiting(time.monotonic() - began)
    if not reason:
        return ""
    return f"the tests must load and use the answer, got {' '.join(reason.split())[:300]}; correct the data set"
