"""The interface between the simulation and a cost model: a roofline of published figures, or a run's calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ProcessorSharing:
    """One machine that computes everything: the cores that each part would use if it ran alone.

    cores: of the machine. replica: used by a generating replica. token: core-seconds per sampled token, outside the
    replicas. trainer: used while it trains.
    """

    cores: float
    replica_cores: float
    token_core_s: float
    trainer_cores: float

    def slowdown_factor(self, replicas: int, tokens_per_s: float, *, is_training: bool) -> float:
        """Return how many times longer everything takes: the cores asked for over the cores there are, at least 1.

        Every part gets the same share of the cores that it needs.
        """
        asked = replicas * self.replica_cores + tokens_per_s * self.token_core_s + is_training * self.trainer_cores
        return max(1.0, asked / self.cores)


class CostModel(Protocol):
    """Seconds of everything that takes time. B: live rollouts of one replica, k: draft tokens per rollout."""

    data_s: float
    """Assembling a batch and sending it to the trainer."""
    prepare_s: float
    """From a trained step to the new version serving everywhere."""
    load_s: float
    """The part of `prepare_s` in which a replica emits no tokens."""
    sharing: ProcessorSharing | None
    """How replicas and trainer share a machine's cores; None where they do not."""

    def step_s(self, batch_B: Floats, k: int, context: float) -> Floats:
        """Return the seconds of one engine step for each batch size: drafting and verifying k tokens per rollout.

        k = 0 is a step that samples one token per rollout.
        """

    def start_s(self, rollouts: int, tokens: float) -> float:
        """Return the seconds that `rollouts` starting together cost their replica, apart from decoding.

        tokens: of their prompts, each prompt counted once.
        """

    def logprob_s(self, tokens: float) -> float:
        """Return the seconds for the log-probabilities of a batch of so many tokens, prompts included."""

    def train_s(self, tokens: float) -> float:
        """Return the seconds for gradient and optimizer step of such a batch."""
