"""Generate families of verifiable problems, for demos, tests and benchmarks that have no data set.

`sources` uses this module if a run names a family instead of a file. It is public (docs/python-api.md). Invariant: a
problem is a pure function of (family, seed, index, difficulty), the same on every machine and in every process. So a
prompt stream over a family can seek without state. Each problem has a worked solution, which only the supervised
warm-up reads (`examples/demo/make_policy.py`). A run gives the question to the policy and the answer to the verifier.

A worked solution has one line per step, and ends in `#### <answer>` as in GSM8K. The number of steps has a long tail,
and so do the lengths of rollouts. Problems of two seeds are drawn independently, so short ones may coincide. For a
validation set without training questions, pass these as `exclude` to `held_out_problems`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from random import Random

from specrl.errors import DatasetInvalid

__all__ = [
    "Difficulty",
    "GeneratedProblem",
    "default_difficulty",
    "family_names",
    "generate_problem",
    "held_out_problems",
    "stream_problems",
]


@dataclass(frozen=True, slots=True)
class Difficulty:
    """The size of a family's problems. Raises DatasetInvalid for values out of range.

    shortest, longest: fewest and most steps (operations; digit columns for `addition`).
    tail: probability of each further step, so lengths are geometric; with 0 all problems have `shortest` steps.
    largest_operand: largest number that one step adds or subtracts, >= 1. `addition` and `wheels` ignore it.
    largest_value: largest running total, > largest_operand. `addition` and `wheels` ignore it.
    """

    shortest: int
    longest: int
    tail: float
    largest_operand: int = 9
    largest_value: int = 19

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise DatasetInvalid(
                f"shortest must be between 1 and longest, got shortest={self.shortest}, longest={self.longest}; "
                "give the least and the greatest number of steps"
            )
        if not 0.0 <= self.tail < 1.0:
            raise DatasetInvalid(f"tail must be in [0, 1), got tail={self.tail}; give the probability of one more step")
        if not 1 <= self.largest_operand < self.largest_value:
            raise DatasetInvalid(
                f"largest_operand must be between 1 and largest_value - 1, got largest_operand={self.largest_operand}, "
                f"largest_value={self.largest_value}; raise largest_value"
            )


@dataclass(frozen=True, slots=True)
class GeneratedProblem:
    """One generated question with its answer, and the worked solution that ends in `#### <answer>`."""

    family: str
    seed: int
    index: int
    question: str
    solution: str
    answer: str


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of problem: its default difficulty, and the function that draws and writes one.

    write: returns a question, the steps of its solution, and the answer.
    """

    difficulty: Difficulty
    write: Callable[[Random, Difficulty], tuple[str, list[str], int | str]]


def family_names() -> list[str]:
    """Return the names of all families, in the order of the documentation."""
    return list(_FAMILIES)


def default_difficulty(family: str) -> Difficulty:
    """Return a family's default difficulty. Raises DatasetInvalid for an unknown family."""
    return _find_family(family).difficulty


def generate_problem(family: str, seed: int, index: int, difficulty: Difficulty | None = None) -> GeneratedProblem:
    """Generate problem number `index` (from 0) of a family's stream `seed`.

    It takes about 10 us and keeps no state: an index gives the same problem in any order and in any process.
    Raises DatasetInvalid for an unknown family or a negative index.
    """
    kind = _find_family(family)
    if index < 0:
        raise DatasetInvalid(f"index must be >= 0, got index={index}; streams start at 0")
    # Random hashes a string seed with SHA-512, which unlike hash() is the same in every process.
    rng = Random(f"{family}/{seed}/{index}")  # noqa: S311 - problems, not secrets
    question, steps, answer = kind.write(rng, difficulty or kind.difficulty)
    solution = "\n".join([*steps, f"#### {answer}"])
    return GeneratedProblem(family, seed, index, question, solution, str(answer))


def stream_problems(
    family: str, seed: int, start: int = 0, difficulty: Difficulty | None = None
) -> Iterator[GeneratedProblem]:
    """Yield a family's problems from index `start` on, endlessly."""
    for index in itertools.count(start):
        yield generate_problem(family, seed, index, difficulty)


def held_out_problems(
    family: str, seed: int, count: int, exclude: Collection[str] = (), difficulty: Difficulty | None = None
) -> list[GeneratedProblem]:
    """Return the first `count` problems of a stream whose questions differ from each other and from `exclude`.

    Raises DatasetInvalid if the family has too few problems at this difficulty, that is, if 100 draws per problem do
    not suffice.
    """
    seen = set(exclude)
    found: list[GeneratedProblem] = []
    for problem in stream_problems(family, seed, difficulty=difficulty):
        if len(found) == count:
            return found
        if problem.index >= 100 * count:
            break
        if problem.question not in seen:
            seen.add(problem.question)
            found.append(problem)
    raise DatasetInvalid(
        f"count must be <= the number of distinct problems of family={family!r}, got count={count}, "
        f"found {len(found)}; raise the difficulty or lower the count"
    )


