"""On which rollouts the mismatch between sampler and trainer is measured."""

from __future__ import annotations

import numpy as np
import pytest

from specrl.records import FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.trainer.megatron_backend.policy.tensors import _is_current


def sampled_under(*versions: int) -> TrainRollout:
    """Build a rollout with one token per version."""
    rollout = Rollout(
        rollout_id="000001-00000-000-0",
        group_id="000001-00000",
        sample_index=0,
        token_ids_T=np.arange(len(versions), dtype=np.int32),
        sampler_logprobs_T=np.full(len(versions), -1.0, dtype=np.float32),
        versions=tuple(VersionSpan(version, place, place + 1) for place, version in enumerate(versions)),
        finish_reason=FinishReason.LENGTH,
        replica_id="gen-0",
        text="",
        seconds=1.0,
    )
    return TrainRollout((1, 2), rollout, 0.5)


@pytest.mark.parametrize(("versions", "is_compared"), [((3, 3), True), ((2, 3), False), ((2, 2), False)])
def test_sampler_and_trainer_are_compared_on_rollouts_of_the_present_version_alone(
    versions: tuple[int, ...], is_compared: bool
) -> None:
    """Tokens of version 3 after some of version 2 attend to keys and values of version 2, so they may differ."""
    assert _is_current(sampled_under(*versions), 3) is is_compared
