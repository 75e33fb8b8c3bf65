"""Run one answer against its tests in the sandbox, within one time limit for all of them.

Called by `verifier.Code` and by `specrl.agent_tools`, in workers. Invariants: the output of a sandbox is untrusted. It
is read up to a maximum size and compared, and never run, unpickled or hashed. When a method returns, every process that
it started has ended.
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

from specrl.rewards.code.reference_tests import FunctionTests, ProgramTests, PythonTests
from specrl.rewards.code.result_comparison import is_same_text, is_same_value
from specrl.rewards.code.time_limit import TimeLimit
from specrl.rewards.sandbox import confine
from specrl.rewards.sandbox.confine import ConfinedProgram, ConfinementLimits, SandboxProgram
from specrl.rewards.sandbox.inside.codec import Link, Malformed, encode
from specrl.rewards.sandbox.inside.load_tests import SOUND
from specrl.rewards.sandbox.inside.tests import PASSED, UNPLAIN
from specrl.spec.data import SandboxLimits


@dataclass(frozen=True)
class SandboxOptions:
    """The limits of sandboxed programs.

    wall_s: for all tests of one answer together. path: the section of the run file, for messages. weaker_because: why
    `isolation: Auto` took Landlock; "" if it did not (`machine_check`).
    """

    limits: ConfinementLimits
    wall_s: int
    output_bytes: int
    path: str
    weaker_because: str = ""

    @classmethod
    def from_section(cls, section: SandboxLimits, path: str) -> SandboxOptions:
        """Build the limits from a section of the run file."""
        limits = ConfinementLimits(
            section.isolation,
            section.cpu_s,
            section.memory_mib * 2**20,
            section.processes,
            section.scratch_mib * 2**20,
            section.packages,
        )
        return cls(limits, section.wall_s, section.output_kib * 2**10, path)


@dataclass(frozen=True)
class ProgramRun:
    """The result of running a program.

    output: the bytes that it printed. status: its exit status, negative for a signal; None if it was killed while it
    was still running. broken_limit: a description of the limit that it broke, "" for none.
    """

    output: bytes
    status: int | None
    broken_limit: str = ""

    @property
    def is_success(self) -> bool:
        """Whether the program ended by itself with exit status 0."""
        return not self.broken_limit and self.status == 0

    @property
    def exit_description(self) -> str:
        """Description of the program's end, as the rest of a sentence."""
        if self.broken_limit or self.status is None:
            return self.broken_limit or "was killed"
        if self.status >= 0:
            return f"ended with exit status {self.status}"
        known = {int(number): number.name for number in signal.Signals}
        return f"was killed by {known.get(-self.status, f'signal {-self.status}')}"


