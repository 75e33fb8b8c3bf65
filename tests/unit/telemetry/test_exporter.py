"""What a replica and the trainer serve to Prometheus."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client import REGISTRY, Counter

from specrl.errors import PortTaken
from specrl.telemetry.exporter import serve_metrics

PROMETHEUS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


def test_names_of_vllm_are_served_as_they_are_to_whoever_prefers_openmetrics() -> None:
    counter = Counter("vllm:served_tokens", "As vLLM names its own.")
    try:
        port = serve_metrics("127.0.0.1", 0)
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Accept": PROMETHEUS})
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - loopback
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert "vllm:served_tokens_total 0.0" in answer.read().decode().splitlines()
    finally:
        REGISTRY.unregister(counter)


def test_nothing_else_is_served_and_nothing_without_a_port() -> None:
    assert serve_metrics("127.0.0.1", None) == 0
    port = serve_metrics("127.0.0.1", 0)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=60)
    with pytest.raises(PortTaken, match="choose another --metrics-port"):
        serve_metrics("127.0.0.1", port)
