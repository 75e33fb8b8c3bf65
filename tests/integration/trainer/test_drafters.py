"""Every kind of drafter beside the policy: what a step computes and changes with it, and without one.

All on one rank, on the same batches. `test_megatron_backend.py` has what several ranks do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.trainer.conftest import VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.tiny_models import Shape, make_mtp_policy

from specrl.drafting import budget
from specrl.drafting.registry import KINDS
from specrl.trainer.megatron_backend import MegatronBackend
from specrl.trainer.megatron_backend.training import drafter_training

STEPS = 10
POLICY = "the policy's folder"  # stands for its path: the policy drafts for itself
SPECULATION: dict[str, dict[str, Any]] = {
    "eagle3": {"eagle3": {}},
    "mtp": {"mtp": {"numDraftTokens": 2}},
    "draft_model": {"draftModel": {"path": POLICY}},
}
"""The run file's `generation.speculation` for each kind of `KINDS`."""
NOT_HELD = {"draft_model"}
"""Kinds that the trainer does not hold if they are frozen."""

Tensors = dict[str, torch.Tensor]


@dataclass
class Training:
    """What some steps have left. policy: weights and moments. calls: of the policy's model, of its output layer."""

    policy: Tensors
    drafter: Tensors
    calls: tuple[int, int]


def speculation_of(kind: str, policy: Path) -> dict[str, Any]:
    """Return the kind's `generation.speculation`, with the policy's path."""
    return {
        member: {field: str(policy) if value == POLICY else value for field, value in section.items()}
        for member, section in SPECULATION[kind].items()
    }


def train(policy: Path, speculation: dict[str, Any], **drafter: Any) -> Training:
    """Train ten steps. drafter: fields of `trainer.drafter`."""
    backend = MegatronBackend(a_spec(policy, speculation=speculation, drafter={"tokenBudget": 60, **drafter}))
    backend.load_model(None)
    calls = [0, 0]

    def count_call(place: int) -> Any:
        def count(_module: torch.nn.Module, _inputs: Any) -> None:
            calls[place] += 1

        return count

    (chunk,) = backend.models.policy.chunks
    chunk.register_forward_pre_hook(count_call(0))
    chunk.output_layer.register_forward_pre_hook(count_call(1))
    for step in range(1, STEPS + 1):
        backend.train_step(a_batch(step, VOCAB))
    found = {
        f"{kind}.{name}": tensor.clone()
        for kind, tensors in backend.models.policy.gather_state().items()
        for name, tensor in tensors
    }
    trained = backend.models.drafter
    drafted = {} if trained is None else {name: x.clone() for name, x in trained.collect_state().items()}
    backend.close()
    return Training(found, drafted, (calls[0], calls[1]))


@pytest.fixture(scope="module")
def policy_with_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(heads=4, groups=2, head_dim=16, vocab=VOCAB)
    return make_mtp_policy(tmp_path_factory.mktemp("heads") / "policy", seed=5, sharpness=4.0, shape=shape, noise=0.1)


@pytest.fixture(scope="module", params=sorted(SPECULATION))
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def source(kind: str, policy: Path, policy_with_heads: Path) -> Path:
    """The policy of the kind."""
    return policy_with_heads if kind == "mtp" else policy


@pytest.fixture(scope="module")
def without(source: Path) -> Training:
    return train(source, {"none": {}})


@pytest.fixture(scope="module")
def trained(source: Path, kind: str) -> Training:
    return train(source, speculation_of(kind, source))


@pytest.fixture(scope="module")
def frozen(source: Path, kind: str) -> Training:
    return train(source, speculation_of(kind, source), online=False)


def assert_equal_bits(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_every_kind_is_tested_here() -> None:
    assert SPECULATION.keys() == KINDS.keys()


def test_policy_has_the_same_bits_whether_the_drafter_is_trained_or_frozen_or_absent(
    trained: Training, frozen: Training, without: Training
) -> None:
    """Weights and moments after ten steps on the same rollouts."""
    assert_equal_bits(trained.policy, without.policy)
    assert_equal_bits(frozen.policy, without.policy)


def test_only_training_moves_the_drafter(kind: str, trained: Training, frozen: Training) -> None:
    assert (frozen.drafter == {}) == (kind in NOT_HELD)
    assert kind in NOT_HELD or any(
        not torch.equal(trained.drafter[name], frozen.drafter[name]) for name in frozen.drafter
    )


def test_step_keeps_no_more_targets_than_their_bound(source: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a number of tokens as the budget, and with a share of the policy's operations that pays for any drafter."""
    monkeypatch.setattr(budget, "ONLINE_SHARE", 1.0)
    for settings in ({"tokenBudget": 60}, {}):
        backend = MegatronBackend(a_spec(source, speculation=speculation_of(kind, source), drafter=settings))
        try:
            backend.load_model(None)
            drafter = backend.models.drafter
            assert drafter is not None
            inputs = drafter.model.inputs
            assert KINDS[kind].read_states == len(inputs.aux_layers) + inputs.embedding + inputs.normed
            row_bytes = len(drafter.model.draft_ids_K) * 4
            monkeypatch.setattr(budget, "TARGET_BYTES", 3 * row_bytes)
            lessons = drafter_training.choose_step_lessons(backend.models, drafter, a_batch(1, VOCAB))
            assert 0 < sum(lesson.completion_length - 1 for lesson in lessons) <= 3
        finally:
            backend.close()


def test_step_calls_the_model_as_often_as_a_step_without_drafter(
    trained: Training, frozen: Training, without: Training
) -> None:
    assert trained.calls == frozen.calls == without.calls
    assert without.calls[0] >= 2 * STEPS
