"""Rollouts that are kept to be looked at, in a bounded amount of memory."""

from __future__ import annotations

import numpy as np

from specrl.coordinator.samples import LONGEST_TEXT, Samples
from specrl.records import FinishReason, GradedRollout, Prompt, Reward, Rollout, VersionSpan


def test_every_text_of_a_sample_is_bounded_its_verdict_included() -> None:
    """The extracted answer may be all of the completion, as with the verifier jsonSchema."""
    long = "7" * (2 * LONGEST_TEXT)
    rollout = Rollout(
        rollout_id="000001-00000-000-0",
        group_id="000001-00000",
        sample_index=0,
        token_ids_T=np.asarray([1], np.int32),
        sampler_logprobs_T=np.asarray([-0.5], np.float32),
        versions=(VersionSpan(0, 0, 1),),
        finish_reason=FinishReason.STOP,
        replica_id="gen-0",
        text=long,
        seconds=0.5,
    )
    samples = Samples(1)
    samples.offer(Prompt("p0", 0, (1,), long, "7"), GradedRollout(rollout, Reward(0.0, extracted=long, reason=long)))
    (kept,) = samples.newest(1)
    assert {len(text) for text in (kept.prompt, kept.completion, kept.extracted, kept.reason)} == {LONGEST_TEXT}
