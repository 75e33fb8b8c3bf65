"""benchmarks/peers.py: its arithmetic, what it keeps, and that TRL gets specrl's prompts."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from pathlib import Path

import pytest
from benchmarks import peers
from benchmarks.demo_runs import RUN_FILE, overrides_of
from benchmarks.peers_trl import StepLine, check_token_ids, list_prompts
from tests.tiny_models import make_tokenizer
from transformers import AutoTokenizer

from specrl.formats.reports import PhaseSeconds, StepReport
from specrl.prompts import load_prompts
from specrl.spec import load_spec
from specrl.spec.yaml_input import quote_yaml


def make_marks(step_s: float, start_s: float = 10.0, generation_s: float = 1.0, steps: int = 8) -> list[peers.Mark]:
    """Make a run that computes on two cores. The reward grows by 0.1 with each step."""
    walls = [start_s + step_s * number for number in range(steps)]
    return [
        peers.Mark(wall, 2 * wall, generation_s, 0.5, 0.1 * number, 100) for number, wall in enumerate(walls, start=1)
    ]


def test_first_two_steps_and_the_last_are_left_out() -> None:
    marks = make_marks(step_s=3)
    slow = [mark._replace(generation_s=100.0) for mark in marks]
    slow[2:-1] = marks[2:-1]
    slow[-1] = slow[-1]._replace(wall_s=1000.0, cpu_s=1000.0)
    found = peers.compute_figures(slow, equal_s=21)
    assert found[:-1] == (3, 6, 1, 0.5, 10, 20)


def test_reward_is_of_the_last_three_steps_that_ended_in_the_time_of_the_fastest_arm() -> None:
    turn = {"fast": make_marks(step_s=1), "slow": make_marks(step_s=2, start_s=50)}
    equal_s = peers.compute_equal_time(turn)
    assert equal_s == 7
    assert peers.compute_figures(turn["fast"], equal_s).reward == pytest.approx(0.7)
    assert peers.compute_figures(turn["slow"], equal_s).reward == pytest.approx(0.3)


def test_time_starts_at_the_end_of_the_first_step_so_that_a_long_start_costs_no_reward() -> None:
    early, late = (peers.compute_figures(make_marks(2, start_s), 7) for start_s in (10, 500))
    assert early.reward == late.reward
    assert late.start_s == 500


def test_ratios_are_to_the_reference_in_the_same_turn_with_an_interval_over_turns() -> None:
    turns = [
        {peers.REFERENCE: make_marks(step_s=2.0), "specrl-lag0": make_marks(step_s=2.0)},
        # Other work made the whole turn slower; the ratio is hardly affected.
        {peers.REFERENCE: make_marks(step_s=10.0), "specrl-lag0": make_marks(step_s=12.0)},
    ]
    specrl, reference = peers.make_rows(turns)
    assert specrl[:4] == ("specrl, no drafts, lag 0", "2", "7.00", "1.10 (-0.17 to 2.37)")
    assert reference[:4] == ("TRL, vLLM, two ranks", "2", "6.00", "1.00")
    assert dict(zip(peers.COLUMNS, specrl, strict=True))["rest, s"] == "5.50"


def test_one_turn_has_no_interval_and_a_turn_without_the_reference_does_not_count() -> None:
    turn = {peers.REFERENCE: make_marks(step_s=2.0), "trl-defaults": make_marks(step_s=5.0)}
    rows = peers.make_rows([turn, {"trl-defaults": make_marks(step_s=50.0)}])
    assert [(row[1], row[3]) for row in rows] == [("1", "1.00"), ("1", "2.50")]


def test_every_other_turn_is_reversed() -> None:
    assert peers.order_arms(peers.ARMS, 1) == list(reversed(peers.order_arms(peers.ARMS, 2)))


def test_arms_have_names_of_their_own_and_a_choice_of_them_has_the_reference() -> None:
    assert len(set(peers.NAMES)) == len(peers.NAMES)
    assert [arm.name for arm in peers.parse_arms("trl-vllm-2,specrl-lag1")] == ["specrl-lag1", "trl-vllm-2"]
    for text in ("specrl-lag0", "trl-vllm-2,other"):
        with pytest.raises(ArgumentTypeError, match="must be some of"):
            peers.parse_arms(text)


def test_only_finished_arms_of_the_same_settings_are_kept(tmp_path: Path) -> None:
    """Arms of another policy or drafter in the same folder were taken for the present one's."""
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "model.safetensors").write_bytes(b"first")
    benchmark = peers.Benchmark(policy, policy, tmp_path, steps=8)
    arms = peers.ARMS[:2]
    for turn, arm in ((1, arms[0]), (1, arms[1]), (2, arms[0])):
        benchmark.keep_marks(turn, arm, make_marks(1))
    peers.Benchmark(policy, policy, tmp_path, steps=7).keep_marks(2, arms[1], make_marks(1, steps=7))
    assert benchmark.load_marks(1, arms[0]) == make_marks(1)
    assert benchmark.load_marks(2, arms[1]) is None
    assert [len(turn) for turn in benchmark.load_turns(2)] == [2, 1]
    (policy / "model.safetensors").write_bytes(b"trained again")
    assert [len(turn) for turn in benchmark.load_turns(2)] == [0, 0]


def test_steps_of_both_sides_are_marked_once_their_line_is_whole(tmp_path: Path) -> None:
    line = json.dumps({"step": 1, "reward": 0.5, "tokens": 12.0, "generation_s": 1.5, "sync_s": 0.25}) + "\n"
    file = tmp_path / "steps.jsonl"
    watcher = peers.StepWatcher("an arm", 2, peers.read_trl_step, tmp_path, "steps.jsonl")
    watcher.look()
    file.write_text(line + line[:9], encoding="utf-8")
    watcher.look()
    watcher.look()
    assert [mark[2:] for mark in watcher.marks] == [(1.5, 0.25, 0.5, 12.0)]

    fields = dict.fromkeys(name for name, field in StepReport.model_fields.items() if field.is_required())
    phases = PhaseSeconds(generation=1.5, prepare=0.25, train=3.0)
    numbers = dict.fromkeys(fields, 0) | {"step": 1, "reward": 0.5, "tokens": 12, "acceptance_length": None}
    report = StepReport.model_validate(numbers | {"phases": phases, "exposed_generation": 1.5})
    assert peers.read_specrl_step(report.model_dump_json(by_alias=True)) == StepLine(1, 0.5, 12, 1.5, 0.25)


def test_trl_gets_the_prompts_of_the_stream_in_its_order_and_the_same_token_ids(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, 264)
    fields = {"model.path": quote_yaml(tmp_path), "prompts.maxTokens": "160", "model.maxLength": "320"}
    spec = load_spec(RUN_FILE, overrides_of(fields))
    rows = list_prompts(spec, 2)
    stream = load_prompts(spec)
    assert len(rows) == 2 * spec.schedule.prompts_per_step
    for position, row in enumerate(rows):
        prompt = stream.prompt(position)
        assert (row["prompt"], row["answer"]) == (prompt.text, prompt.answer)

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    check_token_ids(lambda texts: tokenizer(text=texts)["input_ids"], rows)
    with pytest.raises(ValueError, match="use a policy whose tokenizer adds no tokens"):
        check_token_ids(lambda texts: [[1, *ids] for ids in tokenizer(text=texts)["input_ids"]], rows)
