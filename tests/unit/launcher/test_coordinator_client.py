"""Reads a run from its coordinator, which may not answer, and from its folder, whose files may be torn."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest

from specrl.errors import RunInvalid
from specrl.launcher.coordinator_client import CoordinatorReports, request_run_action
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import read_http_address, read_stored_status, read_stored_steps

STEP = (
    '{"step": %d, "policyVersion": 1, "phases": {}, "exposedGeneration": 0, "reward": %s, "rollouts": 1, "tokens": 1,'
    ' "meanLength": 1, "acceptanceLength": null, "policyLagMax": 0, "policyLagMean": 0, "loss": 0, "gradNorm": 0,'
    ' "learningRate": 0, "entropy": 0, "clipFraction": 0, "importanceWeightMean": 1, "effectiveSampleSize": 1,'
    ' "mismatchMeanAbs": 0, "mismatchMaxAbs": 0, "mismatchKl": 0, "mismatchTokens": 0}'
)


def answering(status_code: int, text: str) -> CoordinatorReports:
    transport = httpx2.MockTransport(lambda request: httpx2.Response(status_code, text=text))
    return CoordinatorReports("127.0.0.1:1", transport=transport)


def test_status_is_parsed() -> None:
    with answering(200, '{"run": "tiny", "phase": "training", "step": 3}') as reports:
        status = reports.fetch_status()
    assert status is not None
    assert (status.run, status.step) == ("tiny", 3)


def test_coordinator_that_does_not_answer_is_none() -> None:
    def refuse(request: httpx2.Request) -> httpx2.Response:
        raise httpx2.ConnectError("refused", request=request)

    with CoordinatorReports("127.0.0.1:1", transport=httpx2.MockTransport(refuse)) as reports:
        assert reports.fetch_status() is None
        assert reports.fetch_steps(0) == []
        assert reports.fetch_validations() == []


def test_an_answer_from_another_kind_of_server_is_none() -> None:
    for code, text in ((500, "{}"), (200, "<html>"), (200, '{"detail": "Not Found"}'), (200, "[]")):
        with answering(code, text) as reports:
            assert reports.fetch_status() is None
            assert reports.fetch_steps(0) == []


def test_a_run_that_starts_is_not_said_to_be_over(tmp_path: Path) -> None:
    """Its user was told to resume it, which was then refused because a launcher runs it."""
    directory = RunDirectory(tmp_path)
    with directory.lock(), pytest.raises(RunInvalid, match=r"which is still starting; see .*logs, then try again"):
        request_run_action(directory, "POST", "/pause")
    with pytest.raises(RunInvalid, match="which is not running; resume it with"):
        request_run_action(directory, "POST", "/pause")


def test_address_may_be_a_url() -> None:
    with CoordinatorReports("http://127.0.0.1:9") as reports:
        assert reports.url == "http://127.0.0.1:9"


def test_a_torn_last_line_is_skipped_and_a_repeated_step_appears_once(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert read_stored_steps(directory) == []
    lines = [STEP % (1, 0.1), STEP % (2, 0.2), STEP % (2, 0.3), (STEP % (3, 0.4))[:50]]
    directory.metrics_file.write_text("\n".join(lines))
    assert [(step.step, step.reward) for step in read_stored_steps(directory)] == [(1, 0.1), (2, 0.3)]


def test_the_folder_of_a_run_that_never_started_has_no_status(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert read_stored_status(directory) is None
    assert read_http_address(directory) is None
    directory.status_file.write_text("{")
    directory.endpoints_file.write_text("[")
    assert read_stored_status(directory) is None
    assert read_http_address(directory) is None
