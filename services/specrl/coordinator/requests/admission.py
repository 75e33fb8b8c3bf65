"""Decides who may read a run over HTTP and who may act on it.

In a cluster, a user who may `get` the run's RLJob may read, and a user who may `update` it may act:

    Authorization: Bearer TOKEN --TokenReview--> user, groups --LocalSubjectAccessReview: VERB this RLJob?--> admitted

The second review is of the job's namespace alone: a right to ask about all namespaces would show what any user may do.

The token must be issued for AUDIENCE. So a token sent here is useless at the API server, and the other way round.
Decisions are cached for REMEMBERED_S under a digest of the token. A failed review is not cached.

On one machine everybody who reaches the address may read what has no prompts. Acting, and reading prompts, requires the
token in the run's folder, which only the folder's owner can read.
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

from specrl.coordinator.requests.rljob_api import RLJobReference
from specrl.rpc import run_token
from specrl.spec.rljob.manifest import API_VERSION, PLURAL

AUDIENCE = "specrl.dev"
REMEMBERED_S = 60.0  # a revoked permission lasts at most this much longer
MAX_REMEMBERED = 1000  # bounds the cache while a client tries random tokens
LONGEST_TOKEN = 16 << 10  # characters; bounds the text that is hashed and forwarded

_ROLES = {"get": "viewer", "update": "editor"}

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class AdmissionDecision:
    """The decision on one token: 200 admits it, any other HTTP status refuses it with `detail`."""

    status: HTTPStatus
    detail: str = ""


class AdmissionPolicy(Protocol):
    """Admits or refuses HTTP requests. Called by `doors`, before a request is routed."""

    async def admit_request(self, request: Request) -> None:
        """Raise HTTPException unless the request is admitted."""

    def is_known(self, request: Request) -> bool:
        """Whether the request's token is known to be right. Asks nobody."""


class OpenAdmission:
    """Admits every request."""

    async def admit_request(self, request: Request) -> None:
        """Admit the request."""

    def is_known(self, request: Request) -> bool:
        """Return False: nobody shows a token."""
        return False


class TokenAdmission:
    """Admits requests that carry the token of the run's folder."""

    def __init__(self, directory: Path) -> None:
        """Use the token in `directory`; draw one if the launcher has not."""
        self._token = run_token.ensure_token(directory)

    async def admit_request(self, request: Request) -> None:
        """Raise HTTPException 401 unless the request carries the token."""
        if not self.is_known(request):
            raise _make_refusal(
                AdmissionDecision(
                    HTTPStatus.UNAUTHORIZED,
                    f"send `Authorization: Bearer TOKEN` with the content of the file {run_token.TOKEN_FILE} in the "
                    "run's folder, or use `specrl pause`, `resume`, `checkpoint` or `scale`, which send it",
                )
            )

    def is_known(self, request: Request) -> bool:
        """Whether the request carries the token."""
        shown = _read_bearer_token(request)
        # compare_digest takes constant time, so that response times do not reveal how much of a guess was right.
        return shown is not None and hmac.compare_digest(shown.encode(), self._token.encode())


