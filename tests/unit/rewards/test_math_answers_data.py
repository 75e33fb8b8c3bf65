"""The labelled set of mathematical answers has the size and balance that the published accuracy relies on."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[2] / "data"
OPEN = DATA / "math_answers.jsonl"
HELD_OUT = DATA / "math_answers_held_out.jsonl"


def read_pairs(*files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def test_every_pair_has_its_fields() -> None:
    for pair in read_pairs(OPEN, HELD_OUT):
        assert pair.keys() - {"mark", "note"} == {"form", "reference", "completion", "reward"}
        assert pair["reward"] in (0, 1)
        assert pair["reference"].strip()
        assert pair["completion"].strip()
        assert pair.get("mark") != "####", "the default is not stated"


def test_every_form_has_enough_pairs_in_both_files() -> None:
    forms = Counter(pair["form"] for pair in read_pairs(OPEN, HELD_OUT))
    held_out = Counter(pair["form"] for pair in read_pairs(HELD_OUT))
    assert len(forms) >= 40
    assert min(forms.values()) >= 15
    assert forms.keys() == held_out.keys()
    assert min(held_out.values()) >= 5


def test_enough_of_the_answers_are_wrong() -> None:
    for pairs in (read_pairs(OPEN), read_pairs(HELD_OUT)):
        wrong = sum(pair["reward"] == 0 for pair in pairs)
        assert 0.45 <= wrong / len(pairs) <= 0.65


def test_no_pair_occurs_twice_in_either_file_or_both() -> None:
    keys = Counter((pair["reference"], pair["completion"], pair.get("mark")) for pair in read_pairs(OPEN, HELD_OUT))
    assert [key for key, count in keys.items() if count > 1] == []
