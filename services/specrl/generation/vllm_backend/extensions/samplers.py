"""Calls the samplers that vLLM bound in a worker directly, so that `sampling_check` can draw from them.

vLLM has two model runners, each with samplers of its own. This code matches vLLM 0.32 and 0.33; a sampler of any other
class is an error.

The first runner is used on CPUs, and on GPUs for suffix decoding. Its samplers get all inputs as arguments.

The second runner is used on GPUs otherwise. Its samplers are Triton kernels, which CPUs cannot run, and read
temperatures and seeds from a table of requests. We copy the sampler objects and give the copies a table of our own;
code and options are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from specrl.errors import EngineFailed

# Shapes: R rows (requests), K draft tokens of a row at most, V vocabulary, N rows of logits.

FIRST_RUNNER = ("vllm.v1.sample.sampler.Sampler", "vllm.v1.sample.rejection_sampler.RejectionSampler")
SECOND_RUNNER = (
    "vllm.v1.worker.gpu.sample.sampler.Sampler",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler",
)
STANDARD = "standard"  # vLLM's other verification methods are lossy, or lossless only over whole sequences
MAX_DRAFTS = 3  # per row in the check; `sampling_check` has distributions for so many positions
PLACEHOLDER = -1  # after a row's last token


@dataclass(frozen=True)
class SamplingSetting:
    """Sampling parameters of a request. top_k 0 and top_p 1 turn these filters off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0


class SamplerBatch(NamedTuple):
    """The rows of one sampler call. Row r has counts_R[r] drafts and counts_R[r] + 1 rows of logits.

    Tensors are on the samplers' device.
    """

    settings_R: list[SamplingSetting]
    seeds_R: list[int]
    counts_R: np.ndarray
    drafts_RK: np.ndarray
    """Vocabulary ids, with PLACEHOLDER after a row's last draft."""
    logits_NV: torch.Tensor
    """The policy's logits, row after row."""
    draft_logits_RKV: torch.Tensor | None
    """Log-probabilities of the distributions that the drafts were drawn from; None for certain drafts."""


Draw = Callable[[SamplerBatch], np.ndarray]
"""Samples a batch; returns vocabulary ids [R, K + 1], with PLACEHOLDER after a row's last token."""


@dataclass(frozen=True)
class BoundSamplers:
    """A model runner's samplers: `draw` for a batch without drafts, `verify` if a row has some."""

    draw: Draw
    verify: Draw
    num_drafts: int
    """Drafts of a row at most. 0 without speculation; `verify` must not be called then."""
    names: tuple[str, str | None]
    """Class names of the samplers behind `draw` and `verify`."""


def find_bound_samplers(model_runner: Any) -> BoundSamplers:
    """Find the samplers that a model runner calls. Raises EngineFailed for any sampler class not listed above."""
    speculation = model_runner.vllm_config.speculative_config
    rejection_sampler = getattr(model_runner, "rejection_sampler", None) if speculation is not None else None
    found = (_class_name(getattr(model_runner, "sampler", None)), _class_name(rejection_sampler))
    method = STANDARD if speculation is None else speculation.rejection_sample_method
    for known, make in ((FIRST_RUNNER, _wrap_first_samplers), (SECOND_RUNNER, _wrap_second_samplers)):
        if method == STANDARD and found == (known if speculation is not None else (known[0], None)):
            return make(model_runner, found)
    raise EngineFailed(
        f"vLLM's samplers must be {' and '.join(FIRST_RUNNER)}, or {' and '.join(SECOND_RUNNER)}, and verify drafts by "
        f"the {STANDARD} method, got {found[0]} and {found[1]}, method {method}; specrl cannot check others: "
        "install a version of vLLM that it supports, and no package that replaces samplers"
    )


def _class_name(found: Any) -> str | None:
    return None if found is None else f"{type(found).__module__}.{type(found).__qualname__}"


