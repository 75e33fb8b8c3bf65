"""Sampling parameters and seeds of rollouts. Pure.

Each rollout has its own seed, derived from its place in the run. So a rollout that is sampled again, at another
replica or after a restart, uses the same random numbers.
"""

from __future__ import annotations

import hashlib

from specrl.records import Sampling
from specrl.spec import RunSpec


def derive_seed(run_seed: int, *place: object) -> int:
    """Derive a 63-bit sampling seed from the run's seed and the numbers and names that identify the rollout."""
    digest = hashlib.blake2b(repr((run_seed, *place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def make_training_sampling(spec: RunSpec, seed: int) -> Sampling:
    """Return the sampling parameters of a training rollout with this seed."""
    sampling = spec.generation.sampling
    return Sampling(
        max_tokens=sampling.max_tokens,
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=sampling.top_k,
        seed=seed,
        stop=sampling.stop,
    )
