"""Every file that is read, cut short, changed, or holding another thing: an error in words, or done without.

`READERS` has one entry for each kind of file, with a sound file of that kind. What a reader may raise is a SpecrlError;
what it may not is anything else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.certificates import Authority
from tests.integration.border.fuzzing import fuzz
from tests.integration.trainer.runs import a_batch
from tests.rljob_cases import a_job
from tests.run_files import a_model_folder, a_run
from tests.stand_ins.trainer_backend import StandInBackend
from tests.unit.report.runs import a_folder

from specrl.coordinator.calibration import Calibration, EngineStep, TrainedStages
from specrl.coordinator.checked_prompts import read_decision
from specrl.coordinator.report import StageSeconds
from specrl.coordinator.report_files import ReportFiles
from specrl.coordinator.sinks.contract import Received
from specrl.coordinator.sinks.follower import tails
from specrl.coordinator.store import claim_for
from specrl.coordinator.store.sqlite_store import SqliteStore
from specrl.drafting import formats
from specrl.drafting.head import load_head, write_untrained
from specrl.drafting.policy_config import PolicyConfig, read_policy_config
from specrl.errors import SpecrlError, StoreFailed, StoreInvalid
from specrl.generation.draft_length import StepCosts
from specrl.generation.vllm_backend import checkpoint as engine_checkpoint
from specrl.generation.vllm_backend import drafting
from specrl.launcher import reports
from specrl.launcher.model_folder import read_model_folder
from specrl.launcher.run_directory import RunDirectory
from specrl.prompts.sources import open_source
from specrl.prompts.templates import PromptTemplate
from specrl.records import GradedRollout, Group, Prompt, Reward, StreamPlace, TrainerStatus, wire
from specrl.report import reading
from specrl.rewards.reference_cache import read_refusals
from specrl.rpc import tls
from specrl.simulator.measured import MeasuredCosts, read_calibration
from specrl.simulator.models import read_shape
from specrl.simulator.scenario_file import find, parse, read_mapping
from specrl.spec import load_spec
from specrl.spec.data import FileSource, OnBadLine, Prompts, PromptSource
from specrl.spec.generation import Eagle3
from specrl.trainer import checkpoints, checksums
from specrl.trainer.megatron_backend.checkpoint import State, read_state


@dataclass(frozen=True)
class Reader:
    """A kind of file: how a sound one is made in a folder, and what reads it there.

    is_json: it may be damaged as a JSON value, too. is_done_without: reading it never fails.
    """

    write: Callable[[Path], Path]
    read: Callable[[Path], object]
    is_json: bool = False
    is_done_without: bool = False
    examples: int = 60


def _written(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _run_file(folder: Path) -> Path:
    (folder / "run.yaml").write_text(yaml.safe_dump(a_run(folder)))
    return folder / "run.yaml"


def _in_run(name: str) -> Callable[[Path], Path]:
    """A file of a run of one step, as a report is made of it."""
    row = {"mechanism": "eagle3:3", "batch": 8, "speed": 1.4, "speedLow": 1.2, "speedHigh": 1.5}

    def write(folder: Path) -> Path:
        shutil.copytree(a_folder(folder / "runs").path, folder, dirs_exist_ok=True)
        (folder / "comparison.json").write_text(json.dumps([row]))
        return folder / name

    return write


def _in_model(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        shutil.rmtree(folder / "model", ignore_errors=True)
        a_model_folder(folder / "model", rms_norm_eps=1e-6, rope_theta=1e6, head_dim=16, tie_word_embeddings=True)
        index = {"weight_map": {"model.embed_tokens.weight": "model.safetensors"}}
        (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder / "model" / name

    return write


def _policy(folder: Path) -> PolicyConfig:
    return PolicyConfig(folder, 264, 64, 128, 2, 6, 2, 16, 512, 1e-6, 1e6, True)


def _in_head(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        _in_model("config.json")(folder)
        shutil.rmtree(folder / "head", ignore_errors=True)
        write_untrained(folder / "head", folder / "model", Eagle3(), 0)
        return folder / "head" / name

    return write


def _scenario_file(folder: Path) -> Path:
    return Path(shutil.copy(find("paper-8b-zero-sync"), folder / "scenario.yaml"))


def _calibration() -> bytes:
    steps = [
        EngineStep(live=live, draft_tokens=k, context=80, seconds=0.01 + 0.001 * live, steps=9)
        for live in (1, 8)
        for k in (0, 3)
    ]
    stages = StageSeconds(data=0.1, prepare=0.3, generation=1, logprob=0.5, train=2)
    trained = TrainedStages(step=1, stages=stages, rollouts=8, tokens=900, load_seconds=0.1)
    found = Calibration(run="a", hardware="b", engine_steps=tuple(steps), acceptance=(0.7,), steps=(trained,))
    return found.model_dump_json(by_alias=True).encode()


def _take_calibration(file: Path) -> object:
    return MeasuredCosts(read_calibration(file), parse(read_mapping(find("paper-8b-zero-sync"))))


def _parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a", "b"], "answer": ["1", "2"]}), folder / "data.parquet")
    return folder / "data.parquet"


def _read_source(kind: str, on_bad_line: OnBadLine = OnBadLine.FAIL) -> Callable[[Path], object]:
    return lambda file: open_source(PromptSource(**{kind: FileSource(path=str(file), on_bad_line=on_bad_line)}))


def _checksums(folder: Path) -> Path:
    (folder / "state.json").write_text("{}")
    checksums.write(folder, {"state.json": checksums.checksum(folder / "state.json")})
    return folder / checksums.FILE


def _step_answer(folder: Path) -> Path:
    """Of a trainer that has trained and saved step 1."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    backend = StandInBackend(32)
    backend.load(None)
    metrics = backend.train_step(a_batch(1, 32))
    backend.save(checkpoints.directory(folder, 1)).result()
    from specrl.api.v1 import trainer_pb2

    reply = trainer_pb2.TrainStepReply(policy_version=1, metrics=wire.train_metrics_to_wire(metrics))
    checkpoints.metrics_file(folder, 1).write_bytes(reply.SerializeToString())
    return checkpoints.metrics_file(folder, 1)


