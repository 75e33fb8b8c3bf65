"""One answer before its tests, in the sandbox."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specrl.errors import VerifierFailed
from specrl.rewards.code.comparison import same_value
from specrl.rewards.code.references import FunctionTests, PythonTests
from specrl.rewards.sandbox import confine
from specrl.rewards.sandbox.confine import CannotConfine, Confined, Confinement, Program
from specrl.rewards.sandbox.inside.codec import Link, decode, encode
from specrl.rewards.sandbox.inside.tests import BROKEN, FAILED, PASSED
from specrl.spec.data import SandboxLimits


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
                    same_value(_call(link, tests.name, arguments), expected) for arguments, expected in tests.cases
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


def _call(link: Link, name: str, arguments: list[Any]) -> Any:
    """A call's result. Raises LookupError when the answer raised instead."""
    link.send({"call": name, "arguments": encode(arguments), "named": encode({})})
    return decode(link.receive()["result"])


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
