"""One suite for all sinks, with their real libraries and without a network; and the follower, with a sink that fails.

TensorBoard's files are read back by its own accumulator, MLflow's by its client, Weights & Biases' offline files record
by record. `make sinks` installs the three libraries.
"""

from __future__ import annotations

import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs
from tests.requirements import SINKS
from tests.run_files import a_run
from tests.unit.report.runs import a_step

from specrl.coordinator.observe.report_files import ReportFiles
from specrl.coordinator.observe.sinks import find_openers, follower
from specrl.coordinator.observe.sinks.contract import ReportSink, SinkProgress, SinkRun, flatten_step
from specrl.coordinator.observe.sinks.follower import SinkFollower
from specrl.coordinator.preflight import find_sink_problems
from specrl.formats.reports import Phase, StepReport, ValidationReport
from specrl.spec import parse_spec

RUN_ID = "0123456789abcdef0123456789abcdef"
END_S = 60.0  # of tests that hang otherwise

Curve = dict[int, list[float]]
"""The values of one number by step. A step that was written twice has two values."""


@dataclass(frozen=True)
class Kind:
    """A kind of sink: its section of the run file, and a function that reads a curve back."""

    name: str
    section: dict[str, Any]
    curve: Callable[[Path, str], Curve]
    environment: dict[str, str] = field(default_factory=dict)


def tensorboard_curve(folder: Path, name: str) -> Curve:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}, purge_orphaned_data=False)
    events.Reload()
    return by_step((item.step, item.value) for item in events.Scalars(name))


def mlflow_curve(folder: Path, name: str) -> Curve:
    from mlflow import MlflowClient

    client = MlflowClient(f"file://{folder}/mlruns")
    experiment = client.get_experiment_by_name("specrl")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    return by_step((item.step, item.value) for item in client.get_metric_history(run.info.run_id, name))