class ReviewAdmission:
    """Admits users whom the API server allows `verb` on one RLJob."""

    def __init__(self, place: RLJobReference, verb: str = "get", clock: Callable[[], float] = time.monotonic) -> None:
        self._place = place
        self._verb = verb
        self._clock = clock
        self._known: dict[bytes, tuple[float, AdmissionDecision]] = {}

    async def admit_request(self, request: Request) -> None:
        """Raise HTTPException unless the token's user is allowed: 401, 403, or 503 when the review failed."""
        token = _read_bearer_token(request)
        verdict = AdmissionDecision(
            HTTPStatus.UNAUTHORIZED,
            f"send `Authorization: Bearer TOKEN` with a token for the audience {AUDIENCE}; "
            f"`kubectl create token ACCOUNT --audience {AUDIENCE}` creates one",
        )
        if token is not None:
            verdict = await self._decide_cached(token)
        if verdict.status is not HTTPStatus.OK:
            raise _make_refusal(verdict)

    def is_known(self, request: Request) -> bool:
        """Whether the request's token was reviewed lately, and admitted."""
        token = _read_bearer_token(request)
        if token is None:
            return False
        until, known = self._known.get(_digest_token(token), (0.0, None))
        return known is not None and known.status is HTTPStatus.OK and self._clock() < until

    async def _decide_cached(self, token: str) -> AdmissionDecision:
        key = _digest_token(token)
        now = self._clock()
        until, known = self._known.get(key, (now, None))
        if known is not None and now < until:
            return known
        try:
            verdict = await self._review_token(token)
        except (httpx2.HTTPError, OSError, ValueError) as error:
            log.warning("token_review_failed", reason=str(error))
            return AdmissionDecision(
                HTTPStatus.SERVICE_UNAVAILABLE, f"the API server did not review the token: {error}; {_advise_on(error)}"
            )
        # A dictionary keeps the order of insertion: the first entry is the oldest.
        self._known.pop(key, None)
        if len(self._known) >= MAX_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[key] = now + REMEMBERED_S, verdict
        return verdict

    async def _review_token(self, token: str) -> AdmissionDecision:
        question: dict[str, Any] = {"token": token, "audiences": [AUDIENCE]}
        found = await self._create_review("authentication.k8s.io/v1", "TokenReview", question)
        if not found.get("authenticated") or AUDIENCE not in found.get("audiences", ()):
            reason = found.get("error") or f"its user is unknown, or it was not issued for the audience {AUDIENCE}"
            return AdmissionDecision(HTTPStatus.UNAUTHORIZED, f"the token is not valid: {reason}; send another one")
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
        found = await self._create_review(
            "authorization.k8s.io/v1", "LocalSubjectAccessReview", question, place.namespace
        )
        if found.get("allowed"):
            return AdmissionDecision(HTTPStatus.OK)
        return AdmissionDecision(
            HTTPStatus.FORBIDDEN,
            f"{user.get('username')} must be allowed to {self._verb} {PLURAL}.{group} {place.name} in namespace "
            f"{place.namespace}; ask for a role there, such as the release's {_ROLES.get(self._verb, 'editor')}",
        )

    async def _create_review(
        self, version: str, kind: str, spec: dict[str, Any], namespace: str = ""
    ) -> dict[str, Any]:
        """Create a review and return its status. Raises ValueError when the answer has none.

        namespace: of the review; empty if it is cluster-scoped.
        """
        body: dict[str, Any] = {"apiVersion": version, "kind": kind, "spec": spec}
        if namespace:
            body["metadata"] = {"namespace": namespace}
        place = f"{version}/namespaces/{namespace}" if namespace else version
        answer = await self._place.call_api("POST", f"{place}/{kind.lower()}s", body)
        status = answer.get("status")
        if not isinstance(status, dict):
            raise ValueError(f"{kind} must have a status, got {answer!r:.200}")
        return status


def _advise_on(error: Exception) -> str:
    """Return what to do about a review that failed."""
    if isinstance(error, httpx2.HTTPStatusError) and error.response.status_code == HTTPStatus.FORBIDDEN:
        return "name the job's namespace in the chart's rbac.tokenReviewNamespaces (docs/deploy.md)"
    return "retry"


def _digest_token(token: str) -> bytes:
    """Return the key of a token in the cache, which must not hold tokens."""
    return hashlib.sha256(token.encode()).digest()


def _read_bearer_token(request: Request) -> str | None:
    """Return the request's bearer token; None when it has none, or one that is too long to be genuine."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token.strip()
    return token if scheme.lower() == "bearer" and 0 < len(token) <= LONGEST_TOKEN else None


def _make_refusal(verdict: AdmissionDecision) -> HTTPException:
    headers = {"WWW-Authenticate": "Bearer"} if verdict.status is HTTPStatus.UNAUTHORIZED else None
    return HTTPException(verdict.status, verdict.detail, headers)
