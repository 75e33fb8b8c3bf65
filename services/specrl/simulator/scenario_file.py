"""From a name or a file to a Scenario, with `path=value` overrides; every problem at once.

A name is that of a file of examples/plan/, which the wheel carries too. A file is a scenario, a run file, or an RLJob.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from specrl.errors import Problem, SpecInvalid
from specrl.files import read_text
from specrl.simulator.scenario import Scenario
from specrl.spec.stand_ins import section_of

EXAMPLES = Path(__file__).parent / "scenarios"
"""Named scenarios: examples/plan, which this links to and a wheel has a copy of."""


def named() -> list[str]:
    """Names of the scenarios that come with specrl."""
    return sorted(file.stem for file in EXAMPLES.glob("*.yaml"))


def find(scenario: str) -> Path:
    """The file that a name or path stands for. Raises SpecInvalid with the names there are."""
    if Path(scenario).is_file():
        return Path(scenario)
    file = EXAMPLES / f"{scenario}.yaml"
    if "/" not in scenario and file.is_file():
        return file
    known = ", ".join(named())
    close = difflib.get_close_matches(scenario, named(), n=1)
    remedy = f"did you mean {close[0]}?" if close else f"the scenarios are {known}"
    raise SpecInvalid((Problem("SCENARIO", f"must be a scenario's name or a file, got {scenario!r}", remedy),))


def read_mapping(path: Path) -> dict[str, Any]:
    """The one YAML mapping of a file. Raises SpecInvalid."""
    try:
        found = yaml.safe_load(read_text(path))
    except OSError as error:
        raise SpecInvalid((Problem(str(path), f"must be readable, got {error.strerror}", "check the path"),)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise SpecInvalid((Problem(str(path), f"must be YAML, got {reason}", "fix the syntax"),)) from error
    if not isinstance(found, dict):
        raise SpecInvalid((Problem(str(path), "must be a mapping of sections", "see examples/plan/"),))
    return found


def parse(raw: dict[str, Any], overrides: Sequence[str] = ()) -> Scenario:
    """A mapping with overrides applied. Raises SpecInvalid with every problem of form; `rules.py` has the others."""
    problems = [problem for override in overrides for problem in _apply(raw, override)]
    try:
        scenario = Scenario.model_validate(raw)
    except ValidationError as error:
        known = {problem.path.removeprefix("--set ") for problem in problems}
        found = [_problem(detail) for detail in error.errors()]
        problems += [problem for problem in found if problem.path not in known]
        raise SpecInvalid(tuple(problems)) from error
    if problems:
        raise SpecInvalid(tuple(problems))
    return scenario


def _apply(raw: dict[str, Any], override: str) -> Iterator[Problem]:
    """`a.b=value`, value in YAML. Yields a problem for a path that no scenario has, and then changes nothing."""
    path, separator, text = override.partition("=")
    *parents, last = path.split(".")
    if not separator or not all([*parents, last]):
        yield Problem("--set", f"must be path=value, got {override!r}", "as in speculation.k=5")
        return
    unknown = _unknown(path.split("."))
    if unknown is not None:
        yield unknown
        return
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        yield Problem(f"--set {path}", f"must be YAML, got {text!r}", "quote the value")
        return
    place = raw
    for key in parents:
        inner = place.get(key)
        if isinstance(inner, str) and key == "speculation":
            inner = {"mechanism": inner}
        place[key] = inner if isinstance(inner, dict) else {}
        place = place[key]
    place[last] = value
    if path.startswith("speculation.") and last in ("acceptanceLength", "chances"):
        place.pop("chances" if last == "acceptanceLength" else "acceptanceLength", None)
    if path == "speculation.mechanism" and value == "none":
        for field in ("k", "acceptanceLength", "chances"):
            place.pop(field, None)


def _unknown(keys: Sequence[str]) -> Problem | None:
    section: type[BaseModel] | None = Scenario
    for depth, key in enumerate(keys):
        if section is None:
            break
        fields = {str(field.alias): field for field in section.model_fields.values()}
        if key in fields:
            section = section_of(fields[key])
        elif depth == 1 and keys[0] == "speculation" and key in ("eagle3", "ngram"):
            continue  # as run files say it
        else:
            close = difflib.get_close_matches(key, fields, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"the fields are {', '.join(fields)}"
            return Problem(f"--set {'.'.join(keys)}", "is not a field of a scenario", remedy)
    return None


def _problem(detail: Any) -> Problem:
    path = ".".join(to_camel(part) if isinstance(part, str) else str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return Problem(path, "must be given", "add it; examples/plan/ has scenarios to copy")
    if detail["type"] == "extra_forbidden":
        return _unknown([str(part) for part in detail["loc"]]) or Problem(path, "is not a field here", "remove it")
    message = detail["msg"].removeprefix("Input should be ")
    shown = detail["input"] if not isinstance(detail["input"], dict | list) else type(detail["input"]).__name__
    return Problem(path, f"must be {message}, got {shown!r}", "docs/simulator.md lists the fields")
