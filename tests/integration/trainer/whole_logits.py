"""Log-probabilities and entropies of all rows at once, by Megatron's own cross-entropy: what chunks must equal.

Shapes: L rows, V vocabulary, W columns of this tensor parallel rank, M ids of sampling sets.
"""

from __future__ import annotations

from unittest import mock

import torch
import torch.distributed as dist

from specrl.drafting import vocabulary
from specrl.models.policy_config import PolicyConfig
from specrl.trainer.megatron_backend.model.gpt_model import compute_padded_vocabulary, mask_padding
from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.policy.distributions import SamplingDistributions
from specrl.trainer.megatron_backend.policy.truncation import SetMask

ROWS = 11


def measure_whole(
    sampling: SamplingDistributions, logits_LW: torch.Tensor, target_L: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `SamplingDistributions.measure_tokens`, in one piece and differentiated by autograd."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # warns unless our package comes first

    scaled_LW = mask_padding(logits_LW.float() / sampling.temperature, sampling.vocab_size)
    if sampling.sets is not None:
        scaled_LW = sampling.sets.mask_outside(scaled_LW.clone(), sampling.tensor.rank * scaled_LW.shape[1])
    with torch.no_grad():
        top_L = scaled_LW.max(-1).values
        dist.all_reduce(top_L, dist.ReduceOp.MAX, group=sampling.tensor.group)
        shifted_LW = scaled_LW - top_L[:, None]
        mass_LW = shifted_LW.exp()
        weighted_LW = mass_LW * shifted_LW.clamp(min=torch.finfo(torch.float32).min)
        sums_2L = torch.stack([mass_LW.sum(-1), weighted_LW.sum(-1)])
        dist.all_reduce(sums_2L, group=sampling.tensor.group)
    # Last, since it works in place.
    logprob_L = -vocab_parallel_cross_entropy(scaled_LW[:, None], target_L[:, None])[:, 0]
    return logprob_L, sums_2L[0].log() - sums_2L[1] / sums_2L[0]


def compare_chunks(groups: RankGroups, config: PolicyConfig, rows_per_chunk: int) -> dict[str, bool]:
    """Say for each case whether chunks give the bits of the whole: log-probabilities, entropies and gradients."""
    width = compute_padded_vocabulary(config, groups.tensor.size) // groups.tensor.size
    columns = slice(groups.tensor.rank * width, (groups.tensor.rank + 1) * width)
    generator = torch.Generator().manual_seed(7)
    logits_LV = 4 * torch.randn(ROWS, width * groups.tensor.size, generator=generator)
    target_L, other_L = torch.randint(config.vocab_size, (2, ROWS), generator=generator)
    gradient_L = torch.randn(ROWS, generator=generator)
    # Sets of two tokens, but for the rows 2 and 3 of rollouts without sets.
    row_M = torch.tensor([row for row in range(ROWS) if row not in (2, 3)]).repeat(2)
    id_M = torch.cat([ids_L[row_M[: len(row_M) // 2]] for ids_L in (target_L, other_L)])
    is_whole_L = torch.zeros(ROWS, dtype=torch.bool).index_fill(0, torch.tensor([2, 3]), True)
    found: dict[str, bool] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for sets in (None, SetMask(row_M, id_M, is_whole_L)):
            sampling = SamplingDistributions(0.7, config.vocab_size, sets, groups.tensor)
            results = []
            for measure in (measure_whole, SamplingDistributions.measure_tokens):
                logits_LW = logits_LV[:, columns].to(dtype).clone().requires_grad_()
                with mock.patch.object(vocabulary, "CHUNK_BYTES", 4 * width * rows_per_chunk):
                    logprob_L, entropy_L = measure(sampling, logits_LW, target_L)
                    (found_LW,) = torch.autograd.grad(logprob_L, logits_LW, gradient_L)
                results.append((logprob_L.detach(), entropy_L, found_LW))
            name = f"{dtype} {'sets' if sets else 'whole vocabulary'}"
            found[name] = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
            assert results[0][2].any()  # there is something to compare
    return found
