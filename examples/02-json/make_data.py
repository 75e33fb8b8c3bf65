"""Make the sentences of this example, and the JSON objects that they ask for: made up, and the same at every call.

    python examples/02-json/make_data.py    # writes train.jsonl and validation.jsonl beside this file

A line is a problem: {"question": SENTENCE, "answer": JSON_SCHEMA}. The schema admits one object, the right one, in any
order of its members and with any white space. `rewards.jsonSchema` reads it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = """
Anna Ben Clara David Emma Frank Grace Henry Isla Jack Karen Liam Maria Noah Olivia Paul Rosa Sam Tina Victor Wendy Tom
Lucy Peter Nina Oscar Laura Mark Julia Simon
"""
CITIES = """
Paris London Berlin Madrid Rome Vienna Boston Chicago Denver Seattle Tokyo Cairo Lima Oslo Dublin Athens Toronto Sydney
Delhi Nairobi
"""
JOBS = "teacher nurse pilot farmer baker lawyer painter doctor plumber singer writer chef"
SENTENCES = (
    "{name} is {age}, lives in {city} and works as a {job}.",
    "{name}, a {age}-year-old {job}, lives in {city}.",
    "The {job} {name} is {age} years old and lives in {city}.",
    "In {city} lives {name}, a {job} of {age} years.",
)
TRAIN_COUNT = 1024
VALIDATION_COUNT = 64


def make_problems(seed: int) -> Iterator[dict[str, Any]]:
    """Yield problems without end. The same seed gives the same problems."""
    draw = random.Random(seed)  # noqa: S311 - problems need no secrecy
    names, cities, jobs = NAMES.split(), CITIES.split(), JOBS.split()
    while True:
        facts = {
            "name": draw.choice(names),
            "age": draw.randint(18, 80),
            "city": draw.choice(cities),
            "job": draw.choice(jobs),
        }
        yield {"question": draw.choice(SENTENCES).format(**facts), "answer": admit_only(facts)}


def admit_only(facts: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON Schema that admits one object: these facts. A job may begin with a capital letter."""
    values: dict[str, Any] = {name: {"const": value} for name, value in facts.items()}
    values["job"] = {"enum": [facts["job"], facts["job"].capitalize()]}
    return {"type": "object", "properties": values, "required": sorted(values), "additionalProperties": False}


def write_problems(file: Path, count: int, seed: int, without: set[str]) -> set[str]:
    """Write so many different problems whose sentences are not in `without`. Returns their sentences."""
    seen = set[str]()
    lines = list[str]()
    for problem in make_problems(seed):
        if len(lines) == count:
            break
        sentence = problem["question"]
        if sentence not in seen | without:
            seen.add(sentence)
            lines.append(json.dumps(problem))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the problems of the JSON example.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the two files")
    out = parser.parse_args().out
    validation = write_problems(out / "validation.jsonl", VALIDATION_COUNT, seed=2, without=set())
    write_problems(out / "train.jsonl", TRAIN_COUNT, seed=1, without=validation)
    print(f"{out / 'train.jsonl'}: {TRAIN_COUNT} problems; {out / 'validation.jsonl'}: {VALIDATION_COUNT} others")


if __name__ == "__main__":
    main()
