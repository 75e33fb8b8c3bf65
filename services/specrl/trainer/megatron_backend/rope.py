"""Rotary frequencies of a policy: as they were trained, or stretched for long contexts.

Megatron's own `yarn` and `rope_scaling` know fewer of the fields that a config.json may have; so the model is built
with plain positions, and given these frequencies. Computed in the order of transformers' `modeling_rope_utils`, which
is also vLLM's, so that all three agree to the last bit. D: head size.
"""

from __future__ import annotations

import math

import torch

from specrl.drafting.policy_config import PolicyConfig, RopeScaling


def inverse_frequencies(config: PolicyConfig) -> torch.Tensor:
    """[D / 2] float32: radians per position of each pair of numbers."""
    dim, scaling = config.head_dim, config.rope_scaling
    plain = 1.0 / (config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if scaling is None:
        return plain
    return {"llama3": _llama3, "yarn": _yarn}[scaling.kind](plain, config, scaling)


def attention_factor(config: PolicyConfig) -> float:
    """What cosine and sine are multiplied by: 1 but for YaRN, which sharpens attention over longer contexts."""
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    numbers = scaling.numbers
    if numbers["attention_factor"]:
        return numbers["attention_factor"]
    if numbers["mscale"] and numbers["mscale_all_dim"]:
        return _mscale(scaling, numbers["mscale"]) / _mscale(scaling, numbers["mscale_all_dim"])
    return _mscale(scaling, 1.0)


def _mscale(scaling: RopeScaling, times: float) -> float:
    return 0.1 * times * math.log(scaling.numbers["factor"]) + 1.0


def _llama3(plain: torch.Tensor, _config: PolicyConfig, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1 (arXiv:2407.21783): long waves are stretched by `factor`, short ones left, others interpolated."""
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


def _yarn(plain: torch.Tensor, config: PolicyConfig, scaling: RopeScaling) -> torch.Tensor:
    """YaRN (arXiv:2309.00071): a ramp between the pairs that turn beta_fast and beta_slow times in the old context."""
    numbers, dim = scaling.numbers, config.head_dim

    def pair(turns: float) -> float:
        length = numbers["original_max_position_embeddings"]
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair(numbers["beta_fast"]), pair(numbers["beta_slow"])
    if numbers["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # as transformers and vLLM keep the ramp finite
    powers = config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    kept = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    return 1.0 / (numbers["factor"] * powers) * (1 - kept) + plain * kept
