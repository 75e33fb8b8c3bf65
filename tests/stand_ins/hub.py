"""A stand-in for the Hugging Face Hub: answers huggingface_hub's requests as the real one does, over local HTTP.

It knows repositories with commits, branches and tags. Small files are redirected on the same host, large ones (LFS) to
another host, the CDN, with the headers X-Repo-Commit, X-Linked-ETag and X-Linked-Size on the redirect. The CDN serves
ranges. Tests add faults: answers with a status, bodies that are cut short, and a body that waits.

The paths, headers and error codes were read from huggingface_hub 2.4.0 (file_download.py, utils/_http.py, hf_api.py).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_of_a_member"
"""The token of an account that has agreed to every gated repository's terms, and sees every private one."""


@dataclass
class HubRepository:
    """A repository. commits: files by commit. refs: commit by branch or tag."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    is_gated: bool = False
    is_private: bool = False


@dataclass(frozen=True)
class HubRequest:
    """A request that was answered."""

    method: str
    path: str
    first_byte: int
    has_token: bool
    host: str


@dataclass
class Fault:
    """What happens to the next `times` requests whose path contains `part` and whose method is `method`.

    status: answer with it. cut_at: send so many bytes of the body, then end the connection. wait: before the body.
    damages: the body's last byte is another one.
    """

    part: str
    method: str = "GET"
    times: int = 1
    status: int = 0
    code: str = ""
    cut_at: int | None = None
    wait: threading.Event | None = None
    damages: bool = False


@dataclass
class StandInHub:
    """The server's content. lfs_bytes: files of at least this size are on the CDN."""

    url: str = ""
    cdn_url: str = ""
    repositories: dict[tuple[str, str], HubRepository] = field(default_factory=dict)
    requests: list[HubRequest] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lfs_bytes: int = 10_000

    def add_model(self, name: str, files: dict[str, bytes], **kind: bool) -> str:
        """Add a commit to the main branch of a model. Returns the commit."""
        return self._add("models", name, files, **kind)

    def add_data_set(self, name: str, files: dict[str, bytes], **kind: bool) -> str:
        """Add a commit to the main branch of a data set. Returns the commit."""
        return self._add("datasets", name, files, **kind)

    def _add(self, kind: str, name: str, files: dict[str, bytes], **traits: bool) -> str:
        content = hashlib.sha1(usedforsecurity=False)
        for path, body in sorted(files.items()):
            content.update(path.encode() + b"\0" + body)
        commit = content.hexdigest()
        repository = self.repositories.setdefault((kind, name), HubRepository({}, {}, **traits))
        repository.commits[commit] = dict(files)
        repository.refs["main"] = commit
        return commit

    def take_fault(self, method: str, path: str) -> Fault | None:
        """Return the fault of this request, if there is one left."""
        for fault in self.faults:
            if fault.times > 0 and fault.method == method and fault.part in path:
                fault.times -= 1
                return fault
        return None

    def count(self, method: str, part: str) -> int:
        """Count the requests of a method whose path contains `part`."""
        return sum(it.method == method and part in it.path for it in self.requests)


