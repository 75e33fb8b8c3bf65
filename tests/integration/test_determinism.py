"""maxPolicyLag 0 and one seed: two runs of real engines and trainer end in the same bytes, another seed in others."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from tests.integration.runs import start
from tests.tiny_models import make_policy

pytestmark = pytest.mark.slow


def a_synchronous_run(policy: Path, seed: int) -> dict[str, object]:
    """Three steps on two replicas with speculation and two trainer ranks."""
    return {
        "name": "same",
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 192},
        "prompts": {"source": {"generated": {"family": "ledger", "count": 64}}, "maxTokens": 120},
        "rewards": {"exact": {}},
        "generation": {
            "replicas": 2,
            "sampling": {"temperature": "1", "maxTokens": 24},
            "speculation": {"eagle3": {"numDraftTokens": 3}},
            "maxLiveRollouts": 16,
        },
        "trainer": {
            "parallelism": {"data": 2},
            "optimizer": {"learningRate": "1e-3"},
            "drafter": {"initialisation": {"prompts": 8, "epochs": 1}},
        },
        "schedule": {"steps": 3, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 0, "seed": seed},
    }


def train(folder: Path, policy: Path, seed: int) -> dict[str, str]:
    """Run to the end; sha256 of every tensor file of the export and of the checkpoint."""
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump(a_synchronous_run(policy, seed)))
    run = start(folder, "run", "-f", "run.yaml", "--plain")
    try:
        run.finish(900)
    finally:
        run.stop()
    files = [*run.directory.glob("export/*/*.safetensors"), *run.directory.glob("checkpoints/step-000003/**/*.distcp")]
    assert len(files) >= 4, "policy, drafter, and a checkpoint file per rank"
    return {str(file.relative_to(run.directory)): sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.timeout(2800)
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    policy = make_policy(tmp_path / "policy", sharpness=4.0)
    first = train(tmp_path / "first", policy, seed=1)
    again = train(tmp_path / "again", policy, seed=1)
    assert first == again
    other = train(tmp_path / "other", policy, seed=2)
    assert other["export/policy/model.safetensors"] != first["export/policy/model.safetensors"]
