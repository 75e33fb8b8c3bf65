"""A run in a cluster tells its RLJob how far it is. The operator reads it; nothing in the run waits for it.

At most one write in PERIOD_S, and none while nothing has changed, under a field manager of the coordinator's own: the
operator writes the rest of the status. What could not be written is written later, in its newest form. A later RLJob of
the same name is not written to: the token is of an account that goes with the job.

Two conditions are the coordinator's. `CollectiveReady`: the first weights have gone through the very collective that
all later ones take, checked and within its deadline; False, when replicas were given up in it. `RunFinished`: the last
step is trained and the policy exported.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import structlog

from specrl.coordinator.board import Board
from specrl.coordinator.report import Phase, Status, StepReport
from specrl.errors import RunInvalid
from specrl.files import parse_object, read_text
from specrl.spec.rljob import API_VERSION, KIND, PLURAL

FIELD_MANAGER = "specrl-coordinator"
PERIOD_S = 10.0
DEADLINE_S = 10.0
FINAL_S = 120.0
"""How long the end of a run is told again and again before the coordinator goes on without."""
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where every pod finds its token and the API server's certificate."""

log = structlog.get_logger(__name__)

Now = Callable[[], datetime]


@dataclass(frozen=True)
class Place:
    """Which RLJob, at which API server."""

    namespace: str
    name: str
    server: str
    account: Path = ACCOUNT

    async def call(
        self, method: str, path: str, body: dict[str, Any], kind: str = "application/json", **query: str
    ) -> dict[str, Any]:
        """One call of the API server. Raises httpx2.HTTPError, OSError without a token, ValueError for its certificate.

        The token is read anew: kubelets renew it every hour.
        """
        token = read_text(self.account / "token").strip()
        trusted: ssl.SSLContext | bool = True
        if self.server.startswith("https:"):
            trusted = _trust_only(self.account / "ca.crt")
        async with httpx2.AsyncClient(verify=trusted, timeout=DEADLINE_S, trust_env=False) as client:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            url = f"{self.server}/apis/{path}"
            answer = await client.request(method, url, params=query, headers=headers, json=body)
            if answer.is_error:
                raise httpx2.HTTPStatusError(
                    f"the API server must take {method} {path}, got {answer.status_code}: {answer.text[:200]}",
                    request=answer.request,
                    response=answer,
                )
            return parse_object(answer.content)