def _find_family(name: str) -> Family:
    if name not in _FAMILIES:
        raise DatasetInvalid(
            f"family must be one of {', '.join(_FAMILIES)}, got family={name!r}; see prompts/families.py"
        )
    return _FAMILIES[name]


def _draw_steps(rng: Random, difficulty: Difficulty) -> int:
    steps = difficulty.shortest
    while steps < difficulty.longest and rng.random() < difficulty.tail:
        steps += 1
    return steps


def _draw_change(rng: Random, total: int, difficulty: Difficulty) -> int:
    """Draw a change != 0 that keeps the running total within 0 to largest_value."""
    # One number fewer than the range holds, then shifted by one from 0 upwards: so 0 is never drawn.
    lowest = max(-difficulty.largest_operand, -total)
    highest = min(difficulty.largest_operand, difficulty.largest_value - total)
    change = rng.randint(lowest, highest - 1)
    return change if change < 0 else change + 1


def _write_addition(rng: Random, difficulty: Difficulty) -> tuple[str, list[str], int]:
    """Write `Add 478 and 65.`: one step per column from the right, each with the carry in and the carry out."""
    columns = _draw_steps(rng, difficulty)
    first = rng.randint(10 ** (columns - 1), 10**columns - 1)  # has all columns; the other may be shorter
    second = rng.randint(1, 10**columns - 1)
    if rng.random() < 0.5:
        first, second = second, first
    steps: list[str] = []
    carry = 0
    for column in range(columns):
        a = first // 10**column % 10
        b = second // 10**column % 10
        total = a + b + carry
        steps.append(f"{a}+{b}+{carry}={total // 10}{total % 10}")
        carry = total // 10
    return f"Add {first} and {second}.", steps, first + second


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _write_ledger(rng: Random, difficulty: Difficulty) -> tuple[str, list[str], int]:
    """Write `Stock: 7. Jan +5 Feb -3`: one step per month, with the running total after its change."""
    total = rng.randint(1, difficulty.largest_operand)
    entries = [f"Stock: {total}."]
    steps = []
    for month in _MONTHS[: _draw_steps(rng, difficulty)]:
        change = _draw_change(rng, total, difficulty)
        entries.append(f"{month} {change:+d}")
        steps.append(f"{month} {total}{change:+d}={total + change}")
        total += change
    return " ".join(entries), steps, total


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _write_wheels(rng: Random, difficulty: Difficulty) -> tuple[str, list[str], str]:
    """Write `Wheels at Tue K. Turn 3 times.`: one step per turn of a wheel of days and a wheel of letters."""
    # The first line of the solution is the start; the number in front counts the remaining turns down to 0.
    day = rng.randrange(7)
    letter = rng.randrange(26)
    turns = _draw_steps(rng, difficulty)
    stands = [f"{_DAYS[(day + turn) % 7]} {_LETTERS[(letter + turn) % 26]}" for turn in range(turns + 1)]
    steps = [f"{turns - turn} {stand}" for turn, stand in enumerate(stands)]
    return f"Wheels at {stands[0]}. Turn {turns} times.", steps, stands[-1]


_NAMES = ("Ann", "Ben", "Eva", "Max", "Mia", "Tom")
_THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")
_GAINS = ("gets", "buys", "finds")
_LOSSES = ("loses", "sells", "gives away")


def _write_word_problem(rng: Random, difficulty: Difficulty) -> tuple[str, list[str], int]:
    """Write `Mia has 7 pens. Mia buys 2. ...`: a chain as in `ledger`, in sentences as in GSM8K."""
    name = rng.choice(_NAMES)
    things = rng.choice(_THINGS)
    total = rng.randint(1, difficulty.largest_operand)
    sentences = [f"{name} has {total} {things}."]
    steps: list[str] = []
    for _ in range(_draw_steps(rng, difficulty)):
        change = _draw_change(rng, total, difficulty)
        sentences.append(f"{name} {rng.choice(_GAINS if change > 0 else _LOSSES)} {abs(change)}.")
        steps.append(f"{name} has {total}{change:+d}={total + change} {things}.")
        total += change
    sentences.append(f"How many {things} does {name} have?")
    return " ".join(sentences), steps, total


_FAMILIES = {
    "wheels": Family(Difficulty(shortest=2, longest=18, tail=0.85), _write_wheels),
    "addition": Family(Difficulty(shortest=2, longest=8, tail=0.6), _write_addition),
    "ledger": Family(Difficulty(shortest=3, longest=9, tail=0.7, largest_operand=3, largest_value=9), _write_ledger),
    "wordProblem": Family(Difficulty(shortest=2, longest=8, tail=0.6), _write_word_problem),
}
