"""A whole run whose policy calls a tool: real engine, real sandbox, real trainer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from tests.integration.runs import start
from tests.tiny_models import make_text_policy

pytestmark = pytest.mark.slow

QUESTIONS = {f"{first}+{second}=": first + second for first in range(1, 5) for second in (3, 4)}


def a_policy(folder: Path) -> Path:
    """Calls a calculator, and often says something else than it answered."""
    texts = [
        f"{question}<tool>{question[:-1]}</tool><output>{answer}</output>#### {said}"
        for question, answer in QUESTIONS.items()
        for said in (answer, 5)
    ]
    return make_text_policy(folder, texts, steps=200)


def a_run(policy: Path) -> dict[str, object]:
    return {
        "name": "calculate",
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 128},
        "prompts": {"source": {"jsonl": {"path": "sums.jsonl"}}, "maxTokens": 16},
        "rewards": {"exact": {}},
        "tools": {"answeredBy": {"code": {}}, "maxOutputTokens": 24},
        "generation": {
            "sampling": {"temperature": "1", "maxTokens": 96},
            "speculation": {"eagle3": {"numDraftTokens": 3}},
            "maxLiveRollouts": 16,
        },
        "trainer": {
            "optimizer": {"learningRate": "1e-4"},
            "drafter": {"initialisation": {"prompts": 8, "epochs": 1}},
        },
        "schedule": {"steps": 3, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 0},
        "validation": {"source": {"jsonl": {"path": "others.jsonl"}}, "everySteps": 3},
    }


@pytest.mark.timeout(1800)
def test_sampler_and_trainer_agree_on_every_sampled_token_and_on_no_other(tmp_path: Path) -> None:
    for name, sums in (("sums", QUESTIONS), ("others", {"1+2=": 3, "2+1=": 3})):
        rows = [{"question": question, "answer": f"#### {answer}"} for question, answer in sums.items()]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(a_run(a_policy(tmp_path / "policy"))))
    run = start(tmp_path, "run", "-f", "run.yaml", "--plain")
    try:
        run.finish(1500)
    finally:
        run.stop()
    reports = run.reports()
    assert [report["step"] for report in reports] == [1, 2, 3]
    for report in reports:
        assert report["mismatchTokens"] == report["tokens"], "every sampled token is compared"
        assert report["mismatchMaxAbs"] < 1e-2, "also those after an output: both have read the same tokens"
        assert report["toolCalls"] > 0