# -- vLLM's first model runner: vllm.v1.worker.gpu_model_runner --------------------------------------------------------


def _wrap_first_samplers(model_runner: Any, names: tuple[str, str | None]) -> BoundSamplers:
    device = torch.device(model_runner.device)
    idle = model_runner.input_batch.sampling_metadata  # a template: the runner has no requests at its start

    def make_metadata(batch: SamplerBatch) -> Any:
        has_filter = any(setting.top_k or setting.top_p < 1 for setting in batch.settings_R)
        top_k = [setting.top_k or batch.logits_NV.shape[1] for setting in batch.settings_R]
        top_p = [setting.top_p for setting in batch.settings_R]
        return replace(
            idle,
            temperature=torch.tensor([setting.temperature for setting in batch.settings_R], device=device),
            all_greedy=False,
            all_random=True,
            top_p=torch.tensor(top_p, device=device) if has_filter else None,
            top_k=torch.tensor(top_k, dtype=torch.int32, device=device) if has_filter else None,
            generators={row: torch.Generator(device).manual_seed(seed) for row, seed in enumerate(batch.seeds_R)},
            max_num_logprobs=None,
            no_penalties=True,
            output_token_ids=[[] for _ in batch.counts_R],
            spec_token_ids=[[] for _ in batch.counts_R],
        )

    def draw_tokens(batch: SamplerBatch) -> np.ndarray:
        output = model_runner.sampler(logits=batch.logits_NV, sampling_metadata=make_metadata(batch))
        return np.asarray(output.sampled_token_ids.cpu().numpy())

    def verify_drafts(batch: SamplerBatch) -> np.ndarray:
        from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

        is_draft_RK = batch.drafts_RK != PLACEHOLDER
        # The last row of logits of each request is for the bonus token, the others verify its drafts.
        ends_R = np.cumsum(batch.counts_R + 1)
        others_N = np.setdiff1d(np.arange(ends_R[-1]), ends_R - 1)
        draft_probs = None
        if batch.draft_logits_RKV is not None:
            draft_probs = batch.draft_logits_RKV[torch.tensor(is_draft_RK, device=device)].exp()
        drafts = SpecDecodeMetadata(
            draft_token_ids=_int32_tensor(batch.drafts_RK[is_draft_RK], device),
            num_draft_tokens=batch.counts_R.tolist(),
            cu_num_draft_tokens=_int32_tensor(np.cumsum(batch.counts_R), device),
            cu_num_sampled_tokens=_int32_tensor(ends_R, device),
            target_logits_indices=_int32_tensor(others_N, device),
            bonus_logits_indices=_int32_tensor(ends_R - 1, device),
            logits_indices=_int32_tensor(np.arange(ends_R[-1]), device),
        )
        output = model_runner.rejection_sampler(drafts, draft_probs, batch.logits_NV, make_metadata(batch))
        return np.asarray(output.sampled_token_ids.cpu().numpy())

    is_speculating = model_runner.vllm_config.speculative_config is not None
    return BoundSamplers(draw_tokens, verify_drafts, MAX_DRAFTS if is_speculating else 0, names)


def _int32_tensor(values: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.int32, device=device)


# -- vLLM's second model runner: vllm.v1.worker.gpu.model_runner -------------------------------------------------------


