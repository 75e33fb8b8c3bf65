"""A registry of images and charts: `distribution`, as most private registries run it, on plain HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import httpx2
import yaml
from tests.cluster.programs.build import find_program
from tests.e2e.harness.programs import Program

MANIFESTS = "application/vnd.oci.image.manifest.v1+json"


class Registry:
    """A running registry."""

    def __init__(self, address: str, port: int, folder: Path) -> None:
        self.host = f"{address}:{port}"
        """For clients on the machine. Images of pods name node.REGISTRY instead."""
        self._folder = folder
        self._program: Program | None = None
        self._homes: dict[str, str] = {}  # a repository that has a blob, by the blob's digest

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def start(self) -> None:
        """Start the server. Returns when it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "version": 0.1,
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(self._folder / "content")}},
            "http": {"addr": self.host},
        }
        (self._folder / "registry.yaml").write_text(yaml.safe_dump(settings))
        command = [find_program("registry"), "serve", self._folder / "registry.yaml"]
        # The collector of traces would be looked for on loopback.
        self._program = Program("registry", command, self._folder / "registry.log", OTEL_TRACES_EXPORTER="none")
        self._program.start()
        self._program.wait_until(self._answers, "answer")

    def digest_of(self, repository: str, tag: str) -> str:
        """Return the digest that a tag names."""
        path = f"{self.url}/v2/{repository}/manifests/{tag}"
        response = httpx2.head(path, headers={"Accept": MANIFESTS}, timeout=30, trust_env=False)
        response.raise_for_status()
        return str(response.headers["Docker-Content-Digest"])

    def push_layout(self, layout: Path, digest: str, repository: str, tag: str) -> None:
        """Push an image of an OCI layout. digest: of its manifest, which must be of one architecture."""
        content = (layout / "blobs" / digest.replace(":", "/")).read_bytes()
        manifest = json.loads(content)
        with httpx2.Client(base_url=f"{self.url}/v2/{repository}/", timeout=300, trust_env=False) as client:
            for blob in (manifest["config"], *manifest["layers"]):
                if client.head(f"blobs/{blob['digest']}").is_success:
                    continue
                # generation and trainer share gigabytes: what another repository has is not sent again.
                known = {"mount": blob["digest"], "from": self._homes.get(blob["digest"], repository)}
                answer = client.post("blobs/uploads/", params=known).raise_for_status()
                self._homes[blob["digest"]] = repository
                if answer.status_code == httpx2.codes.CREATED:
                    continue
                target = httpx2.URL(answer.headers["Location"])  # it has a query of its own
                with (layout / "blobs" / blob["digest"].replace(":", "/")).open("rb") as data:
                    client.put(target.copy_merge_params({"digest": blob["digest"]}), content=data).raise_for_status()
            kind = {"Content-Type": manifest.get("mediaType", MANIFESTS)}
            client.put(f"manifests/{tag}", content=content, headers=kind).raise_for_status()

    def stop(self) -> None:
        """Stop the server."""
        if self._program is not None:
            self._program.stop()

    def _answers(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/v2/", timeout=5, trust_env=False).is_success
        except httpx2.HTTPError:
            return False
