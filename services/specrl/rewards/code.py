"""Verifier `code`: the answer's program, run with the prompt's tests where it can do no harm and tell no lies.

Stage 3 of the loop; `pool.VerifierPool` calls `Code.reward` in its workers. Invariants (docs/decisions/0008): what was
expected never enters the process that the answer runs in, and what that process writes is a claim to be compared, never
a verdict. An answer that breaks a limit, crashes or says nothing is wrong (0). A sandbox that cannot be made, tests
that cannot judge, or a machine too busy to tell are VerifierFailed. When `reward` returns, nothing that it started
lives. Its own time limit ends it before the pool's would.

A reference is one of

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                         a program: standard input and output
    {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}              a function (or method of `Solution`)
    assert add(1, 2) == 3                                               tests in Python, run apart from the answer
"""

from __future__ import annotations

import ast
import builtins
import fcntl
import json
import math
import os
import re
import select
import signal
import socket
import symtable
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from specrl.errors import Problem, SpecInvalid, VerifierFailed
from specrl.rewards.sandbox import confine
from specrl.rewards.sandbox.confine import CannotConfine, Confined, Confinement, Program
from specrl.rewards.sandbox.inside.codec import Link, decode, encode
from specrl.rewards.sandbox.inside.tests import BROKEN, FAILED, PASSED
from specrl.rewards.verifier import NO_ANSWER, Ungraded, Verdict, Verifier
from specrl.spec.data import CodeVerifier, Isolation, SandboxLimits

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+-]*)[^\n]*$", re.MULTILINE)
_PYTHON = {"", "python", "python3", "py"}
_TRIAL_S = 30
"""Longest trial of the sandbox on a loaded machine, in seconds, also of the processor; 0.1 on an idle one."""
_CLOSE = 1e-9
"""Relative and absolute difference at which two floats are the same result."""


