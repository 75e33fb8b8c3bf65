"""Replicas and the trainer serve their metrics to Prometheus."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress

import pytest
from prometheus_client import REGISTRY, Counter

from specrl.errors import PortTaken
from specrl.telemetry import exporter
from specrl.telemetry.exporter import serve_metrics
from specrl.telemetry.metrics import HTTP_REFUSED

PROMETHEUS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def test_metric_names_of_vllm_are_unchanged_if_the_scraper_prefers_openmetrics() -> None:
    counter = Counter("vllm:served_tokens", "As vLLM names its own.")
    try:
        port = serve_metrics("127.0.0.1", 0)
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": PROMETHEUS})
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - loopback
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert "vllm:served_tokens_total 0.0" in answer.read().decode().splitlines()
    finally:
        REGISTRY.unregister(counter)


def test_other_paths_answer_404_and_without_a_port_nothing_is_served() -> None:
    assert serve_metrics("127.0.0.1", None) == 0
    port = serve_metrics("127.0.0.1", 0)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=60)
    with pytest.raises(PortTaken, match="choose another --metrics-port"):
        serve_metrics("127.0.0.1", port)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> int:
    """Port of a server with small bounds."""
    for name, value in (("REQUEST_S", 60.0), ("CONNECTION_S", 60.0), ("MAX_CONNECTIONS", 4)):
        monkeypatch.setattr(exporter, name, value)
    return serve_metrics("127.0.0.1", 0)


def refused(kind: str) -> float:
    return HTTP_REFUSED.labels(kind)._value.get()


def read_all(client: socket.socket) -> bytes:
    found = b""
    with suppress(OSError):
        while data := client.recv(1 << 16):
            found += data
    return found


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", "timeout"),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n", "timeout"),
        (b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 9000 + b"\r\n", "malformed"),
        (b"\0\0\0\r\n\r\n", "malformed"),
        (b"GET /metrics HTTP/1.1\r\nHost: attacker.example\r\n\r\n", "host"),
    ],
)
def test_a_connection_that_is_no_scrape_is_closed(
    small: int, sent: bytes, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every idle client held a thread of the trainer or of a replica for ever."""
    if kind == "timeout":
        monkeypatch.setattr(exporter, "CONNECTION_S", 0.3)
    before = refused(kind)
    with socket.create_connection(("127.0.0.1", small), 60) as client:
        client.sendall(sent)
        assert b"specrl_" not in read_all(client)
    assert refused(kind) > before


def test_a_crowd_of_idle_clients_keeps_no_scraper_out(small: int) -> None:
    before = refused("crowded")
    with ExitStack() as idle:
        for _ in range(12):
            idle.enter_context(socket.create_connection(("127.0.0.1", small), 60))
        with urllib.request.urlopen(f"http://127.0.0.1:{small}/metrics", timeout=60) as answer:
            assert b"specrl_http_refused_total" in answer.read()
    assert refused("crowded") >= before + 8


def test_metrics_are_made_a_few_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each scrape of a large process takes 10 ms from its work."""
    made = []
    monkeypatch.setattr(exporter, "RENDERS_PER_S", 0.001)
    text = exporter.MetricsText()
    for _ in range(3 * exporter.RENDERS_AT_ONCE):
        assert text.read(lambda: made.append(1))
    assert len(made) == exporter.RENDERS_AT_ONCE
