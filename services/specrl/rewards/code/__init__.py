"""Verifier `code`: runs answers that are programs against tests, in a sandbox of the operating system.

`rewards.choice` builds the verifier; `specrl.agent_tools` runs tool calls in the same sandbox.
"""

from specrl.rewards.code.verifier import Code

__all__ = ["Code"]
