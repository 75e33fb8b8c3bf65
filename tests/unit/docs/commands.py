"""Finds the `specrl` and `make` commands of Markdown pages and examples, and compares each with the real thing.

Commands are:
- in a code block, lines whose first word is `specrl`, `.venv/bin/specrl` or `make`; their comments do not count
- in backticks, texts that begin with `specrl ` or `make `. Arguments may be left out there: `specrl run`

Some words stand for something else:
- a word in capitals (RUN, FILE, DIR) is the reader's; N, X and SHARE are numbers
- in [brackets] is what may be left out
- a path that begins with a folder of the repository, such as examples/, must exist. Other paths are the reader's
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from specrl.cli import app
from specrl.errors import SpecInvalid
from specrl.spec import RunSpec, load_spec
from specrl.spec.base import find_section

ROOT = Path(__file__).parents[3]
PROGRAMS = {"specrl": "specrl", ".venv/bin/specrl": "specrl", "make": "make"}
NUMBERS = {"N": "1", "X": "0.5", "SHARE": "0.05"}
FENCE = re.compile(r"^(```+)[^\n]*\n(.*?)^\1`*$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
INLINE = re.compile(r"`((?:specrl|make)\s[^`]+)`")
ENDS = {"|", "&&", "||", ";", ">", ">>", "&"}  # a command ends where the shell goes on to another
PATH = re.compile(r"[\w.-]+(/[\w.-]*)+")


@dataclass(frozen=True)
class Command:
    """One command. is_mention: it stands in a sentence, so its arguments may be left out."""

    place: str
    words: tuple[str, ...]
    is_mention: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {' '.join(self.words)}"


def find_commands(text: str, place: str) -> Iterator[Command]:
    """Yield the commands of a Markdown page."""
    blocks = [found[2] for found in FENCE.finditer(text)]
    prose = FENCE.sub("", text)
    blocks.append("\n".join(line.strip() for line in INDENTED.findall(prose)))
    for block in blocks:
        # The indentation of a continued line is no part of the command.
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            yield from _read_line(line.strip(), place)
    for found in INLINE.findall(INDENTED.sub("", prose)):
        yield Command(place, _split_words(" ".join(found.split())), is_mention=True)


def find_commands_of_comments(text: str, place: str) -> Iterator[Command]:
    """Yield the commands in the comments of an example."""
    comments = "\n".join(re.sub(r"^# ?", "", line) for line in text.splitlines() if line.startswith("#"))
    for line in comments.splitlines():
        yield from _read_line(line.strip(), place)
    for found in INLINE.findall(comments):
        yield Command(place, _split_words(" ".join(found.split())), is_mention=True)


def _read_line(line: str, place: str) -> Iterator[Command]:
    first = line.partition(" ")[0]
    if first not in PROGRAMS:
        return
    if first == "make":  # an explanation may follow, as in a table
        target, *rest = re.findall(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""", re.split(r"  |#", line)[0])[1:]
        assigned = [word for word in rest if re.match(r"[A-Z_]+=", word)]
        yield Command(place, ("make", target, *assigned))
        return
    yield Command(place, _split_words(line))


def _split_words(line: str) -> tuple[str, ...]:
    words = [word for word in shlex.split(line, comments=True) if word != "..."]
    end = next((place for place, word in enumerate(words) if word in ENDS), len(words))
    words = [word.removeprefix("[").removesuffix("]") for word in words[:end]]
    return (PROGRAMS[words[0]], *(NUMBERS.get(word, word) for word in words[1:]))


def find_problem(command: Command) -> str:
    """Say what is wrong with a command; "" if it can be run as it stands."""
    return _find_make_problem(command) if command.words[0] == "make" else _find_specrl_problem(command)


@cache
def make_targets() -> frozenset[str]:
    """The targets of the Makefile that have a description."""
    return frozenset(re.findall(r"^([a-z0-9-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


@cache
def specrl_commands() -> dict[str, Any]:
    """The commands of `specrl`, by their words without `specrl`: "run", "checkpoint list"."""

    def walk(group: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                yield from walk(command, (*words, name))
            else:
                yield " ".join((*words, name)), command

    return dict(walk(typer.main.get_command(app), ()))


def name_command(command: Command) -> str:
    """Return program and subcommand, or target: `specrl checkpoint list`, `make test`."""
    words = command.words[1:]
    if command.words[0] == "make":
        return f"make {words[0]}"
    for count in (2, 1):
        if " ".join(words[:count]) in specrl_commands():
            return f"specrl {' '.join(words[:count])}"
    return "specrl"


def _find_make_problem(command: Command) -> str:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in command.words[1:]:
        variable, is_assigned, _ = word.partition("=")
        if is_assigned and f"$({variable})" not in makefile:
            return f"the Makefile has no variable {variable}"
        if not is_assigned and word not in make_targets():
            return f"the Makefile has no target {word}"
    return ""


def _find_specrl_problem(command: Command) -> str:
    words = command.words[1:]
    if words[:1] == ("--version",):
        return ""
    name = name_command(command)
    if name == "specrl":
        groups = {known.split()[0] for known in specrl_commands()}
        is_group = command.is_mention and len(words) == 1 and words[0] in groups
        return "" if is_group else "specrl has no such command"
    known = specrl_commands()[name.removeprefix("specrl ")]
    rest = list(words[len(name.split()) - 1 :])
    try:
        given = known.make_context(name, rest).params
    except typer.BadParameter.__base__ as error:  # UsageError, which typer does not export
        # BadOptionUsage: an option without its value
        is_shortened = command.is_mention and type(error).__name__ in {"MissingParameter", "BadOptionUsage"}
        return "" if is_shortened else str(error.format_message())
    return next(_find_argument_problems(given), "")


def _find_argument_problems(given: dict[str, Any]) -> Iterator[str]:
    """Yield wrong fields of --set, scenarios without a file, and paths of the repository that do not exist."""
    file = given.get("file")
    overrides = given.get("overrides") or ()
    if isinstance(file, Path) and is_of_repository(str(file)) and (ROOT / file).is_file():
        try:
            load_spec(ROOT / file, overrides)
        except (SpecInvalid, OSError) as error:
            yield str(error)
    elif isinstance(file, Path):
        yield from (problem for override in overrides if (problem := find_field_problem(override)))
    source = given.get("source")
    is_scenario = isinstance(source, str) and re.fullmatch(r"[a-z][a-z0-9-]+", source)
    if is_scenario and not (ROOT / "examples" / "plan" / f"{source}.yaml").is_file():
        yield f"there is no scenario {source} in examples/plan"
    for value in given.values():
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, str | Path) and is_of_repository(str(item)) and not (ROOT / item).exists():
                yield f"{item} does not exist"


def is_of_repository(path: str) -> bool:
    """Whether a path begins with a folder of the repository. runs/ is no such folder: git ignores it."""
    first = Path(path).parts[:1]
    return bool(PATH.fullmatch(path)) and first != ("runs",) and (ROOT / first[0]).is_dir()


def find_field_problem(override: str) -> str:
    """Say whether the left side of `--set PATH=VALUE` names no field of a run file."""
    path = override.partition("=")[0]
    section: Any = RunSpec
    for key in path.split("."):
        fields = {str(field.alias): field for field in section.model_fields.values()} if section is not None else {}
        if key not in fields:
            return f"a run file has no field {path}"
        section = find_section(fields[key])
    return ""
