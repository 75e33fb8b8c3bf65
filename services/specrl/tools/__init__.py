"""Between the turns of a rollout: calls of the policy, answered in processes of their own, as tokens that it reads."""

from specrl.tools.pool import Output, ToolPool
from specrl.tools.tool import Tool, check_tools, tool_for
from specrl.tools.transcript import Delimiters, Ending, Episode

__all__ = ["Delimiters", "Ending", "Episode", "Output", "Tool", "ToolPool", "check_tools", "tool_for"]
