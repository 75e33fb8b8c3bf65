"""The problems of examples/02-json: the same at every call, no validation sentence is trained on, one right object.

The figures of the example's page and of docs/measured.md belong to these problems. Whoever changes them measures again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from specrl.rewards.choice import verifier_for
from specrl.spec import load_spec

EXAMPLE = Path(__file__).parents[3] / "examples" / "02-json"
DIGESTS = {
    "train.jsonl": "f92d03b4f2038e5db55e7b29e740f084d2f1387363bf9edcf24950d741963664",
    "validation.jsonl": "8d5d4d4edefdc3ac25f47eda99ba1a0902168c147a508868623c296ad9df04e4",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("json")
    subprocess.run([sys.executable, EXAMPLE / "make_data.py", "--out", out], check=True, capture_output=True)
    return out


def read_problems(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_problems_are_those_that_were_measured(folder: Path) -> None:
    assert {name: sha256((folder / name).read_bytes()).hexdigest() for name in DIGESTS} == DIGESTS


def test_no_validation_sentence_is_trained_on(folder: Path) -> None:
    sentences = {name: [row["question"] for row in read_problems(folder / name)] for name in DIGESTS}
    both = [*sentences["train.jsonl"], *sentences["validation.jsonl"]]
    assert len(set(both)) == len(both)


def test_a_reference_admits_its_facts_alone(folder: Path) -> None:
    verifier = verifier_for(load_spec(EXAMPLE / "run.yaml").rewards)
    for row in read_problems(folder / "validation.jsonl"):
        reference = json.dumps(row["answer"])
        verifier.check_reference(reference)
        values = row["answer"]["properties"]
        facts = {name: value.get("const", value.get("enum", [""])[0]) for name, value in values.items()}
        assert all(str(fact) in row["question"] for fact in facts.values())
        right = [facts, dict(reversed(facts.items())), facts | {"job": facts["job"].capitalize()}]
        without_city = {name: value for name, value in facts.items() if name != "city"}
        wrong = [
            facts | {"age": str(facts["age"])},
            facts | {"city": "Atlantis"},
            facts | {"country": "Chile"},
            without_city,
        ]
        assert [verifier.grade(reference, json.dumps(it), row).reward for it in right] == [1, 1, 1]
        assert [verifier.grade(reference, json.dumps(it), row).reward for it in wrong] == [0, 0, 0, 0]
        assert verifier.grade(reference, json.dumps(facts) + "\nThis is the object.", row).reward == 0
