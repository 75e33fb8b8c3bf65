"""Answer the policy's tool calls between the turns of a rollout, in worker processes.

`transcript` keeps a rollout's tokens turn by turn, `tool` defines tools, `pool` runs them. The coordinator's
`replica_session` calls all three; the launcher's preflight calls `check`. Users write a function, not a class of this
package (docs/python-api.md).
"""

from specrl.agent_tools.pool import ToolOutput, ToolPool
from specrl.agent_tools.preflight import check
from specrl.agent_tools.tool import Tool, tool_for
from specrl.agent_tools.transcript import CallDelimiters, Episode

__all__ = ["CallDelimiters", "Episode", "Tool", "ToolOutput", "ToolPool", "check", "tool_for"]
