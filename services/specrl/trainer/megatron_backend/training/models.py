"""The models of one rank: the policy with its optimizer, the reference, the drafter; and the step that they are at.

`backend.py` loads them. The other modules of this package train them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specrl.drafting.criteria import DraftCriterion
from specrl.drafting.online import DrafterTrainer
from specrl.drafting.registry import find_kind
from specrl.errors import MemoryTooSmall, TrainerFailed, raise_problems
from specrl.machine import available_memory_bytes
from specrl.models import read_served_models
from specrl.models.policy_config import PolicyConfig, check_reference, read_policy_config
from specrl.records import StreamPlace
from specrl.spec import RunSpec
from specrl.spec.generation import DraftSampling
from specrl.spec.trainer import Routing
from specrl.trainer.learning_rate import compute_learning_rate
from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.policy.sharded_policy import ShardedPolicy
from specrl.trainer.memory import exhaustion
from specrl.trainer.memory.estimate import estimate_rank_memory


@dataclass(frozen=True)
class CheckpointState:
    """How far training has come: everything in a checkpoint that is not a tensor; state.json.

    step: the last trained step, which is the policy's version.
    updates: that the policy's optimizer has made. Not the step: some steps are skipped, others make several updates.
    skipped_in_a_row: consecutive steps up to this one whose gradients were not finite.
    stream: position in the prompt stream. None in checkpoints of a supervised warm-up and in old ones.
    """

    step: int
    is_drafter_initialised: bool
    has_drafter: bool
    updates: int
    skipped_in_a_row: int
    stream: StreamPlace | None = None


@dataclass
class RankModels:
    """The models of one rank and their progress.

    reference: the frozen policy that the divergence is measured from. It is not in checkpoints, since its folder stays.
    """

    spec: RunSpec
    config: PolicyConfig
    groups: RankGroups
    policy: ShardedPolicy
    reference: ShardedPolicy | None
    drafter: DrafterTrainer | None
    state: CheckpointState

    @property
    def sampling_temperature(self) -> float:
        """The sampling temperature, at which log-probabilities are computed, too."""
        return float(self.spec.generation.sampling.temperature)

    def count_updates(self, step: int, updates: int, *, is_skipped: bool) -> None:
        """Count the policy's updates of a step. Raises TrainerFailed after too many consecutive skipped steps."""
        most = self.spec.trainer.optimizer.max_skipped_steps
        skipped = self.state.skipped_in_a_row + 1 if is_skipped else 0
        if skipped > most:
            raise TrainerFailed(
                f"gradients of step {step} are not finite, for {skipped} steps in a row, more than "
                f"trainer.optimizer.maxSkippedSteps={most}; stopping: lower "
                "trainer.optimizer.learningRate, or inspect the step's rollouts"
            )
        self.state = replace(self.state, updates=self.state.updates + updates, skipped_in_a_row=skipped)

    def finish_step(self, step: int) -> None:
        """Make `step` the current version. It was trained, skipped, or had no rollouts."""
        self.state = replace(self.state, step=step)

    def learning_rate(self, step: int) -> float:
        """Compute the policy's learning rate in a step."""
        return compute_learning_rate(self.spec.trainer.optimizer, step, self.spec.schedule.steps)


def load_models(spec: RunSpec, config: PolicyConfig, groups: RankGroups) -> RankModels:
    """Load the initial policy, the reference and the drafter. A collective.

    Raises MemoryTooSmall, SpecInvalid, CheckpointInvalid.
    """
    dtype: torch.dtype = getattr(torch, spec.model.dtype.value)
    _check_memory(spec, groups)
    policy = ShardedPolicy(config, spec.trainer, dtype, groups, spec.schedule.seed)
    policy.load_folder()
    reference = _load_reference(spec, config, groups, dtype)
    drafter = _load_drafter(spec, policy)
    kind = find_kind(spec)
    is_trained = kind is not None and not kind.is_fresh(spec)
    state = CheckpointState(0, is_trained, drafter is not None, updates=0, skipped_in_a_row=0)
    return RankModels(spec, config, groups, policy, reference, drafter, state)


def _check_memory(spec: RunSpec, groups: RankGroups) -> None:
    """Raise MemoryTooSmall if this rank's models, or a step with them, do not fit; SpecInvalid if one is incomplete."""
    served = read_served_models(spec)
    raise_problems(served.problems)
    needed = estimate_rank_memory(spec, served)
    if groups.device.type == "cuda":
        free = torch.cuda.mem_get_info()[0]
        place = "GPU"
    else:
        free = available_memory_bytes()
        place = "machine"
    if needed.most > free:
        remedy = exhaustion.OF_STATE if needed.state > free else f"{exhaustion.OF_PASSES}; or {exhaustion.OF_DRAFTER}"
        raise MemoryTooSmall(
            f"each trainer rank needs {needed.state / 2**30:.1f} GiB for weights, gradients and optimizer state, and "
            f"{(needed.most - needed.state) / 2**30:.1f} GiB at most for a step, got {free / 2**30:.1f} GiB free on "
            f"this {place}; {remedy}"
        )


def _load_reference(
    spec: RunSpec, config: PolicyConfig, groups: RankGroups, dtype: torch.dtype
) -> ShardedPolicy | None:
    kl = spec.trainer.loss.reference_kl
    if kl is None:
        return None
    of_reference = read_policy_config(Path(kl.path or spec.model.path))
    check_reference(of_reference, config)
    # The reference has no low-rank updates, and its routers choose experts themselves.
    frozen = spec.trainer.model_copy(update={"lora": None, "routing": Routing.ANEW})
    reference = ShardedPolicy(of_reference, frozen, dtype, groups, spec.schedule.seed)
    reference.freeze_folder()
    return reference


def _load_drafter(spec: RunSpec, policy: ShardedPolicy) -> DrafterTrainer | None:
    """Load or make the run's drafter; None without one. Makes the policy's passes collect what it reads."""
    kind = find_kind(spec)
    if kind is None:
        return None
    drafter = kind.load_drafter(spec, policy.config)
    settings = spec.trainer.drafter
    learning_rate = kind.learning_rate if settings.learning_rate is None else float(settings.learning_rate)
    generation = spec.generation
    temperature = float(generation.sampling.temperature)
    is_probabilistic = generation.speculation.draft_sampling is DraftSampling.PROBABILISTIC
    drafter.to(policy.groups.device)
    policy.connect_drafter(drafter, temperature)
    return DrafterTrainer(
        drafter,
        learning_rate,
        float(settings.clip_norm),
        kind.count_passes(spec),
        DraftCriterion(settings.loss, temperature, is_probabilistic),
    )
