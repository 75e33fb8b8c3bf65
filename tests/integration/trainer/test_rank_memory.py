"""The estimate of a rank's memory against the most bytes of live tensors in a step, in several layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.fork_server import ForkServer
from tests.integration.trainer.conftest import Launch
from tests.tiny_models import Shape, make_policy

from specrl.trainer.memory import estimate

NO_DRAFTER: dict[str, Any] = {"speculation": {"none": {}}}
CASES: dict[str, dict[str, Any]] = {
    "float32": NO_DRAFTER,
    "bfloat16": {**NO_DRAFTER, "dtype": "bfloat16"},
    "recomputed layers": {**NO_DRAFTER, "recompute": "Layers"},
    "drafter": {},
    "reduced draft vocabulary": {"speculation": {"eagle3": {"draftVocabSize": 512}}},
    "Muon": {**NO_DRAFTER, "optimizer": {"kind": "Muon"}},
    "low-rank": {**NO_DRAFTER, "lora": {"rank": 4}},
    "reference": {**NO_DRAFTER, "loss": {"referenceKl": {"coefficient": "0.05"}}},
}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "data": {**NO_DRAFTER, "data": 2},
    "pipeline": {**NO_DRAFTER, "pipeline": 2},
    "recomputed pipeline": {**NO_DRAFTER, "pipeline": 2, "recompute": "Layers"},
}


@pytest.fixture(scope="module")
def policy_of_4096_words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("words"), shape=Shape(intermediate=192, vocab=4096))


def test_the_estimate_has_the_limits_of_drafting() -> None:
    from specrl.drafting import budget, vocabulary

    assert estimate.CHUNK_BYTES == vocabulary.CHUNK_BYTES
    assert (estimate.MAX_UPDATES, estimate.UPDATE_STARTS) == (budget.MAX_UPDATES, budget.UPDATE_STARTS)
    assert estimate.MIN_SLICE_STARTS == budget.MIN_SLICE_STARTS


@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_within_15_percent_of_the_peak(case: str, policy_of_4096_words: Path) -> None:
    from tests.integration.trainer.memory_worker import measure

    found = measure(policy_of_4096_words, CASES[case])
    assert found["estimated"] == pytest.approx(found["measured"], rel=0.15)


@pytest.mark.parametrize("case", TWO_RANKS)
def test_the_estimate_is_within_15_percent_of_the_peak_of_two_ranks(
    case: str, policy_of_4096_words: Path, tmp_path: Path, ranks: ForkServer
) -> None:
    out = tmp_path / "out"
    program = ["memory_worker", str(policy_of_4096_words), str(out), json.dumps(TWO_RANKS[case])]
    Launch(ranks, out, "data=2", program, []).finish([0, 0])
    found = [json.loads((out / f"memory-{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["estimated"] == pytest.approx(max(item["measured"] for item in found), rel=0.15)
