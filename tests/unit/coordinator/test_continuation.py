"""A run resumes from a trainer's checkpoint only if both have the same prompt stream and promptsPerStep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.integration.coordinator.small_run import a_spec
from tests.run_files import a_model_folder

from specrl.coordinator.ledger.continuation import check_stream_place, place_of_checkpoint
from specrl.errors import RunInvalid
from specrl.prompts import load_prompts
from specrl.prompts.stream import PromptStream
from specrl.records import StreamPlace, TrainerStatus
from specrl.spec import RunSpec

P = 3


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    made = a_spec(a_model_folder(tmp_path / "policy"))
    return made.model_copy(update={"prompts": made.prompts.model_copy(update={"max_tokens": 128})})


def at(step: int, stream: StreamPlace | None) -> TrainerStatus:
    return TrainerStatus(step, step, True, 1, stream)


def with_source(spec: RunSpec, **changes: Any) -> PromptStream:
    data = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    data["prompts"]["source"]["generated"] |= changes
    return load_prompts(RunSpec.model_validate(data))


def test_a_run_resumes_from_the_place_that_its_checkpoint_records(spec: RunSpec) -> None:
    prompts = load_prompts(spec)
    place = place_of_checkpoint(4, spec, prompts)
    assert (place.cursor, place.problems) == (4 * P, 64)
    check_stream_place(at(4, place), spec, prompts)


def test_a_checkpoint_without_a_stream_place_is_refused(spec: RunSpec) -> None:
    with pytest.raises(RunInvalid, match="the checkpoint of step 4 must record its position"):
        check_stream_place(at(4, None), spec, load_prompts(spec))


@pytest.mark.parametrize("changes", [{"seed": 5}, {"count": 65}, {"difficulty": 1}])
def test_a_different_stream_is_refused_and_both_identities_are_named(spec: RunSpec, changes: dict[str, int]) -> None:
    place = place_of_checkpoint(4, spec, load_prompts(spec))
    other = with_source(spec, **changes)
    with pytest.raises(RunInvalid, match=f"{place.identity}.*{other.identity()}.*keep prompts.source"):
        check_stream_place(at(4, place), spec, other)


def test_a_different_order_is_a_different_stream(spec: RunSpec) -> None:
    shuffled = spec.model_copy(update={"prompts": spec.prompts.model_copy(update={"shuffle_seed": 1})})
    assert load_prompts(shuffled).identity() != load_prompts(spec).identity() == load_prompts(spec).identity()


def test_a_different_number_of_prompts_per_step_is_refused(spec: RunSpec) -> None:
    prompts = load_prompts(spec)
    place = StreamPlace(16, len(prompts), prompts.identity())
    with pytest.raises(RunInvalid, match=r"promptsPerStep must be 4, .* got 3"):
        check_stream_place(at(4, place), spec, prompts)


def test_a_trainer_that_is_past_its_checkpoint_is_refused(spec: RunSpec) -> None:
    status = TrainerStatus(6, 4, True, 1, None)
    with pytest.raises(RunInvalid, match=r"got step=6 and a checkpoint of 4; start the trainer again"):
        check_stream_place(status, spec, load_prompts(spec))
