"""The process that `telemetry_overhead.py` measures: a coordinator whose telemetry is switched while it runs.

    python -m benchmarks.telemetry_coordinator RUN-DIRECTORY COLLECTOR

It prints its gRPC and HTTP ports. Each line of input names a level; it then prints the CPU seconds used so far. A level
includes all levels before it. It takes effect once the queue of the previous level is exported, so that CPU time is
charged to the level that caused it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import prometheus_client
import structlog
import uvicorn
from benchmarks.scale_coordinator import Grader, Prompts
from prometheus_client.metrics import MetricWrapperBase

from specrl.coordinator.ledger import make_claim, open_store
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.service import CoordinatorService
from specrl.coordinator.observe.observer import RunObserver
from specrl.coordinator.observe.timeline import Timeline
from specrl.coordinator.observe.web.app import make_app
from specrl.coordinator.run_spans import RunSpans
from specrl.coordinator.wiring import wire_coordinator
from specrl.rpc.server import start_server
from specrl.spec import digest_spec, load_spec
from specrl.telemetry import metrics
from specrl.telemetry.otel import TraceSink, make_otlp_exporter
from specrl.telemetry.spans import Recorder, SpanSink

LEVELS = ("off", "metrics", "spans", "traces")


class NoMetric:
    """Stands in for a metric when metrics are off."""

    def __getattr__(self, _: str) -> Callable[..., NoMetric]:
        return lambda *_args, **_labels: self


class Switched(Recorder):
    """A recorder whose listeners can be added and removed, unlike in a run."""

    def listen(self, *sinks: SpanSink) -> None:
        self._sinks = sinks


class Telemetry:
    """The telemetry that is on."""

    def __init__(self, collector: str) -> None:
        self._metrics = {name: value for name, value in vars(metrics).items() if isinstance(value, MetricWrapperBase)}
        self.timeline = Timeline()
        self._traces = TraceSink(make_otlp_exporter(collector), {"service.name": "specrl-coordinator"})
        self._sinks: dict[str, tuple[SpanSink, ...]] = {
            "off": (),
            "metrics": (),
            "spans": (self.timeline,),
            "traces": (self.timeline, self._traces),
        }
        self._level = "off"
        self.recorder = Switched()
        self.timeline.set_recorder(self.recorder)

    def switch(self, level: str) -> None:
        """Export the queue, then switch to `level`. Scrapes metrics once, as Prometheus would."""
        if self._level != "off":
            prometheus_client.generate_latest()
        self._traces._processor.force_flush()  # waits until everything is sent, which a run never does
        self._level = level
        self.recorder.listen(*self._sinks[level])
        for name, metric in self._metrics.items():
            setattr(metrics, name, NoMetric() if level == "off" else metric)


async def coordinate(folder: Path, collector: str) -> None:
    """Serve the run in `folder` until the input ends."""
    telemetry = Telemetry(collector)
    telemetry.switch("off")
    spec = load_spec(folder / "run.yaml")
    claim = make_claim(folder)
    store = await StoreLink.open(spec.name, lambda: open_store(spec, folder, claim))
    registry = Registry(digest_spec(spec), spec.telemetry.heartbeat_s, time.monotonic)
    service = CoordinatorService(registry, spec.name, spec.telemetry.heartbeat_s)
    _, port = await start_server(service.add_to, "127.0.0.1", 0)
    loop = wire_coordinator(
        spec,
        folder,
        store,
        registry,
        Prompts(spec.prompts.max_tokens),
        Grader(),
        spans=RunSpans(telemetry.recorder, claim.run_id),
    )
    observer = RunObserver(loop.context, loop, timeline=telemetry.timeline)
    running = asyncio.create_task(loop.run())
    listener = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(make_app(loop.context, observer), log_config=None, access_log=False))
    serving = asyncio.create_task(web.serve([listener]))
    say(f"{port} {listener.getsockname()[1]}")
    while level := (await asyncio.to_thread(sys.stdin.readline)).strip():
        telemetry.switch(level)
        say(time.process_time())
    for task in (running, serving):
        task.cancel()


def say(value: Any) -> None:
    sys.stdout.write(f"{value}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(coordinate(Path(sys.argv[1]), sys.argv[2]))
