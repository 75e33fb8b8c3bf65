"""Asks something of a run that is under way on this machine: the CLI's hold on the coordinator's actions.

What lets it act is the token file in the run's folder, which the run's owner alone can read.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httpx2

from specrl.coordinator import run_token
from specrl.coordinator.report import Status
from specrl.errors import RunInvalid
from specrl.files import parse_object
from specrl.launcher.reports import http_address, trust_no_authority
from specrl.launcher.run_directory import RunDirectory

PATIENCE_S = 30.0
"""What is asked is made durable before it is answered, and a store may take its time."""


def ask(directory: RunDirectory, method: str, path: str, body: dict[str, Any] | None = None) -> Status:
    """Ask one thing of a run; returns its status then. Raises RunInvalid when nobody answers, or it is refused."""
    address = http_address(directory)
    if not directory.is_driven() or address is None:
        raise RunInvalid(
            f"a run must be under way to be asked for something, got {directory.path}, which is not; "
            f"go on with `specrl run --resume {directory.path}`"
        )
    try:
        token = run_token.read(directory.path)
        # trust_env: a proxy of the user's has no business between us and our own machine.
        answer = httpx2.request(
            method,
            f"{address}{path}",
            json=body,
            headers={"Authorization": f"Bearer {token}"},
            verify=trust_no_authority(),
            timeout=PATIENCE_S,
            trust_env=False,
        )
        found = parse_object(answer.content)
        if answer.is_success:
            return Status.model_validate(found)
    except (OSError, ValueError, httpx2.HTTPError) as error:
        raise RunInvalid(
            f"the coordinator of {directory.path} must answer, got {error}; see {directory.logs}, and ask again"
        ) from error
    detail = str(found.get("detail", ""))
    raise RunInvalid(f"{path} was refused with {HTTPStatus(answer.status_code).phrase}: {detail}")
