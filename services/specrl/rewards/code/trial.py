"""One answer before its tests, in the sandbox, until the time for all of them is up.

Called by `verifier.Code` and by `specrl.tools`, in workers. What comes out of a sandbox is a claim: it is read up to a
size, compared, and never run, unpickled or hashed. When a method returns, nothing that it started lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from specrl.rewards.code.comparison import same_text, same_value
from specrl.rewards.code.references import FunctionTests, ProgramTests, PythonTests
from specrl.rewards.code.time_limit import TimeLimit
from specrl.rewards.sandbox import confine
from specrl.rewards.sandbox.confine import Confined, Confinement, Program
from specrl.rewards.sandbox.inside.codec import Link, Malformed, encode
from specrl.rewards.sandbox.inside.load_tests import SOUND
from specrl.rewards.sandbox.inside.tests import PASSED, UNPLAIN
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
    """Methods raise CannotConfine when the sandbox does not start, and Ungraded on a machine that is too busy.

    Those that judge return why the answer is wrong; nothing when it is right.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._limits = sandbox.limits
        self._largest = sandbox.output_bytes
        self._time = TimeLimit(sandbox.wall_s)

    def run(self, script: str, source: str, standard_input: str, arguments: Sequence[str] = ()) -> Run:
        """Run `source` by a script of `sandbox/inside`."""
        output, theirs = os.pipe()
        with _owned(output), _content(standard_input) as given, _content(source) as file:
            with _owned(theirs):
                program = Program(script, (given, theirs, None, file), tuple(arguments))
                process = confine.start(program, self._limits)
            try:
                with self._time.watch(process):
                    said, broken = self._read(output, process)
            finally:
                ending = process.end()
        return Run(said, ending.status, broken)

    def choose(self, blocks: Sequence[str], names: Sequence[str]) -> str:
        """The block that is the program; the last one where choosing breaks a limit."""
        run = self.run("choose.py", json.dumps(list(blocks)), "", names)
        place = int(run.said) if run.is_success and run.said.isdigit() else -1
        return blocks[place]

    def run_program(self, answer: str, tests: ProgramTests) -> str:
        """Judge what the answer prints, case by case."""
        for number, (given, expected) in enumerate(tests.cases, 1):
            run = self.run("program.py", answer, given)
            if not run.is_success:
                return f"case {number} of {len(tests.cases)}: {run.how}"
            if not same_text(run.said.decode(errors="replace"), expected):
                return f"case {number} of {len(tests.cases)}: another output"
        return ""

    def call_function(self, answer: str, tests: FunctionTests) -> str:
        """Judge what the answer's function returns, call by call.

        Where each expected result is a list of one, the results may all be the lists or all be what is in them.
        """
        forms = {False, True} if tests.may_be_wrapped else {False}
        with _content(answer) as source, self._functions(source) as connection:
            link = Link(connection, self._largest, self._wait)
            try:
                if _object(link.receive()).get("failed") != "":
                    return "it raises when it is loaded"
                for number, (arguments, expected) in enumerate(tests.cases, 1):
                    link.send({"call": tests.name, "of": None, "arguments": encode(arguments), "named": encode({})})
                    reply = _object(link.receive())
                    if "result" not in reply:
                        return f"case {number} of {len(tests.cases)}: raises, or returns no plain data"
                    given = reply["result"]
                    forms = {form for form in forms if same_value(given, expected[0] if form else expected)}
                    if not forms:
                        return f"case {number} of {len(tests.cases)}: another result"
            except TimeoutError:
                return self._is_over_time
            except (EOFError, OSError, Malformed):
                return "its process ended, or sent no reply"
        return ""

    def run_tests(self, answer: str, tests: PythonTests) -> str:
        """Judge by tests in Python, which `load_tests` has loaded without an answer before."""
        with _content(answer) as source, _content(tests.source) as judge, ExitStack() as stack:
            theirs = stack.enter_context(self._functions(source))
            arguments = (str(self._largest), *tests.names)
            program = Program("tests.py", (None, None, None, theirs.fileno(), judge), arguments)
            judging = confine.start(program, self._limits)
            theirs.close()
            try:
                with self._time.watch(judging):
                    poll = select.poll()
                    poll.register(judging.report, select.POLLIN)
                    has_ended = bool(self._time.poll(poll))
            finally:
                status = judging.end().status
        if status == PASSED:
            return ""
        if status == UNPLAIN:
            return "the tests pass it more than plain data"
        return "fails a test" if has_ended else self._is_over_time

    def load_tests(self, tests: PythonTests) -> str:
        """Load tests in Python without an answer; why they cannot judge any, or nothing."""
        run = self.run("load_tests.py", tests.source, "", tests.names)
        said = run.said.decode(errors="replace")
        if not run.is_success or not said:
            return f"a program that {run.how} before it used the answer"
        return "" if said == SOUND else said

    @property
    def _is_over_time(self) -> str:
        return f"it ran longer than {self._time.wall_s} s"

    @contextmanager
    def _functions(self, source: int) -> Iterator[socket.socket]:
        """The answer's functions, behind a socket."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                descriptors = (None, None, None, theirs.fileno(), source)
                process = confine.start(Program("functions.py", descriptors, (str(self._largest),)), self._limits)
            try:
                with self._time.watch(process):
                    yield ours
            finally:
                process.end()

    def _read(self, output: int, process: Confined) -> tuple[bytes, str]:
        """What comes out until the program ends, and the limit it broke: there was too much, or it took too long."""
        said = bytearray()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        poll.register(process.report, select.POLLIN)
        while len(said) <= self._largest:
            ready = dict(self._time.poll(poll))
            if not ready:
                return bytes(said), f"ran longer than {self._time.wall_s} s"
            if output in ready:
                part = os.read(output, 1 << 16)
                said += part
                if not part:
                    poll.unregister(output)
            elif process.report in ready:  # and nothing is left to read
                return bytes(said), ""
        return bytes(said[: self._largest]), f"printed more than {self._largest} bytes"

    def _wait(self, connection: socket.socket, is_sending: bool) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLOUT if is_sending else select.POLLIN)
        if not self._time.poll(poll):
            raise TimeoutError


def _object(reply: Any) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise Malformed("a reply must be an object")
    return reply


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
