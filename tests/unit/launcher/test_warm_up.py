"""A warm-up continues in its folder with the same options, or says which of them differ."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest
from tests.run_files import a_model_folder, a_run
from typer.testing import CliRunner

from specrl.cli import app
from specrl.errors import RunInvalid, SpecInvalid
from specrl.launcher import warm_up
from specrl.launcher.processes import child_guard
from specrl.launcher.warm_up import WarmUp, WarmUpOptions, lock_folder, plan_warm_up
from specrl.machine import GpuMachine
from specrl.spec import dump_spec, parse_spec
from specrl.trainer.checkpointing.checkpoints import STATE, step_directory


def a_base_model(path: Path) -> None:
    """Write a model folder whose tokenizer has an end token, which completions for training get."""
    a_model_folder(path)
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "~"}
    (path / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def test_a_warm_up_with_other_options_is_refused_with_their_names(tmp_path: Path) -> None:
    """It was refused without naming what differed, such as the number of steps."""
    spec = parse_spec(a_run(tmp_path))
    wish = WarmUpOptions(None, 7, Decimal(1), 4, None, Decimal("0.05"))
    out = tmp_path / "warm"
    with lock_folder(out):
        WarmUp(spec, wish, out)
        assert WarmUp(spec, wish, out).is_resumed
        with pytest.raises(RunInvalid, match="got --steps 10 instead of 7 and --batch-size 8 instead of 4;"):
            WarmUp(spec, replace(wish, steps=10, batch_size=8), out)
        with pytest.raises(RunInvalid, match="got another run file;"):
            WarmUp(parse_spec(a_run(tmp_path, name="other")), wish, out)


def test_a_second_warm_up_with_the_same_folder_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    """It wrote the first one's metrics anew, emptied its logs, and deleted the checkpoint that it was writing."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    a_base_model(tmp_path / "model")
    spec = parse_spec(a_run(tmp_path))
    (tmp_path / "run.yaml").write_text(dump_spec(spec))
    out = tmp_path / "warm"
    with lock_folder(out):
        done = CliRunner().invoke(app, ["sft", "-f", f"{tmp_path}/run.yaml", "--data", str(data), "--out", str(out)])
        assert done.exit_code == 2, done.output
        assert "--out must not be the folder of an active warm-up, got" in " ".join(done.stderr.split())
        assert [path.name for path in (tmp_path / "warm-sft").iterdir()] == ["lock"]
    with lock_folder(out):  # the first one has ended
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "warm-sft").touch()
    with pytest.raises(RunInvalid, match=r"warm-sft must be a writable folder, got .*; name another --out"):
        lock_folder(tmp_path / "warm").__enter__()


def test_a_resumed_warm_up_shows_only_the_steps_after_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It printed all earlier steps again. Its trainer writes the file anew, and drops step 4, which it trains again."""
    metrics = tmp_path / "warm-sft" / "metrics.jsonl"
    trainer = tmp_path / "trainer.py"
    trainer.write_text(
        "import json, pathlib, sys\n"
        f"lines = [json.dumps({{'step': step, 'loss': 1.0}}) for step in range(6)]\n"
        f"pathlib.Path({str(metrics)!r}).write_text('\\n'.join(lines) + '\\n')\n"
    )
    spec = parse_spec(a_run(tmp_path))
    wish = WarmUpOptions(None, 5, Decimal(1), 4, None, Decimal("0.05"))
    with lock_folder(tmp_path / "warm"):
        WarmUp(spec, wish, tmp_path / "warm")
    metrics.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in range(5)))
    folder = step_directory(metrics.parent, 3)
    folder.mkdir(parents=True)
    (folder / STATE).touch()
    (metrics.parent / "export" / "policy").mkdir(parents=True)
    monkeypatch.setattr(child_guard, "guarded_command", lambda _: (sys.executable, str(trainer)))
    shown: list[int] = []
    resumed = WarmUp(spec, wish, tmp_path / "warm")
    assert resumed.trained == 3
    assert resumed.run(lambda line: shown.append(line["step"]), lambda _: None)
    assert shown == [4, 5]


def test_an_example_beyond_the_models_length_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """Only the started trainer compared lengths, so its ranks ended with one line of a list, after a minute."""
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1=", "completion": "2" * 5000}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    a_base_model(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(dump_spec(parse_spec(a_run(tmp_path))))
    options = ["-f", f"{tmp_path}/run.yaml", "--data", str(data), "--out", str(tmp_path / "warm"), "--steps", "2"]
    done = CliRunner().invoke(app, ["sft", *options, "--held-out", "0"])
    assert done.exit_code == 2, done.output
    assert "data.jsonl:2: " in done.stderr
    assert "model.maxLength" in done.stderr
    assert not (tmp_path / "warm-sft").exists()


@pytest.mark.parametrize("code", [1, 2])
def test_a_warm_up_whose_rank_fails_ends_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Every failure had exit code 2, so a script took one that a repetition mends for a refusal."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    a_base_model(tmp_path / "model")
    (tmp_path / "run.yaml").write_text(dump_spec(parse_spec(a_run(tmp_path))))
    program = f"import sys; print('out of luck', file=sys.stderr); sys.exit({code})"
    monkeypatch.setattr(child_guard, "guarded_command", lambda _: (sys.executable, "-c", program))
    options = ["-f", f"{tmp_path}/run.yaml", "--data", str(data), "--out", str(tmp_path / "warm"), "--steps", "2"]
    done = CliRunner().invoke(app, ["sft", *options])
    assert done.exit_code == code
    assert "out of luck" in done.stderr
    assert ("resume with the same command" in done.stderr) == (code == 1)


def test_a_warm_up_that_the_gpus_cannot_run_is_refused_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks without a GPU of their own ended with an error of CUDA, after a minute of imports."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n')
    training = {"optimizer": {"learningRate": "1e-5"}, "parallelism": {"data": 2}}
    a_base_model(tmp_path / "model")
    spec = parse_spec(a_run(tmp_path, trainer=training))
    wish = WarmUpOptions(data, 5, Decimal(1), 4, None, Decimal(0))
    monkeypatch.setattr(warm_up, "read_gpu_machine", lambda: GpuMachine(("7",), "535.104.05", {"0": 1 << 30}))
    with pytest.raises(SpecInvalid) as caught:
        plan_warm_up(spec, wish)
    driver, visible, ranks = (str(problem) for problem in caught.value.problems)
    assert driver.startswith("NVIDIA's driver: must be 580 or newer")
    assert "must name GPUs of this machine, got 7" in visible
    assert "must have a GPU for each of its 2 ranks, got 1 visible: 7" in ranks
    monkeypatch.setattr(warm_up, "read_gpu_machine", GpuMachine)
    assert plan_warm_up(spec, wish)[0].schedule.steps == 5, "without GPUs the ranks compute on CPUs"
