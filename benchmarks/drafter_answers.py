"""Measures the acceptance length of a fresh EAGLE-3 head against the number of answers that it was initialised on.

    python -m benchmarks.drafter_answers --policy MODEL --data gsm8k/train.jsonl --work runs/drafter-answers \\
        --out benchmarks/results/drafter_answers.json [--answers 64,256,1024]

MODEL is a folder of SmolLM2-135M-Instruct, or of another policy. The policy answers questions of GSM8K with vLLM, at
temperature 0.7 and at most 96 tokens. The first 64 answers are held out at every count. For each count, a head is
trained from the start on so many further answers, by the rule of the product (`drafter_schedule.choose_next`): epochs
go on until the held-out acceptance length gains less than 0.02 in one, at falling learning rates. Acceptance is
estimated by the trainer, for greedy drafts (k = 3); that it is what vLLM accepts is tested by
tests/integration/trainer/test_drafter_in_vllm.py.

Everything can be interrupted. Answers are appended to WORK/answers.jsonl one by one; the trainer writes every epoch;
a finished count is written to --out at once. The same command goes on from there. Files of another policy, other data
or other settings are refused.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.paper_runs import read_whole_lines
from rich.console import Console
from rich.table import Table

from specrl.coordinator.rollouts.drafter_conclusion import build_report
from specrl.coordinator.rollouts.drafter_schedule import (
    AnswersGiven,
    AnswersPoint,
    Stop,
    TrainEpoch,
    choose_next,
    forecast_doubling,
)
from specrl.files import replace_file
from specrl.formats.statistics.pass_rates import NORMAL_95
from specrl.generation.compare import build_request, parse_mechanism, replace_speculation
from specrl.prompts import load_prompts
from specrl.records import DrafterEpochMetrics, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec import RunSpec, parse_spec
from specrl.spec.trainer import DrafterInitialisation

HELD_OUT = 64
LONGEST = 96  # tokens of an answer
LIVE = 32  # answers that are sampled at a time
QUESTION = "{question}\nThink step by step. End with a line that has only #### and the number."


def make_spec(policy: Path, data: Path, draft_vocab_size: int) -> RunSpec:
    """Make the run file."""
    return parse_spec(
        {
            "name": "drafter-answers",
            "model": {"path": str(policy), "dtype": "float32", "maxLength": 768},
            "prompts": {
                "source": {"jsonl": {"path": str(data)}},
                "template": QUESTION,
                "format": "Chat",
                "maxTokens": 400,
            },
            "rewards": {"math": {}},
            "generation": {
                "sampling": {"temperature": "0.7", "maxTokens": LONGEST},
                "speculation": {"eagle3": {"numDraftTokens": 3, "draftVocabSize": draft_vocab_size}},
                "maxLiveRollouts": LIVE,
                "draftLength": "Fixed",
                "threads": 1,
            },
            "trainer": {"optimizer": {"learningRate": "1e-6"}, "microBatchTokens": 1024, "threads": 1},
            "schedule": {"steps": 1, "promptsPerStep": 2, "groupSize": 4, "maxPolicyLag": 0},
        }
    )


def identify_inputs(policy: Path, data: Path) -> str:
    """Return a digest of the policy, the data and the settings of the answers."""
    found = hashlib.blake2b(f"{HELD_OUT} {LONGEST} {QUESTION}".encode(), digest_size=8)
    for file in (policy / "model.safetensors", policy / "tokenizer.json", data):
        with file.open("rb") as content:
            found.update(hashlib.file_digest(content, "blake2b").digest())
    return found.hexdigest()


class AnswerFile:
    """The answers so far, by place in the stream of prompts. The first line has the identity of what they are of."""

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"identity": identity}) + "\n", encoding="utf-8")
        lines = read_whole_lines(path)  # an answer whose line was cut off is sampled again
        if not lines or json.loads(lines[0]).get("identity") != identity:
            sys.exit(f"{path} must have answers of this policy, data and settings, got others; use another --work")
        self.answers: dict[int, dict[str, Any]] = {row["place"]: row for row in map(json.loads, lines[1:])}

    def add_answer(self, place: int, prompt: Sequence[int], rollout: Rollout) -> None:
        """Append one answer."""
        row = {
            "place": place,
            "prompt": list(prompt),
            "tokens": rollout.token_ids_T.tolist(),
            "logprobs": [round(float(value), 4) for value in rollout.sampler_logprobs_T],
            "finish": rollout.finish_reason.value,
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.answers[place] = row

    def make_rollouts(self, places: range) -> list[TrainRollout]:
        """Return the answers at these places as the trainer takes them."""
        return [_make_rollout(self.answers[place]) for place in places]


def _make_rollout(row: dict[str, Any]) -> TrainRollout:
    name = f"drafter-{row['place']:06d}"
    rollout = Rollout(
        rollout_id=f"{name}-0",
        group_id=name,
        sample_index=0,
        token_ids_T=np.array(row["tokens"], dtype=np.int32),
        sampler_logprobs_T=np.array(row["logprobs"], dtype=np.float32),
        versions=(VersionSpan(0, 0, len(row["tokens"])),),
        finish_reason=FinishReason(row["finish"]),
        replica_id="",
        text="",
        seconds=0.0,
    )
    return TrainRollout(tuple(row["prompt"]), rollout, 0.0)


async def sample_answers(spec: RunSpec, answers: AnswerFile, count: int) -> None:
    """Sample the answers that are missing up to place `count`."""
    missing = [place for place in range(count) if place not in answers.answers]
    if not missing:
        return
    from specrl.generation.vllm_backend.engine import VllmEngine

    prompts = load_prompts(spec)
    engine = VllmEngine(replace_speculation(spec, parse_mechanism("none", ""), spec.model.path), "answers")
    await engine.start()
    waiting = list(reversed(missing))
    began = time.monotonic()

    async def sample_waiting() -> None:
        while waiting:
            place = waiting.pop()
            ids = prompts.prompt(place).token_ids
            async for rollout in engine.generate([build_request(spec, ids, f"a{place}", place)], admit_together=False):
                answers.add_answer(place, ids, rollout)
            done = len(missing) - len(waiting)
            if done % 16 == 0:
                print(f"{len(answers.answers)} of {count} answers, {time.monotonic() - began:.0f} s", flush=True)

    try:
        await asyncio.gather(*(sample_waiting() for _ in range(LIVE)))
    finally:
        await engine.close()


def train_head(spec: RunSpec, answers: AnswerFile, count: int, work: Path) -> dict[str, Any]:
    """Train a head on `count` answers by the product's rule. Returns a row of the results."""
    from specrl.trainer.megatron_backend import MegatronBackend

    held_out = answers.make_rollouts(range(HELD_OUT))
    rollouts = answers.make_rollouts(range(HELD_OUT, HELD_OUT + count))
    drafts = sum(max(0, item.rollout.sampled_length - 1) for item in held_out)
    prompts = HELD_OUT + count
    # The number of answers is given, so no more of them are asked for.
    plan = DrafterInitialisation(prompts=prompts, max_prompts=prompts)
    backend = MegatronBackend(spec)
    backend.load_model(None)
    finished: list[DrafterEpochMetrics] = []
    began = time.process_time()
    while True:
        decision = choose_next(plan, finished, AnswersGiven(prompts, count, drafts), 0.0)
        if not isinstance(decision, TrainEpoch):
            break
        epochs = [*(item.epoch for item in finished), decision.epoch]
        finished = backend.train_drafter(rollouts, held_out, epochs, work / f"epochs-{count}.safetensors")
        held = finished[-1].held_out
        assert held is not None
        print(
            f"{count} answers, epoch {len(finished)}: {held.acceptance_length:.3f} on held-out answers, "
            f"{finished[-1].trained.acceptance_length:.3f} on its own, {time.process_time() - began:.0f} s of CPU",
            flush=True,
        )
    backend.close()
    assert isinstance(decision, Stop)
    report = build_report(plan, finished, AnswersGiven(prompts, count, drafts), HELD_OUT, decision.reason)
    tokens = sum(item.rollout.sampled_length for item in rollouts)
    seconds = round(sum(item.trained.seconds for item in finished))
    kept = {"rollouts", "heldOutLengthPerEpoch", "heldOutAcceptedPerPosition", "heldOutAcceptanceLength"}
    kept |= {"heldOutError", "trainedAcceptanceLength", "stopReason"}
    return {
        **{name: value for name, value in report.model_dump(by_alias=True).items() if name in kept},
        "tokens": tokens,
        "heldOutDrafts": drafts,
        "epochs": len(finished),
        "wallSeconds": seconds,
    }


