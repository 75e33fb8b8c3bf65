"""Starts `limited_worker`, which renders chat templates and reads Parquet and CSV files under limits, and talks to it.

Invariant: whatever the template or the file does, a call ends, with an answer or with LimitReached. What bounds each
wait: the worker's own limit of processor time, and STALLED_S without an answer.

Called by `templates` and `table_rows`. Each has its own worker, which ends with the object that started it, and when
this process ends, since its input then ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).with_name("limited_worker.py")

STALLED_S = 600.0
"""Longest wait for the next answer. The processor time of the worker ends before, unless the machine stands still."""

_CHUNK_BYTES = 1 << 20


class LimitReached(Exception):
    """The worker ended before it had answered. The message says by which limit."""


class LimitedProcess:
    """One worker. task: "templates", "parquet" or "csv". processor_s: for each answer."""

    def __init__(self, task: str, memory_mib: int, processor_s: int) -> None:
        self._memory_mib = memory_mib
        self._processor_s = processor_s
        # -P: its folder, whose modules have names as libraries have, is not searched for imports. In a process group
        # of its own it is not reached by Ctrl-C, and ends when this process closes its input.
        command = [sys.executable, "-P", str(_PROGRAM), task, str(memory_mib), str(processor_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0
        )
        self._end = weakref.finalize(self, _end_process, self._process)

    def close(self) -> None:
        """End the worker. Safe to call twice."""
        self._end()

    def ask(self, request: object) -> Iterator[Any]:
        """Yield the answers to a request: decoded JSON, or bytes. All must be taken before the next request.

        Raises LimitReached, and nothing can be asked afterwards.
        """
        content = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(len(content).to_bytes(8) + content)
            self._process.stdin.flush()
        except OSError:  # it has ended; why is told below
            pass
        while True:
            head = self._read(9)
            answer = self._read(int.from_bytes(head[1:]))
            if head[:1] == b"A":
                yield answer
                continue
            found = json.loads(answer)
            if "end" in found:
                return
            if "memory" in found:
                self.close()
                raise LimitReached(f"more than {self._memory_mib} MiB of memory")
            yield found

    def _read(self, count: int) -> bytes:
        """Read so many bytes of the worker's answers. Raises LimitReached if it ends or stalls."""
        assert self._process.stdout is not None
        output = self._process.stdout.fileno()
        waiting = select.poll()
        waiting.register(output, select.POLLIN)
        parts: list[bytes] = []
        until = time.monotonic() + STALLED_S
        while count:
            if not waiting.poll(max(0.0, until - time.monotonic()) * 1000):
                self.close()
                raise LimitReached(f"no answer in {STALLED_S:.0f} s")
            part = os.read(output, min(count, _CHUNK_BYTES))
            if not part:
                raise LimitReached(self._explain_end())
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _explain_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STALLED_S)
        status = self._process.returncode
        self.close()
        if status == -signal.SIGXCPU:
            return f"more than {self._processor_s} s of processor time"
        return f"the end of the process that tried it, with exit status {status}"


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # it has nothing to lose
    with suppress(OSError):  # a request that was not sent whole
        assert process.stdin is not None
        process.stdin.close()
    assert process.stdout is not None
    process.stdout.close()
    process.wait()
