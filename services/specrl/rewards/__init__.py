"""Grade completions: one reward per rollout, computed in worker processes that may hang or crash.

`Ungraded` is the only name for users' code (docs/python-api.md), and `check` is for the launcher. specrl's own packages
import from the modules below: `choice` builds the run's verifier, `pool` runs it, `checks` tries it before the run.
"""

from specrl.rewards.choice import check as check  # the launcher's preflight calls `check` of every package
from specrl.rewards.verifier import Ungraded

__all__ = ["Ungraded"]
