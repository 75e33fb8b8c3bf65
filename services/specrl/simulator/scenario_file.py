"""From a name or a file to a Scenario, with `path=value` overrides; every problem at once.

A name is that of a file of examples/plan/. A file is a scenario, a run file, or an RLJob.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specrl.errors import Problem, SpecInvalid
from specrl.installation import EXAMPLES
from specrl.simulator.scenario import Scenario
from specrl.spec.stand_ins import field_at
from specrl.spec.yaml_input import parse_override, problem_of, read_documents, unknown_field

SCENARIOS = EXAMPLES / "plan"
"""Named scenarios, one file each."""


def named() -> list[str]:
    """Names of the scenarios that come with specrl."""
    return sorted(file.stem for file in SCENARIOS.glob("*.yaml"))


def find(scenario: str) -> Path:
    """The file that a name or path stands for. Raises SpecInvalid with the names there are."""
    if Path(scenario).is_file():
        return Path(scenario)
    file = SCENARIOS / f"{scenario}.yaml"
    if "/" not in scenario and file.is_file():
        return file
    known = ", ".join(named())
    close = difflib.get_close_matches(scenario, named(), n=1)
    remedy = f"did you mean {close[0]}?" if close else f"the scenarios are {known}"
    raise SpecInvalid((Problem("SCENARIO", f"must be a scenario's name or a file, got {scenario!r}", remedy),))


def read_mapping(path: Path) -> dict[str, Any]:
    """The one YAML mapping of a file. Raises SpecInvalid."""
    found = read_documents(path)
    if len(found) == 1 and isinstance(found[0], dict):
        return found[0]
    raise SpecInvalid((Problem(str(path), "must be one mapping of sections", "see examples/plan/"),))


def parse(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """A mapping with overrides applied. Raises SpecInvalid with every problem of form; `rules.py` has the others."""
    problems = [problem for override in overrides for problem in _apply(raw, override)]
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        known = {problem.path.removeprefix("--set ") for problem in problems}
        found = [problem_of(detail, Scenario, "see docs/simulator.md") for detail in error.errors()]
        problems += [problem for problem in found if problem.path not in known]
        raise SpecInvalid(tuple(problems)) from error
    if problems:
        raise SpecInvalid(tuple(problems))
    return scenario


def _apply(raw: dict[str, Any], override: str) -> Iterator[Problem]:
    """Set a field to what an override says. Yields a problem for a path that no scenario has, and changes nothing."""
    try:
        given = parse_override(override, "speculation.k=5")
    except SpecInvalid as error:
        yield from error.problems
        return
    unknown = _unknown(given.keys)
    if unknown is not None:
        yield replace(unknown, path=f"--set {given.path}")
        return
    if isinstance(raw.get("speculation"), str):
        raw["speculation"] = {"mechanism": raw["speculation"]}
    section, last = given.set_in(raw), given.keys[-1]
    if given.path.startswith("speculation.") and last in ("acceptanceLength", "chances"):
        section.pop("chances" if last == "acceptanceLength" else "acceptanceLength", None)
    if given.path == "speculation.mechanism" and given.value == "none":
        for field in ("k", "acceptanceLength", "chances"):
            section.pop(field, None)


def _unknown(keys: Sequence[str]) -> Problem | None:
    """The problem of the first key that names no field."""
    if keys[0] == "speculation" and keys[1:2] in (["eagle3"], ["ngram"]):  # as run files say it
        keys = [keys[0], *keys[2:]]
    firsts = (keys[:count] for count in range(1, len(keys) + 1))
    return next((unknown_field(Scenario, first) for first in firsts if field_at(Scenario, first) is None), None)
