"""A whole run whose policy calls a tool: real engine, real sandbox, real trainer. And what it says of what it read.

Its prompts and completions hold marks, and its verifier now and then raises an error that quotes a completion. A
verifier that breaks for good needs no engine: tests/integration/launcher/test_broken_reward.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from tests.integration.runs import StartedRun, start
from tests.tiny_models import make_text_policy
from tokenizers import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ASKED, SAID = "osprey", "kestrel"
"""Marks of a prompt and of a completion."""

QUESTIONS = {f"{ASKED} {first}+{second}=": first + second for first in range(1, 5) for second in (3, 4)}

VERIFIER = f"""
import pathlib

SEEN = pathlib.Path(__file__).with_name("seen.txt")

def grade(reference, completion):
    with SEEN.open("a") as file:
        file.write(completion + "\\n")
    if SEEN.read_text().count("{SAID}") % 7 == 3:
        raise ValueError(f"cannot parse {{completion!r}} of {ASKED}")
    return float(f"#### {{reference}} {SAID}" in completion)
"""


def a_policy(folder: Path) -> Path:
    """Calls a calculator, and often says something else than it answered."""
    texts = [
        f"{question}<tool>{question[len(ASKED) + 1 : -1]}</tool><output>{answer}</output>#### {said} {SAID}"
        for question, answer in QUESTIONS.items()
        for said in (answer, 5)
    ]
    return make_text_policy(folder, texts, steps=200)


def a_run(policy: Path) -> dict[str, object]:
    return {
        "name": "calculate",
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 160},
        "prompts": {"source": {"jsonl": {"path": "sums.jsonl"}}, "maxTokens": 24},
        "rewards": {"python": {"function": "my_verifier:grade", "folder": "."}},
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


@dataclass(frozen=True)
class Calculated:
    """The finished run. served: what its coordinator answered while it was under way, by path."""

    folder: Path
    directory: Path
    reports: list[dict[str, Any]]
    served: dict[str, str]


@pytest.fixture(scope="module")
def calculated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Calculated]:
    folder = tmp_path_factory.mktemp("calculate")
    others = {f"{ASKED} 1+2=": 3, f"{ASKED} 2+1=": 3}
    for name, sums in (("sums", QUESTIONS), ("others", others)):
        rows = [{"question": question, "answer": str(answer)} for question, answer in sums.items()]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_verifier.py").write_text(VERIFIER)
    (folder / "run.yaml").write_text(yaml.safe_dump(a_run(a_policy(folder / "policy"))))
    run = start(folder, "run", "-f", "run.yaml", "--plain")
    try:
        run.until(lambda: len(run.reports()) >= 1, 1200)
        served = everything_served(run)
        run.finish(600)
        yield Calculated(folder, run.directory, run.reports(), served)
    finally:
        run.stop()


def everything_served(run: StartedRun) -> dict[str, str]:
    address = json.loads((run.directory / "endpoints.json").read_text())["http"]
    paths = ("/status", "/steps", "/validations", "/metrics", "/readyz")
    return {path: httpx2.get(f"{address}{path}", trust_env=False).text for path in paths}


def test_sampler_and_trainer_agree_on_every_sampled_token_and_on_no_other(calculated: Calculated) -> None:
    assert [report["step"] for report in calculated.reports] == [1, 2, 3]
    for report in calculated.reports:
        assert report["mismatchTokens"] == report["tokens"], "every sampled token is compared"
        assert report["mismatchMaxAbs"] < 1e-2, "also those after an output: both have read the same tokens"
        assert report["toolCalls"] > 0


def test_nothing_that_was_asked_or_said_is_in_what_the_run_wrote_and_served(calculated: Calculated) -> None:
    """Neither as text nor as token ids, though completions failed in the verifier with their words in the error."""
    seen = (calculated.folder / "seen.txt").read_text()
    assert seen.count(SAID) >= 48, "the policy does say it"
    written = {path.name: path.read_text() for path in (calculated.directory / "logs").iterdir()}
    assert {"coordinator.log", "gen-0.log", "trainer.log"} <= written.keys()
    assert "verifier_erred" in written["coordinator.log"], "the verifier did fail"
    assert "ValueError at my_verifier.py:10" in written["coordinator.log"], "and where, is said"
    for name in ("metrics.jsonl", "validations.jsonl", "status.json", "origin.json", "endpoints.json"):
        written[name] = (calculated.directory / name).read_text()
    written["the terminal"] = (calculated.folder / "output.txt").read_text()
    marks = [*(mark for word in (ASKED, SAID) for mark in (word, *ids_of(calculated.folder, word))), "<tool>"]
    for name, text in (written | calculated.served).items():
        assert [mark for mark in marks if mark in text] == [], name


def ids_of(folder: Path, word: str) -> list[str]:
    """A word's token ids, as lists are written."""
    ids = Tokenizer.from_file(str(folder / "policy" / "tokenizer.json")).encode(word, add_special_tokens=False).ids
    assert len(ids) >= 3
    return [separator.join(map(str, ids)) for separator in (", ", ",", " ")]
