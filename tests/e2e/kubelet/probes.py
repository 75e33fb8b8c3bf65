"""Probes: httpGet, tcpSocket, grpc and exec, with Kubernetes' thresholds and defaults."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
import httpx2
from tests.e2e.harness.api import Object
from tests.e2e.kubelet.container import Running

SERVING = b"\x08\x01"  # grpc.health.v1.HealthCheckResponse with status SERVING


async def watch(
    probe: Object, check: Callable[[], Awaitable[bool]], decided: Callable[[bool], Awaitable[None]]
) -> None:
    """Probe for ever. `decided` is called with True or False each time that a threshold is reached."""
    await asyncio.sleep(probe.get("initialDelaySeconds", 0))
    passed = failed = 0
    while True:
        if await check():
            passed = passed + 1
            failed = 0
            if passed == probe.get("successThreshold", 1):
                await decided(True)
        else:
            passed = 0
            failed = failed + 1
            if failed == probe.get("failureThreshold", 3):
                await decided(False)
        await asyncio.sleep(probe.get("periodSeconds", 10))


async def passes(probe: Object, container: Object, running: Running, address: str) -> bool:
    """Probe once. Returns whether it succeeded."""
    timeout_s = float(probe.get("timeoutSeconds", 1))
    if "exec" in probe:
        return await running.execute(probe["exec"]["command"], timeout_s) == 0
    if "httpGet" in probe:
        return await _http(probe["httpGet"], container, address, timeout_s)
    if "grpc" in probe:
        return await _grpc(probe["grpc"], address, timeout_s)
    return await _tcp(address, port_of(container, probe["tcpSocket"]["port"]), timeout_s)


def port_of(container: Object, port: int | str) -> int:
    """Resolve a port, given as a number or by its name in the container."""
    if isinstance(port, int):
        return port
    found: int = next(each["containerPort"] for each in container["ports"] if each.get("name") == port)
    return found


async def _http(get: Object, container: Object, address: str, timeout_s: float) -> bool:
    scheme = get.get("scheme", "HTTP").lower()
    host = get.get("host") or address
    url = f"{scheme}://{host}:{port_of(container, get['port'])}{get.get('path', '/')}"
    headers = {each["name"]: each["value"] for each in get.get("httpHeaders", [])}
    try:
        async with httpx2.AsyncClient(verify=False, timeout=timeout_s, trust_env=False) as client:  # as the kubelet
            answer = await client.get(url, headers=headers)
    except httpx2.HTTPError:
        return False
    return 200 <= answer.status_code < 400


async def _tcp(address: str, port: int, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(address, port)
            writer.close()
    except (OSError, TimeoutError):
        return False
    return True


async def _grpc(service: Object, address: str, timeout_s: float) -> bool:
    name = service.get("service", "").encode()
    request = b"\x0a" + bytes([len(name)]) + name if name else b""
    async with grpc.aio.insecure_channel(f"{address}:{service['port']}") as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return bool(await call(request, timeout=timeout_s) == SERVING)
        except grpc.aio.AioRpcError:
            return False
