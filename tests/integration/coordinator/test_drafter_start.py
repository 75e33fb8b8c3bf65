"""The drafter's initialisation in a whole run: what dies in the middle of it is not done again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.coordinator.small_run import VOCAB, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.coordinator import drafter_start
from specrl.coordinator.board import DRAFTER_START
from specrl.coordinator.drafter_start import held_out_prompts
from specrl.spec import RunSpec

PROMPTS, SAMPLES = 10, 2


def an_initialisation(folder: Path) -> RunSpec:
    """No steps: 10 prompts answered twice, of which 3 are held out."""
    spec = a_spec(folder, steps=0)
    plan = {"prompts": PROMPTS, "samples_per_prompt": SAMPLES, "epochs": 3, "held_out": "0.3"}
    plan_of = type(spec.trainer.drafter.initialisation)
    drafter = spec.trainer.drafter.model_copy(update={"initialisation": plan_of.model_validate(plan)})
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"drafter": drafter}), "validation": None})


def stored(run: Run) -> dict[int, bytes]:
    return {row.index: row.data for row in run.store.rollouts() if row.step == 0}


async def test_answers_and_epochs_outlive_the_coordinator(tmp_path: Path) -> None:
    spec = an_initialisation(tmp_path)
    slow = TableShape(VOCAB, 128, 0.004)
    async with Run(tmp_path, spec, make_engine=lambda name: TableEngine(name, seed=7, shape=slow)) as run:
        await run.until(lambda: 4 <= len(stored(run)) < PROMPTS * SAMPLES)
        before = stored(run)
        await run.restart_coordinator()
        await run.until(lambda: run.store.fact(DRAFTER_START) is not None)
        after = stored(run)
        assert len(after) == PROMPTS * SAMPLES
        assert {index: after[index] for index in before} == before  # to the second that each took
        report = run.store.fact(DRAFTER_START)
        assert (report["rollouts"], report["heldOutPrompts"]) == (7 * SAMPLES, 3)
        assert len(report["lossPerEpoch"]) == 3
        assert len(report["heldOutAcceptance"]) == 3
        await run.finish()
        assert run.board.status().summary.drafter_start.held_out_prompts == 3


async def test_trainer_that_dies_after_the_training_answers_again_without_training(tmp_path: Path) -> None:
    spec = an_initialisation(tmp_path)
    async with Run(tmp_path, spec) as run:
        await run.until((tmp_path / "checkpoints" / "drafter.safetensors").is_file)
        await run.restart_trainer()
        await run.restart_coordinator()
        await run.finish()
        report = run.store.fact(DRAFTER_START)
        assert len(report["lossPerEpoch"]) == 3
        assert report["lossPerEpoch"] == sorted(report["lossPerEpoch"], reverse=True)


async def test_finished_initialisation_is_not_repeated(tmp_path: Path) -> None:
    spec = an_initialisation(tmp_path)
    async with Run(tmp_path, spec) as run:
        await run.finish()
        first, bits = run.store.fact(DRAFTER_START), stored(run)
        await run.restart_coordinator()
        await run.finish()
        assert (run.store.fact(DRAFTER_START), stored(run)) == (first, bits)


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
    assert held_out_prompts(prompts, share) == held_out
    assert drafter_start.held_out_prompts(prompts, share) != set(prompts)