def _wrap_second_samplers(model_runner: Any, names: tuple[str, str | None]) -> BoundSamplers:
    """Copy the bound samplers and give the copies a request table of our own; code and options are shared."""
    device = torch.device(model_runner.device)
    speculation = model_runner.vllm_config.speculative_config
    steps = 0 if speculation is None else model_runner.rejection_sampler.num_speculative_steps

    def sample_batch(batch: SamplerBatch, *, verifies: bool) -> np.ndarray:
        sampler = copy.copy(model_runner.sampler)
        _replace_request_tables(sampler, batch, device)
        layout = _build_input_batch(batch, device)
        logits = batch.logits_NV
        if not verifies:
            return np.asarray(sampler(logits, layout).sampled_token_ids.cpu().numpy())
        rejection_sampler = copy.copy(model_runner.rejection_sampler)
        rejection_sampler.sampler = sampler
        draft_logits = None
        if batch.draft_logits_RKV is not None:
            # vLLM divides draft logits by the temperature when it reads them, so these are multiplied by it first.
            temperature_R = torch.tensor([setting.temperature for setting in batch.settings_R], device=device)
            draft_logits = torch.zeros(len(batch.counts_R), steps, logits.shape[1], device=device)
            draft_logits[:, : batch.draft_logits_RKV.shape[1]] = batch.draft_logits_RKV * temperature_R[:, None, None]
        output = rejection_sampler(logits, layout, draft_logits)
        tokens_RK = output.sampled_token_ids.cpu().numpy()
        return np.where(
            np.arange(tokens_RK.shape[1]) < output.num_sampled.cpu().numpy()[:, None], tokens_RK, PLACEHOLDER
        )

    return BoundSamplers(
        draw=lambda batch: sample_batch(batch, verifies=False),
        verify=lambda batch: sample_batch(batch, verifies=True),
        num_drafts=min(MAX_DRAFTS, steps),
        names=names,
    )


def _replace_request_tables(sampler: Any, batch: SamplerBatch, device: torch.device) -> None:
    """Replace the request tables of a copied sampler by tables of a batch's requests."""
    from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    rows = len(batch.counts_R)
    vocabulary = batch.logits_NV.shape[1]
    states = SamplingStates(rows, vocabulary)
    states.temperature.np[:] = [setting.temperature for setting in batch.settings_R]
    states.top_k.np[:] = [setting.top_k or vocabulary for setting in batch.settings_R]
    states.top_p.np[:] = [setting.top_p for setting in batch.settings_R]
    states.seeds.np[:] = batch.seeds_R
    states.seeds_set[:] = True
    states.apply_staged_writes()
    sampler.sampling_states = states
    sampler.needs_logits_processing = np.ones(rows, dtype=bool)
    sampler.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=_int32_tensor(np.zeros(rows), device)))
    sampler.logprob_token_ids_state = LogprobTokenIdsState(rows, device)
    sampler.logits_processors = []  # penalties, biases and banned words; rollouts use none
    sampler.thinking_budget_state = SimpleNamespace(apply=lambda *_: None)


def _build_input_batch(batch: SamplerBatch, device: torch.device) -> Any:
    """Build the fields of vLLM's InputBatch that its samplers read.

    A row's input tokens are the last sampled token, here 0, and its drafts.
    """
    rows = len(batch.counts_R)
    lengths_R = batch.counts_R + 1
    starts_R = np.concatenate([[0], np.cumsum(lengths_R)])
    row_N = np.repeat(np.arange(rows), lengths_R)
    local_N = np.arange(starts_R[-1]) - starts_R[row_N]
    inputs_RK = np.concatenate([np.zeros((rows, 1), dtype=np.int64), batch.drafts_RK], axis=1)
    return SimpleNamespace(
        num_reqs=rows,
        num_draft_tokens=int(batch.counts_R.sum()),
        input_ids=_int32_tensor(inputs_RK[row_N, local_N], device),
        positions=torch.tensor(local_N, device=device),
        logits_indices=torch.arange(int(starts_R[-1]), device=device),
        idx_mapping=_int32_tensor(np.arange(rows), device),
        idx_mapping_np=np.arange(rows, dtype=np.int32),
        expanded_idx_mapping=_int32_tensor(row_N, device),
        expanded_local_pos=_int32_tensor(local_N, device),
        cu_num_logits=_int32_tensor(starts_R, device),
        cu_num_logits_np=starts_R.astype(np.int32),
        seq_lens=_int32_tensor(lengths_R, device),
        seq_lens_cpu_upper_bound=torch.tensor(lengths_R, dtype=torch.int32),
    )
