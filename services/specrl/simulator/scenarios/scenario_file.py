"""Turns a name or a file into a Scenario, with `path=value` overrides, and reports every problem at once.

A name is that of a file in examples/plan/. A file is a scenario, a run file, or an RLJob. Called by `specrl simulate`
and `specrl plan`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specrl.errors import SpecInvalid, SpecProblem
from specrl.installation import EXAMPLES
from specrl.simulator.scenarios.scenario import Scenario
from specrl.spec.yaml_input import convert_error, parse_override, read_documents

SCENARIOS = EXAMPLES / "plan"
"""Folder of the named scenarios, one file each."""


def list_scenario_names() -> list[str]:
    """Return the names of the scenarios that come with specrl."""
    return sorted(file.stem for file in SCENARIOS.glob("*.yaml"))


def find_scenario(scenario: str) -> Path:
    """Return the file for a name or path. Raises SpecInvalid with the known names."""
    if Path(scenario).is_file():
        return Path(scenario)
    file = SCENARIOS / f"{scenario}.yaml"
    if "/" not in scenario and file.is_file():
        return file
    known = ", ".join(list_scenario_names())
    close = difflib.get_close_matches(scenario, list_scenario_names(), n=1)
    remedy = f"did you mean {close[0]}?" if close else f"the scenarios are {known}"
    raise SpecInvalid((SpecProblem("SCENARIO", f"must be a scenario's name or a file, got {scenario!r}", remedy),))


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the single YAML mapping of a file. Raises SpecInvalid."""
    found = read_documents(path)
    if len(found) == 1 and isinstance(found[0], dict):
        return found[0]
    raise SpecInvalid((SpecProblem(str(path), "must be one mapping of sections", "see examples/plan/"),))


def parse_scenario(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """Return the scenario of a mapping with overrides applied. Raises SpecInvalid with every malformed field.

    `rules.py` checks the rules between fields.
    """
    problems = [problem for override in overrides for problem in _apply_override(raw, override)]
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        problems += [convert_error(detail, Scenario, "see docs/simulator.md") for detail in error.errors()]
        raise SpecInvalid(tuple(problems)) from error
    if problems:
        raise SpecInvalid(tuple(problems))
    return scenario


def _apply_override(raw: dict[str, Any], override: str) -> Iterator[SpecProblem]:
    """Apply one override to the mapping. Yields the problem of a malformed override."""
    try:
        given = parse_override(override, "speculation.k=5")
    except SpecInvalid as error:
        yield from error.problems
        return
    # Overrides may assume the long form of the section.
    if isinstance(raw.get("speculation"), str):
        raw["speculation"] = {"mechanism": raw["speculation"]}
    section = given.set_in(raw)
    last = given.keys[-1]
    # acceptanceLength and chances exclude each other, so setting one of them replaces the other.
    if given.dotted_path.startswith("speculation.") and last in ("acceptanceLength", "chances"):
        section.pop("chances" if last == "acceptanceLength" else "acceptanceLength", None)
    if given.dotted_path == "speculation.mechanism" and given.value == "none":
        for field in ("k", "acceptanceLength", "chances"):
            section.pop(field, None)
