"""Makes vLLM's first model runner return the ids that top-k and top-p left for each sampled token.

vLLM 0.32 and 0.33 have nearly everything for this (`return_sampling_mask`). The second model runner, which GPUs use,
returns the ids. The scheduler cuts them by request, and the front end by stop strings. But the first model runner,
which CPUs use, returns none, and a check of vLLM's config rejects it. So this module skips the check for it
(`allow_first_runner`, in each process), and takes the ids from its samplers (`install_recorder`, in each worker).

Both samplers mask what top-k and top-p leave out with -inf. Without drafts, `Sampler.sample` returns the masked
log-probabilities. With drafts, `RejectionSampler._get_logprobs_tensors` gets the masked logits of every draft and of
the bonus token. The token at place j of a request, whether accepted, recovered or bonus, was decided by the policy's
distribution at place j. So its set is that of row j, whatever the drafter proposed.

Steps must not overlap (`arguments.build_engine_arguments`): the sampled tokens of a step must be known when its ids are
handed on.

Called by `plugin.register` and by `worker`.

Shape suffixes: N rows of a step's logits; V vocabulary; R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


def allow_first_runner() -> None:
    """Skip vLLM's check for the first model runner. Its other conditions hold: see `arguments`."""
    from vllm.config import VllmConfig

    check = VllmConfig._verify_sampling_replay_config

    def verify_unless_first(self: Any) -> None:
        if self.use_v2_model_runner:
            check(self)

    VllmConfig._verify_sampling_replay_config = verify_unless_first  # type: ignore[method-assign]  # replaces a method


def install_recorder(model_runner: Any) -> None:
    """Patch the samplers and steps of a first model runner, if the config requests sampling masks."""
    config = model_runner.vllm_config
    if not config.model_config.return_sampling_mask or config.use_v2_model_runner:
        return
    recorder = SetRecorder()
    sampler = model_runner.sampler
    sampler.sample = recorder.watch_sampler(sampler.sample)
    if config.speculative_config is not None:
        verifier = model_runner.rejection_sampler
        verifier._get_logprobs_tensors = recorder.watch_verifier(verifier._get_logprobs_tensors)
    sample_tokens = model_runner.sample_tokens

    def sample_and_hand_on(*args: Any, **kwargs: Any) -> Any:
        recorder.forget_rows()
        output = sample_tokens(*args, **kwargs)
        if recorder.has_rows:
            output.sampling_masks = recorder.take_masks(output.sampled_token_ids)
        return output

    model_runner.sample_tokens = sample_and_hand_on


class SetRecorder:
    """Keeps the masked logits of the last call of a sampler, until the sampled tokens of the step are known."""

    def __init__(self) -> None:
        self._rows_NV: torch.Tensor | None = None
        self._starts_R: list[int] | None = None

    @property
    def has_rows(self) -> bool:
        return self._rows_NV is not None

    def forget_rows(self) -> None:
        self._rows_NV = None
        self._starts_R = None

    def watch_sampler(self, sample: Any) -> Any:
        """Wrap `Sampler.sample`, which also draws the bonus tokens of a step with drafts."""

        def sample_and_keep(*args: Any, **kwargs: Any) -> Any:
            sampled, processed_RV = sample(*args, **kwargs)
            self._rows_NV = processed_RV
            self._starts_R = None  # one row per request
            return sampled, processed_RV

        return sample_and_keep

    def watch_verifier(self, build_logprobs: Any) -> Any:
        """Wrap `RejectionSampler._get_logprobs_tensors`, which is called after the bonus tokens were drawn."""

        def keep_and_build(*args: Any) -> Any:
            _, metadata, logits_NV, target_logits, bonus_logits, _ = args
            rows_NV = torch.empty_like(logits_NV, dtype=torch.float32)
            rows_NV[metadata.target_logits_indices] = target_logits.float()
            rows_NV[metadata.bonus_logits_indices] = bonus_logits.float()
            self._rows_NV = rows_NV
            # The rows of a request are those of its drafts, then that of its bonus token.
            self._starts_R = [0, *metadata.cu_num_sampled_tokens.tolist()[:-1]]
            return build_logprobs(*args)

        return keep_and_build

    def take_masks(self, sampled: Sequence[Sequence[int]]) -> Any:
        """Return vLLM's SamplingMaskLists of a step, and forget the rows. sampled: token ids by request."""
        from vllm.v1.outputs import SamplingMaskLists

        rows_NV = self._rows_NV
        assert rows_NV is not None
        starts = range(len(sampled)) if self._starts_R is None else self._starts_R
        self.forget_rows()
        wanted = [start + place for start, tokens in zip(starts, sampled, strict=True) for place in range(len(tokens))]
        is_kept = torch.isfinite(rows_NV[wanted]).cpu().numpy()
        return SamplingMaskLists(
            np.nonzero(is_kept)[1].astype(np.int32),
            np.concatenate([[0], np.cumsum(is_kept.sum(1))]),
            [0, *np.cumsum([len(tokens) for tokens in sampled]).tolist()],
        )
