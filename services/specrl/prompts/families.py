"""Generated problem families: verifiable problems without a data set, for demos, tests and benchmarks.

Stage 1 of the loop when a run names a family instead of a file. Invariant: a problem is a pure function of
(family, seed, index, difficulty), the same on every machine and in every process, so a prompt stream over a family
is seekable without state. Each problem comes with a worked solution, which only supervised warm-up reads
(`examples/demo/make_policy.py`); a run gives the policy the question and the verifier the answer.

A worked solution is one line per step, and ends in `#### <answer>` as in GSM8K. The number of steps is long-tailed,
hence so are rollout lengths. Problems of two seeds are drawn independently and may coincide when they are short:
pass the questions seen in training as `exclude` to `held_out_problems` for a validation set that shares none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from random import Random

from specrl.errors import DatasetInvalid


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How large a family's problems are.

    shortest, longest: least and greatest number of steps (operations; digit columns for `addition`).
    tail: probability that a problem goes on by one more step, so lengths are geometric; 0 makes all `shortest`.
    largest_operand: greatest number that one step adds or takes, >= 1. `addition` and `wheels` ignore it.
    largest_value: greatest running total, > largest_operand. `addition` and `wheels` ignore it.
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
            raise DatasetInvalid(f"tail must be in [0, 1), got tail={self.tail}; it is a probability of one more step")
        if not 1 <= self.largest_operand < self.largest_value:
            raise DatasetInvalid(
                f"largest_operand must be between 1 and largest_value - 1, got largest_operand={self.largest_operand}, "
                f"largest_value={self.largest_value}; raise largest_value"
            )


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its answer, and the worked solution that ends in `#### <answer>`."""

    family: str
    seed: int
    index: int
    question: str
    solution: str
    answer: str


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of problem: its usual difficulty, and how one is drawn and written."""

    name: str
    difficulty: Difficulty
    write: Callable[[Random, Difficulty], tuple[str, list[str], int | str]]


def family_names() -> list[str]:
    """Name every family, in the order of the documentation."""
    return list(_FAMILIES)


def default_difficulty(family: str) -> Difficulty:
    """Return the difficulty a family has when none is given. Raises DatasetInvalid for an unknown family."""
    return _family(family).difficulty


def generate_problem(family: str, seed: int, index: int, difficulty: Difficulty | None = None) -> Problem:
    """Write problem number `index` of a family's stream `seed`.

    Cheap (some 10 us) and without state: any index, in any order, in any process gives the same problem.
    Raises DatasetInvalid for an unknown family or a negative index.
    """
    kind = _family(family)
    if index < 0:
        raise DatasetInvalid(f"index must be >= 0, got index={index}; streams start at 0")
    # A string seed is hashed with SHA-512: unlike hash(), the same in every process.
    rng = Random(f"{family}/{seed}/{index}")  # noqa: S311 - problems, not secrets
    question, steps, answer = kind.write(rng, difficulty or kind.difficulty)
    solution = "\n".join([*steps, f"#### {answer}"])
    return Problem(family, seed, index, question, solution, str(answer))


def stream_problems(family: str, seed: int, start: int = 0, difficulty: Difficulty | None = None) -> Iterator[Problem]:
    """Yield a family's problems from index `start` on, without end."""
    index = start
    while True:
        yield generate_problem(family, seed, index, difficulty)
        index += 1


def held_out_problems(
    family: str, seed: int, count: int, exclude: Collection[str] = (), difficulty: Difficulty | None = None
) -> list[Problem]:
    """Take the first `count` problems of a stream whose questions differ from each other and from `exclude`.

    Raises DatasetInvalid when the family has too few problems at this difficulty (100 draws for each one wanted).
    """
    seen = set(exclude)
    found: list[Problem] = []
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


def _family(name: str) -> Family:
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
    """Draw a change != 0 that keeps the running total within 0..largest_value."""
    lowest = max(-difficulty.largest_operand, -total)
    highest = min(difficulty.largest_operand, difficulty.largest_value - total)
    change = rng.randint(lowest, highest - 1)
    return change if change < 0 else change + 1


def _write_addition(rng: Random, difficulty: Difficulty) -> tuple[str, list[str], int]:
    """`Add 478 and 65.`: columns from the right, each with the carry it takes and the carry it leaves."""
    columns = _draw_steps(rng, difficulty)
    first = rng.randint(10 ** (columns - 1), 10**columns - 1)
    second = rng.randint(1, 10**columns - 1)
    if rng.random() < 0.5:
        first, second = second, first
    steps: list[str] = []
    carry = 0
    for column in range(columns):
        a, b = first // 10**column % 10, second // 10**column % 10
        total = a + b + carry
        steps.append(f"{a}+{b}+{carry}={total // 10}{total % 10}")
        carry = total // 10
    return f"Add {first} and {second}.", steps, first + second


_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def _write_ledger(rng: Random, difficulty: Difficulty) -> tuple[str, list[str], int]:
    """`Stock: 7. Jan +5 Feb -3`: the running total after each month's change."""
    total = rng.randint(1, difficulty.largest_operand)
    entries, steps = [f"Stock: {total}."], []
    for month in _MONTHS[: _draw_steps(rng, difficulty)]:
        change = _draw_change(rng, total, difficulty)
        entries.append(f"{month} {change:+d}")
        steps.append(f"{month} {total}{change:+d}={total + change}")
        total += change
    return " ".join(entries), steps, total


_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _write_wheels(rng: Random, difficulty: Difficulty) -> tuple[str, list[str], str]:
    """`Wheels at Tue K. Turn 3 times.`: where a wheel of days and one of letters stand, turn by turn."""
    day, letter, turns = rng.randrange(7), rng.randrange(26), _draw_steps(rng, difficulty)
    stands = [f"{_DAYS[(day + turn) % 7]} {_LETTERS[(letter + turn) % 26]}" for turn in range(turns + 1)]
    steps = [f"{turns - turn} {stand}" for turn, stand in enumerate(stands)]
    return f"Wheels at {stands[0]}. Turn {turns} times.", steps, stands[-1]


_NAMES = ("Ann", "Ben", "Eva", "Max", "Mia", "Tom")
_THINGS = ("apples", "books", "coins", "eggs", "pens", "shells")
_GAINS = ("gets", "buys", "finds")
_LOSSES = ("loses", "sells", "gives away")


def _write_word_problem(rng: Random, difficulty: Difficulty) -> tuple[str, list[str], int]:
    """`Mia has 7 pens. She ...`: the same chain told as a story, in the manner of GSM8K."""
    name, things = rng.choice(_NAMES), rng.choice(_THINGS)
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
    family.name: family
    for family in (
        Family("wheels", Difficulty(shortest=2, longest=18, tail=0.85), _write_wheels),
        Family("addition", Difficulty(shortest=2, longest=8, tail=0.6), _write_addition),
        Family(
            "ledger", Difficulty(shortest=3, longest=9, tail=0.7, largest_operand=3, largest_value=9), _write_ledger
        ),
        Family("wordProblem", Difficulty(shortest=2, longest=8, tail=0.6), _write_word_problem),
    )
}