@contextmanager
def serve_hub(address: str = "127.0.0.1", port: int = 0) -> Iterator[StandInHub]:
    """Serve a hub without repositories. Its CDN is at localhost, which is another host than 127.0.0.1 for clients."""
    hub = StandInHub()

    class Handler(_Handler):
        content = hub

    server = ThreadingHTTPServer((address, port), Handler)
    server.daemon_threads = True
    port = server.server_address[1]
    hub.url = f"http://{address}:{port}"
    hub.cdn_url = f"http://localhost:{port}/cdn"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    content: StandInHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        return

    def _answer(self) -> None:
        hub = self.content
        address = urlsplit(self.path)
        path = unquote(address.path)
        first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        host = self.headers.get("Host", "").partition(":")[0]
        hub.requests.append(HubRequest(self.command, path, first, bool(token), host))
        fault = hub.take_fault(self.command, path)
        if fault is not None and fault.status:
            self._refuse(fault.status, fault.code)
        elif token and token != TOKEN and not path.startswith("/cdn/"):
            self._refuse(401, "", "Invalid credentials in Authorization header")
        elif path.startswith("/cdn/"):
            self._send_body(self._find_blob(path.removeprefix("/cdn/")), {"ETag": '"cdn"'}, first, fault)
        elif path.startswith("/api/resolve-cache/"):
            kind, owner, name, commit, *rest = path.removeprefix("/api/resolve-cache/").split("/")
            body = hub.repositories[kind, f"{owner}/{name}"].commits[commit]["/".join(rest)]
            self._send_body(body, _file_headers(body, commit), first, fault)
        elif path.startswith("/api/"):
            self._describe(path.removeprefix("/api/"), parse_qs(address.query), bool(token))
        else:
            self._resolve(path.lstrip("/"), bool(token))

    def _describe(self, path: str, query: dict[str, list[str]], has_token: bool) -> None:
        """Answer with a repository's commit and files."""
        kind, owner, name, *rest = path.split("/")
        repository = self._find_repository(kind, f"{owner}/{name}", has_token)
        if repository is None:
            return
        commit = self._find_commit(repository, "/".join(rest[1:]) if rest[:1] == ["revision"] else "main")
        if commit is None:
            return
        has_sizes = query.get("blobs", [""])[0].lower() == "true"
        files = [
            {"rfilename": file} | (self._measure(body) if has_sizes else {})
            for file, body in repository.commits[commit].items()
        ]
        body = json.dumps(
            {
                "_id": "0",
                "id": f"{owner}/{name}",
                "sha": commit,
                "private": repository.is_private,
                "gated": "auto" if repository.is_gated else False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "siblings": files,
            }
        ).encode()
        self._send_body(body, {"Content-Type": "application/json"}, 0, None)

    def _measure(self, body: bytes) -> dict[str, object]:
        """Tell a file's size and its hashes. The blobId of a large file is that of git's pointer to it."""
        if len(body) < self.content.lfs_bytes:
            return {"size": len(body), "blobId": _git_id(body)}
        pointer = {"sha256": hashlib.sha256(body).hexdigest(), "size": len(body), "pointerSize": 130}
        return {"size": len(body), "blobId": _git_id(b"pointer"), "lfs": pointer}

    def _resolve(self, path: str, has_token: bool) -> None:
        """Answer for a file: a redirect to its content, with what a client needs to know of it."""
        kind = "datasets" if path.startswith("datasets/") else "models"
        name, _, rest = path.removeprefix("datasets/").partition("/resolve/")
        repository = self._find_repository(kind, name, has_token)
        if repository is None:
            return
        if repository.is_gated and not has_token:
            self._refuse(401, "GatedRepo", f"Access to {kind} {name} is restricted.")
            return
        revision, _, file = rest.partition("/")
        commit = self._find_commit(repository, revision)
        if commit is None:
            return
        if file not in repository.commits[commit]:
            self._refuse(404, "EntryNotFound", "Entry not found", commit)
            return
        body = repository.commits[commit][file]
        headers = {"X-Repo-Commit": commit, "X-Linked-Size": str(len(body)), "Content-Length": "0"}
        if len(body) >= self.content.lfs_bytes:
            digest = hashlib.sha256(body).hexdigest()
            headers |= {"X-Linked-ETag": f'"{digest}"', "Location": f"{self.content.cdn_url}/{digest}"}
            self._send_head(302, headers)
        else:
            headers |= {"ETag": f'"{_git_id(body)}"', "X-Linked-ETag": f'"{_git_id(body)}"'}
            headers["Location"] = f"/api/resolve-cache/{kind}/{name}/{commit}/{file}"
            self._send_head(307, headers)

    def _find_repository(self, kind: str, name: str, has_token: bool) -> HubRepository | None:
        repository = self.content.repositories.get((kind, name))
        if repository is None or (repository.is_private and not has_token):
            # The hub does not tell a private repository from one that does not exist.
            self._refuse(404 if has_token else 401, "RepoNotFound", "Repository not found")
            return None
        return repository

    def _find_commit(self, repository: HubRepository, revision: str) -> str | None:
        commit = repository.refs.get(revision, revision)
        if commit in repository.commits:
            return commit
        self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return None

    def _find_blob(self, digest: str) -> bytes:
        for repository in self.content.repositories.values():
            for files in repository.commits.values():
                for body in files.values():
                    if hashlib.sha256(body).hexdigest() == digest:
                        return body
        raise KeyError(digest)

    def _send_body(self, body: bytes, headers: dict[str, str], first: int, fault: Fault | None) -> None:
        part = body[first:]
        if fault is not None and fault.damages:
            part = part[:-1] + bytes([part[-1] ^ 1])
        if first:
            headers = {**headers, "Content-Range": f"bytes {first}-{len(body) - 1}/{len(body)}"}
        self._send_head(206 if first else 200, {**headers, "Content-Length": str(len(part)), "Accept-Ranges": "bytes"})
        if self.command == "HEAD":
            return
        if fault is not None and fault.wait is not None:
            self.wfile.flush()
            fault.wait.wait(30)
        if fault is not None and fault.cut_at is not None:
            self.wfile.write(part[: fault.cut_at])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return
        self.wfile.write(part)

    def _refuse(self, status: int, code: str = "", message: str = "", commit: str = "") -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": commit, "Content-Length": "0"}
        self._send_head(status, {name: value for name, value in headers.items() if value})

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _file_headers(body: bytes, commit: str) -> dict[str, str]:
    return {"ETag": f'"{_git_id(body)}"', "X-Repo-Commit": commit, "Content-Type": "application/octet-stream"}


def _git_id(body: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(body) + body, usedforsecurity=False).hexdigest()
