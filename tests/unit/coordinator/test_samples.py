"""Samples of rollouts take bounded memory and disk, and never stop a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from specrl.coordinator.observe import samples
from specrl.coordinator.observe.samples import LONGEST_TEXT, RolloutFile, RolloutSamples
from specrl.coordinator.schedule.scheduler import SlotId
from specrl.formats.rollout_samples import RolloutSample
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import read_stored_rollouts
from specrl.records import FinishReason, GradedRollout, Group, Prompt, Reward, Rollout, VersionSpan
from specrl.spec.data import ExactVerifier, Rewards

REWARDS = Rewards(exact=ExactVerifier())


def a_rollout(slot: SlotId, text: str = "It is 7.") -> Rollout:
    return Rollout(
        rollout_id=str(slot),
        group_id=slot.group_id,
        sample_index=slot.sample,
        token_ids_T=np.asarray([1, 2], np.int32),
        sampler_logprobs_T=np.asarray([-0.5, -0.5], np.float32),
        versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 2)),
        finish_reason=FinishReason.STOP,
        replica_id="gen-0",
        text=text,
        seconds=0.5,
    )


def a_group(step: int, index: int, prompt: str = "1+6=", size: int = 2) -> Group:
    rollouts = tuple(a_rollout(SlotId(step, index, sample)) for sample in range(size))
    rewards = tuple(Reward(float(sample), reason="it is right") for sample in range(size))
    return Group(SlotId(step, index, 0).group_id, Prompt("p0", 0, (1,), prompt, "7"), step, rollouts, rewards)


def read_ids(folder: Path) -> list[str]:
    return [sample.id for sample in read_stored_rollouts(RunDirectory(folder))]


def names(step: int, places: Sequence[tuple[int, int]]) -> list[str]:
    return [str(SlotId(step, index, sample)) for index, sample in places]


def test_every_text_of_a_sample_is_bounded() -> None:
    """The extracted answer may be the whole completion, for example with the verifier jsonSchema."""
    long = "7" * (2 * LONGEST_TEXT)
    kept = RolloutSamples(REWARDS, 1)
    kept.offer_rollout(
        Prompt("p0", 0, (1,), long, "7"),
        GradedRollout(a_rollout(SlotId(1, 0, 0), long), Reward(0.0, extracted=long, reason=long)),
    )
    (sample,) = kept.list_newest(1)
    assert {len(text) for text in (sample.prompt, sample.completion, sample.extracted, sample.reason)} == {LONGEST_TEXT}


def test_a_line_has_the_texts_the_rewards_by_name_and_where_they_come_from(tmp_path: Path) -> None:
    RolloutFile(tmp_path, REWARDS, 1).append_step(5, [a_group(5, 2)])
    (line,) = (tmp_path / "rollouts.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 5,
        "id": "000005-00002-000-0",
        "replica": "gen-0",
        "oldestVersion": 3,
        "newestVersion": 4,
        "tokens": 2,
        "seconds": 0.5,
        "finishReason": "stop",
        "reward": 0.0,
        "rewards": {"exact": 0.0},
        "extracted": "",
        "reason": "it is right",
        "error": "",
        "prompt": "1+6=",
        "completion": "It is 7.",
    }


def test_samples_of_a_step_are_spread_over_its_prompts(tmp_path: Path) -> None:
    """The first that finish would be the short ones, and a group's all have one prompt."""
    for count, places in ((1, [(0, 0)]), (3, [(0, 0), (1, 0), (0, 1)]), (9, [(0, 0), (1, 0), (0, 1), (1, 1)])):
        folder = tmp_path / str(count)
        folder.mkdir()
        RolloutFile(folder, REWARDS, count).append_step(1, [a_group(1, 0), a_group(1, 1)])
        assert read_ids(folder) == names(1, places)


def test_no_file_is_written_if_the_run_file_asks_for_none(tmp_path: Path) -> None:
    RolloutFile(tmp_path, REWARDS, 0).append_step(1, [a_group(1, 0)])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_once_and_stops_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    file = RolloutFile(folder, REWARDS, 1)  # a folder that is not there refuses every write, as a full disk does
    for step in (1, 2):
        file.append_step(step, [a_group(step, 0)])
    folder.mkdir()
    file.append_step(3, [a_group(3, 0)])
    assert read_ids(folder) == names(3, [(0, 0)])
    assert capfd.readouterr().out.count("report_files_delayed") == 1


def test_a_truncated_line_is_skipped_and_the_next_ones_are_whole(tmp_path: Path) -> None:
    RolloutFile(tmp_path, REWARDS, 1).append_step(1, [a_group(1, 0)])
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write('{"step": 2, "id": "0000')
    again = RolloutFile(tmp_path, REWARDS, 1)
    again.append_step(3, [a_group(3, 0)])
    again.append_step(4, [a_group(4, 0)])
    assert read_ids(tmp_path) == [*names(1, [(0, 0)]), *names(3, [(0, 0)]), *names(4, [(0, 0)])]


def test_the_files_are_bounded_and_the_newest_steps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LARGEST_FILE", 4096)
    file = RolloutFile(tmp_path, REWARDS, 1)
    for step in range(1, 101):
        file.append_step(step, [a_group(step, 0)])
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3 * 4096
    kept = [int(name.split("-")[0]) for name in read_ids(tmp_path)]
    assert kept == list(range(kept[0], 101))
    assert len(kept) >= 10


def test_a_step_that_a_restart_repeated_has_its_last_lines(tmp_path: Path) -> None:
    file = RolloutFile(tmp_path, REWARDS, 1)
    file.append_step(1, [a_group(1, 0, "first")])
    file.append_step(1, [a_group(1, 0, "second")])
    assert [sample.prompt for sample in read_stored_rollouts(RunDirectory(tmp_path))] == ["second"]


def test_half_of_a_surrogate_pair_is_written_as_a_question_mark(tmp_path: Path) -> None:
    """A data set in JSON may hold one, and UTF-8 has none."""
    RolloutFile(tmp_path, REWARDS, 1).append_step(1, [a_group(1, 0, "\ud83d?")])
    sample = RolloutSample.model_validate_json((tmp_path / "rollouts.jsonl").read_text())
    assert sample.prompt == "??"