def _trust_only(authority: Path) -> ssl.SSLContext:
    """Verifies servers by one authority's certificate; the machine's store and SSL_CERT_FILE are not read.

    Python 3.13 adds VERIFY_X509_STRICT, which refuses authorities without a key usage or a key identifier. Those of
    older clusters have none (kubernetes-client/python#2394), and Python 3.12 accepts them. Both are to trust the same.
    """
    context = ssl.create_default_context(cafile=str(authority))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def place_of(rljob: str, outer: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> Place:
    """The RLJob `namespace/name` at the API server of the cluster that this process runs in. Raises RunInvalid."""
    namespace, separator, name = rljob.partition("/")
    if not separator or not namespace or not name:
        raise RunInvalid(f"--rljob must be NAMESPACE/NAME, got {rljob!r}; leave it out of a run without a cluster")
    host, port = outer.get("KUBERNETES_SERVICE_HOST"), outer.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise RunInvalid("--rljob must be given in a pod alone, got no KUBERNETES_SERVICE_HOST; leave it out elsewhere")
    host = f"[{host}]" if ":" in host else host
    return Place(namespace, name, f"https://{host}:{port}", account)


def told(status: Status, newest: StepReport | None) -> dict[str, Any]:
    """What the RLJob's status is to say, but for times."""
    progress: dict[str, Any] = {"step": status.step}
    if status.policy_version >= 0:
        progress["policyVersion"] = status.policy_version
    if status.is_paused:
        progress["paused"] = True
    if newest is not None:
        progress["policyLag"] = newest.policy_lag_max
        if newest.stages.total > 0:
            progress["exposedGenerationShare"] = f"{newest.stages.generation / newest.stages.total:.2f}"
        if newest.acceptance_length is not None:
            progress["acceptanceLength"] = f"{newest.acceptance_length:.2f}"
    return {"progress": progress, "conditions": _conditions(status)}


def _conditions(status: Status) -> list[dict[str, str]]:
    given_up = sum(count for moved, count in status.replica_transitions.items() if moved.endswith("-> stale"))
    conditions = []
    if status.policy_version >= 0:
        conditions.append(_condition("CollectiveReady", True, "WeightsArrived", "all replicas have had their weights"))
    elif given_up:
        reasons = "; ".join(f"{it.id}: {it.reason}" for it in status.replicas if it.reason)
        conditions.append(
            _condition(
                "CollectiveReady",
                False,
                "PreflightFailed",
                f"the first weights reached no replica, {given_up} times given up{f' ({reasons})' if reasons else ''}; "
                "see the logs of trainer and replicas, and check placement.nvlink, the network between their nodes and "
                "NetworkPolicies",
            )
        )
    if status.phase is Phase.INITIALISING:
        progress = f" ({status.done} of {status.total})" if status.total else ""
        conditions.append(_condition("DrafterReady", False, "Initialising", f"{status.detail}{progress}"))
    elif status.phase is not Phase.WAITING and any(replica.drafter_version >= 0 for replica in status.replicas):
        conditions.append(_condition("DrafterReady", True, "Serves", "replicas have the drafter that this run trains"))
    if status.phase is Phase.FINISHED:
        where = f"; the policy is in {status.summary.policy_path}" if status.summary else ""
        conditions.append(
            _condition("RunFinished", True, "MaxStepsReached", f"{status.steps} steps are trained{where}")
        )
    return conditions


def _condition(kind: str, is_so: bool, reason: str, message: str) -> dict[str, str]:
    return {"type": kind, "status": "True" if is_so else "False", "reason": reason, "message": message[:1024]}


class Teller:
    """Keeps one RLJob told. `turn` writes what has changed; `run` does so for as long as the run goes on."""

    def __init__(self, board: Board, place: Place, now: Now = lambda: datetime.now(UTC)) -> None:
        self._board, self._place, self._now = board, place, now
        self._said: dict[str, Any] | None = None
        self._since: dict[str, tuple[str, str]] = {}

    async def run(self) -> None:
        """Tell what changes until cancelled."""
        while True:
            await self.turn()
            await asyncio.sleep(PERIOD_S)

    async def end(self) -> bool:
        """Tell how the run ended; again and again for FINAL_S. Returns whether it was heard."""
        try:
            async with asyncio.timeout(FINAL_S):
                while True:
                    if await self.turn():
                        return True
                    await asyncio.sleep(1.0)
        except TimeoutError:
            log.error("rljob_not_told_of_its_end", rljob=self._place.name)
            return False

    async def turn(self) -> bool:
        """Write what is new, if anything is. Returns whether the RLJob says what is so."""
        status = self._board.status()
        newest = self._board.newest_report()
        found = told(status, newest)
        if found == self._said:
            return True
        body = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": self._place.name},
            "status": self._dated(found),
        }
        place = self._place
        path = f"{API_VERSION}/namespaces/{place.namespace}/{PLURAL}/{place.name}/status"
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            await place.call("PATCH", path, body, "application/apply-patch+yaml", **query)
        except (httpx2.HTTPError, OSError, ValueError) as error:  # OSError: no token; ValueError: of ssl
            log.warning("rljob_not_told", rljob=self._place.name, reason=str(error))
            return False
        self._said = found
        return True

    def _dated(self, found: dict[str, Any]) -> dict[str, Any]:
        moment = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = []
        for condition in found["conditions"]:
            said, since = self._since.get(condition["type"], ("", moment))
            since = since if said == condition["status"] else moment
            self._since[condition["type"]] = condition["status"], since
            conditions.append(condition | {"lastTransitionTime": since})
        return {"progress": found["progress"] | {"lastUpdateTime": moment}, "conditions": conditions}
