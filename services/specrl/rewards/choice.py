"""Build the verifiers that the run file names, and check that they work on this machine before the run starts.

The coordinator and `specrl rewards grade` call `verifiers_for`. The launcher's preflight calls `check`.
"""

from __future__ import annotations

import multiprocessing

import pebble

from specrl.errors import SpecInvalid, SpecProblem, collect_problems
from specrl.models import RunModels
from specrl.rewards.code import Code
from specrl.rewards.code.sandbox_runner import SandboxOptions
from specrl.rewards.custom import Custom, UserFunction
from specrl.rewards.math import Math
from specrl.rewards.text.exact import Exact
from specrl.rewards.text.formats import FormatVerifier, Pattern, Tags, ValidJson
from specrl.rewards.text.json_answers import JsonPlace
from specrl.rewards.text.patterns import JsonSchema, Regex
from specrl.rewards.verifier import Verifier, WorkerSetup
from specrl.rewards.verifier_set import VerifierSet, WeightedVerifier
from specrl.spec import RunSpec
from specrl.spec.data import JsonPlace as Place
from specrl.spec.data import Match, Rewards, VerifierSection

_READY_S = 60
"""Limit for the start of a process on a loaded machine. It imports SymPy, which takes 2 s on an idle machine."""


def verifier_for(rewards: VerifierSection, path: str = "rewards") -> Verifier:
    """Build the verifier of a section. Raises ValueError if the section names none.

    path: of the section in the run file, for messages.
    """
    if rewards.math is not None:
        return Math(rewards.math.answer_after)
    if rewards.exact is not None:
        return Exact(rewards.exact.answer_after)
    if rewards.regex is not None:
        return Regex(rewards.regex.answer_after, is_whole=rewards.regex.match is Match.WHOLE)
    if rewards.json_schema is not None:
        in_block = rewards.json_schema.place is Place.FENCED_BLOCK
        return JsonSchema(JsonPlace(rewards.json_schema.answer_after, in_block))
    if rewards.code is not None:
        return Code(SandboxOptions.from_section(rewards.code, f"{path}.code"))
    if rewards.pattern is not None:
        is_whole = rewards.pattern.match is Match.WHOLE
        return Pattern(rewards.pattern.expression, is_whole, f"{path}.pattern")
    if rewards.tags is not None:
        return Tags(rewards.tags.names, rewards.tags.first_is_open)
    if rewards.valid_json is not None:
        place = JsonPlace(in_block=rewards.valid_json.place is Place.FENCED_BLOCK)
        return ValidJson(place, rewards.valid_json.json_schema, f"{path}.validJson")
    if rewards.python is not None:
        return Custom(UserFunction(rewards.python.function, rewards.python.folder, f"{path}.python"))
    names = ", ".join(VerifierSection.model_fields)
    raise ValueError(f"{path} must have exactly one of {names}, got none; name one")


def verifiers_for(rewards: Rewards) -> VerifierSet:
    """Build all verifiers of a run."""
    if rewards.sum is None:
        return VerifierSet((WeightedVerifier(verifier_for(rewards)),))
    path = "rewards.sum.terms"
    return VerifierSet(
        tuple(
            WeightedVerifier(
                verifier=verifier_for(term.verifier, f"{path}.{number}.verifier"),
                path=f"{path}.{number}.verifier",
                name=term.name,
                weight=float(term.weight),
                sources=term.sources,
                column=term.column,
            )
            for number, term in enumerate(rewards.sum.terms)
        )
    )


def check(spec: RunSpec, _models: RunModels | None = None) -> list[SpecProblem]:
    """List the reasons why a verifier cannot work on this machine.

    Takes up to two seconds for each `code` and `python`. The other verifiers need nothing of the machine: they are
    prepared in this process.
    """
    problems: list[SpecProblem] = []
    for term in verifiers_for(spec.rewards).terms:
        with collect_problems(problems):
            if isinstance(term.verifier, Code | Custom):
                check_worker_start(term.verifier, term.path)
            elif isinstance(term.verifier, FormatVerifier):
                term.verifier.prepare_worker()
    return problems


def check_worker_start(work: WorkerSetup, path: str) -> None:
    """Prepare a verifier or tool in a separate process, since it may import a user's code.

    path: the section of the run file that asks for it. Raises SpecInvalid if it is not ready within 60 s.
    """
    with pebble.ProcessPool(1, context=multiprocessing.get_context("spawn")) as pool:
        try:
            pool.schedule(work.prepare_worker, timeout=_READY_S).result()
        except (TimeoutError, pebble.ProcessExpired) as error:
            rule = f"must be ready within {_READY_S} s, got {type(error).__name__}: {error}"
            remedy = "see the log above, and check what its modules do on import"
            raise SpecInvalid((SpecProblem(path, rule, remedy),)) from error
