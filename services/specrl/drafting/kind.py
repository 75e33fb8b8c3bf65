"""The part of a drafter's interface that needs no torch: its checks and its size. `registry.py` lists the kinds.

Called by preflight, by the coordinator, and by the trainer, which loads the drafter through it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from specrl.errors import SpecProblem
from specrl.models import ModelFolder, RunModels
from specrl.models.policy_config import PolicyConfig
from specrl.spec import RunSpec

if TYPE_CHECKING:
    from specrl.drafting.drafter import Drafter

# Most bytes of targets of a step, over all ranks: the policy's logits are kept from its passes until the drafter learns
# from them. With a vocabulary of 151 936 tokens in bfloat16 this is 7 000 starts.
TARGET_BYTES = 2 << 30

# The same for the states that it reads. A slice of a rollout needs those of all tokens before it, so they are several
# times as many bytes as its targets.
STATE_BYTES = 8 << 30


class DrafterKind(ABC):
    """A member of `generation.speculation` whose model the trainer trains.

    loader: `module:function` of a function (spec, policy config) -> Drafter. A name, because the module imports torch,
    which the control plane must not reach.
    learning_rate: what `trainer.drafter.learningRate: null` means. read_states: hidden states that it reads of a token.
    """

    loader: ClassVar[str]
    learning_rate: ClassVar[float] = 1e-3
    read_states: ClassVar[int] = 0

    def load_drafter(self, spec: RunSpec, policy: PolicyConfig) -> Drafter:
        """Load the drafter from the run file's folder, or make a fresh one, in float32 on the CPU.

        Equal at every rank. Raises CheckpointInvalid if it does not fit the policy.
        """
        module, _, function = self.loader.partition(":")
        drafter: Drafter = getattr(import_module(module), function)(spec, policy)
        return drafter

    def is_held(self, spec: RunSpec) -> bool:
        """Whether the trainer holds the drafter in this run, and sends it to replicas."""
        return True

    @abstractmethod
    def is_fresh(self, spec: RunSpec) -> bool:
        """Whether the drafter starts untrained, so that the run initialises it before its first step."""

    def count_passes(self, spec: RunSpec) -> int:
        """Return the number of passes that the drafter is trained in, see `online.py`."""
        return spec.trainer.drafter.passes

    @abstractmethod
    def check(self, spec: RunSpec, models: RunModels) -> list[SpecProblem]:
        """Report what keeps the drafter from fitting the policy or the run. Called with a policy that could be read."""

    def count_draft_ids(self, spec: RunSpec, policy: ModelFolder) -> int:
        """Count the tokens that the drafter can draft: the policy's whole vocabulary, unless a kind says otherwise."""
        return policy.config_number("vocab_size") or 0

    @abstractmethod
    def count_parameters(self, spec: RunSpec, models: RunModels) -> int:
        """Count the parameters that replicas and trainer ranks hold beside those of the policy's folder."""

    def estimate_pass_bytes(self, spec: RunSpec, models: RunModels) -> int:
        """Estimate the most memory of a rank for the activations of one of the drafter's passes. 0: not estimated."""
        return 0
