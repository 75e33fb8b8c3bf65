"""Starts processes of tests as forks of one process that has imported their modules.

    python -m tests.fork_server FD MODULES...       FD: a socket, on which `ForkServer` asks for forks

Importing torch with Megatron or gRPC costs seconds of CPU time. Most of these processes compute for less than a second.
A fork runs the `main` of a module like a program, with its own environment, command line, log and exit code. It does
not prove that the program starts in a new interpreter; tests/integration/trainer/test_trainer_process.py does. vLLM's
processes are forked by `engine_fork.py`, because vLLM starts them through multiprocessing.

Forking is safe because the server has one thread, which it checks before it serves: it only imports. The forks create
their own threads, channels, process groups and tensors.

    ForkServer (pytest)                server                          fork
      start ---- order, 2 files --->  fork ------------------------>  main()
      Forked.pid  <----- pid ----------+                                |
      Forked.wait <----- exit code --- waitpid <-------- ends ----------+
      close ---- end of file -------> kills its forks, ends

The server waits without bound for orders and for forks to end. `Forked.wait` waits for an exit code, up to the caller's
limit. The server ends with pytest, because the socket is then closed.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
MAX_ORDER_BYTES = 1 << 17  # an order is a command line and a dozen variables
NUMBER = struct.Struct("<q")


class ForkServer:
    """The client side, in pytest. Only one thread at a time may use it."""

    def __init__(self, *imported: str) -> None:
        """imported: modules that every fork has imported."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = start_server("tests.fork_server", theirs, *imported, OMP_NUM_THREADS="1")

    def start(self, module: str, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> Forked:
        """Run `module`'s `main` in a fork.

        variables: added to the environment. log: standard output and error are appended to it.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps({"module": module, "arguments": list(arguments), "variables": dict(variables)})
        with theirs, log.open("ab") as out:
            socket.send_fds(self._orders, [order.encode()], [theirs.fileno(), out.fileno()])
        (pid,) = NUMBER.unpack(ours.recv(NUMBER.size))
        return Forked(pid, ours)

    def close(self) -> None:
        """Kill the forks that still run, and end the server."""
        self._orders.close()
        self._server.wait(timeout=60)


def start_server(module: str, theirs: socket.socket, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE FD ARGUMENTS...`, and hand over its end of a socket pair.

    variables: added to the environment.
    """
    path = os.pathsep.join((str(ROOT / "services"), str(ROOT)))
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), *arguments],
            env=os.environ | {"PYTHONPATH": path} | variables,
            cwd=ROOT,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must reach only pytest
        )


@cache
def coordinators() -> ForkServer:
    """The server that the coordinators of this session are forks of."""
    server = ForkServer("specrl.coordinator.main", "tokenizers", "jinja2")
    atexit.register(server.close)
    return server


def start_coordinator(arguments: Sequence[str], log: Path) -> Forked:
    """Run `specrl-coordinator ARGUMENTS` in a fork. tests/integration/store and the launcher's start the program."""
    return coordinators().start("specrl.coordinator.main", arguments, {"HF_HUB_OFFLINE": "1"}, log)


class Forked:
    """A fork, with those methods of `subprocess.Popen` that the tests use."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the fork runs."""
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code, which is -N after signal N. Raises TimeoutExpired."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                (self.returncode,) = NUMBER.unpack(self._connection.recv(NUMBER.size))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0.0) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended after `poll`
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class _Fork:
    """The server's record of a fork. ended: file descriptor that is readable once the fork has ended."""

    pid: int
    ended: int
    connection: socket.socket


def serve_orders(orders: socket.socket) -> None:
    """Fork for every order, and report every exit code. Returns when the client has closed its socket."""
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if isinstance(key.data, _Fork):
                selector.unregister(key.fileobj)
                report_end(key.data)
                continue
            message, files, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 2)
            forks = [other.data for other in selector.get_map().values() if isinstance(other.data, _Fork)]
            if not message:
                for fork in forks:
                    os.kill(fork.pid, signal.SIGKILL)
                return
            connection = socket.socket(fileno=files[0])
            pid = os.fork()
            if pid == 0:
                selector.close()
                orders.close()
                for fork in forks:
                    os.close(fork.ended)
                    fork.connection.close()
                connection.close()
                run_order(json.loads(message), files[1])
            os.close(files[1])
            connection.send(NUMBER.pack(pid))
            fork = _Fork(pid, os.pidfd_open(pid), connection)
            selector.register(fork.ended, selectors.EVENT_READ, fork)


def report_end(fork: _Fork) -> None:
    """Send the exit code to pytest."""
    _, status = os.waitpid(fork.pid, 0)
    os.close(fork.ended)
    with fork.connection:
        fork.connection.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def run_order(order: dict[str, Any], log: int) -> NoReturn:
    """Run the ordered program in this fork, and exit."""
    code = 1
    try:
        for output in (1, 2):
            os.dup2(log, output)
        os.close(log)
        os.environ.update(order["variables"])
        sys.argv = [order["module"], *order["arguments"]]
        importlib.import_module(order["module"]).main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the edge of a program
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the server's own cleanup


def main() -> None:
    """Import the modules, then serve orders."""
    gc.disable()  # looking for garbage, of which imports make hardly any, takes a fifth of their time
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"a process with {len(threads)} threads must not be forked"
    gc.enable()
    gc.freeze()  # so that garbage collection in a fork does not copy the shared pages of imported modules
    serve_orders(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
