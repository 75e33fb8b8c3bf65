"""Who may read a run over HTTP in a cluster: whoever may read its RLJob there.

    Authorization: Bearer TOKEN --TokenReview--> user, groups --SubjectAccessReview: get this RLJob?--> admitted

The token must be meant for AUDIENCE, so that what is shown here is worth nothing at the API server, and the other way
round. Verdicts are remembered for REMEMBERED_S, by a digest of the token; a question that nobody answered is not.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx
import structlog
from fastapi import HTTPException, Request

from specrl.coordinator.rljob import Place
from specrl.spec.rljob import API_VERSION, PLURAL

AUDIENCE = "specrl.dev"
REMEMBERED_S = 60.0
MOST_REMEMBERED = 1000
LONGEST_TOKEN = 16 << 10

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What a token is worth here: an HTTP status, and why."""

    status: HTTPStatus
    detail: str = ""


class Readers:
    """Admits those who may read one RLJob."""

    def __init__(self, place: Place, clock: Callable[[], float] = time.monotonic) -> None:
        self._place, self._clock = place, clock
        self._known: dict[bytes, tuple[float, Verdict]] = {}

    async def admit(self, request: Request) -> None:
        """Raise HTTPException unless the request's token is a reader's: 401, 403, or 503 when nobody could say."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        verdict = Verdict(
            HTTPStatus.UNAUTHORIZED,
            f"send Authorization: Bearer TOKEN with a token for the audience {AUDIENCE}, "
            f"as `kubectl create token ACCOUNT --audience {AUDIENCE}` makes them",
        )
        if scheme.lower() == "bearer" and 0 < len(token.strip()) <= LONGEST_TOKEN:
            verdict = await self._verdict(token.strip())
        if verdict.status is not HTTPStatus.OK:
            headers = {"WWW-Authenticate": "Bearer"} if verdict.status is HTTPStatus.UNAUTHORIZED else None
            raise HTTPException(verdict.status, verdict.detail, headers)

    async def _verdict(self, token: str) -> Verdict:
        key, now = hashlib.sha256(token.encode()).digest(), self._clock()
        until, known = self._known.get(key, (now, None))
        if known is not None and now < until:
            return known
        try:
            verdict = await self._review(token)
        except (httpx.HTTPError, OSError, ValueError) as error:
            log.warning("reader_not_reviewed", reason=str(error))
            return Verdict(HTTPStatus.SERVICE_UNAVAILABLE, f"the API server must review the token, got {error}")
        self._known.pop(key, None)
        if len(self._known) >= MOST_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[key] = now + REMEMBERED_S, verdict
        return verdict

    async def _review(self, token: str) -> Verdict:
        question: dict[str, Any] = {"token": token, "audiences": [AUDIENCE]}
        found = await self._create("authentication.k8s.io/v1", "TokenReview", question)
        if not found.get("authenticated") or AUDIENCE not in found.get("audiences", ()):
            reason = found.get("error") or f"it is of nobody here, or not meant for the audience {AUDIENCE}"
            return Verdict(HTTPStatus.UNAUTHORIZED, f"the token must be valid: {reason}")
        user = found.get("user") or {}
        place = self._place
        group = API_VERSION.partition("/")[0]
        what = {"verb": "get", "group": group, "resource": PLURAL, "namespace": place.namespace, "name": place.name}
        question = {key: user[key] for key in ("groups", "uid", "extra") if key in user}
        question |= {"user": user.get("username", ""), "resourceAttributes": what}
        found = await self._create("authorization.k8s.io/v1", "SubjectAccessReview", question)
        if found.get("allowed"):
            return Verdict(HTTPStatus.OK)
        return Verdict(
            HTTPStatus.FORBIDDEN,
            f"{user.get('username')} must be allowed to get {PLURAL}.{group} {place.name} in {place.namespace}; "
            "ask for a role there, such as the release's viewer",
        )

    async def _create(self, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        """The status of a review."""
        body = {"apiVersion": version, "kind": kind, "spec": spec}
        answer = await self._place.call("POST", f"{version}/{kind.lower()}s", body)
        status = answer.get("status")
        if not isinstance(status, dict):
            raise ValueError(f"a {kind} with a status, as the API server answers it, not {answer!r:.200}")
        return status
