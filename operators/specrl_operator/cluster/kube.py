"""A Cluster over HTTP. The only module that imports the package `kubernetes`: for credentials, TLS and connections.

Requests are JSON at a path, since half of the kinds have no model in any client. Every request has a deadline. A watch
has two, the server's and the socket's: a dead connection looks like one without changes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlencode

import kubernetes
import urllib3

from specrl_operator.api import Object, trim_object
from specrl_operator.cluster.interface import ClusterError, Listing, WatchEvent, WatchExpired
from specrl_operator.kinds import Kind

DEADLINE_S = 15.0
"""Deadline of a request, in seconds. `main.MAX_RECONCILE_S` allows for a dozen that take so long."""
WATCH_S = 240
"""Seconds after which the server ends a watch. A random part of up to a quarter is added, so that watches do not all
end at once."""
PAGE_SIZE = 500
"""Objects of one page of a list, as in client-go's pager."""
MAX_CONNECTIONS = 32
"""Connections in the pool: one per watched kind, and one per worker."""


def connect_cluster(context: str | None = None, deadline_s: float = DEADLINE_S) -> KubeCluster:
    """Connect to a cluster: a kubeconfig context, or without one the cluster of this pod, or else the kubeconfig.

    context: '' is the current one. deadline_s: of every request. Raises ClusterError if there is no configuration.
    """
    configuration = kubernetes.client.Configuration()
    try:
        if context is None:
            kubernetes.config.load_incluster_config(configuration)
        else:
            kubernetes.config.load_kube_config(context=context or None, client_configuration=configuration)
    except kubernetes.config.ConfigException:
        # Not in a pod: a developer's machine has a kubeconfig.
        try:
            kubernetes.config.load_kube_config(client_configuration=configuration)
        except (kubernetes.config.ConfigException, OSError) as error:
            raise ClusterError(
                0, f"found neither a service account nor a kubeconfig: {error}; run in a pod, or set KUBECONFIG"
            ) from error
    configuration.connection_pool_maxsize = MAX_CONNECTIONS
    return KubeCluster(kubernetes.client.ApiClient(configuration), deadline_s)