def print_results(rows: Sequence[dict[str, Any]], counts: Sequence[int]) -> None:
    """Print the table, what twice the answers would bring, and what is missing."""
    table = Table(
        "answers", "tokens", "epochs", "held-out acceptance length", "by position", "on its own answers", "end"
    )
    for row in rows:
        shares = " ".join(f"{share:.2f}" for share in row["heldOutAcceptedPerPosition"])
        length = f"{row['heldOutAcceptanceLength']:.2f} +- {row['heldOutError']:.2f}"
        own = f"{row['trainedAcceptanceLength']:.2f}"
        table.add_row(
            str(row["rollouts"]), str(row["tokens"]), str(row["epochs"]), length, shares, own, row["stopReason"]
        )
    console = Console()
    console.print(table)
    points = [AnswersPoint(row["rollouts"], row["epochs"], row["heldOutAcceptanceLength"]) for row in rows]
    forecast = forecast_doubling(points, max((row["heldOutError"] for row in rows), default=0.0) / NORMAL_95)
    if forecast is not None:
        console.print(f"twice the answers: {forecast.gain:+.2f} ({forecast.low:+.2f} to {forecast.high:+.2f})")
    missing = [count for count in counts if count not in {row["rollouts"] for row in rows}]
    if missing:
        console.print(f"not measured yet: {', '.join(map(str, missing))} answers; run the same command again")


