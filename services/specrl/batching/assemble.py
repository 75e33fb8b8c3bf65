"""Builds the batch of one step from its groups. The coordinator calls `assemble_batch` for every step.

Invariants:
- The batch holds every rollout of every group exactly once.
- Rollouts are ordered by their prompt's position in the stream, whatever order they finished in.
- No token is older than the policy lag bound. The scheduler guarantees this, so a violation here is a bug and raises.

With `trainer.loss.withoutSignal: LeaveOut`, a group whose rewards are all equal is dropped as a whole, and the step's
report names it (docs/decisions/0019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrl.batching.advantages import compute_advantages, has_signal
from specrl.batching.shaping import compute_overlong_penalties
from specrl.errors import RecordInvalid
from specrl.records import Batch, Group, TrainRollout
from specrl.records.rollout import FloatArray
from specrl.spec import RunSpec
from specrl.spec.trainer import WithoutSignal


def assemble_batch(step: int, groups: Sequence[Group], spec: RunSpec, failed: Sequence[int] = ()) -> Batch:
    """Order a step's groups by stream position, shape their rewards and compute every rollout's advantage.

    failed: stream positions of the step's prompts that the scheduler gave up. They have no group.

    Raises RecordInvalid unless all of these hold:
    - There are promptsPerStep different groups, minus the failed prompts.
    - Every group was sampled for this step, is complete and is graded.
    - Every token's policy version is within [step - 1 - maxPolicyLag, step - 1].
    """
    wanted = spec.schedule.prompts_per_step - len(failed)
    if len(groups) != wanted:
        raise RecordInvalid(
            f"step {step}: groups must be promptsPerStep minus the failed prompts, {wanted}, got {len(groups)}; "
            "wait for the missing ones"
        )
    ordered = sorted(groups, key=lambda group: group.prompt.position)
    positions = sorted([*failed, *(group.prompt.position for group in ordered)])
    if len(set(positions)) != len(positions) or len({group.group_id for group in ordered}) != wanted:
        ids = ", ".join(group.group_id for group in ordered)
        raise RecordInvalid(f"step {step}: groups must differ in id and position, got {ids}; drop the duplicate")
    for group in ordered:
        _check_group(step, group, spec)
    kept = [group for group in ordered if not _is_left_out(group, spec)]
    # The positions include failed and dropped groups: the step consumes them, so that the stream moves on past them.
    return Batch(step, tuple(_build_train_rollouts(kept, spec)), tuple(positions))


def _is_left_out(group: Group, spec: RunSpec) -> bool:
    # Decided on the verifier's rewards, before the penalty for length: of equally wrong answers, a shorter one is not
    # better.
    return spec.trainer.loss.without_signal is WithoutSignal.LEAVE_OUT and not has_signal(group.rewards_G)


def _build_train_rollouts(groups: Sequence[Group], spec: RunSpec) -> list[TrainRollout]:
    rewards = [_shape_rewards(group, spec) for group in groups]
    advantages = compute_advantages(rewards, spec.trainer.loss.advantages)
    return [
        TrainRollout(group.prompt.token_ids, rollout, float(advantage), float(reward))
        for group, rewards_G, advantages_G in zip(groups, rewards, advantages, strict=True)
        for rollout, reward, advantage in zip(group.rollouts, rewards_G, advantages_G, strict=True)
    ]


def _shape_rewards(group: Group, spec: RunSpec) -> FloatArray:
    """Return the rewards [G] that are trained on: the verifier's, minus the penalty for overlong completions."""
    overlong = spec.trainer.loss.overlong
    if overlong is None:
        return group.rewards_G
    lengths = [rollout.total_length for rollout in group.rollouts]
    longest = spec.generation.sampling.max_tokens
    penalties_G = compute_overlong_penalties(lengths, longest, overlong.buffer_tokens, float(overlong.penalty))
    return np.asarray(group.rewards_G - penalties_G)


def _check_group(step: int, group: Group, spec: RunSpec) -> None:
    """Raise RecordInvalid unless the group is this step's, complete, and within the lag bound."""

    def reject_group(rule: str, got: object) -> None:
        raise RecordInvalid(
            f"step {step}, group {group.group_id}: {rule}, got {got}; report this as a bug in the scheduler"
        )

    size = spec.schedule.group_size
    bound = spec.schedule.max_policy_lag
    if group.target_step != step:
        reject_group(f"target_step must be {step}", f"target_step={group.target_step}")
    samples = [rollout.sample_index for rollout in group.rollouts]
    if samples != list(range(size)):
        reject_group(f"samples must be 0 to {size - 1} in order", f"sample_index={samples}")
    if len(group.rewards) != size:
        reject_group(f"rewards must be {size}, one per sample", len(group.rewards))
    for rollout in group.rollouts:
        if rollout.group_id != group.group_id:
            reject_group("rollouts must belong to the group", f"{rollout.rollout_id} of group {rollout.group_id}")
        versions = [span.policy_version for span in rollout.versions]
        if not versions:
            reject_group("every rollout must name its policy versions", f"none for {rollout.rollout_id}")
        # Step n trains on version n - 1, so the lag counts from there. A rollout is as old as its oldest token.
        lag = step - 1 - rollout.oldest_version
        if lag > bound:
            reject_group(f"policy lag must be <= maxPolicyLag={bound}", f"lag={lag} for {rollout.rollout_id}")
        if max(versions) > step - 1:
            reject_group(f"policy versions must be <= {step - 1}", f"{max(versions)} for {rollout.rollout_id}")
