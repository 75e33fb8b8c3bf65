"""Verifier `math`: finds a completion's answer, reads it as mathematics, and compares it with the reference.

`grading` shows the order of the steps. `rewards.choice` builds the verifier.
"""

from specrl.rewards.math.verifier import Math

__all__ = ["Math"]