def _read_step_answer(file: Path) -> TrainerStatus:
    import asyncio

    from tests.integration.border.worlds import a_border_spec

    from specrl.trainer.service import TrainerService

    async def load() -> TrainerStatus:
        backend = StandInBackend(32)
        service = TrainerService(backend, a_border_spec(file.parent), file.parent.parent, "127.0.0.1")
        await service.load()
        await service.close()
        return backend.status()

    return asyncio.run(load())


def _costs() -> StepCosts:
    costs = StepCosts((1, 2), (0, 1, 2))
    costs.fill({0: [0.1, 0.2], 2: [0.3, 0.4]})
    return costs


def _take_costs(file: Path) -> object:
    found = drafting._read(file)
    costs = _costs()
    if found is not None and costs.take_json(found):
        assert all(0 < seconds < float("inf") for row in costs.seconds.values() for seconds in row)
    return costs


def _store(folder: Path) -> Path:
    for file in folder.glob("store.db*"):
        file.unlink()
    store = SqliteStore(folder / "store.db")
    store.set_fact("a", {"b": 1})
    store.put_batch(1, wire.batch_to_bytes(a_batch(1, 32, rollouts=1)))
    store.finish_step(1, {"step": 1})
    store.close()
    return folder / "store.db"


def _read_store(file: Path) -> object:
    for leftover in file.parent.glob("store.db-*"):
        leftover.unlink()
    store = SqliteStore(file)
    try:
        return store.facts(), store.trained(), store.reports(), store.batches(), store.rollouts(), store.describe()
    finally:
        store.close()


_ITEM = a_batch(1, 32, rollouts=1).rollouts[0]
_GRADED = wire.graded_to_bytes(GradedRollout(_ITEM.rollout, Reward(1.0)))
_GROUP = wire.group_to_bytes(Group("g0", Prompt("p0", 0, (3, 4), "a", "1"), 1, (_ITEM.rollout,), (Reward(1.0),)))
_PLACE = StreamPlace(12, (14, 15), 64, "0f3a")
_VALIDATION = b'{"policyVersion": 0, "reward": 0.5, "problems": 4, "seconds": 1.0}\n'
_REPORT = json.dumps({"step": 1, "policyVersion": 1}).encode() + b"\n"


