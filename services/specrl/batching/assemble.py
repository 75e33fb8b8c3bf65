"""The batch of one step, from its groups.

Stage 4 of the loop; the coordinator calls `assemble` with the groups that it has chosen for a step. Invariants: all
rollouts of all groups are in the batch, none repeated, in the order of the stream, whatever order they finished in;
none is older than the lag bound. The scheduler keeps that bound by construction, so a breach here is a bug, and raises.
With trainer.loss.withoutSignal LeaveOut a group whose rewards are all the same is not in the batch, as a whole, and the
step's report names it (docs/decisions/0019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrl.batching.advantages import batch_advantages, has_signal
from specrl.batching.shaping import overlong_penalties
from specrl.errors import RecordInvalid
from specrl.records import Batch, Group, TrainRollout
from specrl.records.rollout import FloatArray
from specrl.spec import RunSpec
from specrl.spec.trainer import WithoutSignal


def assemble(step: int, groups: Sequence[Group], spec: RunSpec, failed: Sequence[int] = ()) -> Batch:
    """Order a step's groups by stream position and give every rollout its reward, shaped, and its advantage.

    failed: positions of prompts that the step takes and the scheduler gave up, each reported with its reason.
    Raises RecordInvalid unless there are promptsPerStep different groups, less the failed ones, made for this step,
    each complete and graded, with every token's policy version within [step - 1 - maxPolicyLag, step - 1].
    """
    wanted = spec.schedule.prompts_per_step - len(failed)
    if len(groups) != wanted:
        raise RecordInvalid(
            f"step {step}: groups must be promptsPerStep less the failed prompts, {wanted}, got {len(groups)}; "
            "wait for the rest"
        )
    ordered = sorted(groups, key=lambda group: group.prompt.position)
    positions = sorted([*failed, *(group.prompt.position for group in ordered)])
    if len(set(positions)) != len(positions) or len({group.group_id for group in ordered}) != wanted:
        ids = ", ".join(group.group_id for group in ordered)
        raise RecordInvalid(f"step {step}: groups must differ in id and position, got {ids}; drop the repeated one")
    for group in ordered:
        _check(step, group, spec)
    kept = [group for group in ordered if not _is_left_out(group, spec)]
    return Batch(step, tuple(_train_rollouts(kept, spec)), tuple(positions))


def _is_left_out(group: Group, spec: RunSpec) -> bool:
    """Whether the group is left out: its verdicts are all the same, and the run file says so.

    Decided on the verifier's rewards: what is taken off for length makes no wrong answer better than another.
    """
    return spec.trainer.loss.without_signal is WithoutSignal.LEAVE_OUT and not has_signal(group.rewards_G)


def _train_rollouts(groups: Sequence[Group], spec: RunSpec) -> list[TrainRollout]:
    rewards = [_shaped(group, spec) for group in groups]
    advantages = batch_advantages(rewards, spec.trainer.loss.advantages)
    return [
        TrainRollout(group.prompt.token_ids, rollout, float(advantage), float(reward))
        for group, rewards_G, advantages_G in zip(groups, rewards, advantages, strict=True)
        for rollout, reward, advantage in zip(group.rollouts, rewards_G, advantages_G, strict=True)
    ]


def _shaped(group: Group, spec: RunSpec) -> FloatArray:
    """Rewards [G] as they are trained on."""
    overlong = spec.trainer.loss.overlong
    if overlong is None:
        return group.rewards_G
    lengths, longest = [rollout.length for rollout in group.rollouts], spec.generation.sampling.max_tokens
    penalties_G = overlong_penalties(lengths, longest, overlong.buffer_tokens, float(overlong.penalty))
    return np.asarray(group.rewards_G - penalties_G)


def _check(step: int, group: Group, spec: RunSpec) -> None:
    """Raise RecordInvalid unless the group is this step's, complete, and within the lag bound."""

    def refuse(rule: str, got: object) -> None:
        raise RecordInvalid(f"step {step}, group {group.group_id}: {rule}, got {got}; this is a bug in the schedule")

    size, bound = spec.schedule.group_size, spec.schedule.max_policy_lag
    if group.target_step != step:
        refuse(f"target_step must be {step}", f"target_step={group.target_step}")
    samples = [rollout.sample_index for rollout in group.rollouts]
    if samples != list(range(size)):
        refuse(f"samples must be 0 to {size - 1} in order", f"sample_index={samples}")
    if len(group.rewards) != size:
        refuse(f"rewards must be {size}, one per sample", len(group.rewards))
    for rollout in group.rollouts:
        if rollout.group_id != group.group_id:
            refuse("rollouts must be of their group", f"{rollout.rollout_id} of group {rollout.group_id}")
        versions = [span.policy_version for span in rollout.versions]
        if not versions:
            refuse("every rollout must name its policy versions", f"none for {rollout.rollout_id}")
        lag = step - 1 - rollout.oldest_version
        if lag > bound:
            refuse(f"policy lag must be <= maxPolicyLag={bound}", f"lag={lag} for {rollout.rollout_id}")
        if max(versions) > step - 1:
            refuse(f"policy versions must be <= {step - 1}", f"{max(versions)} for {rollout.rollout_id}")
