"""How long the fuzz suites look, and how what they find is found again.

In `make test` a few examples, always the same. `make fuzz` sets SPECRL_FUZZ_EXAMPLES to many, under a seed that it
prints; `make fuzz SEED=...` repeats it. What fails is printed as Python, with a line that reproduces it.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("SPECRL_FUZZ_EXAMPLES", "0"))


def fuzz(examples: int = 50) -> settings:
    """Settings of one fuzz test. examples: in `make test`."""
    return settings(
        max_examples=max(EXAMPLES, examples),
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