def _certificate(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for file, content in Authority(folder / "authority").secret(["trainer.run"]).items():
            (folder / file).write_bytes(content)
        return folder / name

    return write


def _decision(file: Path) -> object:
    return read_decision(file.parent, "digest")


READERS = {
    "decision on references": Reader(
        _written("references.json", b'{"digest": "digest", "refused": {"key": "why"}}'),
        _decision,
        is_json=True,
        is_done_without=True,
    ),
    "findings on references": Reader(
        _written("findings.jsonl", b'["key", "why"]\n' * 3), read_refusals, is_done_without=True
    ),
    "run file": Reader(_run_file, load_spec, examples=150),
    "RLJob": Reader(_written("job.yaml", yaml.safe_dump(a_job()).encode()), load_spec, examples=150),
    "problems, JSONL": Reader(_written("data.jsonl", b'{"question": "a", "answer": "1"}\n' * 3), _read_source("jsonl")),
    "problems, JSONL, skipping": Reader(
        _written("data.jsonl", b'{"question": "a", "answer": "1"}\n' * 3), _read_source("jsonl", OnBadLine.SKIP)
    ),
    "problems, Parquet": Reader(_parquet, _read_source("parquet"), examples=150),
    "config, launcher": Reader(_in_model("config.json"), lambda f: _launcher_model(f.parent), True),
    "tokenizer, launcher": Reader(_in_model("tokenizer.json"), lambda f: _launcher_model(f.parent), True, examples=30),
    "index, launcher": Reader(_in_model("model.safetensors.index.json"), lambda f: _launcher_model(f.parent), True),
    "weights, launcher": Reader(_in_model("model.safetensors"), lambda f: _launcher_model(f.parent)),
    "config, engine": Reader(_in_model("config.json"), lambda f: _engine_model(f.parent), True),
    "index, engine": Reader(_in_model("model.safetensors.index.json"), lambda f: _engine_model(f.parent), True),
    "weights, engine": Reader(_in_model("model.safetensors"), lambda f: _engine_model(f.parent)),
    "config, trainer": Reader(_in_model("config.json"), lambda f: read_policy_config(f.parent), True, examples=150),
    "tokenizer, coordinator": Reader(_in_model("tokenizer.json"), lambda f: _tokenized(f.parent), True, examples=20),
    "drafter's config": Reader(_in_head("config.json"), lambda f: load_head(f.parent, _policy(f.parent)), True),
    "drafter's weights": Reader(_in_head("model.safetensors"), lambda f: load_head(f.parent, _policy(f.parent))),
    "drafter's config, exported": Reader(_in_head("config.json"), lambda f: formats.named_policy(f.parent), True),
    "checkpoint's state": Reader(
        _written("state.json", json.dumps(asdict(State(3, True, True, 3, 0, _PLACE))).encode()),
        lambda f: read_state(f.parent),
        True,
    ),
    "checkpoint's place in the data": Reader(
        _written("state.json", json.dumps({"stream": asdict(_PLACE)}).encode()),
        lambda f: checkpoints.stream_in(f.parent),
        True,
    ),
    "checkpoint's checksums": Reader(_checksums, lambda f: checksums.damages(f.parent), True),
    "step's answer": Reader(_step_answer, _read_step_answer, is_done_without=True, examples=30),
    "scenario": Reader(_scenario_file, lambda f: parse(read_mapping(f)), examples=100),
    "calibration": Reader(_written("calibration.json", _calibration()), _take_calibration, True, examples=150),
    "config, simulator": Reader(_in_model("config.json"), lambda f: read_shape(f.parent), True, examples=100),
    "draft costs": Reader(
        _written("costs.json", json.dumps(_costs().as_json()).encode()),
        _take_costs,
        True,
        is_done_without=True,
    ),
    "status": Reader(
        _written("status.json", b'{"run": "a", "phase": "training", "step": 1, "steps": 2}'),
        lambda f: reports.stored_status(RunDirectory(f.parent)),
        True,
        is_done_without=True,
    ),
    "endpoints": Reader(
        _written("endpoints.json", b'{"grpc": "127.0.0.1:1", "http": "http://127.0.0.1:2"}'),
        lambda f: reports.http_address(RunDirectory(f.parent)),
        True,
        is_done_without=True,
    ),
    "metrics, launcher": Reader(
        _written("metrics.jsonl", _REPORT * 2),
        lambda f: reports.stored_steps(RunDirectory(f.parent)),
        True,
        is_done_without=True,
    ),
    "metrics, coordinator": Reader(
        _written("metrics.jsonl", _REPORT * 2), lambda f: ReportFiles(f.parent).before(9), True, is_done_without=True
    ),
    "validations": Reader(_written("validations.jsonl", _VALIDATION * 2), lambda f: ReportFiles(f.parent), True, True),
    "metrics, sinks": Reader(
        _written("metrics.jsonl", _REPORT * 2), lambda f: list(tails(f.parent, Received())[0].new()), True, True
    ),
    "origin": Reader(_in_run("origin.json"), lambda f: reading.read(RunDirectory(f.parent)), True, True, 20),
    "comparison": Reader(_in_run("comparison.json"), lambda f: reading.read(RunDirectory(f.parent)), True, True, 20),
    "certificate": Reader(_certificate("tls.crt"), lambda f: tls.read(f.parent)),
    "certificate's key": Reader(_certificate("tls.key"), lambda f: tls.read(f.parent)),
    "authorities": Reader(_certificate("ca.crt"), lambda f: tls.read(f.parent)),
    "store": Reader(_store, _read_store, examples=80),
    "store's id": Reader(_written("store-id", b"a" * 32 + b"\n"), lambda f: claim_for(f.parent)),
    "stored rollout": Reader(_written("row", _GRADED), lambda f: wire.graded_from_bytes(f.read_bytes())),
    "stored group": Reader(_written("row", _GROUP), lambda f: wire.group_from_bytes(f.read_bytes())),
    "stored batch": Reader(
        _written("row", wire.batch_to_bytes(a_batch(1, 32, rollouts=1))),
        lambda f: wire.batch_from_bytes(f.read_bytes()),
    ),
}


def _launcher_model(folder: Path) -> object:
    model = read_model_folder(folder, "model.path")
    return model.number("vocab_size"), model.config.get("architectures")


def _engine_model(folder: Path) -> object:
    model = engine_checkpoint.read_policy(folder, 128)
    return model.is_tied, model.weight_bytes("float32")


def _tokenized(folder: Path) -> object:
    prompts = Prompts(source=PromptSource(jsonl=FileSource(path="none")))
    return PromptTemplate(prompts, str(folder)).tokenize("1 + 1?")


_ABSURD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-1, 0, 1, 1 << 70, -1.5, float("nan"), float("inf"), "", "x", "\0", [], {}, [[]], {"a": {}}]),
    st.text(max_size=4),
)


