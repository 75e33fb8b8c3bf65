"""The verifier that a run asks for, and what can be said about it before the run starts.

Called by the coordinator and by the launcher's preflight.
"""

from __future__ import annotations

import multiprocessing

import pebble

from specrl.errors import Problem, SpecInvalid
from specrl.rewards.code import Code
from specrl.rewards.custom import Custom, UserFunction
from specrl.rewards.exact import Exact
from specrl.rewards.math import Math
from specrl.rewards.patterns import JsonSchema, Regex
from specrl.rewards.verifier import Verifier
from specrl.rewards.workers import Work
from specrl.spec.data import Match, Rewards

_READY_S = 60
"""Longest start of a process on a loaded machine: it imports SymPy, which takes 2 s on an idle one."""


def verifier_for(rewards: Rewards) -> Verifier:
    """The verifier that the run asks for."""
    if rewards.math is not None:
        return Math(rewards.math.answer_after)
    if rewards.exact is not None:
        return Exact(rewards.exact.answer_after)
    if rewards.regex is not None:
        return Regex(rewards.regex.answer_after, is_whole=rewards.regex.match is Match.WHOLE)
    if rewards.json_schema is not None:
        return JsonSchema(rewards.json_schema.answer_after)
    if rewards.code is not None:
        return Code.of(rewards.code)
    if rewards.python is not None:
        return Custom(UserFunction(rewards.python.function, rewards.python.folder, "rewards.python"))
    raise ValueError(f"rewards must have exactly one of {', '.join(Rewards.model_fields)}, got none; name one")


def check_verifier(rewards: Rewards) -> None:
    """Raise SpecInvalid when the verifier cannot work here. In a process of its own: it may run code of the user's."""
    check_ready(verifier_for(rewards), "rewards")


def check_ready(work: Work, path: str) -> None:
    """Raise SpecInvalid when what the run file asks for at `path` is not ready in time, in a process of its own."""
    with pebble.ProcessPool(1, context=multiprocessing.get_context("spawn")) as pool:
        try:
            pool.schedule(work.ready, timeout=_READY_S).result()
        except (TimeoutError, pebble.ProcessExpired) as error:
            rule = f"must be ready in {_READY_S} s, got {type(error).__name__}: {error}"
            remedy = "see the log above, and what its modules do when they are imported"
            raise SpecInvalid((Problem(path, rule, remedy),)) from error
