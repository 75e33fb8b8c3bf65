"""Stage 3 of the loop: a verdict on every rollout, from processes of their own."""

from specrl.rewards.choice import check_references, check_verifier, verifier_for
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifiers import Verifier
from specrl.rewards.workers import FailureKind

__all__ = ["FailureKind", "Verifier", "VerifierPool", "check_references", "check_verifier", "verifier_for"]