@st.composite
def _one_value_wrong(draw: st.DrawFn, value: Any) -> Any:
    """The JSON value with another one in one place."""
    if isinstance(value, dict) and value and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 5)) == 0:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: draw(_one_value_wrong(value[key]))}
    if isinstance(value, list) and value and draw(st.integers(0, 4)):
        place = draw(st.integers(0, min(len(value) - 1, 50)))
        return [*value[:place], draw(_one_value_wrong(value[place])), *value[place + 1 :]]
    return draw(_ABSURD)


def _damaged(reader: Reader, sound: bytes) -> st.SearchStrategy[bytes]:
    last = max(0, len(sound) - 1)
    ways = [
        st.binary(max_size=64),
        st.sampled_from([b"", b"[" * 100_000, b"{}", b"null", b"\xff\xfe", b"1" * 5000, b"\0" * 200]),
        st.integers(0, last).map(lambda end: sound[:end]),
        st.tuples(st.integers(0, last), st.integers(0, 255)).map(
            lambda change: sound[: change[0]] + bytes([change[1]]) + sound[change[0] + 1 :]
        ),
        st.tuples(st.integers(0, last), st.binary(min_size=1, max_size=4)).map(
            lambda insertion: sound[: insertion[0]] + insertion[1] + sound[insertion[0] :]
        ),
        st.just(sound + sound),
    ]
    if reader.is_json:
        value = json.loads(sound.splitlines()[0] if b"\n{" in sound else sound)
        ways += 2 * [_one_value_wrong(value).map(lambda wrong: json.dumps(wrong).encode())]
    if sound.startswith(b"canary:") or b"\nprompts:" in sound:
        ways += 2 * [_one_value_wrong(yaml.safe_load(sound)).map(lambda wrong: yaml.safe_dump(wrong).encode())]
        ways.append(st.sampled_from([b"a: 2020-13-45\n", b"&a [*a]\n", b"a: &a [*a]\n", b"!!python/name:os.system\n"]))
    return st.one_of(ways)


@pytest.mark.parametrize("kind", READERS)
def test_sound_file_is_read(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind]
    reader.read(reader.write(tmp_path))


