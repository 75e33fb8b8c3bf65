"""Rotary frequencies of a policy or of a drafter's layer, with the scaling for long contexts that config.json asks for.

Megatron's `yarn` and `rope_scaling` support fewer fields of config.json. So the policy is built with plain positions,
and `gpt_model.py` replaces its frequencies with these.

Invariant: operations are in the order of transformers' `modeling_rope_utils`, which is also vLLM's, so that sampler and
trainer have the same bits.

Shapes: D head size.
"""

from __future__ import annotations

import math

import torch

from specrl.models.policy_config import RopeScaling


def compute_inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Compute the frequencies [D / 2] float32: radians per position, for each pair of a head's components."""
    plain = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if scaling is None:
        return plain
    if scaling.kind == "llama3":
        return _scale_llama3(plain, scaling)
    return _scale_yarn(plain, theta, scaling)


def compute_attention_factor(scaling: RopeScaling | None) -> float:
    """Compute the factor of cosine and sine. It is 1 except for YaRN (arXiv:2309.00071)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    numbers = scaling.numbers
    if numbers["attention_factor"]:
        return numbers["attention_factor"]
    if numbers["mscale"] and numbers["mscale_all_dim"]:
        return _compute_mscale(scaling, numbers["mscale"]) / _compute_mscale(scaling, numbers["mscale_all_dim"])
    return _compute_mscale(scaling, 1.0)


def _compute_mscale(scaling: RopeScaling, times: float) -> float:
    return 0.1 * times * math.log(scaling.numbers["factor"]) + 1.0


def _scale_llama3(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Scale as Llama 3.1 does (arXiv:2407.21783).

    Frequencies with long wavelengths are divided by `factor`, those with short ones are kept, and those in between are
    interpolated.
    """
    numbers = scaling.numbers
    length, low, high = (
        numbers[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > length / low, plain / numbers["factor"], plain)
    share = (length / wavelengths - low) / (high - low)
    between = (1 - share) * stretched / numbers["factor"] + share * stretched
    is_between = ~(wavelengths < length / high) * ~(wavelengths > length / low)
    return torch.where(is_between, between, stretched)


def _scale_yarn(plain: torch.Tensor, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """Scale as YaRN does (arXiv:2309.00071).

    Pairs are numbered by falling frequency. The pair that turns beta_fast times in the original context is not scaled,
    and the pair that turns beta_slow times is scaled fully. Between them the scaling rises linearly.
    """
    numbers = scaling.numbers
    dim = 2 * len(plain)

    # The index of the pair that makes this many turns over the original context.
    def find_pair(turns: float) -> float:
        length = numbers["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = find_pair(numbers["beta_fast"])
    high = find_pair(numbers["beta_slow"])
    if numbers["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers and vLLM keep the ramp finite
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (numbers["factor"] * powers) * (1 - kept) + plain * kept
