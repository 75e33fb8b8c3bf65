"""The REST client for a coordinator on this machine, used by the launcher and the command line.

`CoordinatorReports` reads reports. A coordinator may be starting or restarting, so a missing answer is None, not an
error. `request_run_action` acts on a run (pause, resume, scale, checkpoint). It authenticates with the token file in
the run's folder, which only the user who started the run can read.
"""

from __future__ import annotations

import ssl
from http import HTTPStatus
from typing import Any, Self

import httpx2

from specrl.errors import RunInvalid
from specrl.files import parse_object
from specrl.formats.reports import StatusReport, StepReport, ValidationReport
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import parse_report, parse_reports, read_http_address
from specrl.rpc import run_token

REPORT_TIMEOUT_S = 2.0

# The coordinator commits an action to its store before it answers, and a remote store may be slow.
ACTION_TIMEOUT_S = 30.0

# Step reports in one response.
PAGE_STEPS = 500


class CoordinatorReports:
    """Reads the reports of a run's coordinator. Use it as a context manager; leaving it closes the connections."""

    def __init__(self, address: str, token: str | None = None, transport: httpx2.BaseTransport | None = None) -> None:
        """address: host:port, or a URL. token: of the run, whose requests a busy coordinator answers first."""
        self.url = address if "://" in address else f"http://{address}"
        self._client = _open_client(self.url, REPORT_TIMEOUT_S, transport)
        if token is not None:
            self._client.headers["Authorization"] = f"Bearer {token}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def fetch_status(self) -> StatusReport | None:
        """Return the run's present status; None when the coordinator does not answer."""
        return parse_report(StatusReport, self._get_json("/status"))

    def fetch_steps(self, after: int) -> list[StepReport]:
        """Return the reports of all steps after step `after`, fetched page by page."""
        found: list[StepReport] = []
        while page := parse_reports(StepReport, self._get_json(f"/steps?after={after}&limit={PAGE_STEPS}")):
            found += page
            after = page[-1].step
        return found

    def fetch_validations(self) -> list[ValidationReport]:
        """Return the reports of all validations so far."""
        return parse_reports(ValidationReport, self._get_json("/validations"))

    def _get_json(self, path: str) -> Any:
        try:
            return self._client.get(path).raise_for_status().json()
        except (httpx2.HTTPError, ValueError):
            return None


def request_run_action(
    directory: RunDirectory,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = ACTION_TIMEOUT_S,
) -> StatusReport:
    """Send one action to a run's coordinator and return the run's status after it.

    path: of the REST API, as in `/pause`. Raises RunInvalid when the run is not running, when its coordinator does not
    answer, or when it refuses the action.
    """
    if not directory.has_launcher():
        raise RunInvalid(
            f"RUN must be an active run, got {directory.path}, which is not running; "
            f"resume it with `specrl run --resume {directory.path}`"
        )
    address = read_http_address(directory)
    if address is None:
        raise RunInvalid(
            f"RUN must have a coordinator that has started, got {directory.path}, which is still starting; "
            f"see {directory.logs_folder}, then try again"
        )
    try:
        token = run_token.read_token(directory.path)
        with _open_client(address, timeout_s) as client:
            answer = client.request(method, path, json=body, headers={"Authorization": f"Bearer {token}"})
        found = parse_object(answer.content)
        if answer.is_success:
            return StatusReport.model_validate(found)
    except (OSError, ValueError, httpx2.HTTPError) as error:
        raise RunInvalid(
            f"the coordinator of {directory.path} did not answer: {error}; see {directory.logs_folder}, then try again"
        ) from error
    detail = str(found.get("detail", ""))
    raise RunInvalid(f"the coordinator refused {path} with {HTTPStatus(answer.status_code).phrase}: {detail}")


def _open_client(url: str, timeout_s: float, transport: httpx2.BaseTransport | None = None) -> httpx2.Client:
    """Make a client that speaks plain HTTP, bypasses the user's proxy, and refuses every HTTPS server.

    A coordinator that serves HTTPS uses a certificate from its run's own authority, issued for role names instead of
    addresses. No public authority signs such names. Loading the system's authorities would cost 20 ms per client.
    """
    trusts_nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return httpx2.Client(base_url=url, verify=trusts_nobody, timeout=timeout_s, transport=transport, trust_env=False)
