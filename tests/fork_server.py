"""Starts processes of tests as forks of one process that has imported what they need.

    python -m tests.fork_server FD MODULES...       FD: a socket, on which `ForkServer` asks for forks

An import of torch with Megatron or gRPC costs seconds of CPU; most of these processes compute for less than one. A fork
runs the `main` of a module as a program of its own would: with its environment, command line, log and exit code. A fork
does not show that an interpreter starts; tests/integration/trainer/test_trainer_process.py starts the real program for
that. vLLM's processes are forked by `engine_fork.py`, since vLLM takes them from multiprocessing.

Forking is safe here because the server has one thread, which it checks before it serves: it imports, and computes
nothing. The forks make threads, channels, process groups and tensors of their own.

    ForkServer (pytest)                server                          fork
      start ---- order, 2 files --->  fork ------------------------>  main()
      Forked.pid  <----- pid ----------+                                |
      Forked.wait <----- exit code --- waitpid <-------- ends ----------+
      close ---- end of file -------> kills its forks, ends

The server waits for orders and for the ends of forks, without bound. `Forked.wait` waits for an exit code, as long as
its caller says. The end of pytest ends the server, because it closes the socket.
"""

from __future__ import annotations

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
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
MOST_ORDER_BYTES = 1 << 17  # an order is a command line and a dozen variables
NUMBER = struct.Struct("<q")


class ForkServer:
    """The side of pytest. Used by one thread at a time."""

    def __init__(self, *imported: str) -> None:
        """imported: the modules that every fork begins with."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "services"), str(ROOT)))}
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), *imported]
        with theirs:
            self._server = subprocess.Popen(
                command,
                env=os.environ | variables,
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for pytest
            )

    def start(self, module: str, arguments: Sequence[str], variables: Mapping[str, str], log: Path) -> Forked:
        """Run `module`'s `main` in a fork. variables: added to the environment. Both outputs go to the end of `log`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps({"module": module, "arguments": list(arguments), "variables": dict(variables)})
        with theirs, log.open("ab") as out:
            socket.send_fds(self._orders, [order.encode()], [theirs.fileno(), out.fileno()])
        (pid,) = NUMBER.unpack(ours.recv(NUMBER.size))
        return Forked(pid, ours)

    def close(self) -> None:
        """Kill what still runs, and end the server."""
        self._orders.close()
        self._server.wait(timeout=60)


class Forked:
    """A fork, with what the tests use of `subprocess.Popen`."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._connection = connection
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or None while it runs."""
        try:
            return self.wait(timeout=0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; the negative number of the signal that killed it. Raises TimeoutExpired."""
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
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@dataclass(frozen=True)
class _Fork:
    """A fork, as the server knows it. ended: a file descriptor that is readable once it has ended."""

    pid: int
    ended: int
    connection: socket.socket


def serve(orders: socket.socket) -> None:
    """Fork for every order; report every exit code. Returns in a fork, and at the end of the orders."""
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if isinstance(key.data, _Fork):
                selector.unregister(key.fileobj)
                report_end(key.data)
                continue
            message, files, _, _ = socket.recv_fds(orders, MOST_ORDER_BYTES, 2)
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
                run(json.loads(message), files[1])
            os.close(files[1])
            connection.send(NUMBER.pack(pid))
            fork = _Fork(pid, os.pidfd_open(pid), connection)
            selector.register(fork.ended, selectors.EVENT_READ, fork)


def report_end(fork: _Fork) -> None:
    """Tell pytest the exit code."""
    _, status = os.waitpid(fork.pid, 0)
    os.close(fork.ended)
    with fork.connection:
        fork.connection.send(NUMBER.pack(os.waitstatus_to_exitcode(status)))


def run(order: dict[str, Any], log: int) -> NoReturn:
    """Be the program that was ordered, and end."""
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
    os._exit(code)  # not by way of the server's own end


def main() -> None:
    """Import, then serve."""
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = list(Path("/proc/self/task").iterdir())
    assert len(threads) == 1, f"a process with {len(threads)} threads must not be forked"
    gc.freeze()  # a fork's collections then leave shared what was imported
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
