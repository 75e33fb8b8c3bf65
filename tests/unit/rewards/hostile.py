"""A verifier that does what its completion says. In a module of its own, since workers import it by name."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from specrl.rewards import Verifier


@dataclass(frozen=True)
class Hostile(Verifier):
    def reward(self, reference: str, completion: str) -> float:
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
                return float("nan")
            case "fill memory":
                return float(len(bytearray(2**40)))
        return float(completion == reference)
