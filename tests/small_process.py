"""A process that has imported little, for tests that start sandboxes.

    python -m tests.small_process FD        FD: a socket, on which `SmallProcess` sends calls

A sandbox is forked from the process that grades, several times for each answer. The product grades in small workers.
pytest with vLLM imported has more than a gigabyte, and every fork copies its page tables. An answer that costs 0.1 s of
CPU time in a small process costs up to 0.5 s in pytest.

The server waits without bound for calls. The caller waits for the result, which the limit of its test bounds. The
server ends with pytest, because the socket is then closed.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
from tests.fork_server import start_server

from specrl.rewards.code import Code
from specrl.rewards.code.sandbox_runner import ProgramRun, SandboxRunner
from specrl.rewards.verifier import Verdict, Verifier


class SmallProcess:
    """The client side, in pytest."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._calls = Connection(ours.detach())
        self._server = start_server("tests.small_process", theirs)

    @property
    def pid(self) -> int:
        return self._server.pid

    def call(self, function: Callable[..., Any], *arguments: object, settings: Mapping[str, object]) -> Any:
        """Call a function in the small process, and return its result or raise its exception.

        settings: values of module attributes during the call, by full name.
        """
        self._calls.send((function, arguments, dict(settings)))
        is_error, result = self._calls.recv()
        if is_error:
            raise result
        return result

    def close(self) -> None:
        """End the server."""
        self._calls.close()
        self._server.wait(timeout=60)


@dataclass(frozen=True)
class HostedVerifier(Verifier):
    """The verifier `code`, whose methods run in a small process."""

    code: Code
    process: SmallProcess = field(hash=False)
    settings: Mapping[str, object] = field(default_factory=dict, hash=False)

    def prepare_worker(self) -> None:
        self._call(Code.prepare_worker)

    def try_reference(self, reference: str, solution: str | None) -> None:
        self._call(Code.try_reference, reference, solution)

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        verdict: Verdict = self._call(Code.grade, reference, completion, row)
        return verdict

    def run_program(self, source: str, standard_input: str = "") -> ProgramRun:
        """Run a program in the sandbox, and return its output and how it ended."""
        run: ProgramRun = self._call(_run_program, source, standard_input)
        return run

    def with_limits(self, wall_s: int, cpu_s: int | None = None) -> HostedVerifier:
        """Return the same verifier with other limits."""
        sandbox = self.code.sandbox
        limits = sandbox.limits if cpu_s is None else replace(sandbox.limits, cpu_s=cpu_s)
        return replace(self, code=replace(self.code, sandbox=replace(sandbox, wall_s=wall_s, limits=limits)))

    def with_settings(self, **changes: object) -> HostedVerifier:
        """Return the same verifier with other attributes of `specrl.rewards.code`: MODULE__ATTRIBUTE=VALUE."""
        named = {f"specrl.rewards.code.{name.replace('__', '.', 1)}": value for name, value in changes.items()}
        return replace(self, settings={**self.settings, **named})

    def _call(self, method: Callable[..., Any], *arguments: object) -> Any:
        return self.process.call(method, self.code, *arguments, settings=self.settings)


def _run_program(code: Code, source: str, standard_input: str) -> ProgramRun:
    return SandboxRunner(code.sandbox).run_script("program.py", source, standard_input)


def serve_calls(calls: Connection) -> None:
    """Answer calls until the client has closed its socket."""
    while True:
        try:
            function, arguments, settings = calls.recv()
        except EOFError:
            return
        with pytest.MonkeyPatch.context() as patch:
            for name, value in settings.items():
                patch.setattr(name, value)
            try:
                answer = (False, function(*arguments))
            except Exception as error:  # noqa: BLE001 - pytest raises it
                answer = (True, error)
        calls.send(answer)


if __name__ == "__main__":
    serve_calls(Connection(int(sys.argv[1])))
