"""Stage 3 of the loop: a verdict on every rollout, from processes of their own."""

from specrl.rewards.pool import FailureKind, VerifierPool
from specrl.rewards.verifiers import Verifier, check_references, verifier_for

__all__ = ["FailureKind", "Verifier", "VerifierPool", "check_references", "verifier_for"]
