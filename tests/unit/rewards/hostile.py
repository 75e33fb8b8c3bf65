"""A verifier that does what its completion says. In a module of its own, since workers import it by name."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specrl.rewards import Verdict, Verifier


@dataclass(frozen=True)
class Hostile(Verifier):
    def grade(self, reference: str, completion: str, row: Mapping[str, Any]) -> Verdict:
        match completion:
            case "hang":
                time.sleep(3600)
            case "hang deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(3600)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(3)
            case "raise":
                raise KeyError(reference)
            case "nonsense":
                return Verdict(float("nan"))
            case "fill memory":
                return Verdict(float(len(bytearray(2**40))))
        return Verdict(float(completion == reference))
