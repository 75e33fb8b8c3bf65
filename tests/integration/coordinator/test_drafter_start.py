"""The drafter's initialisation in a whole run: after a crash no finished part is repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integration.coordinator.small_run import VOCAB, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.coordinator.rollouts.drafter_init import select_held_out_prompts
from specrl.spec import RunSpec

PROMPTS = 10
SAMPLES = 2


def an_initialisation(folder: Path, most: int = PROMPTS) -> RunSpec:
    """A run without steps: 10 prompts with two answers each, at most `most`; 3 prompts are held out."""
    spec = a_spec(folder, steps=0)
    plan = {"prompts": PROMPTS, "max_prompts": most, "samples_per_prompt": SAMPLES, "epochs": 3, "held_out": "0.3"}
    plan_of = type(spec.trainer.drafter.initialisation)
    drafter = spec.trainer.drafter.model_copy(update={"initialisation": plan_of.model_validate(plan)})
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"drafter": drafter}), "validation": None})


def stored(run: Run) -> dict[int, bytes]:
    return {row.index: row.data for row in run.store.read_rollouts() if row.step == 0}


def read_epochs(folder: Path) -> list[Any]:
    """The finished epochs in the trainer's file, with the seconds that each took."""
    finished: list[Any] = json.loads((folder / "checkpoints" / "drafter.safetensors").read_text())["finished"]
    return finished


async def test_answers_and_epochs_outlive_the_coordinator(tmp_path: Path) -> None:
    """It is killed while the first answers are sampled, and again while twice as many are."""
    spec = an_initialisation(tmp_path, most=2 * PROMPTS)
    slow = TableShape(VOCAB, 128, 0.004)
    async with Run(tmp_path, spec, make_engine=lambda name: TableEngine(name, seed=7, shape=slow)) as run:
        await run.until(lambda: 4 <= len(stored(run)) < PROMPTS * SAMPLES)
        before = stored(run)
        await run.restart_coordinator()
        await run.until(lambda: PROMPTS * SAMPLES < len(stored(run)) < 2 * PROMPTS * SAMPLES)
        first_epochs = read_epochs(tmp_path)
        await run.restart_coordinator()
        await run.until(lambda: run.store.read_facts().get("drafterStart") is not None)
        after = stored(run)
        assert len(after) == 2 * PROMPTS * SAMPLES
        assert {index: after[index] for index in before} == before  # including the seconds that each took
        assert read_epochs(tmp_path)[: len(first_epochs)] == first_epochs
        report = run.store.read_facts().get("drafterStart")
        assert (report["rollouts"], report["heldOutPrompts"]) == (17 * SAMPLES, 3)
        assert [(point["rollouts"], point["epochs"]) for point in report["points"]] == [
            (7 * SAMPLES, 3),
            (17 * SAMPLES, 3),
        ]
        assert len(report["lossPerEpoch"]) == 6
        assert len(report["heldOutAcceptedPerPosition"]) == 3
        await run.finish()
        summary = run.observer.build_status().summary
        assert summary.drafter_start.held_out_prompts == 3
        assert summary.policy_path == "", "the policy is the one that the run was given"
        assert [path.name for path in (tmp_path / "export").iterdir()] == ["drafter"]


async def test_trainer_that_dies_after_the_training_answers_again_without_training(tmp_path: Path) -> None:
    spec = an_initialisation(tmp_path)
    async with Run(tmp_path, spec) as run:
        await run.until((tmp_path / "checkpoints" / "drafter.safetensors").is_file)
        await run.restart_trainer()
        await run.restart_coordinator()
        await run.finish()
        report = run.store.read_facts().get("drafterStart")
        assert len(report["lossPerEpoch"]) == 3
        assert report["lossPerEpoch"] == sorted(report["lossPerEpoch"], reverse=True)


async def test_status_names_the_answers_and_then_each_epoch(tmp_path: Path) -> None:
    """It named neither: the training of a drafter was minutes in which nothing was said."""
    said: dict[str, None] = {}
    async with Run(tmp_path, an_initialisation(tmp_path)) as run:

        def note_detail() -> bool:
            said[run.observer.build_status().detail] = None
            return run.running.done()

        await run.until(note_detail)
    lines = [line for line in said if line.startswith("drafter: ")]
    assert lines[0].startswith("drafter: the policy answers prompts, 20 answers")
    assert any(line.startswith("drafter: epoch ") for line in lines), lines


async def test_finished_initialisation_is_not_repeated(tmp_path: Path) -> None:
    spec = an_initialisation(tmp_path)
    async with Run(tmp_path, spec) as run:
        await run.finish()
        first = run.store.read_facts().get("drafterStart")
        bits = stored(run)
        await run.restart_coordinator()
        await run.finish()
        assert (run.store.read_facts().get("drafterStart"), stored(run)) == (first, bits)


@pytest.mark.parametrize(
    ("prompts", "share", "held_out"),
    [
        (["a", "b", "c", "d"], 0.1, {"d"}),
        (["a", "b", "c", "d"], 0.5, {"c", "d"}),
        (["a", "b", "a", "b"], 0.5, {"b"}),  # the source is shorter than the initialisation
        (["a", "a"], 0.5, set()),
        (["a", "b"], 0.9, {"b"}),
        (["a", "b"], 0.0, set()),
    ],
)
def test_held_out_prompts_are_never_trained_on_and_something_always_is(
    prompts: list[str], share: float, held_out: set[str]
) -> None:
    assert select_held_out_prompts(prompts, share) == held_out
    assert select_held_out_prompts(prompts, share) != set(prompts)
