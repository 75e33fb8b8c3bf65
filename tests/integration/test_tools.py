"""A whole run whose policy calls a tool, with a real engine, sandbox and trainer. Its logs must quote no text.

Prompts and completions contain marker words, and the verifier sometimes raises an error that quotes a completion.
tests/integration/launcher/test_broken_reward.py covers a verifier that always fails, which needs no engine, and
tests/integration/test_demo.py the terminal.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.fork_server import ForkServer
from tests.integration.forked_run import ForkedRun
from tests.tiny_models import make_text_policy
from tokenizers import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROMPT_WORD = "osprey"
COMPLETION_WORD = "kestrel"
"""Marker words: one is in every prompt, one in most completions."""

QUESTIONS = {f"{PROMPT_WORD} {first}+{second}=": first + second for first in range(1, 5) for second in (3, 4)}

VERIFIER = f"""
import pathlib

SEEN = pathlib.Path(__file__).with_name("seen.txt")

def grade(reference, completion):
    with SEEN.open("a") as file:
        file.write(completion + "\\n")
    if SEEN.read_text().count("{COMPLETION_WORD}") % 7 == 3:
        raise ValueError(f"cannot parse {{completion!r}} of {PROMPT_WORD}")
    return float(f"#### {{reference}} {COMPLETION_WORD}" in completion)
"""


def a_policy(folder: Path) -> Path:
    """Train a policy that calls a calculator, and often answers with another number than the calculator's."""
    texts = [
        f"{question}<tool>{question[len(PROMPT_WORD) + 1 : -1]}</tool><output>{answer}</output>"
        f"#### {said} {COMPLETION_WORD}"
        for question, answer in QUESTIONS.items()
        for said in (answer, 5)
    ]
    return make_text_policy(folder, texts, steps=200)


def a_run(folder: Path) -> dict[str, object]:
    policy = a_policy(folder / "policy")
    return {
        "name": "calculate",
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 160},
        "prompts": {"source": {"jsonl": {"path": str(folder / "sums.jsonl")}}, "maxTokens": 24},
        "rewards": {"python": {"function": "my_verifier:grade", "folder": str(folder)}},
        "tools": {"answeredBy": {"code": {}}, "maxOutputTokens": 24},
        "generation": {
            "sampling": {"temperature": "1", "maxTokens": 96},
            "speculation": {"eagle3": {"numDraftTokens": 3}},
            "maxLiveRollouts": 16,
        },
        "trainer": {
            "optimizer": {"learningRate": "1e-4"},
            "drafter": {"initialisation": {"prompts": 8, "maxPrompts": 8, "epochs": 1}},
        },
        "schedule": {"steps": 3, "promptsPerStep": 4, "groupSize": 4, "maxPolicyLag": 0},
        "validation": {"source": {"jsonl": {"path": str(folder / "others.jsonl")}}, "everySteps": 3},
    }


@dataclass(frozen=True)
class Calculated:
    """The finished run. served: the coordinator's responses by path, recorded while it was running."""

    folder: Path
    directory: Path
    reports: list[dict[str, Any]]
    served: dict[str, str]


@pytest.fixture(scope="module")
def calculated(tmp_path_factory: pytest.TempPathFactory, ranks: ForkServer) -> Iterator[Calculated]:
    folder = tmp_path_factory.mktemp("calculate")
    others = {f"{PROMPT_WORD} 1+2=": 3, f"{PROMPT_WORD} 2+1=": 3}
    for name, sums in (("sums", QUESTIONS), ("others", others)):
        rows = [{"question": question, "answer": str(answer)} for question, answer in sums.items()]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "my_verifier.py").write_text(VERIFIER)
    # All processes serve on an IPv6 address, as in clusters without IPv4.
    run = ForkedRun(folder, a_run(folder), ranks, "::1" if socket.has_dualstack_ipv6() else "127.0.0.1")
    try:
        run.wait_for_steps(1)
        served = fetch_pages(run)
        run.finish()
        yield Calculated(folder, run.directory.path, run.reports(), served)
    finally:
        run.stop()


def fetch_pages(run: ForkedRun) -> dict[str, str]:
    address = json.loads(run.directory.endpoints_file.read_text())["http"]
    paths = ("/status", "/steps", "/validations", "/metrics", "/readyz")
    return {path: httpx2.get(f"{address}{path}", trust_env=False).text for path in paths}


def test_sampler_and_trainer_agree_on_every_sampled_token_and_on_no_other(calculated: Calculated) -> None:
    assert [report["step"] for report in calculated.reports] == [1, 2, 3]
    for report in calculated.reports:
        assert report["mismatchTokens"] == report["tokens"], "every sampled token is compared"
        assert report["mismatchMaxAbs"] < 1e-2, "also after a tool's output: both have read the same tokens"
        assert report["toolCalls"] > 0


def test_log_and_status_say_which_isolation_was_taken(calculated: Calculated) -> None:
    assert json.loads(calculated.served["/status"])["isolations"].keys() == {"tools.answeredBy.code"}
    assert "isolation_chosen" in (calculated.directory / "logs" / "coordinator.log").read_text()


def test_no_prompt_or_completion_is_in_anything_that_the_run_writes_or_serves(calculated: Calculated) -> None:
    """Search for text and for token ids. The verifier's errors quote completions, and must not be logged whole."""
    seen = (calculated.folder / "seen.txt").read_text()
    assert COMPLETION_WORD in seen, "the policy writes the marker word"
    written = {path.name: path.read_text() for path in (calculated.directory / "logs").iterdir()}
    assert {"coordinator.log", "gen-0.log", "rank-0.log"} <= written.keys()
    assert "verifier_failed" in written["coordinator.log"], "the verifier failed"
    assert "ValueError at my_verifier.py:10" in written["coordinator.log"], "the log names the line that raised it"
    for name in ("metrics.jsonl", "validations.jsonl", "status.json", "origin.json", "endpoints.json"):
        written[name] = (calculated.directory / name).read_text()
    rollouts = (calculated.directory / "rollouts.jsonl").read_text()
    assert PROMPT_WORD in rollouts, "this file keeps prompts and completions on purpose"
    assert COMPLETION_WORD in rollouts
    marks = [
        *(mark for word in (PROMPT_WORD, COMPLETION_WORD) for mark in (word, *ids_of(calculated.folder, word))),
        "<tool>",
    ]
    for name, text in (written | calculated.served).items():
        assert [mark for mark in marks if mark in text] == [], name


def ids_of(folder: Path, word: str) -> list[str]:
    """Return a word's token ids in the ways that lists are printed."""
    ids = Tokenizer.from_file(str(folder / "policy" / "tokenizer.json")).encode(word, add_special_tokens=False).ids
    assert len(ids) >= 3
    return [separator.join(map(str, ids)) for separator in (", ", ",", " ")]
