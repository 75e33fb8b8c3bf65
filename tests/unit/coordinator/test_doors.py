"""What a request must pass before it is routed, on the middleware alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from starlette.types import Message

from specrl.coordinator.main import _choose_doors
from specrl.coordinator.observe.web.stream import MAX_STREAMS, OWNERS_STREAMS, EventStreams
from specrl.coordinator.requests import doors as doors_module
from specrl.coordinator.requests.admission import OpenAdmission, TokenAdmission
from specrl.coordinator.requests.doors import (
    BODY_BYTES,
    OPEN_DOORS,
    PACE_BURST,
    DoorMiddleware,
    Doors,
)
from specrl.rpc.run_token import read_token
from specrl.telemetry import metrics
from specrl.telemetry.hosts import is_host_allowed, list_local_hosts


class Asked:
    """A door before an app that takes note of the requests that it is given."""

    def __init__(self, folder: Path | None = None, host: str = "127.0.0.1") -> None:
        self.bodies: list[bytes] = []
        self.received = 0
        if folder is None:
            self.doors = DoorMiddleware(self._answer, OPEN_DOORS)
        else:
            owner = TokenAdmission(folder)
            self.token = read_token(folder)
            self.doors = DoorMiddleware(self._answer, Doors(OpenAdmission(), owner, owner, list_local_hosts(host)))

    async def _answer(self, scope: Any, receive: Callable[[], Awaitable[Message]], send: Any) -> None:
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(
        self, method: str = "GET", path: str = "/status", *, chunks: tuple[bytes, ...] = (b"",), **headers: str
    ) -> int:
        """Send a request whose body arrives in `chunks`, without an end if the last is None. Returns the status."""
        found: list[int] = []
        sent: list[dict[str, Any]] = []
        headers.setdefault("host", "127.0.0.1:8080")
        left = list(chunks)

        async def receive() -> Message:
            self.received += 1
            if not left:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or len(chunks) > 9}

        async def send(message: Message) -> None:
            sent.append(dict(message))
            if message["type"] == "http.response.start":
                found.append(message["status"])

        encoded = [(key.replace("_", "-").encode(), value.encode("latin-1")) for key, value in headers.items() if value]
        scope = {"type": "http", "method": method, "path": path, "headers": encoded, "client": ("127.0.0.9", 1)}
        await self.doors(scope | {"query_string": b""}, receive, send)
        if found[0] >= 400:
            assert (b"connection", b"close") in sent[0]["headers"]
            assert b"\n" not in sent[1]["body"]
        return found[0]


@pytest.mark.parametrize(
    "host", ["attacker.example:8080", "attacker.example", "127.0.0.1.attacker.example", "", "10.0.0.1"]
)
async def test_a_page_that_was_rebound_to_this_machine_reads_nothing(tmp_path: Path, host: str) -> None:
    """The browser sends the attacker's name as Host, and allows its page to read the answer."""
    asked = Asked(tmp_path)
    before = metrics.HTTP_REFUSED.labels("host")._value.get()
    for path in ("/status", "/spec", "/rollouts", "/events", "/targets", "/metrics", "/healthz", "/", "/openapi.json"):
        assert await asked.send(path=path, host=host, authorization=f"Bearer {asked.token}") == 421
    assert asked.bodies == []
    assert metrics.HTTP_REFUSED.labels("host")._value.get() == before + 9


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "LOCALHOST", "[::1]:8080", "[::1]", "127.0.0.1:65535"])
def test_the_addresses_of_the_machine_itself_are_allowed(host: str) -> None:
    assert is_host_allowed([host.encode()], list_local_hosts("127.0.0.1"))


@pytest.mark.parametrize(
    "values",
    [[], [b""], [b"localhost", b"localhost"], [b"localhost:x"], [b"localhost:"] * 2, [b"[::1"] * 2, [b"::1:80"]],
)
def test_malformed_hosts_are_refused(values: list[bytes]) -> None:
    assert not is_host_allowed(values, list_local_hosts("127.0.0.1"))


