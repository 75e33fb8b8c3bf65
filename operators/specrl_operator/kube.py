"""A Cluster over HTTP. The only module that imports the package `kubernetes`: for credentials, TLS and its connections.

Requests are made by path and in JSON, since half of the kinds have no model in any client. Every request has a
deadline; a watch has two, the server's and the socket's, since a connection that has died in between says nothing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import kubernetes
import urllib3

from specrl_operator.api import Kind, Object, seen
from specrl_operator.cluster import Change, ClusterError, Gone, Listing

DEADLINE_S = 15.0
WATCH_S = 240
"""Of one watch, at the server; up to a quarter more, so that a thousand of them do not end at once."""
PAGE = 500
CONNECTIONS = 32
"""Open at a time: a watch of every kind, and the workers."""


def connect(context: str | None = None, deadline_s: float = DEADLINE_S) -> KubeCluster:
    """The cluster that this process runs in, or that the kubeconfig names; deadline_s is that of every request.

    Raises ClusterError when there is neither.
    """
    configuration = kubernetes.client.Configuration()
    try:
        if context is None:
            kubernetes.config.load_incluster_config(configuration)
        else:
            kubernetes.config.load_kube_config(context=context or None, client_configuration=configuration)
    except kubernetes.config.ConfigException:
        try:
            kubernetes.config.load_kube_config(client_configuration=configuration)
        except (kubernetes.config.ConfigException, OSError) as error:
            raise ClusterError(
                0, f"there must be a cluster, got neither a service account nor a kubeconfig: {error}; set KUBECONFIG"
            ) from error
    configuration.connection_pool_maxsize = CONNECTIONS
    return KubeCluster(kubernetes.client.ApiClient(configuration), deadline_s)


class KubeCluster:
    """Keeps the promises of `Cluster`. May be used by many threads."""

    def __init__(self, client: Any, deadline_s: float = DEADLINE_S) -> None:
        self._client, self._deadline_s = client, deadline_s

    def served(self) -> frozenset[str]:
        found = self._ask("GET", "/apis")
        return frozenset(version["groupVersion"] for group in found["groups"] for version in group["versions"])

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        try:
            return self._ask("GET", kind.path(namespace, name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        items: list[Object] = []
        query = {"labelSelector": selector, "limit": str(PAGE)}
        while True:
            page = self._ask("GET", kind.path(namespace), query)
            # A list's items say neither kind nor version.
            items += [seen({"apiVersion": kind.api_version, "kind": kind.name, **item}) for item in page["items"]]
            more = page["metadata"].get("continue")
            if not more:
                return Listing(items, page["metadata"]["resourceVersion"])
            query["continue"] = more

    def watch(self, kind: Kind, namespace: str | None, selector: str, resource_version: str) -> Iterator[Change]:
        seconds = int(WATCH_S * random.uniform(1, 1.25))  # noqa: S311 - spreads load, hides nothing
        query = {
            "watch": "true",
            "labelSelector": selector,
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
            "allowWatchBookmarks": "true",
        }
        response = self._send("GET", kind.path(namespace), query, stream_s=seconds + self._deadline_s)
        try:
            for line in _lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    if status.get("code") == 410:
                        raise Gone(status.get("message", ""))
                    raise ClusterError(int(status.get("code", 0)), status.get("message", "a watch failed"))
                yield Change(event["type"], seen(event["object"]))
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise ClusterError(0, f"the watch of {kind.plural} broke: {error}") from error
        finally:
            response.close()

    def apply(self, kind: Kind, body: Object, manager: str) -> Object:
        return self._apply(kind, body, manager, "")

    def apply_status(self, kind: Kind, body: Object, manager: str) -> Object:
        return self._apply(kind, body, manager, "/status")

    def create(self, kind: Kind, body: Object) -> Object:
        return self._ask("POST", kind.path(body["metadata"].get("namespace")), None, body)

    def replace(self, kind: Kind, body: Object) -> Object:
        meta = body["metadata"]
        return self._ask("PUT", kind.path(meta.get("namespace"), meta["name"]), None, body)

    def delete(self, kind: Kind, item: Object) -> None:
        meta = item["metadata"]
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": meta["uid"]},
        }
        try:
            self._ask("DELETE", kind.path(meta.get("namespace"), meta["name"]), None, options)
        except ClusterError as error:
            if error.status not in (404, 409):
                raise

    def _apply(self, kind: Kind, body: Object, manager: str, part: str) -> Object:
        meta = body["metadata"]
        path = kind.path(meta.get("namespace"), meta["name"]) + part
        query = {"fieldManager": manager, "force": "true"}
        # JSON is YAML; this media type is the one that every served version knows.
        return self._ask("PATCH", path, query, body, "application/apply-patch+yaml")

    def _ask(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        response = self._send(method, path, query, body, content_type)
        try:
            found: Object = json.loads(response.data)
        except ValueError as error:
            raise ClusterError(0, f"the answer to {method} {path} must be JSON, got {error}") from error
        return found

    def _send(  # noqa: PLR0913, PLR0917 - what an HTTP request consists of
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        stream_s: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """One request. stream_s: the answer is read by the caller, who waits so long for its next byte."""
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "specrl-operator"}
        self._client.update_params_for_auth(headers, [], ["BearerToken"])  # reads a token anew when it has changed
        given = {name: value for name, value in (query or {}).items() if value}
        url = self._client.configuration.host + path + (f"?{urlencode(given)}" if given else "")
        deadline_s = self._deadline_s
        timeout = (
            urllib3.Timeout(total=deadline_s)
            if stream_s is None
            else urllib3.Timeout(connect=deadline_s, read=stream_s)
        )
        try:
            response: urllib3.BaseHTTPResponse = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=timeout,
                preload_content=stream_s is None,
                retries=False,
            )
            if response.status >= 300:
                raise ClusterError(response.status, _words(response.data) or str(response.reason))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ClusterError(0, f"the API server must answer {method} {path}, got {error}") from error
        return response


def _words(body: bytes) -> str:
    """The API server's own words."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Whole lines of a stream, as soon as they are whole."""
    rest = b""
    while part := response.read1():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line for line in lines if line)
