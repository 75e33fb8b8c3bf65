"""Measures grading: verdicts per second by verifier and pool size, the sandbox's overhead, and accuracy.

    python benchmarks/verifiers.py                       # all verifiers, pools of 1, 2 and 4 workers
    python benchmarks/verifiers.py --workers 1,8 --verifiers math,program --turns 5 --json verifiers.json
    python benchmarks/verifiers.py --accuracy            # of `math`, math-verify alone and TRL's reward
    python benchmarks/verifiers.py --accuracy --verl FOLDER --held-out --json accuracy.json

Figures are ratios within one run: medians and ranges. Throughput: the same verdicts, all requested at once, from pools
of different sizes, relative to one worker in the same turn; and each verifier with one worker relative to `exact`.
Sandbox: one small program in the sandbox relative to `subprocess.run` of the same interpreter with the same options,
alternately.

Accuracy (answer_accuracy.py): precision and recall of `math` and of other graders on the labelled pairs of tests/data.
answer_graders.py says how each grader is called, and how to install verl into FOLDER.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from answer_accuracy import measure_accuracy, show_mistakes
from answer_graders import makers
from rich.console import Console
from rich.table import Table

from specrl.errors import SpecInvalid
from specrl.records import Prompt
from specrl.rewards.choice import verifier_for
from specrl.rewards.pool import VerifierPool
from specrl.rewards.sandbox.filesystem import INTERPRETER
from specrl.spec.data import (
    CodeVerifier,
    ExactVerifier,
    Isolation,
    JsonSchemaVerifier,
    MathVerifier,
    RegexVerifier,
    RewardPool,
    Rewards,
)

DATA = Path(__file__).parent.parent / "tests" / "data"
OPEN = DATA / "math_answers.jsonl"
HELD_OUT = DATA / "math_answers_held_out.jsonl"
SUM = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
PROGRAM = "a, b = map(int, input().split())\nprint(a + b)\n"
FUNCTION = "def add(a, b):\n    return a + b\n"


@dataclass(frozen=True)
class Case:
    """A verifier, and a verdict of 1 that is requested repeatedly."""

    rewards: Rewards
    reference: str
    completion: str
    verdicts: int


def cases() -> dict[str, Case]:
    """By name. Cheap verdicts are requested more often, so that all measurements take about as long."""
    plain = {
        "exact": Case(Rewards(exact=ExactVerifier()), "#### 18", "so\n#### 18", 2000),
        "regex": Case(Rewards(regex=RegexVerifier()), r"\d+ eggs", "so\n#### 18 eggs", 2000),
        "jsonSchema": Case(
            Rewards(json_schema=JsonSchemaVerifier()),
            '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
            '{"a": 3}',
            2000,
        ),
        "math": Case(Rewards(math=MathVerifier()), r"#### \frac{1}{2}", r"so \boxed{\frac{2}{4}}", 200),
    }
    for isolation in (Isolation.NAMESPACES, Isolation.LANDLOCK):
        code = Rewards(code=CodeVerifier(isolation=isolation))
        add = '{"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}'
        plain |= {
            f"program, {isolation}": Case(code, SUM, PROGRAM, 40),
            f"function, {isolation}": Case(code, add, FUNCTION, 40),
            f"tests, {isolation}": Case(code, "assert add(1, 2) == 3", FUNCTION, 40),
        }
    return plain


async def throughput(case: Case, workers: int) -> float:
    """Verdicts per second of a warm pool."""
    prompt = Prompt("p0", 0, (1,), "question", case.reference)
    async with VerifierPool(verifier_for(case.rewards), RewardPool(workers=workers, timeout_s=60)) as pool:
        await asyncio.gather(*(pool.grade(prompt, case.completion) for _ in range(workers)))
        started = time.perf_counter()
        rewards = await asyncio.gather(*(pool.grade(prompt, case.completion) for _ in range(case.verdicts)))
        seconds = time.perf_counter() - started
    wrong = [reward for reward in rewards if reward.value != 1.0]
    if wrong:
        raise SystemExit(f"every verdict must be 1, got {wrong[0]}")
    return case.verdicts / seconds


def overhead(isolation: Isolation, turns: int, programs: int) -> list[float]:
    """Seconds of a program in the sandbox over those of a bare subprocess, by turn."""
    verifier = verifier_for(Rewards(code=CodeVerifier(isolation=isolation)))
    verifier.prepare_worker()

    def bare() -> None:
        command = [str(INTERPRETER), "-I", "-S", "-B", "-X", "utf8", "-c", PROGRAM]
        done = subprocess.run(command, input="1 2\n", capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "3\n"

    def confined() -> None:
        assert verifier.compute_reward(SUM, PROGRAM) == 1.0

    def seconds(run: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(programs):
            run()
        return time.perf_counter() - started

    ratios = []
    for turn in range(turns):
        # The order alternates, so that a machine that slows down or speeds up favours neither.
        if turn % 2:
            first = seconds(bare)
            ratios.append(seconds(confined) / first)
        else:
            first = seconds(confined)
            ratios.append(first / seconds(bare))
    return ratios


def shown(ratios: list[float]) -> str:
    return f"{median(ratios):.2f}x ({min(ratios):.2f}-{max(ratios):.2f})"


async def measure(arguments: argparse.Namespace, console: Console) -> None:
    """Measure, print, and write the figures if asked."""
    found = cases()
    chosen = [name for name in found if any(name.startswith(prefix) for prefix in arguments.verifiers)]
    sizes: list[int] = arguments.workers
    rates: dict[str, list[dict[int, float]]] = {name: [] for name in chosen}
    for turn in range(arguments.turns):
        for name in list(rates):
            try:
                order = sizes if turn % 2 else sizes[::-1]
                rates[name].append({size: await throughput(found[name], size) for size in order})
            except SpecInvalid as error:
                console.print(f"{name}: left out; {error}")
                del rates[name]
    table = Table(title=f"verdicts per second, {arguments.turns} turns: median (range)")
    table.add_column("verifier")
    table.add_column("1 worker, relative to exact", justify="right")
    for size in sizes[1:]:
        table.add_column(f"{size} workers, relative to {sizes[0]}", justify="right")
    result: dict[str, dict[str, list[float]]] = {}
    for name, turns in rates.items():
        row = {f"{size} workers": [turn[size] / turn[sizes[0]] for turn in turns] for size in sizes[1:]}
        if "exact" in rates:
            pairs = zip(turns, rates["exact"], strict=True)
            row = {"over exact": [turn[sizes[0]] / exact[sizes[0]] for turn, exact in pairs]} | row
        result[name] = row
        first = f"{median(row['over exact']):.4f}x" if "over exact" in row else ""
        table.add_row(name, first, *(shown(row[f"{size} workers"]) for size in sizes[1:]))
    console.print(table)
    for isolation in (Isolation.NAMESPACES, Isolation.LANDLOCK):
        try:
            ratios = overhead(isolation, 2 * arguments.turns, 20)
        except SpecInvalid as error:
            console.print(f"{isolation}: left out; {error}")
            continue
        result[f"sandbox, {isolation}"] = {"over a subprocess": ratios}
        console.print(f"a program in the sandbox, {isolation}: {shown(ratios)} the time of a bare subprocess")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare_graders(arguments: argparse.Namespace, console: Console) -> None:
    """Measure accuracy, print, and write the figures if asked."""
    files = [OPEN, HELD_OUT] if arguments.held_out else [OPEN]
    measured = measure_accuracy(files, makers(arguments.verl), arguments.limit_s, console)
    if arguments.mistakes:  # never the held-out file's mistakes: the grader must not be tuned on them
        ours = measured[OPEN.name]["ours"]
        show_mistakes([*ours.false_ones, *ours.false_zeros], console)
    if arguments.json:
        figures = {file: {name: tally.figures() for name, tally in found.items()} for file, found in measured.items()}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description="Verdicts per second, and the cost of the sandbox, as ratios.")
    parser.add_argument("--workers", type=lambda text: [int(size) for size in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--verifiers", type=lambda text: text.split(","), default=[""], help="prefixes of names")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument(
        "--accuracy", action="store_true", help="measure precision and recall of `math` and other graders instead"
    )
    parser.add_argument("--held-out", action="store_true", help="accuracy: also on the held-out pairs")
    parser.add_argument(
        "--mistakes", action="store_true", help="accuracy: list the mistakes of `math` on the open file"
    )
    parser.add_argument("--verl", type=Path, help="accuracy: folder that verl is installed in")
    parser.add_argument("--limit-s", type=float, default=30.0, help="accuracy: time limit of a pair, in seconds")
    arguments = parser.parse_args()
    if arguments.accuracy:
        # Wide enough for the graders' columns when the output is no terminal.
        compare_graders(arguments, Console(width=None if sys.stdout.isatty() else 140))
    else:
        asyncio.run(measure(arguments, Console()))


if __name__ == "__main__":
    main()
