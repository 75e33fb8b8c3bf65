"""A real Prometheus, on loopback, until closed."""

from __future__ import annotations

import math
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx2
import yaml
from tests.e2e.binaries import find
from tests.requirements import PROMETHEUS

from specrl.launcher.processes.ports import find_free_port

PATIENCE_S = 180.0  # generous, because the machine may be busy


class Prometheus:
    """Start a Prometheus with this configuration. Skips the test if the program is not available."""

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        PROMETHEUS.require()
        folder.mkdir()
        file = folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        port = find_free_port()
        self._http = httpx2.Client(
            base_url=f"http://127.0.0.1:{port}",
            verify=False,  # no TLS here
            trust_env=False,
            timeout=60,
        )
        self._log = (folder / "log").open("w+")
        self._process = subprocess.Popen(
            [
                *(find("prometheus"), "--config.file", file, "--storage.tsdb.path", folder / "data"),
                *("--web.listen-address", f"127.0.0.1:{port}"),
            ],
            stdout=self._log,
            stderr=self._log,
        )
        deadline = time.monotonic() + PATIENCE_S
        while not self._is_ready():
            assert self._process.poll() is None, Path(self._log.name).read_text(encoding="utf-8")[-3000:]
            assert time.monotonic() < deadline, Path(self._log.name).read_text(encoding="utf-8")[-3000:]
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == httpx2.codes.OK
        except httpx2.TransportError:
            return False

    def over(self, expression: str, began: float, ended: float) -> list[dict[str, str]]:
        """Labels of the series that an expression has a number for at any second of a span of Unix time."""
        asked = {"query": expression, "start": began, "end": ended, "step": 1}
        found = self._ask("/api/v1/query_range", asked)["result"]
        return [
            series["metric"] for series in found if any(math.isfinite(float(value)) for _, value in series["values"])
        ]

    def values(
        self, expression: str, began: float, ended: float, step_s: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Labels of each series of an expression, and its pairs of Unix time and value."""
        asked = {"query": expression, "start": began, "end": ended, "step": step_s}
        found = self._ask("/api/v1/query_range", asked)["result"]
        return [(series["metric"], [(second, float(value)) for second, value in series["values"]]) for series in found]

    def targets(self) -> list[dict[str, Any]]:
        """What it scrapes."""
        found: list[dict[str, Any]] = self._ask("/api/v1/targets", {"state": "active"})["activeTargets"]
        return found

    def _ask(self, path: str, asked: dict[str, Any]) -> Any:
        answer = self._http.post(path, data=asked) if path.endswith("range") else self._http.get(path, params=asked)
        assert answer.status_code == httpx2.codes.OK, answer.text
        return answer.json()["data"]

    def close(self) -> None:
        """End it."""
        self._http.close()
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._log.close()
