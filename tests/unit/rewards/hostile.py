"""A verifier that misbehaves as its reference or completion says. Workers import this module by name.

A completion with `once` misbehaves only the first time, in whichever worker reads it. So a test can imitate a worker
that is killed from outside. The file that the completion names records that it happened.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.errors import VerifierFailed
from specrl.rewards import Ungraded, question_time
from specrl.rewards.verifier import Verdict, Verifier


@dataclass(frozen=True)
class Hostile(Verifier):
    def check_reference(self, reference: str) -> None:
        act(reference)

    def try_reference(self, reference: str, solution: str | None) -> None:
        act(solution or "")

    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        how, _, what = completion.partition(" once ")
        if how and what:
            marker = Path(what)
            if marker.exists():
                return Verdict(1.0, "right")
            marker.touch()
        act(how)
        return Verdict(float(completion == reference), completion)


def act(what: str) -> None:  # noqa: PLR0912 - a table
    match what:
        case "hang":
            time.sleep(3600)
        case "hang deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(3600)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "end":
            os.kill(os.getpid(), signal.SIGTERM)
        case "exit":
            os._exit(3)
        case "exit politely":
            os._exit(0)
        case "leave":
            sys.exit()
        case "raise":
            raise KeyError(what)
        case "recurse":
            act(what)
        case "blame the reference":
            raise VerifierFailed("the reference must be better")
        case "speak":
            raise SilentError
        case "nonsense":
            Verdict(float("nan"))
        case "too large for float32":
            Verdict(1e39)
        case "fill memory":
            bytearray(2**40)
        case "wait for a processor":  # for longer than the pool's timeoutS, whatever the load
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # where the test's other programs are
            waited_s = time.monotonic() - time.process_time()
            while time.monotonic() - time.process_time() < waited_s + 2.2:
                pass
        case "wait for programs":  # as a sandbox does whose programs get no processor, for longer than timeoutS
            for _ in range(25):
                time.sleep(0.1)
                question_time.add_waiting(0.1)
        case "wait for programs for ever":
            while True:
                time.sleep(0.1)
                question_time.add_waiting(10)
        case "judge away":
            raise Ungraded("the judge must answer, got nothing")


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")