class SandboxRunner:
    """Runs programs in sandboxes that share one time limit, which begins when the object is created.

    The isolation must be one that a machine has, not Auto: `machine_check.settle_isolation` chooses it.

    Methods raise CannotConfine if the sandbox does not start, and Ungraded if the machine is too busy. Methods that
    test an answer return why it is wrong, or "" if it is right.
    """

    def __init__(self, sandbox: SandboxOptions) -> None:
        self._limits = sandbox.limits
        self._largest = sandbox.output_bytes
        self._time = TimeLimit(sandbox.wall_s)

    def run_script(self, script: str, source: str, standard_input: str, arguments: Sequence[str] = ()) -> ProgramRun:
        """Run `source` with a script of `sandbox/inside`, and return its output and exit status."""
        output, theirs = os.pipe()
        with _close_at_end(output), _seal_content(standard_input) as given, _seal_content(source) as file:
            with _close_at_end(theirs):
                program = SandboxProgram(script, (given, theirs, None, file), tuple(arguments))
                process = confine.start_program(program, self._limits)
            try:
                with self._time.count_waits(process):
                    said, broken = self._read_output(output, process)
            finally:
                ending = process.end()
        return ProgramRun(said, ending.status, broken)

    def choose_block(self, blocks: Sequence[str], names: Sequence[str]) -> str:
        """Choose the block that is the program. If choosing breaks a limit, the last block is taken."""
        # In the sandbox, since parsing hostile text may take any time and memory. Its output is only an index.
        run = self.run_script("choose.py", json.dumps(list(blocks)), "", names)
        place = int(run.output) if run.is_success and run.output.isdigit() else -1
        return blocks[place]

    def run_program(self, answer: str, tests: ProgramTests) -> str:
        """Run the answer once per case, and compare its output. Returns why it is wrong, or an empty text."""
        for number, (given, expected) in enumerate(tests.cases, 1):
            run = self.run_script("program.py", answer, given)
            if not run.is_success:
                return f"case {number} of {len(tests.cases)}: {run.exit_description}"
            if not is_same_text(run.output.decode(errors="replace"), expected):
                return f"case {number} of {len(tests.cases)}: another output"
        return ""

    def call_function(self, answer: str, tests: FunctionTests) -> str:
        """Call the answer's function once per case, and compare its result. Returns why it is wrong, or an empty text.

        If every expected result is a list of one, the results may all be those lists, or all be their elements.
        """
        # The forms that all results so far agree with: True if results are elements, False if they are lists.
        forms = {False, True} if tests.may_be_wrapped else {False}
        with _seal_content(answer) as source, self._start_functions(source) as connection:
            link = Link(connection, self._largest, self._wait_for_socket)
            try:
                if _require_object(link.receive()).get("failed") != "":
                    return "it raises when it is loaded"
                for number, (arguments, expected) in enumerate(tests.cases, 1):
                    link.send({"call": tests.name, "of": None, "arguments": encode(arguments), "named": encode({})})
                    reply = _require_object(link.receive())
                    if "result" not in reply:
                        return f"case {number} of {len(tests.cases)}: raises, or returns no plain data"
                    given = reply["result"]
                    forms = {form for form in forms if is_same_value(given, expected[0] if form else expected)}
                    if not forms:
                        return f"case {number} of {len(tests.cases)}: another result"
            except TimeoutError:
                return self._is_over_time
            except (EOFError, OSError, Malformed):
                return "its process ended, or sent no reply"
        return ""

    def run_tests(self, answer: str, tests: PythonTests) -> str:
        """Run tests in Python. `load_tests` must have accepted them before.

        Tests and answer run in two sandboxes, connected by a socket. The verdict is the exit status of the tests.
        """
        with _seal_content(answer) as source, _seal_content(tests.source) as judge, ExitStack() as stack:
            theirs = stack.enter_context(self._start_functions(source))
            arguments = (str(self._largest), *tests.required_names)
            program = SandboxProgram("tests.py", (None, None, None, theirs.fileno(), judge), arguments)
            judging = confine.start_program(program, self._limits)
            theirs.close()  # the tests have inherited it; our copy would keep the answer's socket open
            try:
                with self._time.count_waits(judging):
                    poll = select.poll()
                    poll.register(judging.report, select.POLLIN)
                    has_ended = bool(self._time.poll_within_limit(poll))
            finally:
                status = judging.end().status
        if status == PASSED:
            return ""
        if status == UNPLAIN:
            return "the tests pass it more than plain data"
        return "fails a test" if has_ended else self._is_over_time

    def load_tests(self, tests: PythonTests) -> str:
        """Load tests in Python without an answer. Returns why they cannot test any answer, or "" if they can."""
        run = self.run_script("load_tests.py", tests.source, "", tests.required_names)
        said = run.output.decode(errors="replace")
        if not run.is_success or not said:
            return f"a program that {run.exit_description} before it used the answer"
        return "" if said == SOUND else said

    @property
    def _is_over_time(self) -> str:
        return f"it ran longer than {self._time.wall_s} s"

    @contextmanager
    def _start_functions(self, source: int) -> Iterator[socket.socket]:
        """Start a process that serves the answer's functions, and yield our end of its socket."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                descriptors = (None, None, None, theirs.fileno(), source)
                program = SandboxProgram("functions.py", descriptors, (str(self._largest),))
                process = confine.start_program(program, self._limits)
            try:
                with self._time.count_waits(process):
                    yield ours
            finally:
                process.end()

    def _read_output(self, output: int, process: ConfinedProgram) -> tuple[bytes, str]:
        """Read the program's output until it ends. Returns the output and the limit that the program broke, if any."""
        said = bytearray()
        poll = select.poll()
        poll.register(output, select.POLLIN)
        poll.register(process.report, select.POLLIN)
        while len(said) <= self._largest:
            ready = dict(self._time.poll_within_limit(poll))
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

    def _wait_for_socket(self, connection: socket.socket, is_sending: bool) -> None:
        poll = select.poll()
        poll.register(connection, select.POLLOUT if is_sending else select.POLLIN)
        if not self._time.poll_within_limit(poll):
            raise TimeoutError


def _require_object(reply: Any) -> dict[str, Any]:
    if not isinstance(reply, dict):
        raise Malformed("a reply must be an object")
    return reply


@contextmanager
def _close_at_end(descriptor: int) -> Iterator[None]:
    """Close a descriptor at the end of the block."""
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _seal_content(text: str) -> Iterator[int]:
    """Create a read-only file in memory with this content.

    It is sealed, so that a program which inherits the descriptor cannot change it for another one.
    """
    file = os.memfd_create("content", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with os.fdopen(file, "wb") as writer:
        writer.write(text.encode(errors="replace"))
        writer.flush()
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
