"""The list of mutants, what became of each, and the table of both in docs/testing.md.

Called by tools/mutants.py, which runs the tests on each, and by tests/unit/test_mutants.py, which checks that each of
them still applies.
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
BEGIN = "<!-- mutants: written by python -m tools.mutants --write -->"
END = "<!-- end of mutants -->"


class MutantInvalid(Exception):
    """A mutant that cannot be tried; the message names it."""


@dataclass(frozen=True)
class Mutant:
    """old, new: a line of `file` and what replaces it, without indentation. tests: arguments of pytest, cheapest first.

    breaks: what goes wrong, in one sentence. fixed_in: the commit that repaired it once, where there was one.
    """

    id: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]
    fixed_in: str = ""

    @property
    def package(self) -> str:
        """The folder of its file below the source root."""
        return str(Path(*Path(self.file).parts[1:-1]))

    def apply(self, text: str) -> str:
        """The file's text with the line replaced. Raises MutantInvalid unless the line is there exactly once."""
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
    """killed_by: the test that failed; empty for a mutant that survived all. cpu_s: of pytest and all its children."""

    killed_by: str
    cpu_s: float


def load_mutants() -> list[Mutant]:
    """All mutants, in the order of the file."""
    found = tomllib.loads(MUTANTS.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**fields | {"tests": tuple(fields["tests"])}) for fields in found]


def load_results() -> dict[str, Result]:
    """By the mutant's id."""
    if not RESULTS.is_file():
        return {}
    return {name: Result(**fields) for name, fields in json.loads(RESULTS.read_text(encoding="utf-8")).items()}


def write_results(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> None:
    """Write them in the order of the mutants; those of mutants that are gone are left out."""
    rows = {mutant.id: asdict(results[mutant.id]) for mutant in mutants if mutant.id in results}
    RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def make_table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> str:
    """The results as Markdown."""
    rows = ["| mutant | in | what it breaks | killed by | CPU s |", "|---|---|---|---|--:|"]
    for mutant in mutants:
        result = results.get(mutant.id)
        killer = "not tried" if result is None else f"`{result.killed_by}`" if result.killed_by else "**nothing**"
        fixed = f" ({mutant.fixed_in})" if mutant.fixed_in else ""
        cells = (mutant.id, mutant.package, mutant.breaks + fixed, killer, f"{result.cpu_s:.0f}" if result else "")
        rows.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "\n".join(rows)


def write_table(mutants: Sequence[Mutant], results: Mapping[str, Result]) -> None:
    """Replace the table in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{make_table(mutants, results)}\n\n{END}{after}", encoding="utf-8")
