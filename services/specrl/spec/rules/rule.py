"""Cross-field rules. A rule is one record with two forms, Python and CEL, and one message.

Invariant: both forms accept the same runs; a test checks them on the same cases. `run_rules.py` has the rules of every
run, `cluster_rules.py` those of an RLJob. `load.py` checks the Python form, `rljob/crd.py` writes CEL into the CRD.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from specrl.errors import SpecProblem
from specrl.spec.base import Section, find_field, is_optional
from specrl.spec.run import RunSpec


@dataclass(frozen=True)
class Rule[S: Section]:
    """A rule about one type of section, wherever it is used in a run."""

    on: type[S]
    """The section. A rule between two sections belongs to the one that contains both, usually RunSpec."""
    field: str
    """Path below the section at which a problem is reported, as written in files; empty: the section itself."""
    must: str
    """The rule, as in `must be > 0`."""
    remedy: str
    """Advice to the user, as in `raise it, or lower wallS`."""
    holds: Callable[[S], bool]
    """The Python form."""
    cel: str
    """The CEL form. The API server has filled in defaults before."""
    got: Callable[[S], object] | None = None
    """Returns what breaks the rule, for the message; None: the value of `field`."""
    advise: Callable[[S], str] | None = None
    """Returns advice for the value, or "" for `remedy`; None: always `remedy`."""

    @property
    def api_message(self) -> str:
        """The API server's message. It cannot contain the value, as the message of `find_broken_rules` does."""
        return f"{self.must}; {self.remedy}"


# A message shows both values with the sign that holds instead, as in `3 >= 2`.
_OPPOSITE = {"<": ">=", "<=": ">", ">": "<="}
_HOLDS = {"<": operator.lt, "<=": operator.le, ">": operator.gt}


def compare_fields[S: Section](on: type[S], left: str, sign: str, right: str, remedy: str) -> Rule[S]:
    """Build a rule that compares two numbers. It holds if either is not given.

    left, right: paths below the section, as written in files. sign: one of _HOLDS.
    """

    def read_both(section: S) -> tuple[Any, Any]:
        return _value_at(section, left), _value_at(section, right)

    def holds(section: S) -> bool:
        both = read_both(section)
        return None in both or bool(_HOLDS[sign](*both))

    # CEL fails on a field that is not set, so each optional section or field on the paths gets a guard. A dict keeps
    # them in order, each once.
    guards = dict[str, None]()
    terms = []
    for path in (left, right):
        names = path.split(".")
        places = [".".join(names[: end + 1]) for end in range(len(names))]  # for a.b.c: a, a.b, a.b.c
        fields = {place: field for place in places if (field := find_field(on, place.split("."))) is not None}
        guards |= {f"!has(self.{place})": None for place in places if is_optional(fields[place])}
        # Decimals are strings in the CRD. The text of an annotation also has those of `Decimal | None`.
        terms.append(f"double(self.{path})" if "Decimal" in str(fields[path].annotation) else f"self.{path}")
    cel = " || ".join((*guards, f"{terms[0]} {sign} {terms[1]}"))
    return Rule(
        on,
        left,
        f"must be {sign} {right}",
        remedy,
        holds,
        cel,
        lambda section: f" {_OPPOSITE[sign]} ".join(map(str, read_both(section))),
    )


def _value_at(section: Section, path: str) -> Any:
    """Return the value at a path; None if it, or a section on the path, is not given."""
    value: Any = section
    for part in path.split("."):
        if value is None:
            return None
        fields = type(value).model_fields.items()
        value = getattr(value, next(name for name, field in fields if field.alias == part))
    return value


def find_broken_rules(spec: RunSpec, rules: Sequence[Rule[Any]]) -> Iterator[SpecProblem]:
    """Yield every problem that the rules find, in the order of the rules."""
    places = list(walk_sections(spec))
    for rule in rules:
        for path, section in places:
            # Not isinstance: `rljob/crd.py` writes a rule at the section itself, not at subclasses such as PythonTool.
            if type(section) is rule.on and not rule.holds(section):
                where = ".".join(part for part in (path, rule.field) if part)
                remedy = (rule.advise(section) if rule.advise is not None else "") or rule.remedy
                yield SpecProblem(where, f"{rule.must}, got {_describe_violation(rule, section)}", remedy)


def _describe_violation(rule: Rule[Any], section: Section) -> str:
    if rule.got is not None:
        return str(rule.got(section))
    value = _value_at(section, rule.field)
    if value is None:
        return "none"
    return repr(value) if isinstance(value, str) and not isinstance(value, Enum) else str(value)


def walk_sections(section: Section, path: str = "") -> Iterator[tuple[str, Section]]:
    """Yield every section that is given, with its path."""
    yield path, section
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        place = f"{path}.{field.alias}".removeprefix(".")
        if isinstance(value, Section):
            yield from walk_sections(value, place)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                if isinstance(item, Section):
                    yield from walk_sections(item, f"{place}.{number}")