@pytest.mark.parametrize("kind", READERS)
def test_damaged_file_is_refused_in_words_or_done_without(kind: str, tmp_path: Path) -> None:
    reader = READERS[kind]
    file = reader.write(tmp_path)
    sound = file.read_bytes()
    refused: list[str] = []

    @fuzz(reader.examples)
    @given(_damaged(reader, sound))
    def read(content: bytes) -> None:
        file.write_bytes(content)
        try:
            reader.read(file)
        except SpecrlError as error:
            words = str(error)
        else:
            return
        assert not reader.is_done_without, words
        assert len(words.split()) > 4, f"{kind} must be refused in words, got {words!r}"
        refused.append(words)

    read()
    assert refused or reader.is_done_without, "nothing was refused: what was tried?"
    file.write_bytes(sound)
    reader.read(file)


def test_store_that_was_damaged_under_its_coordinator_is_refused(tmp_path: Path) -> None:
    file = _store(tmp_path)
    file.write_bytes(file.read_bytes()[:4096])
    with pytest.raises((StoreFailed, StoreInvalid)):
        _read_store(file)


def test_every_reader_in_the_services_is_fuzzed() -> None:
    """A module that begins to read files must be named here, with the kinds of `READERS` that cover it."""
    import re

    services = Path(__file__).parents[3] / "services" / "specrl"
    reads = re.compile(r"read_text\(|read_bytes\(|read_object\(|\.open\(\"rb?\"|load_file\(|safe_open\(|ParquetFile\(")
    found = {
        str(path.relative_to(services))
        for path in services.rglob("*.py")
        if reads.search(path.read_text(encoding="utf-8")) and "sandbox" not in path.parts and path.name != "files.py"
    }
    assert found == COVERED.keys(), "add what reads a file, with the reader that is fuzzed, or the reason for none"


COVERED = {
    "cli/demo.py": "its own comparison's result and log, written a moment before",
    "version.py": "written when the wheel was built; anything but ASCII is no commit",
    "coordinator/checked_prompts.py": "decision on references",
    "coordinator/origin.py": "the kernel's own",
    "coordinator/report_files.py": "metrics, coordinator; validations",
    "coordinator/rljob.py": "the pod's token, which may be any text",
    "coordinator/sinks/wandb.py": "its own, replaced in one piece; anything else is none",
    "coordinator/store/__init__.py": "store's id",
    "coordinator/store/redis_server.py": "a secret, which may be any text",
    "drafting/formats.py": "drafter's config, exported; imports are in tests/unit/drafting/test_formats.py",
    "drafting/head.py": "drafter's config, drafter's weights",
    "drafting/policy_config.py": "config, trainer",
    "generation/vllm_backend/checkpoint.py": "config, engine; index, engine; weights, engine",
    "generation/vllm_backend/drafting.py": "draft costs",
    "launcher/model_folder.py": "config, launcher; tokenizer, launcher; index, launcher; weights, launcher",
    "machine.py": "the kernel's own; tests/unit/test_machine.py",
    "coordinator/run_token.py": "the token, which may be any text",
    "launcher/reports.py": "status, endpoints, metrics, launcher",
    "launcher/warm_up.py": "what it was asked for, which is compared; the end of a log",
    "launcher/supervisor.py": "the end of a log, which may be any bytes",
    "prompts/sources.py": "problems",
    "report/reading.py": "origin, comparison",
    "rewards/reference_cache.py": "findings on references",
    "rpc/tls.py": "certificate, certificate's key, authorities",
    "simulator/measured.py": "calibration",
    "simulator/models.py": "config, simulator",
    "spec/yaml_input.py": "run file, RLJob, scenario",
    "tensor_files.py": "weights, launcher; weights, engine",
    "trainer/checkpoints.py": "checkpoint's place in the data",
    "trainer/megatron_backend/checkpoint.py": "checkpoint's state; its tensors: trainer/test_bad_disk.py",
    "trainer/checkpoint_export.py": "a checkpoint, whose checksums were compared before",
    "trainer/checksums.py": "checkpoint's checksums",
    "trainer/hf_folder.py": "the policy's config, which was read and copied before",
    "trainer/megatron_backend/hf_weights.py": "tests/integration/trainer/test_bad_disk.py",
    "seams/versions.py": "two files of the package itself",
    "trainer/megatron_backend/initialisation.py": "tests/integration/trainer/test_megatron_backend.py",
    "trainer/service.py": "step's answer",
    "trainer/sft.py": "its own curves, of which lines that cannot be read are dropped",
    "weights/staging.py": "memory of a rank of the same node, whose tensors' checksums were compared",
}
