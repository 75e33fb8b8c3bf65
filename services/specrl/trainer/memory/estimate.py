"""Estimates the most memory of a trainer's rank, by what holds it. Pure arithmetic, without torch.

The launcher's preflight and `--dry-run` use it, and each rank before it loads anything. Tested against the peak of live
tensors in `tests/integration/trainer/test_rank_memory.py`. Libraries, CUDA's context and fragmentation are not counted.

    state     b + 4 bytes a weight for weights and float32 gradients; AdamW's moments, and masters unless b = 4, shared
              by data and context ranks; b more with a reference. 2 b in all with low-rank updates. 12 bytes for each
              of the drafter's parameters, whole at every rank
    passes    activations; L V b of logits; then two chunks of float32 logits, or the gradient of the output layer
    update    4 bytes a weight, while the optimizer steps
    drafter   4 bytes a parameter of gradients; and float32 logits of the starts of an update
    lessons   of each start that the drafter learns from, its target, b K; of each token up to it, the states that the
              drafter reads, b H each and four for EAGLE-3, which data and context ranks share evenly

b: bytes of the policy's dtype, V: vocabulary, K: draft vocabulary, H: hidden size, L: sampled tokens of a pass. The
check of the gradients needs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.drafting.kind import STATE_BYTES, TARGET_BYTES, DrafterKind
from specrl.drafting.registry import find_kind
from specrl.models import RunModels
from specrl.models.policy_config import PolicyConfig
from specrl.spec import RunSpec
from specrl.spec.run import Dtype
from specrl.spec.trainer import Recompute
from specrl.trainer.layout import compute_moment_bytes, compute_shares

DRAFTER_BYTES = 12  # float32 weight and two moments; gradients exist during an update
# Those of `drafting.vocabulary` and `drafting.budget`, which import torch.
CHUNK_BYTES = 256 * 2**20
MAX_UPDATES = 12
UPDATE_STARTS = 100
MIN_SLICE_STARTS = 32

_WORK_MATRICES = 10  # float32 matrices of a chunk of starts that a drafter's loss holds at once


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank.

    state is always held. passes, update and drafter are held one after another. lessons, from the passes to the end of
    a step: what the drafter learns from. All targets are on one rank at worst, and no more on all ranks together.
    """

    state: float
    passes: float
    update: float
    drafter: float
    lessons: float

    @property
    def most(self) -> float:
        """The most bytes at once."""
        return self.state + self.lessons + max(self.passes, self.update, self.drafter)


def estimate_rank_memory(spec: RunSpec, models: RunModels) -> RankMemory:
    """Estimate the memory of one rank. models: with a policy that could be read."""
    assert models.policy is not None
    config = models.policy.policy_config
    trainer = spec.trainer
    item_bytes = 4 if spec.model.dtype is Dtype.FLOAT32 else 2
    kind = trainer.optimizer.kind
    optimizer = (0 if item_bytes == 4 else 4) + compute_moment_bytes(kind, config)
    reference = item_bytes if trainer.loss.reference_kl is not None else 0
    state = update = 0.0
    for mine, shared_by in compute_shares(
        trainer.parallelism, kind, config.num_parameters, config.num_expert_parameters
    ):
        if trainer.lora is None:
            state += mine * (item_bytes + 4 + optimizer / shared_by + reference)
            update += mine * 4
        else:
            state += mine * (2 * item_bytes + reference)
    passes = _count_pass_bytes(spec, config, item_bytes)
    learning = lessons = 0.0
    drafter = find_kind(spec)
    if drafter is not None:
        parameters = drafter.count_parameters(spec, models)
        state += DRAFTER_BYTES * parameters
        learning = 4 * parameters + drafter.estimate_pass_bytes(spec, models)
        if trainer.drafter.online:
            columns = drafter.count_draft_ids(spec, models.policy)
            starts = count_step_starts(spec, columns * item_bytes)
            states = drafter.read_states * item_bytes * config.hidden_size
            lessons = starts * item_bytes * columns + _count_state_bytes(spec, starts, states)
            learning += _count_loss_bytes(spec, drafter, columns, starts)
    return RankMemory(state, passes, update, learning, lessons)


def count_step_starts(spec: RunSpec, row_bytes: int) -> int:
    """Count the starts that the drafter learns from in a step at most. row_bytes: of one start's target."""
    schedule = spec.schedule
    tokens = schedule.prompts_per_step * schedule.group_size * spec.generation.sampling.max_tokens
    budget = spec.trainer.drafter.token_budget
    return min(TARGET_BYTES // max(1, row_bytes), tokens if budget is None else min(tokens, budget))


def count_pass_tokens(spec: RunSpec) -> int:
    """Count the most tokens in one forward pass: a micro-batch, but at most one data rank's share of a step."""
    schedule = spec.schedule
    rollouts = -(-schedule.prompts_per_step * schedule.group_size // spec.trainer.parallelism.data)
    longest = spec.prompts.max_tokens + spec.generation.sampling.max_tokens
    return min(spec.trainer.micro_batch_tokens, rollouts * longest)


def _count_pass_bytes(spec: RunSpec, config: PolicyConfig, item_bytes: int) -> float:
    """Count the bytes of a pass's activations and logits, on the pipeline stage that has most."""
    ranks = spec.trainer.parallelism
    tokens = count_pass_tokens(spec)
    hidden = config.hidden_size
    # Numbers that one layer keeps of a token for its backward pass. Measured on CPUs with SDPA and norms of queries and
    # keys: 6 H, 7 per query, 2 per key, 5 I, and 4 D of rotary positions.
    layer = 6 * hidden + 5 * config.active_intermediate_size
    layer += (7 * config.num_heads + 2 * config.num_groups + 4) * config.head_dim
    layer_bytes = item_bytes * tokens * layer / ranks.tensor
    layers = config.num_layers / ranks.pipeline
    ends = 3 * item_bytes * tokens * hidden / ranks.tensor  # before the first layer and after the last
    kept = layers * layer_bytes
    if spec.trainer.recompute is Recompute.LAYERS:
        kept = layers * item_bytes * tokens * hidden / ranks.tensor  # the layers' inputs
    columns = config.vocab_size / ranks.tensor
    work = 2 * min(4 * tokens * columns, CHUNK_BYTES)
    if spec.generation.sampling.is_truncated:
        work *= 1.25  # masks
    at_logits = kept + ends + item_bytes * tokens * columns + max(work, item_bytes * columns * hidden)
    # The first stage holds the activations of as many micro-batches as there are stages.
    in_first_stage = ranks.pipeline * kept + ends + layer_bytes
    return max(at_logits, in_first_stage)


def _count_state_bytes(spec: RunSpec, starts: int, token_bytes: int) -> float:
    """Count the bytes of one rank's states that the drafter reads, of all tokens up to the starts."""
    longest = spec.prompts.max_tokens + spec.generation.sampling.max_tokens
    slices = -(-starts // MIN_SLICE_STARTS)
    ranks = spec.trainer.parallelism
    return min(STATE_BYTES, slices * longest * token_bytes) / (ranks.data * ranks.context)


def _count_loss_bytes(spec: RunSpec, drafter: DrafterKind, columns: int, starts: int) -> float:
    """Count the bytes of the logits and losses of an update's starts, which may all be of one rank."""
    longest = spec.generation.sampling.max_tokens  # of one slice: a draft model's may be a whole completion
    together = min(starts, max(starts // MAX_UPDATES, UPDATE_STARTS, longest))
    matrix = 4 * together * columns
    return matrix * (drafter.count_passes(spec) + 1) + _WORK_MATRICES * min(matrix, CHUNK_BYTES)
