"""A step without a pass of its own for proximal log-probabilities trains the same policy, and reports the same."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.integration.trainer.runs import GSPO, a_batch, a_spec
from tests.integration.trainer.worker import keep
from tests.tiny_models import Shape, make_policy

from specrl.records import TrainMetrics
from specrl.spec import RunSpec
from specrl.trainer.megatron_backend import MegatronBackend
from specrl.trainer.megatron_backend.training import logprobs

VOCAB = 264

WITHOUT_PASS: dict[str, dict[str, Any]] = {
    "default": {},
    "no drafter": {"speculation": {"none": {}}},
    "recomputed layers": {"recompute": "Layers"},
    "bfloat16": {"dtype": "bfloat16", "speculation": {"none": {}}},
    "low-rank": {"lora": {"rank": 4}},
    "GSPO": {"loss": {**GSPO, "referenceKl": None}},
    "CISPO": {"loss": {"objective": "Cispo", "clipLow": "1"}},
    "ratio to the sampler": {"loss": {"ratioTo": "Sampler", "correction": {"method": "None"}}},
    "weights of sequences": {"loss": {"correction": {"method": "Mask", "level": "Sequence", "high": "4"}}},
    "masked rollouts": {"loss": {"rolloutMask": {"ratioLow": "0.1", "ratioHigh": "10", "maxDivergence": "2"}}},
    "divergence in the loss": {"loss": {"referenceKl": {"coefficient": "0.05", "place": "Loss"}}},
}
WITH_PASS: dict[str, dict[str, Any]] = {
    "two updates": {"optimizer": {"updatesPerStep": 2}},
    "divergence in rewards": {"loss": {"referenceKl": {"coefficient": "0.05", "place": "Reward"}}},
    "both": {"optimizer": {"updatesPerStep": 2}, "loss": GSPO},
}


@pytest.fixture(scope="module")
def tiny_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("tiny"), shape=Shape(layers=2, vocab=VOCAB), sharpness=4.0)


def train(spec: RunSpec, file: Path) -> tuple[list[TrainMetrics], int]:
    """Train two steps and save all weights. Returns figures without seconds, and passes of the policy alone."""
    with closing(MegatronBackend(spec)) as backend:
        return train_backend(backend, file)


def train_backend(backend: MegatronBackend, file: Path) -> tuple[list[TrainMetrics], int]:
    """As `train`."""
    backend.load_model(None)
    schedule = backend.models.policy.schedule
    run_passes = schedule.run_passes
    passes: list[bool] = []

    def count_passes(*arguments: Any, is_training: bool, **options: Any) -> Any:
        passes.append(is_training)
        return run_passes(*arguments, is_training=is_training, **options)

    schedule.run_passes = count_passes  # type: ignore[method-assign]
    figures = []
    for step in (1, 2):
        metrics = backend.train_step(a_batch(step, VOCAB))
        drafter = replace(metrics.drafter, seconds=0.0) if metrics.drafter else None
        figures.append(metrics.model_copy(update={"logprob_seconds": 0.0, "train_seconds": 0.0, "drafter": drafter}))
    keep(file, backend)
    return figures, passes.count(False)


@pytest.mark.parametrize("case", WITHOUT_PASS)
def test_one_update_needs_no_pass_of_its_own(
    case: str, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_spec(tiny_policy, **WITHOUT_PASS[case])
    found, passes = train(spec, tmp_path / "found")
    assert passes == 0
    monkeypatch.setattr(logprobs, "needs_logprob_pass", lambda _trainer: True)
    expected, passes = train(spec, tmp_path / "expected")
    assert passes == 2
    assert found == expected
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()
    assert found[0].entropy > 0
    assert found[0].mismatch_tokens > 0
    if case == "masked rollouts":
        assert 0 < found[0].masked_fraction < 1


@pytest.mark.parametrize("case", WITH_PASS)
def test_later_updates_and_rewards_keep_the_pass(case: str, tiny_policy: Path, tmp_path: Path) -> None:
    found, passes = train(a_spec(tiny_policy, **WITH_PASS[case]), tmp_path / "found")
    assert passes == 2
    assert found[0].entropy > 0
