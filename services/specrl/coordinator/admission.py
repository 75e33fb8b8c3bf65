"""Who may read a run over HTTP, and who may act on it.

In a cluster: whoever may `get` its RLJob there may read, whoever may `update` it may act.

    Authorization: Bearer TOKEN --TokenReview--> user, groups --SubjectAccessReview: VERB this RLJob?--> admitted

The token must be meant for AUDIENCE, so that what is shown here is worth nothing at the API server, and the other way
round. Verdicts are remembered for REMEMBERED_S, by a digest of the token; a question that nobody answered is not.

On one machine everybody who reaches the address may read. Who acts shows the token that the coordinator has written
into the run's folder, where its owner alone can read it.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Protocol

import httpx2
import structlog
from fastapi import HTTPException, Request

from specrl.coordinator import run_token
from specrl.coordinator.rljob import Place
from specrl.spec.rljob import API_VERSION, PLURAL

AUDIENCE = "specrl.dev"
REMEMBERED_S = 60.0
MOST_REMEMBERED = 1000
LONGEST_TOKEN = 16 << 10

_ROLES = {"get": "viewer", "update": "editor"}

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Verdict:
    """What a token is worth here: an HTTP status, and why."""

    status: HTTPStatus
    detail: str = ""


class Admission(Protocol):
    """Stands before a part of the HTTP side."""

    async def admit(self, request: Request) -> None:
        """Raise HTTPException unless this request may pass."""


class Everybody:
    """Admits whoever reaches the address."""

    async def admit(self, request: Request) -> None:
        """Nobody is refused."""


class ByToken:
    """Admits those who can read the run's folder: its token file is what they show."""

    def __init__(self, directory: Path) -> None:
        """Draws a token and writes it into `directory`."""
        self._token = run_token.write(directory)

    async def admit(self, request: Request) -> None:
        """Raise HTTPException 401 unless the request shows the token. The comparison takes as long for every guess."""
        shown = _bearer(request)
        if shown is None or not hmac.compare_digest(shown.encode(), self._token.encode()):
            raise _refusal(
                Verdict(
                    HTTPStatus.UNAUTHORIZED,
                    f"send Authorization: Bearer TOKEN with the content of the file {run_token.TOKEN_FILE} in the "
                    "run's folder; `specrl pause`, `resume`, `checkpoint` and `scale` do",
                )
            )


class ByReview:
    """Admits those who may do `verb` with one RLJob, as the API server says."""

    def __init__(self, place: Place, verb: str = "get", clock: Callable[[], float] = time.monotonic) -> None:
        self._place, self._verb, self._clock = place, verb, clock
        self._known: dict[bytes, tuple[float, Verdict]] = {}

    async def admit(self, request: Request) -> None:
        """Raise HTTPException unless the token's user may: 401, 403, or 503 when nobody could say."""
        token = _bearer(request)
        verdict = Verdict(
            HTTPStatus.UNAUTHORIZED,
            f"send Authorization: Bearer TOKEN with a token for the audience {AUDIENCE}, "
            f"as `kubectl create token ACCOUNT --audience {AUDIENCE}` makes them",
        )
        if token is not None:
            verdict = await self._verdict(token)
        if verdict.status is not HTTPStatus.OK:
            raise _refusal(verdict)

    async def _verdict(self, token: str) -> Verdict:
        key, now = hashlib.sha256(token.encode()).digest(), self._clock()
        until, known = self._known.get(key, (now, None))
        if known is not None and now < until:
            return known
        try:
            verdict = await self._review(token)
        except (httpx2.HTTPError, OSError, ValueError) as error:
            log.warning("token_not_reviewed", reason=str(error))
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
        what = {
            "verb": self._verb,
            "group": group,
            "resource": PLURAL,
            "namespace": place.namespace,
            "name": place.name,
        }
        question = {key: user[key] for key in ("groups", "uid", "extra") if key in user}
        question |= {"user": user.get("username", ""), "resourceAttributes": what}
        found = await self._create("authorization.k8s.io/v1", "SubjectAccessReview", question)
        if found.get("allowed"):
            return Verdict(HTTPStatus.OK)
        return Verdict(
            HTTPStatus.FORBIDDEN,
            f"{user.get('username')} must be allowed to {self._verb} {PLURAL}.{group} {place.name} in "
            f"{place.namespace}; ask for a role there, such as the release's {_ROLES.get(self._verb, 'editor')}",
        )

    async def _create(self, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        """The status of a review."""
        body = {"apiVersion": version, "kind": kind, "spec": spec}
        answer = await self._place.call("POST", f"{version}/{kind.lower()}s", body)
        status = answer.get("status")
        if not isinstance(status, dict):
            raise ValueError(f"a {kind} with a status, as the API server answers it, not {answer!r:.200}")
        return status


def _bearer(request: Request) -> str | None:
    """The bearer token of a request; None when there is none, or one that nobody could have made."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= LONGEST_TOKEN else None


def _refusal(verdict: Verdict) -> HTTPException:
    headers = {"WWW-Authenticate": "Bearer"} if verdict.status is HTTPStatus.UNAUTHORIZED else None
    return HTTPException(verdict.status, verdict.detail, headers)
