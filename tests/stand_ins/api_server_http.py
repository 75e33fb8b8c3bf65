"""The in-memory API server behind HTTP, for tests of `kube.py` without a control plane.

It uses the paths, verbs, media types, Status bodies, and list and watch framing of Kubernetes, for the calls that the
operator makes.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.stand_ins.api_server import FakeApiServer

from specrl_operator import kinds
from specrl_operator.api import Object
from specrl_operator.cluster.interface import ClusterError
from specrl_operator.kinds import Kind

KINDS = [kind for kind in vars(kinds).values() if isinstance(kind, Kind)]
PAGE = 2  # objects per page of a list; small, so that tests cover pagination
TOKEN = "let-me-in"


class HttpApiServer:
    """Serves a FakeApiServer on loopback until closed."""

    def __init__(self, server: FakeApiServer) -> None:
        self.fake = server
        self.watch_s = 0.0
        """Seconds for which a watch waits for changes."""
        self.tokens: set[str] = {TOKEN}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                try:
                    outer._check(self.headers)
                    code = 200
                    found = outer._do(self.command, self.path, body, self.headers)
                except ClusterError as error:
                    code = error.status
                    found = {"kind": "Status", "code": error.status, "message": str(error)}
                with suppress(BrokenPipeError, ConnectionResetError):  # the client may have closed the connection
                    self._answer(code, found)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

            def _answer(self, status: int, found: Any) -> None:
                events = found if isinstance(found, list) else None
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if events is None:
                    data = json.dumps(found).encode()
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                    return
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                text = "".join(json.dumps(event) + "\n" for event in events).encode()
                for start in range(0, len(text), 100):  # lines in pieces, as a network may deliver them
                    part = text[start : start + 100]
                    self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _check(self, headers: Any) -> None:
        if headers.get("Authorization", "").removeprefix("Bearer ") not in self.tokens:
            raise ClusterError(401, "Unauthorized")

    def _do(self, verb: str, target: str, body: Any, headers: Any) -> Any:
        address = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        if address.path == "/apis":
            groups: dict[str, list[Object]] = {}
            for version in sorted(self.fake.list_served_versions() - {"v1"}):
                groups.setdefault(version.partition("/")[0], []).append({"groupVersion": version})
            return {"kind": "APIGroupList", "groups": [{"name": it, "versions": found} for it, found in groups.items()]}
        if address.path.endswith("/events"):  # of the core group; those that the operator creates are of another
            fields = dict(each.split("=") for each in query["fieldSelector"].split(","))
            return {"items": self.fake.list_events("", fields["involvedObject.name"], fields.get("reason"))}
        kind, namespace, name, part = _parse(address.path)
        if name is None:
            return self._many(verb, kind, namespace, query, body)
        if verb == "GET":
            found = self.fake.get(kind, namespace, name)
            if found is None:
                raise ClusterError(404, f'{kind.plural} "{name}" not found')
            return found
        if verb == "PUT":
            return self.fake.replace(kind, body)
        if verb == "DELETE":
            there = self.fake.get(kind, namespace, name)
            if there is None:
                raise ClusterError(404, f'{kind.plural} "{name}" not found')
            if body["preconditions"]["uid"] != there["metadata"]["uid"]:
                raise ClusterError(409, "Precondition failed: UID in precondition")
            self.fake.delete(kind, there)
            return {"kind": "Status", "status": "Success"}
        assert verb == "PATCH"
        if headers.get("Content-Type") == "application/merge-patch+json":
            return self.fake.merge(kind, body)
        if headers.get("Content-Type") != "application/apply-patch+yaml":
            raise ClusterError(415, "the body of the request was in an unknown format")
        assert query["force"] == "true"
        placed = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
        apply = self.fake.apply_status if part == "status" else self.fake.apply
        return apply(kind, placed, query["fieldManager"])

    def _many(self, verb: str, kind: Kind, namespace: str | None, query: dict[str, str], body: Any) -> Any:
        selector = query.get("labelSelector", "")
        if verb == "POST":
            return self.fake.create(kind, body, query["fieldManager"])
        if query.get("watch") == "true":
            try:
                until = time.monotonic() + self.watch_s
                while True:
                    changes = list(self.fake.watch(kind, namespace, selector, query["resourceVersion"]))
                    if changes or time.monotonic() >= until:
                        break
                    time.sleep(0.02)
            except ClusterError as error:
                gone = {"kind": "Status", "code": error.status, "message": str(error)}
                return [{"type": "ERROR", "object": gone}]
            return [{"type": it.type, "object": it.item} for it in changes]
        found = self.fake.list(kind, namespace, selector)
        start = int(query.get("continue", "0"))
        items = [{k: v for k, v in it.items() if k not in ("kind", "apiVersion")} for it in found.items]
        more = {"continue": str(start + PAGE)} if start + PAGE < len(items) else {}
        return {"metadata": {"resourceVersion": found.resource_version, **more}, "items": items[start : start + PAGE]}


def _parse(path: str) -> tuple[Kind, str | None, str | None, str]:
    parts = path.strip("/").split("/")
    version, rest = (parts[1], parts[2:]) if parts[0] == "api" else (f"{parts[1]}/{parts[2]}", parts[3:])
    namespace = None
    if rest[0] == "namespaces":
        namespace = rest[1]
        rest = rest[2:]
    kind = next((it for it in KINDS if (it.api_version, it.plural) == (version, rest[0])), None)
    if kind is None:
        raise ClusterError(404, "the server could not find the requested resource")
    return kind, namespace, rest[1] if len(rest) > 1 else None, rest[2] if len(rest) > 2 else ""
