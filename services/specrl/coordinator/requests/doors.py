"""What a request must pass before it is routed: its Host, its pace, its admission, and the size of its body.

    request --Host (local runs)--> --pace (without the token)--> --admission--> --body limit--> routes

ASGI middleware, because FastAPI reads a whole body before it asks any dependency, the admission included. Everything
but OPEN_PATHS needs an admission, so a new route is closed until somebody opens it. Every refusal is one line, counted
by kind, and closes its connection, so that a body that is still under way is not read either.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from http import HTTPStatus

import structlog
from fastapi import HTTPException, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specrl.coordinator.requests.admission import AdmissionPolicy, OpenAdmission
from specrl.telemetry import metrics
from specrl.telemetry.hosts import is_host_allowed
from specrl.telemetry.pace import Pace

BODY_BYTES = 16 << 10
"""Longest body. /scale reads about 20 bytes. /given-up reads what the launcher cuts to fit."""

BODY_S = 10.0
"""Longest time in which a body must arrive."""

PACE_PER_S = 20.0
"""Requests a second of one address that shows no token; further ones wait. An open page asks for about two."""

PACE_BURST = 150
"""Such requests that are answered at once after a quiet time. Opening a page takes about fifteen."""

MAX_PACED = 1000
"""Addresses whose pace is remembered."""

OPEN_PATHS = frozenset({"/", "/healthz", "/readyz", "/metrics", "/openapi.json"})
"""Paths that need no admission: the page without data of the run, probes, metrics and the description of the API."""

OPEN_PREFIX = "/assets/"

PRIVATE_PATHS = frozenset({"/rollouts"})
"""Reads that show prompts and completions."""

_READS = frozenset({"GET", "HEAD"})

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Doors:
    """Who may send which requests.

    readers, private_readers, actors: admit reads, reads that show prompts, and everything else. hosts: names that the
    Host header may have, of `list_local_hosts`; None accepts any, as in a cluster, where probes come by a pod's IP.
    is_paced: whether requests without an admission are slowed down to PACE_PER_S.
    """

    readers: AdmissionPolicy
    private_readers: AdmissionPolicy
    actors: AdmissionPolicy
    hosts: frozenset[str] | None = None
    is_paced: bool = True

    def choose_policy(self, method: str, path: str) -> AdmissionPolicy | None:
        """Choose who decides on a request; None if everybody may send it."""
        if method not in _READS:
            return self.actors
        if path in PRIVATE_PATHS:
            return self.private_readers
        is_open = path in OPEN_PATHS or path.startswith(OPEN_PREFIX)
        return None if is_open else self.readers


OPEN_DOORS = Doors(OpenAdmission(), OpenAdmission(), OpenAdmission(), is_paced=False)
"""Doors that admit everybody, as in tests and benchmarks."""


class DoorMiddleware:
    """Applies `Doors` to every request of `app`."""

    def __init__(self, app: ASGIApp, doors: Doors) -> None:
        self._app = app
        self._doors = doors
        self._paces = OrderedDict[str, Pace]()
        for kind in metrics.HTTP_REFUSALS:  # exports 0, so that alerts see the first increase
            metrics.HTTP_REFUSED.labels(kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # lifespan; web sockets are switched off
            await self._app(scope, receive, send)
            return
        try:
            await self._admit(scope)
            body = await _read_body(scope, receive)
        except HTTPException as error:
            metrics.HTTP_REFUSED.labels(_KINDS.get(error.status_code, "permission")).inc()
            log.debug("request_refused", status=error.status_code, reason=error.detail)
            headers = {**(error.headers or {}), "Connection": "close"}
            await JSONResponse({"detail": error.detail}, error.status_code, headers)(scope, receive, send)
            return
        await self._app(scope, _replay_body(body, receive), send)

    async def _admit(self, scope: Scope) -> None:
        """Raise HTTPException unless the request may be routed."""
        hosts = self._doors.hosts
        values = [value for key, value in scope["headers"] if key == b"host"]
        if hosts is not None and not is_host_allowed(values, hosts):
            shown = ", ".join(value.decode("latin-1") for value in values)[:100] or "none"
            raise HTTPException(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"Host must be {', '.join(sorted(hosts))}, got {shown!r}; open the address that `specrl status` prints",
            )
        request = Request(scope)
        policy = self._doors.choose_policy(scope["method"], scope["path"])
        if self._doors.is_paced and not self._is_known(request):
            wait_s = self._find_pace(scope).take_turn()
            if wait_s:
                await asyncio.sleep(wait_s)
        if policy is not None:
            await policy.admit_request(request)
        is_known = self._is_known(request)  # perhaps since this request
        scope[_IS_OWNER] = is_known or not self._doors.is_paced
        if is_known and (trust := scope.get(TRUST)) is not None:
            trust()

    def _is_known(self, request: Request) -> bool:
        return self._doors.actors.is_known(request) or self._doors.readers.is_known(request)

    def _find_pace(self, scope: Scope) -> Pace:
        client = scope.get("client")
        address = client[0] if client else ""
        if address.startswith("127."):  # any user of a machine may call from all of these
            address = "127.0.0.1"
        pace = self._paces.pop(address, None) or Pace(PACE_PER_S, PACE_BURST)
        self._paces[address] = pace
        if len(self._paces) > MAX_PACED:
            self._paces.popitem(last=False)
        return pace


TRUST = "specrl.trust"
"""Key of a scope: a function that marks the connection as one that has shown the token (`web_server`)."""

_IS_OWNER = "specrl.is_owner"


def is_owner(scope: Scope) -> bool:
    """Whether the request has shown the run's token, or a user's that was admitted lately."""
    return bool(scope.get(_IS_OWNER))


_KINDS: dict[int, str] = {
    HTTPStatus.MISDIRECTED_REQUEST: "host",
    HTTPStatus.UNAUTHORIZED: "token",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body",
    HTTPStatus.REQUEST_TIMEOUT: "timeout",
}


async def _read_body(scope: Scope, receive: Receive) -> bytes:
    """Read a body of at most BODY_BYTES within BODY_S. Raises HTTPException."""
    too_large = HTTPException(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"a body must be at most {BODY_BYTES} bytes, got more; send less",
    )
    for key, value in scope["headers"]:
        if key == b"content-length" and (len(value) > len(str(BODY_BYTES)) or int(value) > BODY_BYTES):
            raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    break
                body += message.get("body", b"")
                if len(body) > BODY_BYTES:  # in chunks, without a length
                    raise too_large
                if not message.get("more_body", False):
                    break
    except TimeoutError as error:
        raise HTTPException(
            HTTPStatus.REQUEST_TIMEOUT, f"a body must arrive within {BODY_S:.0f} s, got a part of it; send it at once"
        ) from error
    return bytes(body)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that returns the body once, and then what the connection says."""
    is_sent = False

    async def receive_next() -> Message:
        nonlocal is_sent
        if is_sent:
            return await receive()
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_next