def wandb_curve(folder: Path, name: str) -> Curve:
    import json

    from wandb.proto import wandb_internal_pb2

    axis = "validation/version" if name.startswith("validation/") else "step"
    rows = []
    files = sorted((folder / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{RUN_ID}.wandb"}, "`wandb sync` joins them into one run"
    for file in files:
        for data in wandb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                rows.append(
                    {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                )
    return by_step((row[axis], row[name]) for row in rows if name in row)


def wandb_records(data: bytes) -> Iterator[bytes]:
    """W&B's files are LevelDB logs behind a header of 7 bytes: blocks of 32 KiB, records of crc, length and type."""
    place = 7
    part = b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            yield part
            part = b""


def by_step(pairs: Iterator[tuple[int, float]]) -> Curve:
    found: Curve = defaultdict(list)
    for step, value in pairs:
        found[int(step)].append(value)
    return dict(found)


KINDS = [
    Kind("tensorboard", {}, tensorboard_curve),
    Kind("wandb", {"mode": "Offline"}, wandb_curve),
    Kind("mlflow", {}, mlflow_curve, {"MLFLOW_ALLOW_FILE_STORE": "true"}),
]


@pytest.fixture(params=KINDS, ids=[kind.name for kind in KINDS])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kind:
    found: Kind = request.param
    if find_spec(found.name) is None:
        SINKS.skip(f"{found.name} is not installed")
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    return found


def a_sink_run(folder: Path, **sinks: dict[str, Any]) -> SinkRun:
    return SinkRun(parse_spec(a_run(folder, telemetry={"sinks": sinks})), folder, RUN_ID)


def reports(*steps: int) -> list[StepReport]:
    return [a_step(step, reward=step / 8) for step in steps]


def validations(*versions: int) -> list[ValidationReport]:
    return [ValidationReport(policy_version=v, reward=v / 16, problems=4, seconds=1.0) for v in versions]


def opened(kind: Kind, folder: Path) -> ReportSink:
    return find_openers(a_sink_run(folder, **{kind.name: kind.section}))[kind.name]()


def follow(kind: Kind, folder: Path, phase: Phase = Phase.FINISHED) -> None:
    """Run a follower from its start until it has sent everything in the files, as one coordinator process does."""
    run = a_sink_run(folder, **{kind.name: kind.section})
    follower = SinkFollower(kind.name, run, find_openers(run)[kind.name], look_s=0.01)
    follower.start()
    follower.request_end(phase)
    follower.join(END_S)


# -- every sink -------------------------------------------------------------------------------------------------------


def test_every_report_arrives_once_also_over_a_restart(kind: Kind, tmp_path: Path) -> None:
    files = ReportFiles(tmp_path)
    files.append_steps(reports(1, 2, 3))
    files.append_validations(validations(0, 2))
    follow(kind, tmp_path, Phase.STOPPED)
    files.append_steps(reports(1, 2, 3, 4, 5))
    files.append_validations(validations(0, 2, 4))
    follow(kind, tmp_path)
    assert kind.curve(tmp_path, "reward") == {step: [step / 8] for step in (1, 2, 3, 4, 5)}
    assert kind.curve(tmp_path, "phases/generation") == {step: [4.0] for step in (1, 2, 3, 4, 5)}
    assert kind.curve(tmp_path, "validation/reward") == {version: [version / 16] for version in (0, 2, 4)}


def test_an_abandoned_sink_knows_its_progress(kind: Kind, tmp_path: Path) -> None:
    first = opened(kind, tmp_path)
    assert first.read_progress() == SinkProgress()
    for report in reports(1, 2):
        first.add_step(report)
    first.flush()
    for validation in validations(0):
        first.add_validation(validation)
    first.flush()
    first.close(None)
    again = opened(kind, tmp_path)
    assert again.read_progress() == SinkProgress(step=2, version=0)
    again.close(Phase.FINISHED)


def test_mlflow_has_the_run_file_and_the_final_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SINKS.require()
    mlflow = import_module("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    client = mlflow.MlflowClient()
    ReportFiles(tmp_path).append_steps(reports(1))
    for phase, status in ((Phase.STOPPED, "KILLED"), (Phase.FAILED, "FAILED"), (Phase.FINISHED, "FINISHED")):
        follow(KINDS[2], tmp_path, phase)
        (run,) = client.search_runs([client.get_experiment_by_name("specrl").experiment_id])
        assert run.info.status == status
    assert run.data.params["schedule.promptsPerStep"] == "2"
    assert run.data.tags["specrl.run"] == RUN_ID


def test_a_flattened_step_has_all_numbers_and_no_text() -> None:
    found = flatten_step(a_step(3, failed={"g1": "secret words"}, reward=None, weight_sync={"pause": 0.5}))
    assert found["exposed_generation_share"] == 0.4
    assert found["accepted_per_position/1"] == 0.7
    assert found["policy_lags/0"] == 2.0
    assert found["weight_sync/pause"] == 0.5
    assert "reward" not in found
    assert all(isinstance(value, float) for value in found.values())


# -- the follower -----------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """A sink in memory that survives reopening and fails at chosen steps."""

    steps: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    """Steps at which it fails once."""
    closed: list[Phase | None] = field(default_factory=list)
    awaited: int = 0
    """The step that sets `has_awaited`."""
    has_awaited: threading.Event = field(default_factory=threading.Event)

    def read_progress(self) -> SinkProgress:
        return SinkProgress(max(self.steps, default=0))

    def add_step(self, report: StepReport) -> None:
        if report.step in self.failures:
            self.failures.remove(report.step)
            raise ConnectionError("away")
        self.steps.append(report.step)
        if report.step == self.awaited:
            self.has_awaited.set()

    def add_validation(self, report: ValidationReport) -> None: ...

    def flush(self) -> None: ...

    def close(self, phase: Phase | None) -> None:
        self.closed.append(phase)


def metric(name: str, sink: str) -> float:
    return REGISTRY.get_sample_value(f"specrl_coordinator_sink_{name}", {"rljob": "tiny", "sink": sink}) or 0.0


def test_a_sink_that_failed_gets_the_rest_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "FIRST_PAUSE_S", 0.001)
    ReportFiles(tmp_path).append_steps(reports(1, 2, 3, 4))
    memory = Memory(failures=[2, 2, 4], awaited=4)
    before = metric("failures_total", "one")
    started = SinkFollower("one", a_sink_run(tmp_path), lambda: memory, look_s=0.001)
    with capture_logs() as logged:
        started.start()
        assert memory.has_awaited.wait(END_S)
        started.request_end(Phase.FINISHED)
        started.join(END_S)
    assert memory.steps == [1, 2, 3, 4]
    assert memory.closed == [None, None, None, Phase.FINISHED]
    assert metric("failures_total", "one") - before == 3
    assert metric("step", "one") == 4
    lost = [line for line in logged if line["event"] == "sink_lost"]
    assert 1 <= len(lost) <= 3
    assert [line["event"] for line in logged].count("sink_recovered") == len(lost), "once per recovery"


def test_a_sink_that_hangs_blocks_neither_the_files_nor_the_end(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path)
    hangs = threading.Event()
    freed = threading.Event()
    files.append_steps(reports(1))

    class Hanging(Memory):
        def add_step(self, report: StepReport) -> None:
            hangs.set()
            freed.wait()
            super().add_step(report)

    memory = Hanging()
    started = SinkFollower("two", a_sink_run(tmp_path), lambda: memory, look_s=0.001)
    with capture_logs() as logged:
        started.start()
        assert hangs.wait(END_S)
        files.append_steps(reports(1, 2, 3))
        started.request_end(Phase.FINISHED)
        started.join(0.01)
        assert [line["event"] for line in logged] == ["sink_abandoned"]
    freed.set()
    started.join(END_S)
    assert memory.steps == [1, 2, 3], "a sink that is waited for gets everything"


def test_an_incomplete_line_is_not_read_until_it_ends(tmp_path: Path) -> None:
    memory = Memory()
    lines = [report.model_dump_json(by_alias=True) for report in reports(1, 2)]
    (tmp_path / "metrics.jsonl").write_text(f"{lines[0]}\nnonsense\n{lines[1][:40]}")
    started = SinkFollower("three", a_sink_run(tmp_path), lambda: memory)
    started.start()
    started.request_end(Phase.STOPPED)
    started.join(END_S)
    assert memory.steps == [1]
    (tmp_path / "metrics.jsonl").write_text(f"{lines[0]}\nnonsense\n{lines[1]}\n")
    again = SinkFollower("three", a_sink_run(tmp_path), lambda: memory)
    again.start()
    again.request_end(Phase.FINISHED)
    again.join(END_S)
    assert memory.steps == [1, 2]


# -- preflight --------------------------------------------------------------------------------------------------------


def test_a_sink_without_its_package_is_refused_with_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrl.coordinator.preflight.find_spec", lambda name: None)
    tensorboard, wandb = find_sink_problems(a_sink_run(tmp_path, tensorboard={}, wandb={"mode": "Offline"}).spec)
    assert (tensorboard.path, wandb.path) == ("telemetry.sinks.tensorboard", "telemetry.sinks.wandb")
    assert "run `make sinks` in a clone, or install the extra `wandb` (docs/install.md)" in str(wandb)
    assert not list(find_sink_problems(a_sink_run(tmp_path).spec))


def test_a_sink_without_its_server_or_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrl.coordinator.preflight.find_spec", lambda name: name)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    run = a_sink_run(tmp_path, wandb={}, mlflow={})
    assert len(list(find_sink_problems(run.spec))) == 2
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert not list(find_sink_problems(run.spec))
