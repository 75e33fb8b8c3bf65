"""What a cross-field rule is: one record, checked here in Python and by an API server in CEL, with the same message.

`rules.py` has those of every run, `cluster_rules.py` those of an RLJob. `load.py` tries them, `crd.py` writes them into
the CRD, and a test runs both forms on the same cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specrl.errors import Problem
from specrl.spec.base import Section
from specrl.spec.run import RunSpec


@dataclass(frozen=True)
class Rule:
    """A rule of one kind of section, wherever in a run the section stands."""

    on: type[Section]
    """The section. A rule between two of them stands at the one that holds both: for most, RunSpec."""
    field: str
    """Field below it that the problem is shown at, as written in files; empty: the section itself."""
    must: str
    """What must hold, as in `must be > 0`."""
    remedy: str
    got: Callable[[Any], str | None]
    """From the section to what breaks the rule, as text; None if it holds."""
    cel: str
    """The same for an API server, which has filled defaults in: true if it holds."""

    @property
    def message(self) -> str:
        """What the API server says."""
        return f"{self.must}; {self.remedy}"


def broken(spec: RunSpec, rules: Sequence[Rule]) -> Iterator[Problem]:
    """Every problem that the rules find, in the order of the rules."""
    places = list(_sections(spec, ""))
    for rule in rules:
        for path, section in places:
            got = rule.got(section) if type(section) is rule.on else None
            if got is not None:
                where = ".".join(part for part in (path, rule.field) if part)
                yield Problem(where, f"{rule.must}, got {got}", rule.remedy)


def _sections(section: Section, path: str) -> Iterator[tuple[str, Section]]:
    """Every section that is given, with its path."""
    yield path, section
    for name, field in type(section).model_fields.items():
        value, place = getattr(section, name), f"{path}.{field.alias}".removeprefix(".")
        if isinstance(value, Section):
            yield from _sections(value, place)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                if isinstance(item, Section):
                    yield from _sections(item, f"{place}.{number}")
