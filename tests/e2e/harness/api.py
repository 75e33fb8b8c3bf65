"""A small client of the Kubernetes API for tests. It shares no code with the operator, whose writes it checks.

Kinds are named by their path: `v1/pods`, `apps/v1/deployments`, `specrl.dev/v1alpha1/rljobs`.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml

Object = dict[str, Any]

MERGE = "application/merge-patch+json"
APPLY = "application/apply-patch+yaml"
RLJOBS = "specrl.dev/v1alpha1/rljobs"


class Refused(Exception):
    """The API server refused a request."""

    def __init__(self, status: int, answer: Object) -> None:
        self.status = status
        self.message = answer.get("message", "")
        super().__init__(f"{status} {answer.get('reason', '')}: {self.message}")
        self.causes = [(each.get("field", ""), each["message"]) for each in answer.get("details", {}).get("causes", [])]
        """Field and message of each problem of an object."""


def read_refusal(response: httpx2.Response) -> Refused:
    """Read the error of an unsuccessful response."""
    try:
        return Refused(response.status_code, response.json())
    except ValueError:
        return Refused(response.status_code, {"message": response.text})


def path_of(kind: str, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
    """Return the URL path of a collection or an object."""
    group, _, plural = kind.rpartition("/")
    base = f"/api/{group}" if "/" not in group else f"/apis/{group}"
    words = [base, *(["namespaces", namespace] if namespace else []), plural]
    return "/".join([*words, *(word for word in (name, subresource) if word)])


@dataclass
class Api:
    """A client with one user's credentials."""

    server: str
    ca: Path
    token: str
    _client: httpx2.Client = field(init=False, repr=False)
    _others: list[Api] = field(init=False, default_factory=list, repr=False)
    _plurals: dict[str, dict[str, tuple[str, bool]]] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._client = httpx2.Client(
            base_url=self.server,
            verify=ssl.create_default_context(cafile=str(self.ca)),
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=60,
        )

    def with_token(self, token: str) -> Api:
        """Return a client of the same server with another user's token. It is closed together with this one."""
        self._others.append(Api(self.server, self.ca, token))
        return self._others[-1]

    def close(self) -> None:
        """Close all connections."""
        for other in self._others:
            other.close()
        self._client.close()

    def kubeconfig(self, path: Path, namespace: str = "default") -> Path:
        """Write a kubeconfig for kubectl, helm and controllers."""
        user = {"token": self.token}
        cluster = {"server": self.server, "certificate-authority": str(self.ca)}
        context = {"cluster": "test", "user": "test", "namespace": namespace}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": user}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def send_request(self, method: str, path: str, body: Any = None, content_type: str = "", **params: Any) -> Object:
        """Send a request; `params` go into the query. Raises Refused unless it succeeds."""
        headers = {"Content-Type": content_type or "application/json"}
        response = self._client.request(method, path, json=body, params=params, headers=headers)
        if response.is_success:
            answer: Object = response.json()
            return answer
        raise read_refusal(response)

    def get_text(self, path: str, **params: Any) -> str:
        """Get text that is not JSON: logs, metrics, health."""
        response = self._client.get(path, params=params)
        if not response.is_success:
            raise read_refusal(response)
        return response.text

    def get(self, kind: str, name: str, namespace: str | None = None, subresource: str | None = None) -> Object:
        return self.send_request("GET", path_of(kind, namespace, name, subresource))

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """Get an object; None if it does not exist."""
        try:
            return self.get(kind, name, namespace)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    def list(self, kind: str, namespace: str | None = None, labels: str = "") -> list[Object]:
        """List the objects of one namespace, or of all."""
        items: list[Object] = self.send_request("GET", path_of(kind, namespace), labelSelector=labels)["items"]
        return items

    def create(self, manifest: Object, **params: Any) -> Object:
        kind, namespace = self._place(manifest)
        return self.send_request("POST", path_of(kind, namespace), manifest, **params)

    def apply(self, manifest: Object, manager: str = "tests", **params: Any) -> Object:
        """Apply an object, server-side and forced."""
        kind, namespace = self._place(manifest)
        path = path_of(kind, namespace, manifest["metadata"]["name"])
        return self.send_request(
            "PATCH", path, manifest, APPLY, **({"fieldManager": manager, "force": "true"} | params)
        )

    def patch(self, kind: str, name: str, change: Object, namespace: str | None = None, **at: str) -> Object:
        """Send a merge patch for the object or a subresource."""
        return self.send_request("PATCH", path_of(kind, namespace, name, at.get("subresource")), change, MERGE)

    def scale(self, kind: str, name: str, namespace: str, replicas: int) -> Object:
        """Set the replica count by the scale subresource, as `kubectl scale` does."""
        return self.patch(kind, name, {"spec": {"replicas": replicas}}, namespace, subresource="scale")

    def delete(self, kind: str, name: str, namespace: str | None = None, **params: Any) -> None:
        """Delete an object, and its children in the background. No error if it does not exist."""
        try:
            self.send_request("DELETE", path_of(kind, namespace, name), propagationPolicy="Background", **params)
        except Refused as refused:
            if refused.status != 404:
                raise

    def token_of(self, account: str, namespace: str, *audiences: str) -> str:
        """Request a token of a service account."""
        request = {"spec": {"audiences": list(audiences) or None, "expirationSeconds": 3600}}
        path = path_of("v1/serviceaccounts", namespace, account, "token")
        answer = self.send_request(
            "POST", path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"} | request
        )
        token: str = answer["status"]["token"]
        return token

    def logs(self, pod: str, namespace: str, container: str) -> str:
        """Read a container's log, as `kubectl logs` does."""
        return self.get_text(path_of("v1/pods", namespace, pod, "log"), container=container)

    def _place(self, manifest: Object) -> tuple[str, str | None]:
        """Return the resource path and namespace of a manifest, from the server's discovery."""
        version = manifest["apiVersion"]
        kind = manifest["kind"]
        if kind not in self._plurals.get(version, {}):
            found = self.send_request("GET", path_of(f"{version}/x").removesuffix("/x"))["resources"]
            self._plurals[version] = {
                item["kind"]: (item["name"], item["namespaced"]) for item in found if "/" not in item["name"]
            }
        plural, namespaced = self._plurals[version][kind]
        namespace = manifest["metadata"].get("namespace", "default") if namespaced else None
        return f"{version}/{plural}", namespace


def find_condition(thing: Object, kind: str) -> Object:
    """Return the condition of a type in a status; empty if there is none."""
    found: list[Object] = thing.get("status", {}).get("conditions") or []
    return next((each for each in found if each["type"] == kind), {})


def is_condition_true(thing: Object, kind: str) -> bool:
    """Whether the condition of a type is True."""
    return find_condition(thing, kind).get("status") == "True"


def wait_until(claim: Callable[[], Any], what: str, timeout_s: float = 120.0, explain: Callable[[], Any] = str) -> Any:
    """Poll until `claim` returns something true, and return that. The time limit allows for a busy machine."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = claim()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}\n{explain()}"
        time.sleep(0.1)
