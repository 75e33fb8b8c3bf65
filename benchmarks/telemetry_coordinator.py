"""The process that `telemetry_overhead.py` measures: a coordinator whose telemetry is switched while it runs.

    python -m benchmarks.telemetry_coordinator RUN-DIRECTORY COLLECTOR   # prints its gRPC and HTTP ports; then, for
                                                                         # each line of input, which names a level,
                                                                         # the CPU seconds that it has used so far

A level takes effect once what the one before has queued is exported, so that CPU time lies with the level that caused
it. Each level has all that those before it have.
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

from specrl.coordinator.board import Board
from specrl.coordinator.controls import Controls
from specrl.coordinator.loop import Loop
from specrl.coordinator.parts import Parts
from specrl.coordinator.registry import Registry
from specrl.coordinator.run_spans import RunSpans
from specrl.coordinator.service import CoordinatorService
from specrl.coordinator.store import claim_for, open_store
from specrl.coordinator.store_link import StoreLink
from specrl.coordinator.timeline import Timeline
from specrl.coordinator.web import make_app
from specrl.rpc.server import serve
from specrl.spec import digest, load_spec
from specrl.telemetry import metrics
from specrl.telemetry.otel import TraceSink, otlp_exporter
from specrl.telemetry.spans import Recorder, Sink

LEVELS = ("off", "metrics", "spans", "traces")


class NoMetric:
    """Takes the place of a metric where there are to be none."""

    def __getattr__(self, _: str) -> Callable[..., NoMetric]:
        return lambda *_args, **_labels: self


class Switched(Recorder):
    """A recorder whose listeners come and go, which none in a run do."""

    def listen(self, *sinks: Sink) -> None:
        self._sinks = sinks


class Telemetry:
    """What is on now."""

    def __init__(self, collector: str) -> None:
        self._metrics = {name: value for name, value in vars(metrics).items() if isinstance(value, MetricWrapperBase)}
        self.timeline = Timeline()
        self._traces = TraceSink(otlp_exporter(collector), {"service.name": "specrl-coordinator"})
        self._sinks: dict[str, tuple[Sink, ...]] = {
            "off": (),
            "metrics": (),
            "spans": (self.timeline,),
            "traces": (self.timeline, self._traces),
        }
        self._level = "off"
        self.recorder = Switched()
        self.timeline.ask(self.recorder)

    def switch(self, level: str) -> None:
        """Export what is queued, then be at `level`. Metrics are scraped here once, as a Prometheus would."""
        if self._level != "off":
            prometheus_client.generate_latest()
        self._traces._processor.force_flush()  # waits until all is sent, which a run never does
        self._level = level
        self.recorder.listen(*self._sinks[level])
        for name, metric in self._metrics.items():
            setattr(metrics, name, NoMetric() if level == "off" else metric)


async def coordinate(folder: Path, collector: str) -> None:
    """Serve the run in `folder` until input ends."""
    telemetry = Telemetry(collector)
    telemetry.switch("off")
    spec, claim = load_spec(folder / "run.yaml"), claim_for(folder)
    store = await StoreLink.open(spec.name, lambda: open_store(spec, folder, claim))
    registry = Registry(digest(spec), spec.telemetry.heartbeat_s, time.monotonic)
    board = Board(spec, folder, registry, store)
    service = CoordinatorService(registry, spec.name, spec.telemetry.heartbeat_s)
    _, port = await serve(service.add_to, "127.0.0.1", 0)
    spans = RunSpans(telemetry.recorder, claim.run_id)
    prompts = Prompts(spec.prompts.max_tokens)
    parts = Parts(
        spec=spec,
        directory=folder,
        registry=registry,
        store=store,
        board=board,
        controls=Controls(spec, folder, store, board),
        prompts=prompts,
        validation_prompts=(),
        grader=Grader(),
        spans=spans,
        timeline=telemetry.timeline,
    )
    running = asyncio.create_task(Loop(parts).run())
    listener = socket.create_server(("127.0.0.1", 0))
    web = uvicorn.Server(uvicorn.Config(make_app(parts), log_config=None, access_log=False))
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