class KubeCluster:
    """Implements `Cluster`. May be used by many threads."""

    def __init__(self, client: Any, deadline_s: float = DEADLINE_S) -> None:
        self._client = client
        self._deadline_s = deadline_s

    def list_served_versions(self) -> frozenset[str]:
        found = self._request_json("GET", "/apis")
        return frozenset(version["groupVersion"] for group in found["groups"] for version in group["versions"])

    def get(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        try:
            return self._request_json("GET", kind.build_path(namespace, name))
        except ClusterError as error:
            if error.status == 404:
                return None
            raise

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> Listing:
        items: list[Object] = []
        query = {"labelSelector": selector, "limit": str(PAGE_SIZE)}
        while True:
            page = self._request_json("GET", kind.build_path(namespace), query)
            # The API server leaves out kind and apiVersion of a list's items.
            items += [
                trim_object({"apiVersion": kind.api_version, "kind": kind.name, **item}) for item in page["items"]
            ]
            more = page["metadata"].get("continue")
            if not more:
                return Listing(items, page["metadata"]["resourceVersion"])
            query["continue"] = more

    def list_events(self, namespace: str, name: str, reason: str | None = None) -> Sequence[Object]:
        # Of the core group: controllers and kubelets write there, and its field selectors are the oldest.
        query = {"fieldSelector": (f"reason={reason}," if reason else "") + f"involvedObject.name={name}"}
        found: Sequence[Object] = self._request_json("GET", f"/api/v1/namespaces/{namespace}/events", query)["items"]
        return found

    def watch(self, kind: Kind, namespace: str | None, selector: str, resource_version: str) -> Iterator[WatchEvent]:
        seconds = int(WATCH_S * random.uniform(1, 1.25))  # noqa: S311 - spreads load, hides nothing
        query = {
            "watch": "true",
            "labelSelector": selector,
            "resourceVersion": resource_version,
            "timeoutSeconds": str(seconds),
            "allowWatchBookmarks": "true",
        }
        response = self._send_request("GET", kind.build_path(namespace), query, stream_s=seconds + self._deadline_s)
        try:
            for line in _read_lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    if status.get("code") == 410:
                        raise WatchExpired(status.get("message", ""))
                    raise ClusterError(
                        int(status.get("code", 0)), status.get("message", f"the watch of {kind.plural} failed")
                    )
                yield WatchEvent(event["type"], trim_object(event["object"]))
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise ClusterError(0, f"lost the connection of the watch of {kind.plural}: {error}") from error
        finally:
            response.close()

    def apply(self, kind: Kind, body: Object, manager: str) -> Object:
        return self._apply_patch(kind, body, manager, "")

    def apply_status(self, kind: Kind, body: Object, manager: str) -> Object:
        return self._apply_patch(kind, body, manager, "/status")

    def create(self, kind: Kind, body: Object, manager: str) -> Object:
        path = kind.build_path(body["metadata"].get("namespace"))
        return self._request_json("POST", path, {"fieldManager": manager}, body)

    def merge(self, kind: Kind, body: Object) -> Object:
        meta = body["metadata"]
        return self._request_json("PATCH", kind.build_path(meta.get("namespace"), meta["name"]), None, body)

    def replace(self, kind: Kind, body: Object) -> Object:
        meta = body["metadata"]
        return self._request_json("PUT", kind.build_path(meta.get("namespace"), meta["name"]), None, body)

    def delete(self, kind: Kind, item: Object) -> None:
        meta = item["metadata"]
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": meta["uid"]},
        }
        try:
            self._request_json("DELETE", kind.build_path(meta.get("namespace"), meta["name"]), None, options)
        except ClusterError as error:
            if error.status not in (404, 409):  # 409: the precondition failed, so the name belongs to another uid
                raise

    def _apply_patch(self, kind: Kind, body: Object, manager: str, part: str) -> Object:
        meta = body["metadata"]
        path = kind.build_path(meta.get("namespace"), meta["name"]) + part
        query = {"fieldManager": manager, "force": "true"}
        return self._request_json("PATCH", path, query, body)

    def _request_json(
        self, method: str, path: str, query: dict[str, str] | None = None, body: Object | None = None
    ) -> Object:
        response = self._send_request(method, path, query, body)
        try:
            found: Object = json.loads(response.data)
        except ValueError as error:
            raise ClusterError(0, f"the API server's answer to {method} {path} is not JSON: {error}") from error
        return found

    def _send_request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None,
        body: Object | None = None,
        stream_s: float | None = None,
    ) -> urllib3.BaseHTTPResponse:
        """Send one request. stream_s: the caller reads the body as a stream, with this timeout between two reads."""
        content_type = "application/json"
        if method == "PATCH":
            # A server-side apply has a field manager. JSON is valid YAML, and every API server accepts it for apply.
            kind = "apply-patch+yaml" if query else "merge-patch+json"
            content_type = f"application/{kind}"
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": "specrl-operator"}
        # Re-reads the projected token when the kubelet has rotated it.
        self._client.update_params_for_auth(headers, [], ["BearerToken"])
        given = {name: value for name, value in (query or {}).items() if value}
        url = self._client.configuration.host + path + (f"?{urlencode(given)}" if given else "")
        timeout = urllib3.Timeout(total=self._deadline_s)
        if stream_s is not None:
            timeout = urllib3.Timeout(connect=self._deadline_s, read=stream_s)
        try:
            response: urllib3.BaseHTTPResponse = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=None if body is None else json.dumps(body),
                headers=headers,
                timeout=timeout,
                preload_content=stream_s is None,
                retries=False,  # the work queue retries, with backoff
            )
            # Redirects are refused, too: an API server sends none, and a proxy's login page is no answer.
            if response.status >= 300:
                raise ClusterError(response.status, _extract_message(response.data) or str(response.reason))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ClusterError(0, f"the API server did not answer {method} {path}: {error}") from error
        return response


def _extract_message(body: bytes) -> str:
    """Extract the message of a metav1.Status; the start of the body if it is something else, as a proxy's page is."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def _read_lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a stream, each as soon as it is complete."""
    rest = b""
    # read1 returns what has arrived. read and stream would wait for a full buffer, and delay events.
    while part := response.read1():
        *lines, rest = (rest + part).split(b"\n")
        yield from (line for line in lines if line)
