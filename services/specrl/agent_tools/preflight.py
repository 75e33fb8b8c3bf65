"""Check before the run that its tools fit its policy and this machine. Called by the launcher's preflight."""

from __future__ import annotations

from specrl.agent_tools.tool import tool_for
from specrl.agent_tools.transcript import CallDelimiters
from specrl.errors import SpecProblem, collect_problems
from specrl.models import RunModels
from specrl.rewards.choice import check_worker_start
from specrl.spec import RunSpec


def check(spec: RunSpec, models: RunModels) -> list[SpecProblem]:
    """List the problems of a run's tools: delimiters that the policy cannot write, or a tool that does not start."""
    problems: list[SpecProblem] = []
    if spec.tools is None:
        return problems
    if models.policy is not None and models.policy.vocabulary is not None:
        with collect_problems(problems):
            CallDelimiters(spec.tools, spec.model.path)
    with collect_problems(problems):
        check_worker_start(tool_for(spec.tools), "tools")
    return problems
