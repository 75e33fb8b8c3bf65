"""The message of a container is why its process ended, and not what libraries logged."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrl.errors import CheckpointInvalid, StoreFailed
from specrl.termination import MAX_BYTES, report_error


@pytest.fixture
def message(tmp_path: Path) -> Path:
    """An empty message, as the kubelet mounts it."""
    path = tmp_path / "termination-log"
    path.write_text("")
    return path


def test_a_refusal_is_on_standard_error_and_the_containers_message(
    message: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_error("specrl-trainer", CheckpointInvalid("no model"), str(message))
    assert message.read_text(encoding="utf-8") == "specrl-trainer: no model"
    assert capsys.readouterr().err == "specrl-trainer: no model\n"


def test_outside_of_a_container_no_file_is_made(tmp_path: Path) -> None:
    report_error("specrl-trainer", CheckpointInvalid("no model"), str(tmp_path / "none"))
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_lost_another_does_not_replace_the_refusal(message: Path) -> None:
    assert StoreFailed.exit_code == 1
    report_error("specrl-trainer", StoreFailed("lost rank 1"), str(message))
    report_error("specrl-trainer", CheckpointInvalid("no model"), str(message))
    report_error("specrl-trainer", StoreFailed("lost rank 0"), str(message))
    assert message.read_text(encoding="utf-8") == "specrl-trainer: no model"


def test_a_long_message_ends_where_the_kubelet_stops_reading(message: Path) -> None:
    report_error("p", CheckpointInvalid("x" * 2 * MAX_BYTES), str(message))
    assert message.stat().st_size == MAX_BYTES
