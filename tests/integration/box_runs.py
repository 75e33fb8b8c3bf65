"""Small whole runs of one task: every question's answer is 3, and the first policy says 4 as often."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fork_server import ForkServer
from tests.integration.forked_run import ForkedRun
from tests.tiny_models import Shape, make_text_policy

QUESTIONS = [f"box {letter}" for letter in "abcdefgh"]


def make_box_policy(folder: Path, family: str = "qwen3") -> Path:
    """Train a policy that answers 3 as often as 4, so that rewards differ within a group and training changes it."""
    texts = [f"{question} is #### {answer}" for question in QUESTIONS for answer in (3, 4)]
    return make_text_policy(folder, texts, shape=Shape(family=family), steps=80)


def write_questions(folder: Path) -> Path:
    """Write the questions and answers as a prompt file."""
    file = folder / "boxes.jsonl"
    rows = [{"question": question, "answer": "#### 3"} for question in QUESTIONS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def a_box_run(policy: Path, questions: Path, speculation: dict[str, Any]) -> dict[str, Any]:
    """Make a run of two steps on one replica and one trainer rank.

    The policy and drafter that the first step trained generate the second. The draft length is fixed: an adaptive one
    depends on measured times, and may be 0.
    """
    return {
        "name": "boxes",
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 64},
        "prompts": {"source": {"jsonl": {"path": str(questions)}}, "maxTokens": 16},
        "rewards": {"exact": {}},
        "generation": {
            "sampling": {"temperature": "1", "maxTokens": 16},
            "speculation": speculation,
            "draftLength": "Fixed",
            "maxLiveRollouts": 16,
            "kvCacheMib": 64,
        },
        "trainer": {
            "optimizer": {"learningRate": "1e-3"},
            "drafter": {"initialisation": {"prompts": 8, "maxPrompts": 8, "epochs": 4}},
        },
        "schedule": {"steps": 2, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 0},
    }


def a_synchronous_run(policy: Path, questions: Path) -> dict[str, Any]:
    """Make a run with an EAGLE-3 head on two replicas and two trainer ranks."""
    run = a_box_run(policy, questions, {"eagle3": {"numDraftTokens": 3}})
    run["generation"]["replicas"] = 2
    run["trainer"]["parallelism"] = {"data": 2}
    return run


def train_to_end(folder: Path, run: dict[str, Any], ranks: ForkServer) -> ForkedRun:
    """Train to the end, and stop all processes. ranks: the server that the trainer's ranks are forks of."""
    trained = ForkedRun(folder, run, ranks)
    try:
        trained.finish()
    finally:
        trained.stop()
    return trained