def read_rows(out: Path, identity: str) -> list[dict[str, Any]]:
    """Read the finished counts of an earlier call. Exits if they are of something else."""
    if not out.exists():
        return []
    found = json.loads(out.read_text(encoding="utf-8"))
    if found.get("identity") != identity:
        sys.exit(f"{out} must have results of this policy, data and settings, got others; use another --out")
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="folder of the policy")
    parser.add_argument("--data", type=Path, required=True, help="JSON Lines with a column `question`")
    parser.add_argument("--work", type=Path, required=True, help="folder for the answers and for finished epochs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--answers", default="64,256,1024", help="numbers of answers (default: %(default)s)")
    parser.add_argument("--draft-vocab-size", type=int, default=4096, help="default: %(default)s")
    given = parser.parse_args()
    spec = make_spec(given.policy.resolve(), given.data.resolve(), given.draft_vocab_size)
    identity = identify_inputs(given.policy, given.data)
    answers = AnswerFile(given.work / "answers.jsonl", identity)
    identity = f"{identity} {given.draft_vocab_size}"
    counts = sorted(int(count) for count in given.answers.split(","))
    rows = read_rows(given.out, identity)
    for count in counts:
        if any(row["rollouts"] == count for row in rows):
            continue
        asyncio.run(sample_answers(spec, answers, HELD_OUT + count))
        rows = sorted([*rows, train_head(spec, answers, count, given.work)], key=lambda row: int(row["rollouts"]))
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(given.out) as scratch:
            content = {"policy": given.policy.name, "identity": identity, "rows": rows}
            scratch.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print_results(rows, counts)


if __name__ == "__main__":
    main()
