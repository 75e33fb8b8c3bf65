"""Verifier `math`: a completion's answer is found, read as mathematics and compared with the reference."""

from specrl.rewards.math.verifier import Math

__all__ = ["Math"]