@dataclass(frozen=True)
class ProgramTests:
    """Standard input, and the output that is expected."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FunctionTests:
    """Arguments of a function, and the results that are expected."""

    name: str
    cases: tuple[tuple[list[Any], Any], ...]


@dataclass(frozen=True)
class PythonTests:
    """Tests in Python, and the names in them that the answer must define."""

    source: str
    names: tuple[str, ...]


Tests = ProgramTests | FunctionTests | PythonTests


@dataclass(frozen=True)
class Sandbox:
    """What a program may do and take; `path` is where the run file says so."""

    limits: Confinement
    wall_s: int
    output_bytes: int
    path: str

    @classmethod
    def of(cls, section: SandboxLimits, path: str) -> Sandbox:
        """As the run file has it."""
        limits = Confinement(
            section.isolation,
            section.cpu_s,
            section.memory_mib * 2**20,
            section.processes,
            section.scratch_mib * 2**20,
            section.packages,
        )
        return cls(limits, section.wall_s, section.output_kib * 2**10, path)

    def try_out(self) -> None:
        """Run a program that tries what it must not be able to do. Raises SpecInvalid when it can, or cannot start.

        It has time of its own: whether the machine isolates is not the question of how long an answer may take.
        """
        packages = self.limits.packages
        if packages is not None and not Path(packages).is_dir():
            rule = f"must be a folder, got {packages}"
            raise SpecInvalid((Problem(f"{self.path}.packages", rule, "check the path, or leave it out"),))
        patient = replace(self, wall_s=_TRIAL_S, limits=replace(self.limits, cpu_s=_TRIAL_S))
        try:
            run = Trial(patient).run("program.py", _PROBE.format(path=__file__), "")
        except VerifierFailed as error:
            raise SpecInvalid((self._busy(str(error)),)) from error
        except CannotConfine as error:
            if isinstance(error.__cause__, TimeoutError):
                raise SpecInvalid((self._busy(str(error)),)) from error
            raise SpecInvalid((self._refusal(str(error)),)) from error
        if not run.is_success:
            raise SpecInvalid((self._busy(f"a trial program that {run.how}"),))
        if run.said != b"confined":
            raise SpecInvalid((self._refusal(f"a trial program: {run.said.decode(errors='replace')}"),))

    def _busy(self, reason: str) -> Problem:
        rule = f"must run a trial program to its end within {_TRIAL_S} s, got {reason}"
        return Problem(self.path, rule, "try again when the machine is less busy, or run elsewhere")

    def _refusal(self, reason: str) -> Problem:
        remedy = "permit what it names, or run elsewhere"
        if self.limits.isolation is Isolation.NAMESPACES:
            remedy = (
                "permit user namespaces (sysctl user.max_user_namespaces, "
                "kernel.apparmor_restrict_unprivileged_userns; in a cluster the pod's seccomp profile), or accept less "
                "with isolation: Landlock"
            )
        rule = f"must be possible on this machine, got {self.limits.isolation}: {reason}"
        return Problem(f"{self.path}.isolation", rule, remedy)


@dataclass(frozen=True)
class Run:
    """What a program printed, how it ended, and the limit that it broke, in words; its exit status, below 0 a signal's.

    status None: it was still running, and was killed.
    """

    said: bytes
    status: int | None
    broken: str = ""

    @property
    def is_success(self) -> bool:
        """Whether it came to its end by itself, with exit status 0."""
        return not self.broken and self.status == 0

    @property
    def how(self) -> str:
        """How it ended, for people."""
        if self.broken or self.status is None:
            return self.broken or "was killed"
        if self.status >= 0:
            return f"ended with exit status {self.status}"
        known = {int(number): number.name for number in signal.Signals}
        return f"was killed by {known.get(-self.status, f'signal {-self.status}')}"


@dataclass(frozen=True)
class Code(Verifier):
    """1 for an answer that passes all of its prompt's tests."""

    sandbox: Sandbox

    @classmethod
    def of(cls, section: CodeVerifier) -> Code:
        return cls(Sandbox.of(section, "rewards.code"))

    def ready(self) -> None:
        self.sandbox.try_out()

    def check_reference(self, reference: str) -> None:
        read_tests(reference)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        tests, answer = read_tests(reference), answer_code(completion)
        if not answer.strip():
            return NO_ANSWER
        trial = Trial(self.sandbox)
        try:
            if isinstance(tests, ProgramTests):
                passed = all(_same_text(trial.output(answer, given), out) for given, out in tests.cases)
            elif isinstance(tests, FunctionTests):
                passed = trial.call_function(answer, tests)
            else:
                passed = trial.run_tests(answer, tests)
            return Verdict(float(passed), answer, "passes its tests" if passed else "fails a test")
        except CannotConfine as error:
            raise Ungraded(f"the sandbox must start, got {error}") from error


