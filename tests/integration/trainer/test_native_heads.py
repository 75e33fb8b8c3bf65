"""Native heads beside the policy, on one rank: they change no bit of it, and every way out has them.

Layouts of several ranks are in test_layouts.py, and what vLLM makes of the heads in test_heads_in_vllm.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.trainer.conftest import VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.tiny_models import Shape, make_mtp_policy

from specrl.drafting.mtp.kind import HEADS_PREFIX
from specrl.trainer.checkpointing import checkpoint_export, checkpoints

Tensors = dict[str, torch.Tensor]
MTP: dict[str, Any] = {"mtp": {"numDraftTokens": 2}}
LORA: dict[str, Any] = {"rank": 4, "alpha": "8"}


@dataclass(frozen=True)
class Outcome:
    """What three steps left: masters and moments by kind and name, the heads, and the folders that were exported."""

    state: dict[str, Tensors]
    heads: Tensors
    exported: Path
    of_checkpoint: Path
    resumed: Tensors


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(heads=4, groups=2, head_dim=16, vocab=VOCAB)
    return make_mtp_policy(tmp_path_factory.mktemp("native") / "policy", seed=5, sharpness=4.0, shape=shape, noise=0.1)


def train(policy: Path, out: Path, **settings: Any) -> Outcome:
    """Train three steps with a checkpoint after the second. Then resume it, and train the third again."""
    from specrl.trainer.megatron_backend import MegatronBackend

    spec = a_spec(policy, **settings)
    backend = MegatronBackend(spec)
    backend.load_model(None)
    for step in (1, 2, 3):
        backend.train_step(a_batch(step, VOCAB))
        if step == 2:
            backend.save_checkpoint(checkpoints.step_directory(out, step)).result()
    state = {
        kind: {name: tensor.clone() for name, tensor in tensors}
        for kind, tensors in backend.models.policy.gather_state().items()
    }
    heads = heads_of(backend)
    exported, _ = backend.export_model(out / "export")
    assert exported is not None
    backend.save_checkpoint(checkpoints.step_directory(out, 3)).result()
    backend.close()
    checkpoint_export.export_checkpoint(spec, checkpoints.find_newest(out), out / "from-checkpoint")
    resumed = MegatronBackend(spec)
    resumed.load_model(checkpoints.step_directory(out, 2))
    resumed.train_step(a_batch(3, VOCAB))
    found = heads_of(resumed)
    resumed.close()
    return Outcome(state, heads, exported, out / "from-checkpoint" / "policy", found)


def heads_of(backend: Any) -> Tensors:
    drafter = backend.models.drafter
    found = drafter.model.collect_tensors(torch.float32) if drafter is not None else {}
    return {name: tensor.clone() for name, tensor in found.items()}


def are_equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
def test_heads_trained_frozen_or_absent_leave_the_same_policy(lora: Any, policy: Path, tmp_path: Path) -> None:
    """Beside low-rank updates, the heads are trained whole."""
    trained = train(policy, tmp_path / "trained", speculation=MTP, lora=lora)
    frozen = train(policy, tmp_path / "frozen", speculation=MTP, lora=lora, drafter={"online": False})
    absent = train(policy, tmp_path / "absent", speculation={"none": {}}, lora=lora)
    for other in (frozen, absent):
        assert trained.state.keys() == other.state.keys()
        assert all(are_equal(tensors, other.state[kind]) for kind, tensors in trained.state.items())
    stored = load_file(policy / "model.safetensors")
    given = {name: tensor for name, tensor in stored.items() if name.startswith(HEADS_PREFIX)}
    assert are_equal(frozen.heads, given)
    assert trained.heads.keys() == given.keys()
    assert not any(torch.equal(tensor, given[name]) for name, tensor in trained.heads.items())

    # Every folder has all tensors: the heads as trained, or as they came.
    for outcome, heads in ((trained, trained.heads), (frozen, given), (absent, given)):
        for folder in (outcome.exported, outcome.of_checkpoint):
            found = load_file(folder / "model.safetensors")
            assert found.keys() == stored.keys()
            assert are_equal({name: tensor for name, tensor in found.items() if name in heads}, heads)
        both = [load_file(folder / "model.safetensors") for folder in (outcome.exported, outcome.of_checkpoint)]
        assert are_equal(*both)
    assert are_equal(trained.resumed, trained.heads), "a resumed run has the heads and their moments"
