"""`specrl sft`: its examples, that an interrupted warm-up gives the same policy, and that it learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integration.trainer.runs import a_spec
from tests.stand_ins.trainer_backend import StandInBackend
from tests.tiny_models import Shape, make_policy
from torch.nn import functional
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.errors import DatasetInvalid
from specrl.prompts.templates import load_tokenizer
from specrl.spec import RunSpec, dump_spec, load_spec
from specrl.spec.data import FieldMapping, FileSource, PromptSource
from specrl.spec.tools import AnsweredBy, CodeTool, Tools
from specrl.trainer.calls import RankCalls
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.ranks import AllRanks
from specrl.trainer.sft.examples import TrainingExamples
from specrl.trainer.sft.training import METRICS, run_warm_up

VOCAB = 264


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), shape=Shape(layers=2, heads=4, groups=2, vocab=VOCAB))


def pairs(folder: Path, count: int = 24) -> Path:
    file = folder / "pairs.jsonl"
    rows = [{"prompt": f"{i} + {i}?", "completion": f"it is {2 * i}" + "!" * (i % 5)} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def a_warm_up(policy: Path, folder: Path, *, data: int = 1, **changes: Any) -> RunSpec:
    """A warm-up of six steps with four examples each, and a checkpoint every two steps."""
    spec = a_spec(policy, data=data, speculation={"none": {}})
    source = PromptSource(
        jsonl=FileSource(path=str(pairs(folder)), fields=FieldMapping(question="prompt", answer="completion"))
    )
    schedule = spec.schedule.model_copy(update={"steps": 6, "prompts_per_step": 4})
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": 2})
    prompts = spec.prompts.model_copy(update={"source": source})
    sections = {"prompts": prompts, "schedule": schedule, "checkpoint": checkpoint}
    return spec.model_copy(update=sections | changes)


# -- examples ----------------------------------------------------------------------------------------------------------


def test_every_example_is_trained_once_an_epoch_and_none_that_is_held_out(policy: Path, tmp_path: Path) -> None:
    examples = TrainingExamples(a_warm_up(policy, tmp_path), Decimal("0.2"))
    assert (len(examples.held_out), len(examples)) == (4, 20)

    def contents(rows: Any) -> list[bytes]:
        return [bytes(row.prompt_token_ids) for row in rows]

    steps = [contents(examples.build_batch(step).rollouts) for step in range(1, 11)]
    epochs = [list(chain(*part)) for part in (steps[:5], steps[5:])]
    held = contents(examples.held_out)
    assert all(len(set(epoch)) == 20 and not set(epoch) & set(held) for epoch in epochs)
    assert set(epochs[0]) == set(epochs[1])
    assert epochs[0] != epochs[1], "every epoch has an order of its own"


def test_completion_ends_with_the_end_token_and_what_a_tool_wrote_is_read_alone(policy: Path, tmp_path: Path) -> None:
    tools = Tools(answered_by=AnsweredBy(code=CodeTool()))
    spec = a_warm_up(policy, tmp_path, tools=tools)
    text = "<tool>1+1</tool><output>2</output>two"
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "1 + 1?", "completion": text}) + "\n")
    (row,) = TrainingExamples(spec, Decimal(0)).build_batch(1).rollouts[:1]
    row.check(1000, VOCAB, (0, 0, 0))
    tokens = row.rollout.token_ids_T
    learnt = tokens[row.rollout.sampled_N]
    tokenizer = load_tokenizer(policy)
    assert tokenizer.decode(tokens[:-1]) == text
    assert tokenizer.decode(learnt[:-1]) == "<tool>1+1</tool>two"
    assert learnt[-1] == tokenizer.eos_token_id


def test_example_that_is_too_long_is_named_by_its_line(policy: Path, tmp_path: Path) -> None:
    spec = a_warm_up(policy, tmp_path)
    with (tmp_path / "pairs.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "why?", "completion": "x" * 300}) + "\n")
    with pytest.raises(DatasetInvalid, match=r"pairs.jsonl:25: 305 tokens with its completion.*256 .model.maxLength"):
        TrainingExamples(spec, Decimal(0))


# -- the loop, on the stand-in -----------------------------------------------------------------------------------------


def one_rank(backend: StandInBackend, spec: RunSpec, folder: Path) -> AllRanks:
    return AllRanks(RankCalls(backend, spec, folder, ""), None)


def stops_at(step: int) -> Callable[[], bool]:
    calls = iter(range(1, 100))
    return lambda: next(calls) == step


def test_interrupted_warm_up_ends_where_one_that_was_not_does(policy: Path, tmp_path: Path) -> None:
    """It is stopped in step 3, killed after step 5 with a truncated line of metrics, and resumed."""
    spec = a_warm_up(policy, tmp_path)
    examples = TrainingExamples(spec, Decimal("0.2"))
    whole = StandInBackend(VOCAB)
    (tmp_path / "whole").mkdir()
    assert run_warm_up(one_rank(whole, spec, tmp_path / "whole"), spec, examples, tmp_path / "whole", lambda: False)
    folder = tmp_path / "parts"
    folder.mkdir()
    assert not run_warm_up(one_rank(StandInBackend(VOCAB), spec, folder), spec, examples, folder, stops_at(3))
    assert [step for step, _ in checkpoints.list_complete(folder)] == [2, 3]

    class Dies(StandInBackend):
        def train_supervised(self, batch: Any) -> Any:
            if batch.step == 6:
                raise KeyboardInterrupt
            return super().train_supervised(batch)

    dying = Dies(VOCAB)
    with pytest.raises(KeyboardInterrupt):
        run_warm_up(one_rank(dying, spec, folder), spec, examples, folder, lambda: False)
    dying.close()  # waits for its writer, which the end of a process would end
    with (folder / METRICS).open("a") as file:
        file.write('{"step": 6, "lo')
    last = StandInBackend(VOCAB)
    assert run_warm_up(one_rank(last, spec, folder), spec, examples, folder, lambda: False)
    assert np.array_equal(last.policy_VV, whole.policy_VV)
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4, 5, 6]
    assert [line["heldOutLoss"] is not None for line in lines] == [True, False, True, True, True, False, True]
    assert lines[-1]["heldOutLoss"] < lines[2]["heldOutLoss"] < lines[0]["heldOutLoss"]


# -- the real thing ----------------------------------------------------------------------------------------------------


def specrl_sft(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["sft", *arguments])


def test_two_ranks_learn_what_transformers_would_and_leave_its_folder(policy: Path, tmp_path: Path) -> None:
    spec = a_warm_up(policy, tmp_path, data=2)
    file = tmp_path / "run.yaml"
    out = tmp_path / "warm"
    file.write_text(dump_spec(spec))
    arguments = ("-f", str(file), "--data", str(pairs(tmp_path)), "--out", str(out), "--batch-size", "4")
    result = specrl_sft(*arguments, "--steps", "4", "--learning-rate", "0.003", "--held-out", "0.2", "--plain")
    assert result.exit_code == 0, result.output
    assert "before the first step: held out" in result.stdout
    assert "step 4/4 loss" in result.stdout
    lines = [json.loads(line) for line in (tmp_path / "warm-sft" / "metrics.jsonl").read_text().splitlines()]
    prepared = load_spec(tmp_path / "warm-sft" / "run.yaml")
    examples = TrainingExamples(prepared, Decimal("0.2"))
    before, after = (AutoModelForCausalLM.from_pretrained(it, dtype=torch.float32) for it in (policy, out))
    assert lines[0] == {"step": 0, "heldOutLoss": pytest.approx(cross_entropy(before, examples.held_out), abs=1e-5)}
    assert lines[1]["loss"] == pytest.approx(cross_entropy(before, examples.build_batch(1).rollouts), abs=1e-5)
    assert lines[-1]["heldOutLoss"] == pytest.approx(cross_entropy(after, examples.held_out), abs=1e-5)
    assert lines[-1]["loss"] < lines[1]["loss"]
    assert (out / "tokenizer.json").read_bytes() == (policy / "tokenizer.json").read_bytes()
    assert specrl_sft(*arguments, "--steps", "4").exit_code == 2, "out exists"
    out.rename(tmp_path / "elsewhere")
    refused = specrl_sft(*arguments, "--steps", "5")
    assert "must belong to the same warm-up" in refused.stderr


def cross_entropy(model: torch.nn.Module, rows: Any) -> float:
    """Compute the mean cross-entropy of the completions, in nats per token, with transformers."""
    total = 0.0
    tokens = 0
    for row in rows:
        ids = torch.tensor([*row.prompt_token_ids, *row.rollout.token_ids_T.tolist()])
        labels = ids.clone()
        labels[: len(row.prompt_token_ids)] = -100
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        total += float(functional.cross_entropy(logits[:-1], labels[1:], reduction="sum"))
        tokens += row.rollout.total_length
    return total / tokens


def test_run_of_generated_problems_has_no_completions(policy: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_spec(a_spec(policy)))
    refused = specrl_sft("-f", str(file), "--out", str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "pass --data FILE" in refused.stderr
    assert not (tmp_path / "out-sft").exists()
