"""Which callers and servers are accepted, and how certificates are renewed. Real handshakes on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.certificates import Authority, mount_secret

from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.service import CoordinatorService
from specrl.errors import CallerRefused, PeerUnavailable, SpecrlError, TlsInvalid
from specrl.records import Peer, Role
from specrl.rpc import tls
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.server import ServerOptions, start_server

DOMAIN = "qwen.team-a.specrl"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def another(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("another"))


def identity(folder: Path, by: Authority, *roles: str, domain: str = DOMAIN) -> tls.Identity:
    """Make the identity of a process with a certificate of these roles. Its folder may be mounted again."""
    return tls.Identity(mount_secret(folder, by.secret([f"{role}.{domain}" for role in roles])), DOMAIN)


@pytest.fixture
async def port(tmp_path: Path, authority: Authority) -> AsyncIterator[int]:
    """Serve a coordinator that replicas and the trainer may call."""
    own = identity(tmp_path / "coordinator", authority, tls.COORDINATOR)
    guard = tls.make_guard(own, tls.GENERATION, tls.TRAINER)
    service = CoordinatorService(Registry("digest", 1.0, lambda: 0.0), "run", 1.0, guard)
    server, port = await start_server(service.add_to, "127.0.0.1", 0, ServerOptions(guard=guard))
    yield port
    await server.stop(None)


async def test_only_replicas_share_draft_costs(port: int, tmp_path: Path, authority: Authority) -> None:
    for role, is_admitted in ((tls.GENERATION, True), (tls.TRAINER, False)):
        caller = identity(tmp_path / role, authority, role)
        async with CoordinatorClient(f"127.0.0.1:{port}", caller) as client:
            for call in (client.find_draft_costs("0" * 24), client.keep_draft_costs("0" * 24, "{}")):
                with contextlib.nullcontext() if is_admitted else pytest.raises(CallerRefused):
                    await call


async def called(port: int, caller: tls.Identity | None) -> None:
    async with CoordinatorClient(f"127.0.0.1:{port}", caller) as client:
        await client.send_heartbeat("peer", "1", None)


@pytest.mark.parametrize("roles", [(tls.GENERATION,), (tls.TRAINER,), (tls.COORDINATOR, tls.GENERATION, tls.TRAINER)])
async def test_a_role_that_may_call_is_admitted(
    port: int, tmp_path: Path, authority: Authority, roles: tuple[str, ...]
) -> None:
    await called(port, identity(tmp_path / "caller", authority, *roles))


@pytest.mark.parametrize(("role", "domain"), [(tls.COORDINATOR, DOMAIN), (tls.TRAINER, "qwen.team-b.specrl")])
async def test_another_role_and_another_run_are_refused_by_name(
    port: int, tmp_path: Path, authority: Authority, role: str, domain: str
) -> None:
    caller = identity(tmp_path / "caller", authority, role, domain=domain)
    with pytest.raises(CallerRefused, match=rf"generation or trainer in {DOMAIN}, got {role}\.{domain}"):
        await called(port, caller)


async def test_a_replica_cannot_register_as_the_trainer(port: int, tmp_path: Path, authority: Authority) -> None:
    caller = identity(tmp_path / "caller", authority, tls.GENERATION)
    async with CoordinatorClient(f"127.0.0.1:{port}", caller) as client:
        with pytest.raises(CallerRefused, match=rf"of trainer in {DOMAIN}, got generation\.{DOMAIN}"):
            await client.register_peer(Peer("trainer", Role.TRAINER, "127.0.0.1:1", "digest"))


async def test_callers_without_a_certificate_of_the_authority_are_refused(
    port: int, tmp_path: Path, another: Authority
) -> None:
    for caller in (None, identity(tmp_path / "caller", another, tls.TRAINER)):
        with pytest.raises(PeerUnavailable):
            await called(port, caller)


@pytest.mark.parametrize(("role", "domain"), [(tls.TRAINER, DOMAIN), (tls.COORDINATOR, "qwen.team-b.specrl")])
async def test_a_server_of_another_role_or_run_is_not_taken_for_the_coordinator(
    tmp_path: Path, authority: Authority, role: str, domain: str
) -> None:
    own = identity(tmp_path / "server", authority, role, domain=domain)
    service = CoordinatorService(Registry("digest", 1.0, lambda: 0.0), "run", 1.0)
    server, port = await start_server(
        service.add_to, "127.0.0.1", 0, ServerOptions(guard=tls.make_guard(own, tls.TRAINER))
    )
    try:
        with pytest.raises(PeerUnavailable):
            await called(port, identity(tmp_path / "caller", authority, tls.TRAINER))
    finally:
        await server.stop(None)


async def test_renewed_certificates_are_used_without_a_restart(
    port: int, tmp_path: Path, authority: Authority, another: Authority
) -> None:
    caller = identity(tmp_path / "caller", authority, tls.TRAINER)
    async with CoordinatorClient(f"127.0.0.1:{port}", caller) as client:
        await client.send_heartbeat("peer", "1", None)
        mount_secret(tmp_path / "coordinator", another.secret([f"{tls.COORDINATOR}.{DOMAIN}"]))
        await client.send_heartbeat("peer", "1", None)  # over the open connection
        with pytest.raises(PeerUnavailable):
            await called(port, identity(tmp_path / "late", authority, tls.TRAINER))
        mount_secret(tmp_path / "caller", another.secret([f"{tls.TRAINER}.{DOMAIN}"]))
        await client.send_heartbeat("peer", "1", None)
    await called(port, identity(tmp_path / "new", another, tls.GENERATION))


async def test_files_that_do_not_belong_together_are_not_used(port: int, tmp_path: Path, authority: Authority) -> None:
    folder = tmp_path / "caller"
    caller = identity(folder, authority, tls.TRAINER)
    broken = authority.secret([f"{tls.TRAINER}.{DOMAIN}"]) | {"tls.key": (authority.folder / "ca.key").read_bytes()}
    mount_secret(folder, broken)
    mount_secret(tmp_path / "coordinator", broken)
    await called(port, caller)
    with pytest.raises(TlsInvalid, match=r"--tls must be a folder with tls\.crt, tls\.key, ca\.crt.*check the Secret"):
        tls.Identity(folder, DOMAIN)


async def test_calls_in_progress_continue_while_their_client_opens_a_new_channel(
    port: int, tmp_path: Path, authority: Authority
) -> None:
    folder = tmp_path / "caller"
    async with CoordinatorClient(f"127.0.0.1:{port}", identity(folder, authority, tls.TRAINER)) as client:
        await client.send_heartbeat("peer", "1", None)
        before = [asyncio.create_task(client.send_heartbeat("peer", "1", None)) for _ in range(20)]
        await asyncio.sleep(0)
        mount_secret(folder, authority.secret([f"{tls.TRAINER}.{DOMAIN}"]))
        await client.send_heartbeat("peer", "1", None)
        assert not any(answer.is_known for answer in await asyncio.gather(*before))


@pytest.fixture
def connect(tmp_path: Path, authority: Authority) -> Callable[[int], Awaitable[None]]:
    """Do a handshake as an admitted caller, and hang up."""
    folder = tmp_path / "connecting"
    identity(folder, authority, tls.TRAINER)
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    context.check_hostname = False
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.set_alpn_protocols(["h2"])

    async def connect(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.transport.abort()

    return connect


async def test_many_connections_at_once_are_served_while_certificates_are_renewed(
    port: int, tmp_path: Path, authority: Authority, connect: Callable[[int], Awaitable[None]]
) -> None:
    """gRPC freed certificates in use: the process crashed within a second if every connection changed them."""

    async def connect_often() -> None:
        for _ in range(250):
            await connect(port)

    callers = [asyncio.create_task(connect_often()) for _ in range(8)]
    for _ in range(3):
        await asyncio.sleep(0.1)
        mount_secret(tmp_path / "coordinator", authority.secret([f"{tls.COORDINATOR}.{DOMAIN}"]))
    await asyncio.gather(*callers)


async def test_servers_stop_while_callers_connect(
    tmp_path: Path, authority: Authority, connect: Callable[[int], Awaitable[None]]
) -> None:
    """gRPC 1.78 crashed if a handshake was in progress when a server stopped, within about a hundred servers."""
    guard = tls.make_guard(identity(tmp_path / "server", authority, tls.COORDINATOR), tls.TRAINER)
    present = 0
    connected = 0

    async def connect_until_the_end() -> None:
        nonlocal connected
        while present:
            with contextlib.suppress(OSError):  # the server has stopped
                await connect(present)
                connected += 1

    server, present = await start_server(lambda _: None, "127.0.0.1", 0, ServerOptions(guard=guard))
    callers = [asyncio.create_task(connect_until_the_end()) for _ in range(8)]
    for _ in range(100):
        await asyncio.sleep(0.02)
        await server.stop(None)
        server, present = await start_server(lambda _: None, "127.0.0.1", 0, ServerOptions(guard=guard))
    present = 0
    await asyncio.gather(*callers)
    await server.stop(None)
    assert connected > 100  # so handshakes were in progress


@pytest.mark.parametrize("missing", tls.TLS_FILES)
def test_a_missing_file_is_named(tmp_path: Path, authority: Authority, missing: str) -> None:
    secret = authority.secret([f"{tls.TRAINER}.{DOMAIN}"])
    del secret[missing]
    with pytest.raises(TlsInvalid, match=r"No such file"):
        tls.Identity(mount_secret(tmp_path / "mounted", secret), DOMAIN)


def test_a_key_with_a_password_is_refused_without_a_prompt(tmp_path: Path, authority: Authority) -> None:
    secret = authority.secret([f"{tls.TRAINER}.{DOMAIN}"])
    locked = ["openssl", "ec", "-aes256", "-passout", "pass:secret"]
    secret["tls.key"] = subprocess.run(locked, input=secret["tls.key"], capture_output=True, check=True).stdout
    with pytest.raises(TlsInvalid, match="check the Secret"):
        tls.Identity(mount_secret(tmp_path / "mounted", secret), DOMAIN)


def test_one_tls_option_without_the_other_is_refused(tmp_path: Path) -> None:
    assert tls.load_identity(None, None) is None
    with pytest.raises(SpecrlError, match="--tls and --tls-domain must be given together"):
        tls.load_identity(tmp_path, None)
    with pytest.raises(SpecrlError, match="--tls and --tls-domain must be given together"):
        tls.load_identity(None, DOMAIN)
