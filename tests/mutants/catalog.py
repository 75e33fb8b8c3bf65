"""The list of mutants, the result of each, and their tables in docs/testing.md and docs/attacks.md.

tools/mutants.py runs the tests on each mutant. tests/unit/test_mutants.py checks that each one still applies.
A mutant with an attacker undoes what holds an attack. docs/attacks.md lists those, and docs/testing.md the others.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
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
BEGIN = "<!-- mutants: written by python -m tools.mutants --write -->"
END = "<!-- end of mutants -->"


class MutantInvalid(Exception):
    """A mutant that cannot be tried; the message names it."""


@dataclass(frozen=True)
class Mutant:
    """A wrong line of the product.

    old, new: a line of `file` and its replacement, without indentation. breaks: what goes wrong, in one sentence.
    tests: pytest's arguments, the cheapest first. fixed_in: commit that fixed this bug; empty if it never existed.
    attacker: one of ATTACKERS, who can do what `breaks` says; empty if nobody means it. fix: what the mutant undoes, in
    words; given with an attacker.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    fixed_in: str = ""
    attacker: str = ""
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
    return [Mutant(**fields | {"tests": tuple(fields["tests"])}) for fields in found]


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
    """Render the results of the mutants that are no attack as a Markdown table."""
    rows = ["| mutant | in | what it breaks | killed by | CPU s |", "|---|---|---|---|--:|"]
    for mutant in mutants:
        if not mutant.attacker:
            result = results.get(mutant.id)
            fixed = f" ({mutant.fixed_in})" if mutant.fixed_in else ""
            seconds = f"{result.cpu_s:.0f}" if result else ""
            rows.append(_make_row(mutant.id, mutant.package, mutant.breaks + fixed, _name_killer(result), seconds))
    return "\n".join(rows)


def make_attack_table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> str:
    """Render the attacks as a Markdown table, in the order of ATTACKERS."""
    rows = ["| attacker | what it could do | what holds it | test | mutant |", "|---|---|---|---|---|"]
    attacks = [mutant for mutant in mutants if mutant.attacker]
    for mutant in sorted(attacks, key=lambda it: ATTACKERS.index(it.attacker)):
        fix = f"{mutant.fix} (`{mutant.file.removeprefix('services/')}`)"
        rows.append(_make_row(mutant.attacker, mutant.breaks, fix, _name_killer(results.get(mutant.id)), mutant.id))
    return "\n".join(rows)


def _make_row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _name_killer(result: Result | None) -> str:
    return "not tried" if result is None else f"`{result.killed_by}`" if result.killed_by else "**nothing**"


def write_tables(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> None:
    """Replace the tables in both pages."""
    for page, table in ((PAGE, make_table(mutants, results)), (ATTACKS_PAGE, make_attack_table(mutants, results))):
        before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{table}\n\n{END}{after}", encoding="utf-8")
