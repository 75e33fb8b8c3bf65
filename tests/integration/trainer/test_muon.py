"""Muon on one rank: checkpoints resume bit for bit in either precision, and not with another kind of optimizer.

`test_layouts.py` compares it with a reference in float64, on layouts of two and four ranks.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.integration.trainer.conftest import VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.tiny_models import Shape, make_policy

from specrl.errors import CheckpointInvalid
from specrl.trainer.checkpointing import checkpoints

MUON = {"kind": "Muon"}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon") / "policy"
    return make_policy(folder, seed=5, sharpness=4.0, shape=Shape(heads=4, groups=2, vocab=VOCAB))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_resumes_bit_for_bit(policy: Path, tmp_path: Path, dtype: str) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    spec = a_spec(policy, speculation={"none": {}}, optimizer=MUON, dtype=dtype)
    checkpoint = checkpoints.step_directory(tmp_path, 2)
    states = []
    for resumed_from in (None, checkpoint):
        backend = MegatronBackend(spec)
        backend.load_model(resumed_from)
        for step in (3,) if resumed_from else (1, 2, 3):
            backend.train_step(a_batch(step, VOCAB))
            if step == 2:
                backend.save_checkpoint(checkpoint).result()
        state = backend.models.policy.gather_state()
        states.append({(kind, name): value.clone() for kind, found in state.items() for name, value in found})
        backend.close()
    one, other = states
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)
    # A weight of a layer has Muon's momentum, and every other one AdamW's two moments.
    kinds = {name: {kind for kind, other in one if other == name} for _, name in one}
    assert kinds["model.layers.0.mlp.up_proj.weight"] == {"weights", "momentum_buffer"}
    assert kinds["model.embed_tokens.weight"] == kinds["model.norm.weight"] == {"weights", "exp_avg", "exp_avg_sq"}


def test_a_checkpoint_of_another_optimizer_is_refused(policy: Path, tmp_path: Path) -> None:
    from specrl.trainer.megatron_backend import MegatronBackend

    checkpoint = checkpoints.step_directory(tmp_path, 1)
    backend = MegatronBackend(a_spec(policy, speculation={"none": {}}))
    backend.load_model(None)
    backend.train_step(a_batch(1, VOCAB))
    backend.save_checkpoint(checkpoint).result()
    backend.close()
    other = MegatronBackend(a_spec(policy, speculation={"none": {}}, optimizer=MUON))
    with pytest.raises(CheckpointInvalid, match=r"optimizer\.kind=Muon .*, got exp_avg, exp_avg_sq; resume with"):
        other.load_model(checkpoint)
    other.close()
