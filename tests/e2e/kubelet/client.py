"""The kubelet's API client: requests, and a cache that a watch keeps up to date."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import yaml
from tests.e2e.harness.api import MERGE, Object, Refused, path_of, read_refusal

RETRY_S = 0.5
WATCH_S = 240  # seconds; the server ends a watch then, which bounds the life of a dead connection


class Client:
    """A client with administrator's rights. Node authorization is not modelled."""

    def __init__(self, kubeconfig: Path) -> None:
        content = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
        cluster = content["clusters"][0]["cluster"]
        user = content["users"][0]["user"]
        self.server: str = cluster["server"]
        self.ca = Path(cluster["certificate-authority"])
        self._http = httpx2.AsyncClient(
            base_url=self.server,
            verify=ssl.create_default_context(cafile=str(self.ca)),
            headers={"Authorization": f"Bearer {user['token']}"},
            timeout=60,
            limits=httpx2.Limits(max_connections=64),
        )

    async def call(self, method: str, path: str, body: Any = None, **params: Any) -> Object:
        """Send a request. Raises Refused."""
        content_type = MERGE if method == "PATCH" else "application/json"
        response = await self._http.request(
            method, path, json=body, params=params, headers={"Content-Type": content_type}
        )
        if not response.is_success:
            raise read_refusal(response)
        answer: Object = response.json()
        return answer

    async def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """Get an object; None if it does not exist."""
        try:
            return await self.call("GET", path_of(kind, namespace, name))
        except Refused as refused:
            if refused.status == 404:
                return None
            raise

    async def watch(self, cache: Cache) -> None:
        """List and watch for ever. After any failure of the watch, list again."""
        while True:
            try:
                listed = await self.call("GET", path_of(cache.kind))
                cache.replace(listed["items"])
                await self._follow(cache, listed["metadata"]["resourceVersion"])
            except (Refused, httpx2.HTTPError, ValueError):
                await asyncio.sleep(RETRY_S)

    async def _follow(self, cache: Cache, version: str) -> None:
        params = {"watch": "true", "resourceVersion": version, "timeoutSeconds": WATCH_S}
        timeout = httpx2.Timeout(60, read=WATCH_S + 30)
        async with self._http.stream("GET", path_of(cache.kind), params=params, timeout=timeout) as response:
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":  # the resource version is too old
                    return
                cache.take(event["type"], event["object"])


@dataclass
class Cache:
    """All objects of a kind, by uid. `changed` is called with each added, changed or deleted object."""

    kind: str
    changed: Callable[[Object], None]
    objects: dict[str, Object] = field(default_factory=dict)

    def replace(self, items: list[Object]) -> None:
        gone = self.objects.keys() - {item["metadata"]["uid"] for item in items}
        for item in [self.objects[uid] for uid in gone]:
            self.take("DELETED", item)
        for item in items:
            self.take("MODIFIED", item)

    def take(self, event: str, item: Object) -> None:
        uid = item["metadata"]["uid"]
        if event == "DELETED":
            self.objects.pop(uid, None)
        else:
            self.objects[uid] = item
        self.changed(item)
