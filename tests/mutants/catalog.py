"""The list of mutants, the result of each, and their tables in the docs.

tools/mutants.py runs the tests on each mutant. tests/unit/test_mutants.py checks that each one still applies.
A mutant with an attacker undoes what holds an attack, and is listed in docs/attacks.md. One with cases undoes what
mends a reported case, and is listed in docs/reported-cases.md. docs/testing.md lists the others.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).with_name("mutants.toml")
RESULTS = Path(__file__).with_name("results.json")
PAGE = ROOT / "docs" / "testing.md"
ATTACKS_PAGE = ROOT / "docs" / "attacks.md"
ATTACKERS = (
    "an answer",
    "a data set",
    "a model folder",
    "a run file",
    "a local user",
    "a web page",
    "a client",
    "a neighbour",
)
"""Parties of the threat model in SECURITY.md, in its order."""
CASES_PAGE = ROOT / "docs" / "reported-cases.md"
CASES = (
    *("c07", "c16", "c18", "c20", "c22", "c23", "c26", "c27", "c31"),
    *("h2", "h6", "h8", "h9", "h10", "h11", "h12", "h15", "h16", "h17", "h19", "h20", "h21", "h22"),
    *(f"m{number}" for number in range(16)),
)
"""Reported cases: of other projects, of a first hour with own data, and of a first run with a real model. The page
names the sources."""
BEGIN = "<!-- mutants: written by python -m tools.mutants --write -->"
END = "<!-- end of mutants -->"


class MutantInvalid(Exception):
    """A mutant that cannot be tried; the message names it."""


@dataclass(frozen=True)
class Mutant:
    """A wrong line of the product.

    old, new: a line of `file` and its replacement, without indentation. breaks: what goes wrong, in one sentence.
    tests: pytest's arguments, the cheapest first. fixed_in: commit that fixed this bug; empty if it never existed.
    attacker: one of ATTACKERS, who can do what `breaks` says; empty if nobody means it. cases: those of CASES in which
    `breaks` was seen. fix: what the mutant undoes, in words; given with an attacker or cases.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    fixed_in: str = ""
    attacker: str = ""
    cases: tuple[str, ...] = ()
    fix: str = ""

    @property
    def package(self) -> str:
        """Folder of the file below the source root."""
        return str(Path(*Path(self.file).parts[1:-1]))

    def apply(self, text: str) -> str:
        """Replace the line in a file's text. Raises MutantInvalid unless the line occurs exactly once."""
        if "\n" in self.old + self.new or self.old == self.new:
            raise MutantInvalid(f"{self.id}: a mutant must replace one line by another one")
        lines = text.split("\n")
        places = [number for number, line in enumerate(lines) if line.strip() == self.old]
        if len(places) != 1:
            raise MutantInvalid(f"{self.id}: {self.file} must have its old line exactly once, got {len(places)}")
        line = lines[places[0]]
        lines[places[0]] = line[: len(line) - len(line.lstrip())] + self.new
        return "\n".join(lines)


@dataclass(frozen=True)
class Result:
    """killed_by: test that failed; empty if the mutant survived. cpu_s: CPU time of pytest and all its children."""

    killed_by: str
    cpu_s: float


def load_mutants() -> list[Mutant]:
    """Load all mutants, in the order of the file."""
    found = tomllib.loads(MUTANTS.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**fields | {key: tuple(fields.get(key, ())) for key in ("tests", "cases")}) for fields in found]


def load_results() -> dict[str, Result]:
    """Load results by mutant id."""
    if not RESULTS.is_file():
        return {}
    return {name: Result(**fields) for name, fields in json.loads(RESULTS.read_text(encoding="utf-8")).items()}


def write_results(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> None:
    """Write the results in the order of the mutants. Results of removed mutants are dropped."""
    rows = {mutant.id: asdict(results[mutant.id]) for mutant in mutants if mutant.id in results}
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def make_table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> str:
    """Render the results of the mutants that undo no named fix as a Markdown table."""
    rows = ["| mutant | in | what it breaks | killed by | CPU s |", "|---|---|---|---|--:|"]
    for mutant in mutants:
        if not mutant.fix:
            result = results.get(mutant.id)
            fixed = f" ({mutant.fixed_in})" if mutant.fixed_in else ""
            seconds = f"{result.cpu_s:.0f}" if result else ""
            rows.append(_make_row(mutant.id, mutant.package, mutant.breaks + fixed, _name_killer(result), seconds))
    return "\n".join(rows)


def make_attack_table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> str:
    """Render the attacks as a Markdown table, in the order of ATTACKERS."""
    attacks = sorted((it for it in mutants if it.attacker), key=lambda it: ATTACKERS.index(it.attacker))
    return _make_fix_table("attacker | what it could do", [(it.attacker, it) for it in attacks], results)


def make_case_table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> str:
    """Render the fixes of reported cases as a Markdown table, in the order of CASES."""
    fixes = sorted((it for it in mutants if it.cases), key=lambda it: CASES.index(it.cases[0]))
    return _make_fix_table("case | what went wrong", [(", ".join(it.cases), it) for it in fixes], results)


def _make_fix_table(heading: str, named: Sequence[tuple[str, Mutant]], results: Mapping[str, Result]) -> str:
    rows = [f"| {heading} | what holds it | test | mutant |", "|---|---|---|---|---|"]
    for name, mutant in named:
        fix = f"{mutant.fix} (`{mutant.file.removeprefix('services/')}`)"
        rows.append(_make_row(name, mutant.breaks, fix, _name_killer(results.get(mutant.id)), mutant.id))
    return "\n".join(rows)


def _make_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _name_killer(result: Result | None) -> str:
    return "not tried" if result is None else f"`{result.killed_by}`" if result.killed_by else "**nothing**"


TABLES: Mapping[Path, Callable[[Sequence[Mutant], Mapping[str, Result]], str]] = {
    PAGE: make_table,
    ATTACKS_PAGE: make_attack_table,
    CASES_PAGE: make_case_table,
}
"""The table of each page."""


def write_tables(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> None:
    """Replace the table in each page."""
    for page, make in TABLES.items():
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{make(mutants, results)}\n\n{END}{after}", encoding="utf-8")
