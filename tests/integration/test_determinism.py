"""maxPolicyLag 0 and one seed: two runs of real engines and trainer end in the same bytes, another seed in others."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest
import yaml
from tests.integration.runs import checksums, start
from tests.tiny_models import make_text_policy

pytestmark = pytest.mark.slow

QUESTIONS = [f"box {letter}" for letter in "abcdefgh"]


def a_policy(folder: Path) -> Path:
    """Answers 3 as often as 4, so that rewards differ within a group and the policy really moves."""
    texts = [f"{question} is #### {answer}" for question in QUESTIONS for answer in (3, 4)]
    return make_text_policy(folder, texts, steps=80)


def a_synchronous_run(policy: Path) -> dict[str, object]:
    """Three steps on two replicas with speculation and two trainer ranks."""
    return {
        "name": "same",
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 64},
        "prompts": {"source": {"jsonl": {"path": "boxes.jsonl"}}, "maxTokens": 16},
        "rewards": {"exact": {}},
        "generation": {
            "replicas": 2,
            "sampling": {"temperature": "1", "maxTokens": 16},
            "speculation": {"eagle3": {"numDraftTokens": 3}},
            "draftLength": "Fixed",  # an adaptive one follows the clock
            "maxLiveRollouts": 16,
        },
        "trainer": {
            "parallelism": {"data": 2},
            "optimizer": {"learningRate": "1e-3"},
            "drafter": {"initialisation": {"prompts": 8, "epochs": 1}},
        },
        "schedule": {"steps": 3, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 0},
    }


def train(folder: Path, policy: Path, seed: int) -> dict[str, str]:
    """Run to the end; sha256 of every tensor file of the export and of the last checkpoint."""
    folder.mkdir()
    rows = [{"question": question, "answer": "#### 3"} for question in QUESTIONS]
    (folder / "boxes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.yaml").write_text(yaml.safe_dump(a_synchronous_run(policy)))
    run = start(folder, "run", "-f", "run.yaml", "--plain", "--set", f"schedule.seed={seed}")
    try:
        run.finish(900)
    finally:
        run.stop()
    return checksums(run.directory, 3)


@pytest.mark.timeout(2800)
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    policy = a_policy(tmp_path / "policy")
    first = train(tmp_path / "first", policy, seed=1)
    again = train(tmp_path / "again", policy, seed=1)
    assert first == again
    other = train(tmp_path / "other", policy, seed=2)
    start_bytes = sha256((policy / "model.safetensors").read_bytes()).hexdigest()
    for name in ("export/policy/model.safetensors", "export/drafter/model.safetensors"):
        assert other[name] != first[name] != start_bytes
