"""Low-rank updates of frozen weights: W + alpha / r * B A (LoRA, arXiv:2106.09685), by the names of peft.

The sum is formed before the product, in float32, and rounded to the weight's dtype. So the trainer multiplies with
the very matrices that are broadcast and exported, bit for bit; with the usual y = W x + s B (A x) the sampler's rounded
sum would be another policy than the one that is trained. It costs 2 r operations a weight and pass, and one more copy
of the adapted weights while gradients are computed; what is saved are float32 gradients and the optimizer's state.

Shapes: O output and I input features, R rank.
"""

from __future__ import annotations

import math
import zlib

import torch

from specrl.spec.trainer import Lora


def scale(lora: Lora) -> float:
    """What B A is multiplied by."""
    return float(lora.alpha) / lora.rank


def names(weight: str) -> tuple[str, str]:
    """Of the two factors of a weight's update, A and B."""
    stem = f"base_model.model.{weight.removesuffix('.weight')}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def initial(weight: str, shape_OI: tuple[int, int], rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A [R, I] uniform within 1 / sqrt(I), as in peft, and B [O, R] zero: the same wherever the weight is held."""
    outputs, inputs = shape_OI
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {weight}".encode()))
    bound = 1 / math.sqrt(inputs)
    return torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator), torch.zeros(outputs, rank)


def update(down_RI: torch.Tensor, up_OR: torch.Tensor, scale: float) -> torch.Tensor:
    """[O, I] float32."""
    return scale * (up_OR.float() @ down_RI.float())


def merged(weight_OI: torch.Tensor, update_OI: torch.Tensor) -> torch.Tensor:
    """The updated weight, in the weight's dtype."""
    return (weight_OI.float() + update_OI).to(weight_OI.dtype)
