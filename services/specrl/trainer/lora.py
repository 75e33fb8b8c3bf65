"""Low-rank updates of frozen weights: W + alpha / r * B A (LoRA, arXiv:2106.09685), with peft's tensor names.

Invariant: the trainer multiplies with exactly the matrices that are broadcast and exported, bit for bit. Therefore the
sum W + s B A is formed in float32 and rounded to the weight's dtype before the product. Replicas get that rounded sum.
The usual y = W x + s B (A x) would train a slightly different policy than the one that samples (docs/decisions/0021).

Costs: 2 r operations per weight and pass, and one more copy of the adapted weights while gradients are computed.
Saves: float32 gradients and optimizer state of the frozen weights.

Called by the Megatron backend and by `checkpoint_export`.

Shapes: O output and I input features, R rank.
"""

from __future__ import annotations

import math
import zlib

import torch

from specrl.spec.trainer import Lora


def compute_scale(lora: Lora) -> float:
    """Compute the factor of B A, alpha / r."""
    return float(lora.alpha) / lora.rank


def factor_names(weight: str) -> tuple[str, str]:
    """Return peft's names of the factors A and B of a weight's update. weight: its Hugging Face name."""
    stem = f"base_model.model.{weight.removesuffix('.weight')}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def initialise_factors(
    weight: str, shape_OI: tuple[int, int], rank: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Create A [R, I], uniform within 1 / sqrt(I) as in peft, and B [O, R], zero."""
    outputs, inputs = shape_OI
    # Seeded by the weight's name, so that the factors do not depend on which rank holds the weight.
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {weight}".encode()))
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator), torch.zeros(outputs, rank)


def compute_update(down_RI: torch.Tensor, up_OR: torch.Tensor, scale: float) -> torch.Tensor:
    """Compute the update scale * B A [O, I] in float32. down is A, up is B."""
    return scale * (up_OR.float() @ down_RI.float())


def merge_update(weight_OI: torch.Tensor, update_OI: torch.Tensor) -> torch.Tensor:
    """Add the update in float32. Returns the sum [O, I] in the weight's dtype."""
    return (weight_OI.float() + update_OI).to(weight_OI.dtype)