def test_what_the_user_bound_is_allowed() -> None:
    assert is_host_allowed([b"lab7.example:80"], list_local_hosts("lab7.example"))
    everywhere = list_local_hosts("0.0.0.0")  # noqa: S104 - nothing is bound
    assert is_host_allowed([b"192.168.1.7:80"], everywhere), "rebinding needs a name"
    assert is_host_allowed([b"[fe80::1]:80"], everywhere)
    assert not is_host_allowed([b"attacker.example"], everywhere)


def test_a_local_run_asks_for_its_own_names_and_for_the_token(tmp_path: Path) -> None:
    """The bounds of the middleware are those that the coordinator chooses."""
    doors = _choose_doors(tmp_path, None, "127.0.0.1")
    assert doors.hosts == {"127.0.0.1", "::1", "localhost"}
    assert isinstance(doors.actors, TokenAdmission)
    assert isinstance(doors.private_readers, TokenAdmission)
    assert doors.is_paced


async def test_pods_are_probed_by_any_host() -> None:
    assert await Asked().send(path="/healthz", host="10.1.2.3:8080") == 200


async def test_a_body_is_not_read_before_the_token_is_checked(tmp_path: Path) -> None:
    """300 MiB without a token took 850 MiB of memory, and were answered with 400 instead of 401."""
    asked = Asked(tmp_path)
    flood = (b"[" * (1 << 20),) * 300
    assert await asked.send("PUT", "/scale", chunks=flood) == 401
    assert asked.received == 0
    assert await asked.send("PUT", "/scale", chunks=flood, authorization=f"Bearer {asked.token}") == 413
    assert asked.received == 1
    assert await asked.send("PUT", "/nothing", chunks=flood) == 401, "a route that nobody has opened is closed"
    assert asked.bodies == []


@pytest.mark.parametrize("length", [str(BODY_BYTES + 1), "9" * 400])
async def test_a_length_above_the_limit_is_refused_unread(length: str) -> None:
    asked = Asked()
    for method in ("PUT", "GET"):
        assert await asked.send(method, "/scale", content_length=length) == 413
    assert asked.received == 0


async def test_a_body_that_is_longer_than_it_says_is_refused() -> None:
    """uvicorn's parser refuses it, too; a chunked body has no length at all."""
    asked = Asked()
    assert await asked.send("PUT", "/scale", chunks=(b"x" * 4096,) * 10, content_length="10") == 413
    assert asked.received <= 1 + BODY_BYTES // 4096
    assert await asked.send("PUT", "/scale", chunks=(b"x" * 1000, b"y" * 1000)) == 200
    assert asked.bodies == [b"x" * 1000 + b"y" * 1000]


async def test_a_body_that_does_not_arrive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors_module, "BODY_S", 0.01)
    asked = Asked()
    async with asyncio.timeout(60):
        assert await asked.send("PUT", "/scale", chunks=(b"x",) * 10) == 408
    assert asked.bodies == []


async def test_prompts_and_actions_need_the_token_and_other_reads_do_not(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    for wrong in ("", "Bearer wrong", "Bearer \xff"):
        assert await asked.send(path="/rollouts", authorization=wrong) == 401
        assert await asked.send("POST", "/pause", authorization=wrong) == 401
    assert await asked.send(path="/rollouts", authorization=f"Bearer {asked.token}") == 200
    for path in ("/status", "/metrics", "/", "/assets/main.js"):
        assert await asked.send(path=path) == 200


async def test_requests_without_the_token_wait_when_there_are_too_many(tmp_path: Path) -> None:
    """A flood over all addresses of 127.0.0.0/8 is one; the owner's requests do not wait."""
    asked = Asked(tmp_path)
    flood = [asyncio.create_task(asked.send()) for _ in range(PACE_BURST + 50)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert sum(task.done() for task in flood) <= PACE_BURST + 1
    assert await asked.send(authorization=f"Bearer {asked.token}") == 200
    assert not all(task.done() for task in flood)
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_others_cannot_take_all_streams_of_the_page() -> None:
    observer = cast(Any, type("Observer", (), {"events": None}))
    streams = EventStreams(observer)
    streams._open = MAX_STREAMS - OWNERS_STREAMS
    assert (streams.is_full(is_owner=False), streams.is_full(is_owner=True)) == (True, False)
    streams._open = MAX_STREAMS
    assert streams.is_full(is_owner=True)
