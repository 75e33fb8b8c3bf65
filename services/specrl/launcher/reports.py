"""What a run says of itself: asked of its coordinator while it runs, read from its folder at any time.

A coordinator that does not answer is an ordinary moment of a run's life (it starts, or restarts), so it is None, not
an error. A last line of `metrics.jsonl` that a crash cut short is passed over.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
from pydantic import BaseModel, ValidationError

from specrl.coordinator.report import Status, StepReport, ValidationReport
from specrl.files import SMALL_BYTES, parse_object, read_object
from specrl.launcher.run_directory import RunDirectory

TIMEOUT_S = 2.0
PAGE_STEPS = 500


class CoordinatorReports:
    """The REST side of a run's coordinator."""

    def __init__(self, address: str, transport: httpx2.BaseTransport | None = None) -> None:
        """address: host:port, or a URL."""
        self.url = address if "://" in address else f"http://{address}"
        # trust_env: a proxy of the user's has no business between us and our own machine.
        self._client = httpx2.Client(
            base_url=self.url, verify=trust_no_authority(), timeout=TIMEOUT_S, transport=transport, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def status(self) -> Status | None:
        """The run at this moment; None when the coordinator does not answer."""
        answer = self._get("/status")
        return _parsed(Status, answer) if answer is not None else None

    def steps(self, after: int) -> list[StepReport]:
        """Reports of the steps after `after`, page by page."""
        found: list[StepReport] = []
        while page := _all_parsed(StepReport, self._get(f"/steps?after={after}&limit={PAGE_STEPS}")):
            found += page
            after = page[-1].step
        return found

    def validations(self) -> list[ValidationReport]:
        """All validations so far."""
        return _all_parsed(ValidationReport, self._get("/validations"))

    def _get(self, path: str) -> Any:
        try:
            return self._client.get(path).raise_for_status().json()
        except (httpx2.HTTPError, ValueError):
            return None


def trust_no_authority() -> ssl.SSLContext:
    """Refuses every HTTPS server: the launcher speaks plain HTTP to coordinators of its own machine.

    A coordinator that serves HTTPS has a certificate of its run's own authority, for names of roles instead of
    addresses. No public authority signs such names. Reading the machine's authorities would take 20 ms for each client.
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def stored_status(directory: RunDirectory) -> Status | None:
    """The last status that the coordinator wrote; None when it never came so far."""
    try:
        return _parsed(Status, read_object(directory.status_file))
    except (OSError, ValueError):
        return None


def stored_steps(directory: RunDirectory) -> list[StepReport]:
    """All steps in order; of a step that was recorded twice, the later record."""
    found, _ = read_lines(directory.metrics_file, StepReport)
    return [*{step.step: step for step in found}.values()]


def read_lines[R: BaseModel](file: Path, kind: type[R]) -> tuple[list[R], int]:
    """What the lines of a file hold, and how many hold something else. A line without its end is being written."""
    if not file.exists():
        return [], 0
    with file.open("rb") as lines:
        whole = [line for line in iter(lambda: lines.readline(SMALL_BYTES), b"") if line.endswith(b"\n")]
    found = [_parsed(kind, _json(line)) for line in whole]
    return [report for report in found if report is not None], found.count(None)


def http_address(directory: RunDirectory) -> str | None:
    """Where the coordinator of a running run serves its page; None when it has not started."""
    try:
        address = read_object(directory.endpoints_file, SMALL_BYTES).get("http")
    except (OSError, ValueError):
        return None
    return str(address) if address else None


def _json(line: bytes) -> Any:
    try:
        return parse_object(line)
    except ValueError:
        return None


def _parsed[R: BaseModel](kind: type[R], content: Any) -> R | None:
    try:
        return kind.model_validate(content)
    except ValidationError:
        return None


def _all_parsed[R: BaseModel](kind: type[R], content: Any) -> list[R]:
    found = [_parsed(kind, item) for item in content] if isinstance(content, list) else []
    return [report for report in found if report is not None]