class Trial:
    """One answer before its tests, until the time for all of them is up."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._limits = sandbox.limits
        self._largest = sandbox.output_bytes
        self._wall_s = sandbox.wall_s
        self._started = time.monotonic()
        self._deadline = self._started + sandbox.wall_s
        self._cpu_s = 0.0

    def output(self, answer: str, standard_input: str) -> str | None:
        """What the answer prints as a program; None when it crashes or breaks a limit."""
        run = self.run("program.py", answer, standard_input)
        return run.said.decode(errors="replace") if run.is_success else None

    def run(self, script: str, source: str, standard_input: str) -> Run:
        """Run `source` by a script of `sandbox/inside`. Raises CannotConfine, and VerifierFailed on a busy machine."""
        output, theirs = os.pipe()
        with _owned(output), _content(standard_input) as given, _content(source) as file:
            with _owned(theirs):
                process = confine.start(Program(script, (given, theirs, None, file)), self._limits)
            try:
                said, broken = self._read(output, process)
            finally:
                ending = process.end()
        self._cpu_s += ending.cpu_s
        return Run(said, ending.status, broken)

    def call_function(self, answer: str, tests: FunctionTests) -> bool:
        """Whether every call of the answer's function gives what is expected."""
        ours, theirs = socket.socketpair()
        with ours, _content(answer) as source:
            with theirs:
                process = self._start_functions(theirs, source)
            link = Link(ours, self._largest, self._deadline)
            try:
                return link.receive().get("failed") == "" and all(
                    _same_value(_call(link, tests.name, arguments), expected) for arguments, expected in tests.cases
                )
            except TimeoutError:
                self._check_fault(process)
                return False
            except (EOFError, OSError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError):
                return False  # Malformed, and what comparing absurd values can raise
            finally:
                process.end()

    def run_tests(self, answer: str, tests: PythonTests) -> bool:
        """Whether the tests pass. Raises VerifierFailed when they, and not the answer, are at fault."""
        mine, theirs = socket.socketpair()
        with _content(answer) as source, _content(tests.source) as judge:
            with mine, theirs:
                process = self._start_functions(theirs, source)
                packages_and_names = (str(self._largest), *tests.names)
                program = Program("tests.py", (None, None, None, mine.fileno(), judge), packages_and_names)
                try:
                    judging = confine.start(program, self._limits)
                except CannotConfine:
                    process.end()
                    raise
            try:
                if not self._wait(judging.report):
                    if judging.is_starved():
                        raise VerifierFailed("the tests must end in rewards.code.wallS, got neither verdict nor wait")
                    self._check_fault(process)
                    return False
            finally:
                try:
                    status = judging.end().status
                finally:
                    process.end()
        if status == PASSED:
            return True
        if status == FAILED:
            return False
        how = "need more of the answer than plain data, or an import" if status == BROKEN else f"ended with {status}"
        raise VerifierFailed(f"the tests must be able to judge, got tests that {how}; correct the data set")

    def _start_functions(self, channel: socket.socket, source: int) -> Confined:
        descriptors = (None, None, None, channel.fileno(), source)
        return confine.start(Program("functions.py", descriptors, (str(self._largest),)), self._limits)

    def _read(self, output: int, process: Confined) -> tuple[bytes, str]:
        """What comes out until the program ends, and the limit it broke: there was too much, or it took too long."""
        said = bytearray()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        poll.register(process.report, select.POLLIN)
        while len(said) <= self._largest:
            ready = dict(poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000))
            if not ready:
                self._check_fault(process)
                return bytes(said), f"ran longer than {self._wall_s} s"
            if output in ready:
                part = os.read(output, 1 << 16)
                said += part
                if not part:
                    poll.unregister(output)
            elif process.report in ready:  # and nothing is left to read
                return bytes(said), ""
        return bytes(said[: self._largest]), f"printed more than {self._largest} bytes"

    def _wait(self, report: int) -> bool:
        poll = select.poll()
        poll.register(report, select.POLLIN)
        return bool(poll.poll(max(0.0, self._deadline - time.monotonic()) * 1000))

    def _check_fault(self, process: Confined) -> None:
        """The time is up: raise VerifierFailed if the machine, and not the answer, has used it."""
        is_starved = process.is_starved()
        used_s = self._cpu_s + process.end().cpu_s
        if is_starved and used_s < min(self._limits.cpu_s, (time.monotonic() - self._started) / 2):
            raise VerifierFailed(
                f"an answer must get the processor when it could run, got {used_s:.1f} s of it in "
                f"{time.monotonic() - self._started:.0f} s; the machine is too busy: fewer workers in the pool, or a "
                "larger wallS"
            )


def answer_code(completion: str) -> str:
    """The last fenced block of Python, to the end if it is not closed; without any fence, all of it."""
    blocks: list[str] = []
    opened: tuple[str, str, int] | None = None
    has_fence = False
    for fence in _FENCE.finditer(completion):
        marks, language = fence.group(1), fence.group(2).lower()
        has_fence = True
        if opened is None:
            opened = (marks, language, fence.end() + 1)
        elif marks.startswith(opened[0]) and not language:
            if opened[1] in _PYTHON:
                blocks.append(completion[opened[2] : fence.start()])
            opened = None
    if opened is not None and opened[1] in _PYTHON:
        blocks.append(completion[opened[2] :])
    if not has_fence:
        return completion
    return blocks[-1] if blocks else ""


