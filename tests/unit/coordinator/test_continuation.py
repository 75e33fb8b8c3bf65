"""What a trainer's checkpoint says of the data, held against the run that is to go on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.integration.coordinator.small_run import a_spec
from tests.run_files import a_model_folder

from specrl.coordinator.continuation import place_of, progress_of
from specrl.coordinator.progress import Progress
from specrl.errors import RunInvalid
from specrl.prompts import load_prompts
from specrl.prompts.stream import PromptStream
from specrl.records import StreamPlace, TrainerStatus
from specrl.spec import RunSpec

P = 3
SETTLED = Progress(4, 11, frozenset({13}))


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


def test_what_a_checkpoint_keeps_is_what_a_run_goes_on_from(spec: RunSpec) -> None:
    prompts = load_prompts(spec)
    place = place_of(SETTLED, prompts)
    assert (place.cursor, place.ahead, place.problems) == (11, (13,), 64)
    assert progress_of(at(4, place), spec, prompts) == SETTLED


def test_an_old_checkpoint_is_taken_for_one_of_a_run_in_order_with_a_warning(spec: RunSpec) -> None:
    with capture_logs() as logs:
        assert progress_of(at(4, None), spec, load_prompts(spec)) == Progress(4, 4 * P)
    (entry,) = logs
    assert (entry["event"], entry["step"], entry["taken_for"]) == ("checkpoint_without_stream_found", 4, 4 * P)


@pytest.mark.parametrize("changes", [{"seed": 5}, {"count": 65}, {"difficulty": 1}])
def test_another_stream_is_refused_by_both_identities(spec: RunSpec, changes: dict[str, int]) -> None:
    place, other = place_of(SETTLED, load_prompts(spec)), with_source(spec, **changes)
    with pytest.raises(RunInvalid, match=f"{place.identity}.*{other.identity()}.*keep prompts.source"):
        progress_of(at(4, place), spec, other)


def test_another_order_is_another_stream(spec: RunSpec) -> None:
    shuffled = spec.model_copy(update={"prompts": spec.prompts.model_copy(update={"shuffle_seed": 1})})
    assert load_prompts(shuffled).identity() != load_prompts(spec).identity() == load_prompts(spec).identity()


def test_another_number_of_prompts_a_step_is_refused(spec: RunSpec) -> None:
    prompts = load_prompts(spec)
    place = place_of(Progress(4, 16), prompts)
    with pytest.raises(RunInvalid, match=r"promptsPerStep must be 4, .* got 3"):
        progress_of(at(4, place), spec, prompts)


def test_a_trainer_that_has_moved_on_from_its_checkpoint_is_refused(spec: RunSpec) -> None:
    status = TrainerStatus(6, 4, True, 1, None)
    with pytest.raises(RunInvalid, match=r"got step=6 and a checkpoint of 4; start the trainer again"):
        progress_of(status, spec, load_prompts(spec))
