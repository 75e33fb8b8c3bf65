"""Stage 3 of the loop: a verdict on every rollout, from processes of their own."""

from specrl.rewards.choice import check_verifier, verifier_for
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier import Ungraded, Verdict, Verifier
from specrl.rewards.workers import FailureKind

__all__ = [
    "FailureKind",
    "Ungraded",
    "Verdict",
    "Verifier",
    "VerifierPool",
    "check_verifier",
    "verifier_for",
]