@lru_cache(maxsize=256)  # the rollouts of a group share their reference
def read_tests(reference: str) -> Tests:
    """The tests of a reference. Raises VerifierFailed when there are none, or they are no tests."""
    if not reference.lstrip().startswith("{"):
        return _python_tests(reference)
    try:
        found = json.loads(reference)
        inputs, outputs, name = found["inputs"], found["outputs"], found.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
            raise ValueError("as many inputs as outputs, at least one, are needed")
        if name is None:
            return ProgramTests(tuple(zip(map(_text, inputs), map(_text, outputs), strict=True)))
        if not isinstance(name, str) or not all(isinstance(arguments, list) for arguments in inputs):
            raise ValueError("a function needs a name, and a list of arguments for each call")
        return FunctionTests(name, tuple(zip(inputs, outputs, strict=True)))
    except (ValueError, KeyError, RecursionError) as error:
        raise VerifierFailed(
            f"the reference must be tests as JSON with inputs and outputs, got {error}; correct the data set"
        ) from error


def _python_tests(source: str) -> PythonTests:
    try:
        ast.parse(source)
        names = tuple(sorted(_free_names(symtable.symtable(source, "tests.py", "exec"))))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierFailed(
            f"the reference must be tests in Python, or JSON, got {error} in {source[:80]!r}; correct the data set"
        ) from error
    if not names:
        raise VerifierFailed(
            f"the tests must use something of the answer, got none in {source[:80]!r}; correct the data set"
        )
    return PythonTests(source, names)


def _free_names(module: symtable.SymbolTable) -> set[str]:
    """Names that the tests use and neither define nor find among Python's own."""
    own = {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    used: set[str] = set()
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is module or symbol.is_global()):
                used.add(symbol.get_name())
            if symbol.is_declared_global() and symbol.is_assigned():
                own.add(symbol.get_name())
    return used - own - set(dir(builtins)) - {"__name__", "__file__", "__doc__"}


def _text(value: object) -> str:
    """Lines may be given one by one."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("without fn_name, inputs and outputs must be text")
    return value


def _same_text(given: str | None, expected: str) -> bool:
    """Equality line by line, white space at the end of lines and of the output aside."""
    return given is not None and _lines(given) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _call(link: Link, name: str, arguments: list[Any]) -> Any:
    """A call's result. Raises LookupError when the answer raised instead."""
    link.send({"call": name, "arguments": encode(arguments), "named": encode({})})
    return decode(link.receive()["result"])


def _same_value(given: Any, expected: Any) -> bool:
    """Equality of a result with JSON: a tuple is a list there, keys are text, and floats are close."""
    if isinstance(given, list | tuple) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(_same_value, given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        named = {str(key): value for key, value in given.items()}
        return named.keys() == expected.keys() and all(_same_value(named[key], expected[key]) for key in named)
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float) and type(given) is not type(expected):
        given, expected = float(given), float(expected)
    if isinstance(given, float):
        return isinstance(expected, float) and math.isclose(given, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return type(given) is type(expected) and bool(given == expected)


@contextmanager
def _owned(descriptor: int) -> Iterator[None]:
    """Close a descriptor at the end."""
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _content(text: str) -> Iterator[int]:
    """A file in memory that can be read from its beginning, and never be changed."""
    file = os.memfd_create("content", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(file, "wb") as writer:
        writer.write(text.encode(errors="replace"))
        writer.flush()
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        os.lseek(file, 0, os.SEEK_SET)
        yield file


_PROBE = """
import os, socket
faults = []
try:
    open({path!r}).close()
    faults.append("can read the host's files")
except OSError:
    pass
for place in ("/", "/dev/shm", "/var/tmp"):
    try:
        open(os.path.join(place, "specrl-probe"), "w").close()
        os.unlink(os.path.join(place, "specrl-probe"))
        faults.append("can write " + place)
    except OSError:
        pass
try:
    socket.socket(socket.AF_INET).close()
    faults.append("can open internet sockets")
except OSError:
    pass
print("; ".join(faults) or "confined", end="")
"""
