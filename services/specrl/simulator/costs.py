"""What the simulation asks of costs, whoever knows them: a roofline of published figures, or a run's calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sharing:
    """One machine that computes everything: what each part asks of its cores, alone on it.

    replica: by a replica that generates; token: core-seconds, for each token sampled; trainer: while it trains.
    """

    cores: float
    replica: float
    token: float
    trainer: float

    def slowdown(self, replicas: int, tokens_per_s: float, *, is_training: bool) -> float:
        """How many times longer everything takes beside each other: all get as much of what they ask for."""
        asked = replicas * self.replica + tokens_per_s * self.token + is_training * self.trainer
        return max(1.0, asked / self.cores)


class Costs(Protocol):
    """Seconds of all that takes time. B live rollouts of one replica, k draft tokens each, s tokens of context."""

    def step_s(self, batch_B: Floats, k: int, context: float) -> Floats:
        """One engine step for each of these batch sizes: drafting and verifying k tokens a rollout; 0: one token."""

    def start_s(self, rollouts: int, tokens: float) -> float:
        """What so many rollouts that start together cost their replica, beside decoding.

        tokens: of their prompts, each counted once, which are read.
        """

    def data_s(self) -> float:
        """Assembling a batch and carrying it to the trainer."""

    def logprob_s(self, tokens: float) -> float:
        """Log-probabilities of a batch of so many tokens, prompts included."""

    def train_s(self, tokens: float) -> float:
        """Gradient and step on it."""

    def prepare_s(self) -> float:
        """From a trained step to the new version serving everywhere."""

    def load_s(self) -> float:
        """The part of `prepare_s` in which a replica emits no tokens."""

    def sharing(self) -> Sharing | None:
        """How replicas and trainer share a machine's processors; None where they do not."""
