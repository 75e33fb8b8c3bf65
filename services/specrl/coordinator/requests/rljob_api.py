"""Calls the Kubernetes API server about the run's RLJob. Used by admission and by the writer of the RLJob's status."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from specrl.errors import RunInvalid
from specrl.files import parse_object, read_text
from specrl.telemetry.hosts import join_address

DEADLINE_S = 10.0  # of one request
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where Kubernetes mounts a pod's service account token and the API server's CA certificate."""


@dataclass(frozen=True)
class RLJobReference:
    """The RLJob's namespace and name, and the URL of its API server. account: folder of the token and ca.crt."""

    namespace: str
    name: str
    server: str
    account: Path = ACCOUNT

    async def call_api(
        self, method: str, path: str, body: dict[str, Any], kind: str = "application/json", **query: str
    ) -> dict[str, Any]:
        """Send one request to the API server and return the JSON object that it answers.

        kind: the content type of `body`. Raises httpx2.HTTPError, also for an error status; OSError when the token
        cannot be read; ValueError for an invalid certificate or answer.
        """
        token = read_text(self.account / "token").strip()  # read for each call: kubelets renew it every hour
        trusted: ssl.SSLContext | bool = True
        if self.server.startswith("https:"):
            trusted = _trust_only(self.account / "ca.crt")
        async with httpx2.AsyncClient(verify=trusted, timeout=DEADLINE_S, trust_env=False) as client:
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            url = f"{self.server}/apis/{path}"
            answer = await client.request(method, url, params=query, headers=headers, json=body)
            if answer.is_error:
                raise httpx2.HTTPStatusError(
                    f"the API server answered {method} {path} with {answer.status_code}: {answer.text[:200]}",
                    request=answer.request,
                    response=answer,
                )
            return parse_object(answer.content)


def _trust_only(authority: Path) -> ssl.SSLContext:
    """Make an SSL context that trusts one CA only, and neither the system's CAs nor SSL_CERT_FILE."""
    context = ssl.create_default_context(cafile=str(authority))
    # Python 3.13 sets VERIFY_X509_STRICT, which refuses CAs without a key usage or a key identifier. CAs of older
    # clusters have neither (kubernetes-client/python#2394). Without the flag 3.13 trusts the same CAs as 3.12.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def locate_rljob(rljob: str, outer: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> RLJobReference:
    """Locate the RLJob `namespace/name` at the API server of this pod's cluster. Raises RunInvalid outside a pod."""
    namespace, separator, name = rljob.partition("/")
    if not separator or not namespace or not name:
        raise RunInvalid(f"--rljob must be NAMESPACE/NAME, got {rljob!r}; omit it outside a cluster")
    host = outer.get("KUBERNETES_SERVICE_HOST")
    port = outer.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise RunInvalid("--rljob must be used in a pod only, got no KUBERNETES_SERVICE_HOST; omit it elsewhere")
    return RLJobReference(namespace, name, f"https://{join_address(host, port)}", account)
