"""Every file that is read, cut short, changed, or holding another thing: an error in words, or done without.

`READERS` has one entry for each kind of file, with a sound file of that kind. What a reader may raise is a SpecrlError;
what it may not is anything else.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from tests.certificates import Authority
from tests.gguf_writing import make_model, write_gguf
from tests.integration.border.fuzzing import fuzz
from tests.integration.trainer.runs import a_batch
from tests.rljob_cases import a_job
from tests.run_files import a_model_folder, a_run
from tests.stand_ins.trainer_backend import StandInBackend
from tests.unit.report.runs import a_folder

from specrl.cli.init import read_columns
from specrl.cli.runs.rollouts import choose_samples
from specrl.coordinator.ledger import make_claim
from specrl.coordinator.ledger.sqlite_store import SqliteStore
from specrl.coordinator.observe.report_files import ReportFiles
from specrl.coordinator.observe.sinks.follower import ReportTail
from specrl.coordinator.observe.timeline import Timeline
from specrl.coordinator.rollouts.checked_prompts import read_decision
from specrl.drafting.eagle3 import head_formats
from specrl.drafting.eagle3.head import load_head, write_untrained_head
from specrl.errors import FetchFailed, SpecrlError, StoreFailed, StoreInvalid
from specrl.formats.calibration import EngineStep, RunCalibration, TrainedPhases
from specrl.formats.reports import PhaseSeconds, StepReport
from specrl.formats.rollout_samples import RolloutSample
from specrl.generation.draft_lengths.step_costs import StepCosts
from specrl.generation.vllm_backend import draft_length_client
from specrl.hub import FetchedSource, read_sources, write_sources
from specrl.hub.client import Listing, Repository, RepositoryKind, list_repository
from specrl.hub.data_sets import DataSetWish, find_files, read_card
from specrl.hub.folders import FolderWish, fetch_folder
from specrl.hub.models import ModelWish, fetch_model
from specrl.launcher import stored_reports
from specrl.launcher.run_directory import RunDirectory
from specrl.models.end_tokens import find_end_tokens
from specrl.models.gguf_files.conversion import read_gguf, write_small_files, write_weights
from specrl.models.model_folder import ModelFolder, read_model_folder
from specrl.models.policy_config import PolicyConfig, read_policy_config
from specrl.models.sampling_defaults import list_sampling_notices
from specrl.prompts.columns import DatasetProblem
from specrl.prompts.sources import open_problem_source
from specrl.prompts.templates import PromptTemplate
from specrl.records import GradedRollout, Reward, StreamPlace, TrainerStatus, wire
from specrl.report import reading
from specrl.rewards.checks.reference_cache import read_refusals
from specrl.rpc import tls
from specrl.simulator.costs.measured import MeasuredCosts, read_calibration
from specrl.simulator.scenarios.models import read_shape
from specrl.simulator.scenarios.scenario_file import find_scenario, parse_scenario, read_mapping
from specrl.spec import load_spec, parse_spec
from specrl.spec.data import FieldMapping, FileSource, HubSource, OnBadLine, PromptFormat, Prompts, PromptSource
from specrl.spec.generation import Eagle3
from specrl.trainer.checkpointing import checkpoints, checksums
from specrl.trainer.megatron_backend.checkpoint import read_state
from specrl.trainer.megatron_backend.training.models import CheckpointState


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


def _chat_template(folder: Path) -> Path:
    file = _in_model("chat_template.jinja")(folder)
    file.write_text("{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}")
    return file


def _policy(folder: Path) -> PolicyConfig:
    return PolicyConfig(folder, 264, 64, 128, 2, 6, 2, 16, 512, 1e-6, 1e6, True)


def _in_head(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        _in_model("config.json")(folder)
        shutil.rmtree(folder / "head", ignore_errors=True)
        write_untrained_head(folder / "head", folder / "model", Eagle3(), 0)
        return folder / "head" / name

    return write


def _scenario_file(folder: Path) -> Path:
    return Path(shutil.copy(find_scenario("paper-8b-zero-sync"), folder / "scenario.yaml"))


def _calibration() -> bytes:
    steps = [
        EngineStep(live=live, draft_tokens=k, context=80, seconds=0.01 + 0.001 * live, steps=9)
        for live in (1, 8)
        for k in (0, 3)
    ]
    phases = PhaseSeconds(data=0.1, prepare=0.3, generation=1, logprob=0.5, train=2)
    trained = TrainedPhases(step=1, phases=phases, rollouts=8, tokens=900, load_seconds=0.1)
    found = RunCalibration(run="a", hardware="b", engine_steps=tuple(steps), acceptance=(0.7,), steps=(trained,))
    return found.model_dump_json(by_alias=True).encode()


def _take_calibration(file: Path) -> object:
    return MeasuredCosts(read_calibration(file), parse_scenario(read_mapping(find_scenario("paper-8b-zero-sync"))))


def _parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a", "b"], "answer": ["1", "2"]}), folder / "data.parquet")
    return folder / "data.parquet"


def _read_source(kind: str, on_bad_line: OnBadLine = OnBadLine.FAIL) -> Callable[[Path], object]:
    return lambda file: open_problem_source(PromptSource(**{kind: FileSource(path=str(file), on_bad_line=on_bad_line)}))


def _read_data_set(file: Path) -> object:
    return open_problem_source(PromptSource(dataset=HubSource(name="team/data", files=(str(file),))))


_SHAPE = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
_TOKENIZER: dict[str, Any] = {
    "tokens": ["<unk>", "a", "b", "ab", "<e>", "\u2581", "c", "d"],
    "token_type": [2, 1, 1, 1, 3, 1, 1, 5],
    "eos_token_id": 4,
    "padding_token_id": None,
}


_COMMIT = "ab" * 20
_HUB_MODEL = Repository(RepositoryKind.MODEL, "team/tiny", _COMMIT, "model.path")
_CARD = b"---\nconfigs:\n- config_name: main\n  data_files: train.jsonl\n---\n# Data\n"


def _card(folder: Path) -> Path:
    made = Listing(_HUB_MODEL, _COMMIT, {}, folder)
    made.folder.mkdir(parents=True)
    (made.folder / "README.md").write_bytes(_CARD)
    return made.folder / "README.md"


def _read_card(file: Path) -> object:
    configs = read_card(Listing(_HUB_MODEL, _COMMIT, {}, file.parents[3]))
    wish = DataSetWish(_HUB_MODEL, split="train")
    with suppress(FetchFailed):  # what the damaged card asks for, which the repository does not have
        return find_files(wish, ["train.jsonl"], configs)
    return None


def _hub_config(folder: Path) -> Path:
    """Make a cache that has a model, with the listing of its commit."""
    made = Listing(_HUB_MODEL, _COMMIT, {}, folder)
    a_model_folder(made.folder)
    sizes = {path.name: path.stat().st_size for path in made.folder.iterdir()}
    listing = folder / "models--team--tiny" / "specrl" / f"{_COMMIT}.json"
    listing.parent.mkdir()
    listing.write_text(json.dumps({"commit": _COMMIT, "sizes": sizes}))
    return made.folder / "config.json"


def _fetch_again(file: Path) -> object:
    listing = file.parents[2] / "specrl" / f"{_COMMIT}.json"
    sizes = json.loads(listing.read_text())["sizes"] | {"config.json": file.stat().st_size}
    listing.write_text(json.dumps({"commit": _COMMIT, "sizes": sizes}))  # of its size, so that nothing is fetched
    return fetch_model(ModelWish(_HUB_MODEL), cache=file.parents[3])


_GGUF = make_model("qwen3", **_SHAPE).with_metadata(
    **{f"tokenizer__ggml__{key}": value for key, value in _TOKENIZER.items()}
)
_SPM_GGUF = _GGUF.with_metadata(tokenizer__ggml__model="llama", tokenizer__ggml__scores=[-float(it) for it in range(8)])


def _convert_gguf(file: Path) -> object:
    model = read_gguf(file, "model.path")
    folder = Path(mkdtemp(dir=file.parent))
    write_small_files(model, folder)
    write_weights(model, folder, lambda _count: None)
    shutil.rmtree(folder)
    return model


def _listing(folder: Path) -> Path:
    return _hub_config(folder).parents[2] / "specrl" / f"{_COMMIT}.json"


def _read_listing(file: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)  # a damaged listing is asked for again, from the hub
        return list_repository(_HUB_MODEL, file.parents[2]).find_missing(["config.json"])


def _fetch_record(folder: Path) -> Path:
    """Of a complete folder, so that no source is asked."""
    store = folder / "store"
    a_model_folder(store)
    (folder / "out").mkdir(exist_ok=True)
    fetch_folder(FolderWish(f"file://{store}", folder / "out"))
    return folder / "out" / ".fetch" / "source.json"


def _read_fetch_record(file: Path) -> object:
    out = file.parents[1]
    return fetch_folder(FolderWish(f"file://{out.parent}/store", out))


def _sources(folder: Path) -> Path:
    write_sources(
        folder, [FetchedSource(field="model.path", name="a/b", revision="main", commit=_COMMIT, folder="/hub/x")]
    )
    return folder / "sources.json"


def _checksums(folder: Path) -> Path:
    (folder / "state.json").write_text("{}")
    checksums.write_checksums(folder, {"state.json": checksums.checksum_file(folder / "state.json")})
    return folder / checksums.FILE


def _step_answer(folder: Path) -> Path:
    """Of a trainer that has trained and saved step 1."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    backend = StandInBackend(32)
    backend.load_model(None)
    metrics = backend.train_step(a_batch(1, 32))
    backend.save_checkpoint(checkpoints.step_directory(folder, 1)).result()
    from specrl.api.v1 import trainer_pb2

    reply = trainer_pb2.TrainPartsReply(policy_version=1, metrics=wire.train_metrics_to_wire(metrics))
    checkpoints.metrics_file(folder, 1).write_bytes(reply.SerializeToString())
    return checkpoints.metrics_file(folder, 1)


def _read_step_answer(file: Path) -> TrainerStatus:
    import asyncio

    from tests.integration.border.worlds import a_border_spec

    from specrl.trainer.service import TrainerService

    async def load() -> TrainerStatus:
        backend = StandInBackend(32)
        service = TrainerService(backend, a_border_spec(file.parent), file.parent.parent, "127.0.0.1")
        await service.load_model()
        await service.close()
        return backend.get_status()

    return asyncio.run(load())


def _costs() -> StepCosts:
    costs = StepCosts(2, (-1, 1, 2))
    costs.record_step(0, 1, -2.0)
    costs.record_try(0, 1, -1, [-3.0])
    return costs


def _take_costs(file: Path) -> object:
    found = draft_length_client._read_costs(file)
    costs = _costs()
    if found is not None and costs.load_json(found):
        for node in (0, 1):
            assert all(0 < cost < float("inf") for cost in costs.list_costs(node).values())
    return costs


def _store(folder: Path) -> Path:
    for file in folder.glob("store.db*"):
        file.unlink()
    store = SqliteStore(folder / "store.db")
    store.set_fact("a", {"b": 1})
    store.put_batch(1, wire.batch_to_outline(a_batch(1, 32, rollouts=1)))
    store.finish_step(1, {"step": 1})
    store.close()
    return folder / "store.db"


def _read_store(file: Path) -> object:
    for leftover in file.parent.glob("store.db-*"):
        leftover.unlink()
    store = SqliteStore(file)
    try:
        return (
            store.read_facts(),
            store.read_last_trained_step(),
            store.read_reports(),
            store.list_batch_steps(),
            store.read_rollouts(),
            store.describe(),
        )
    finally:
        store.close()


_ITEM = a_batch(1, 32, rollouts=1).rollouts[0]
_GRADED = wire.graded_to_bytes(GradedRollout(_ITEM.rollout, Reward(1.0)))
_PLACE = StreamPlace(12, 64, "0f3a")
_VALIDATION = b'{"policyVersion": 0, "reward": 0.5, "problems": 4, "seconds": 1.0}\n'
_SAMPLE = (
    RolloutSample(
        step=1,
        id="000001-00000-000-0",
        replica="gen-0",
        oldest_version=0,
        newest_version=0,
        tokens=1,
        seconds=0.5,
        finish_reason="stop",
        reward=1.0,
        rewards={"exact": 1.0},
        extracted="",
        reason="",
        prompt="a",
        completion="b",
    )
    .model_dump_json(by_alias=True)
    .encode()
    + b"\n"
)
_REPORT = json.dumps({"step": 1, "policyVersion": 1}).encode() + b"\n"


def _certificate(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for file, content in Authority(folder / "authority").secret(["trainer.run"]).items():
            (folder / file).write_bytes(content)
        return folder / name

    return write


def _decision(file: Path) -> object:
    return read_decision(file.parent, "digest")


_CHAT = {"chat": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], "by": {"answer": [1, 2.50]}}


def _read_messages(file: Path) -> object:
    """Read problems whose question is a list of messages and whose answer lies inside an object."""
    fields = FieldMapping(question="chat", answer="by.answer.-1")
    return open_problem_source(PromptSource(jsonl=FileSource(path=str(file), fields=fields)))


def _read_generation_config(file: Path) -> object:
    spec = parse_spec(a_run(file.parent))
    policy = ModelFolder(file.parent, "model.path", {"vocab_size": 9}, {}, None)
    return list(list_sampling_notices(spec, file.parent)), find_end_tokens(spec, policy)


READERS = {
    "timeline": Reader(
        _written("timeline.jsonl", b'{"step": 1, "beganS": 1.0, "endedS": 2.0, "bars": []}\n'),
        Timeline,
        is_json=True,
        is_done_without=True,
    ),
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
    "problems, messages": Reader(_written("data.jsonl", json.dumps(_CHAT).encode()), _read_messages),
    "generation config": Reader(
        _written("generation_config.json", b'{"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2]}'),
        _read_generation_config,
        is_done_without=True,
    ),
    "problems, Parquet": Reader(_parquet, _read_source("parquet"), examples=20),
    "data set, JSONL": Reader(_written("train.jsonl", b'{"question": "a", "answer": "1"}\n' * 3), _read_data_set),
    "data set, packed": Reader(
        _written("train.jsonl.gz", gzip.compress(b'{"question": "a", "answer": "1"}\n' * 3)), _read_data_set
    ),
    "data set, JSON": Reader(
        _written("train.json", b'[{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}]'), _read_data_set
    ),
    "data set, CSV": Reader(_written("train.csv", b'question,answer\n"a, b",1\nc,2\n'), _read_data_set, examples=20),
    "data set's card": Reader(_card, _read_card, is_done_without=True),
    "hub's listing": Reader(_listing, _read_listing, True, is_done_without=True),
    "fetched folder's record": Reader(_fetch_record, _read_fetch_record, True),
    "hub's model config": Reader(_hub_config, _fetch_again, True),
    "GGUF": Reader(lambda folder: write_gguf(_GGUF, folder / "a.gguf"), _convert_gguf, examples=150),
    "GGUF, SentencePiece": Reader(lambda folder: write_gguf(_SPM_GGUF, folder / "a.gguf"), _convert_gguf, examples=60),
    "sources": Reader(_sources, lambda file: read_sources(file.parent), True),
    "columns, JSONL": Reader(_written("data.jsonl", b'{"question": "a", "answer": "1"}\n' * 3), read_columns),
    "columns, Parquet": Reader(_parquet, read_columns, examples=8),
    "config": Reader(_in_model("config.json"), lambda f: _model(f.parent), True),
    "tokenizer": Reader(_in_model("tokenizer.json"), lambda f: _model(f.parent), True, examples=30),
    "index": Reader(_in_model("model.safetensors.index.json"), lambda f: _model(f.parent), True),
    "weights": Reader(_in_model("model.safetensors"), lambda f: _model(f.parent)),
    "config, trainer": Reader(_in_model("config.json"), lambda f: read_policy_config(f.parent), True, examples=150),
    "tokenizer, coordinator": Reader(_in_model("tokenizer.json"), lambda f: _tokenized(f.parent), True, examples=20),
    "chat template": Reader(_chat_template, lambda f: _render(f.parent), examples=10),
    "drafter's config": Reader(_in_head("config.json"), lambda f: load_head(f.parent, _policy(f.parent)), True),
    "drafter's weights": Reader(_in_head("model.safetensors"), lambda f: load_head(f.parent, _policy(f.parent))),
    "drafter's config, exported": Reader(
        _in_head("config.json"), lambda f: head_formats.derive_policy_config(f.parent), True
    ),
    "checkpoint's state": Reader(
        _written("state.json", json.dumps(asdict(CheckpointState(3, True, True, 3, 0, _PLACE))).encode()),
        lambda f: read_state(f.parent),
        True,
    ),
    "checkpoint's place in the data": Reader(
        _written("state.json", json.dumps({"stream": asdict(_PLACE)}).encode()),
        lambda f: checkpoints.read_stream_place(f.parent),
        True,
    ),
    "checkpoint's checksums": Reader(_checksums, lambda f: checksums.list_damages(f.parent), True),
    "step's answer": Reader(_step_answer, _read_step_answer, is_done_without=True, examples=30),
    "scenario": Reader(_scenario_file, lambda f: parse_scenario(read_mapping(f)), examples=100),
    "calibration": Reader(_written("calibration.json", _calibration()), _take_calibration, True, examples=150),
    "config, simulator": Reader(_in_model("config.json"), lambda f: read_shape(f.parent), True, examples=100),
    "draft costs": Reader(
        _written("costs.json", json.dumps(_costs().to_json()).encode()),
        _take_costs,
        True,
        is_done_without=True,
    ),
    "status": Reader(
        _written("status.json", b'{"run": "a", "phase": "training", "step": 1, "steps": 2}'),
        lambda f: stored_reports.read_stored_status(RunDirectory(f.parent)),
        True,
        is_done_without=True,
    ),
    "endpoints": Reader(
        _written("endpoints.json", b'{"grpc": "127.0.0.1:1", "http": "http://127.0.0.1:2"}'),
        lambda f: stored_reports.read_http_address(RunDirectory(f.parent)),
        True,
        is_done_without=True,
    ),
    "metrics, launcher": Reader(
        _written("metrics.jsonl", _REPORT * 2),
        lambda f: stored_reports.read_stored_steps(RunDirectory(f.parent)),
        True,
        is_done_without=True,
    ),
    "rollouts": Reader(
        _written("rollouts.jsonl", _SAMPLE * 2),
        lambda f: choose_samples(stored_reports.read_stored_rollouts(RunDirectory(f.parent)), 1, best_first=True),
        True,
        is_done_without=True,
    ),
    "metrics, coordinator": Reader(
        _written("metrics.jsonl", _REPORT * 2),
        lambda f: ReportFiles(f.parent).read_before(9),
        True,
        is_done_without=True,
    ),
    "validations": Reader(_written("validations.jsonl", _VALIDATION * 2), lambda f: ReportFiles(f.parent), True, True),
    "metrics, sinks": Reader(
        _written("metrics.jsonl", _REPORT * 2),
        lambda f: list(ReportTail(f, StepReport, 0).read_new()),
        True,
        True,
    ),
    "origin": Reader(_in_run("origin.json"), lambda f: reading.load_run(RunDirectory(f.parent)), True, True, 20),
    "comparison": Reader(
        _in_run("comparison.json"), lambda f: reading.load_run(RunDirectory(f.parent)), True, True, 20
    ),
    "certificate": Reader(_certificate("tls.crt"), lambda f: tls.read_certificates(f.parent)),
    "certificate's key": Reader(_certificate("tls.key"), lambda f: tls.read_certificates(f.parent)),
    "authorities": Reader(_certificate("ca.crt"), lambda f: tls.read_certificates(f.parent)),
    "store": Reader(_store, _read_store, examples=80),
    "store's id": Reader(_written("store-id", b"a" * 32 + b"\n"), lambda f: make_claim(f.parent)),
    "stored rollout": Reader(_written("row", _GRADED), lambda f: wire.graded_from_bytes(f.read_bytes())),
    "stored batch": Reader(
        _written("row", wire.batch_to_outline(a_batch(1, 32, rollouts=1))),
        lambda f: wire.batch_from_stored(f.read_bytes(), [_GRADED]),
    ),
}


def _model(folder: Path) -> object:
    model = read_model_folder(folder, "model.path")
    return model.config_number("vocab_size"), model.config.get("architectures"), model.is_tied, model.num_parameters


def _render(folder: Path) -> object:
    prompts = Prompts(source=PromptSource(jsonl=FileSource(path="none")), format=PromptFormat.CHAT)
    return PromptTemplate(prompts, str(folder)).format_problem(DatasetProblem("1 + 1?", "2"))


def _tokenized(folder: Path) -> object:
    prompts = Prompts(source=PromptSource(jsonl=FileSource(path="none")))
    return PromptTemplate(prompts, str(folder)).tokenize_text("1 + 1?")


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


def _make_fifo(place: Path) -> None:
    os.mkfifo(place)


def _make_socket(place: Path) -> None:
    # By a short name, since the kernel takes 108 bytes at most.
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as made:
        made.bind(f"{folder}/s")
        shutil.move(f"{folder}/s", place)


SPECIAL: dict[str, Callable[[Path], None]] = {
    "FIFO": _make_fifo,
    "socket": _make_socket,
    "endless device": lambda place: place.symlink_to("/dev/zero"),
    "folder": lambda place: place.mkdir(),
    "link to itself": lambda place: place.symlink_to(place.name),
    "sparse terabyte": lambda place: place.touch() or os.truncate(place, 1 << 40),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [kind for kind in READERS if not kind.startswith("stored")])  # rows of the store
def test_only_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    """Opening a FIFO waited for ever, and a device was read until memory was full."""
    reader = READERS[kind]
    for name, make in SPECIAL.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        file = reader.write(folder)
        file.unlink()
        make(file)
        # OSError: the test asks for the size of a model config, and a sink's failure is caught where sinks are called.
        expected = (SpecrlError, OSError) if kind in ("hub's model config", "metrics, sinks") else SpecrlError
        with suppress(expected):
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
    reads = re.compile(
        r"read_text\(|read_bytes\(|read_object\(|\.open\(\"rb?\"|(?<!\.)(?<!def )load_tensors\("
        r"|open_tensors\(|ParquetFile\(|open_csv\(|open_regular\("
    )
    found = {
        str(path.relative_to(services))
        for path in services.rglob("*.py")
        if reads.search(path.read_text(encoding="utf-8")) and "sandbox" not in path.parts and path.name != "files.py"
    }
    assert found == COVERED.keys(), "add what reads a file, with the reader that is fuzzed, or the reason for none"


COVERED = {
    "generation/vllm_backend/launch.py": "the kernel's own",
    "coordinator/members/draft_costs.py": "its own; replicas check what they are sent",
    "coordinator/observe/timeline.py": "timeline",
    "drafting/draft_model/model.py": "its own export, a moment after it was copied from a folder that was read",
    "cli/demo.py": "its own comparison's result and log, written a moment before",
    "version.py": "written when the wheel was built; anything but ASCII is no commit",
    "coordinator/rollouts/checked_prompts.py": "decision on references",
    "coordinator/observe/origin.py": "the kernel's own",
    "coordinator/observe/report_files.py": "metrics, coordinator; validations",
    "coordinator/requests/rljob_api.py": "the pod's token, which may be any text",
    "coordinator/observe/sinks/wandb.py": "its own, replaced in one piece; anything else is none",
    "coordinator/ledger/__init__.py": "store's id",
    "coordinator/ledger/redis_server.py": "a secret, which may be any text",
    "drafting/eagle3/head_formats.py": "drafter's config, exported; imports are in tests/unit/drafting/test_formats.py",
    "drafting/eagle3/head.py": "drafter's config, drafter's weights",
    "models/policy_config.py": "config, trainer",
    "generation/vllm_backend/checkpoint.py": "tokenizers, which are compared byte for byte",
    "generation/vllm_backend/draft_length_client.py": "draft costs",
    "models/model_folder.py": "config; tokenizer; index; weights",
    "machine.py": "the kernel's own; tests/unit/test_machine.py",
    "rpc/run_token.py": "the token, which may be any text",
    "weights/nccl_log.py": "NCCL's own; lines of another form are ignored: tests/unit/weights/test_nccl_log.py",
    "launcher/doctor/gpus.py": "the kernel's own; what cannot be read is a finding",
    "launcher/doctor/software.py": "a file of an installed package; what cannot be read is a finding",
    "launcher/stored_reports.py": "status, endpoints, metrics, launcher; rollouts",
    "launcher/warm_up.py": "what it was asked for, which is compared; the end of a log",
    "launcher/processes/supervisor.py": "the end of a log, which may be any bytes",
    "models/sampling_defaults.py": "generation config",
    "models/end_tokens.py": "generation config",
    "rewards/function_files.py": "a user's own code, which may be any bytes",
    "hub/client.py": "hub's listing",
    "hub/folders.py": "fetched folder's record",
    "hub/data_sets.py": "data set's card",
    "hub/models.py": "hub's model config",
    "hub/run_sources.py": "sources",
    "hub/gguf_models.py": "GGUF, which is hashed",
    "models/gguf_files/header.py": "GGUF",
    "models/gguf_files/conversion.py": "GGUF",
    "prompts/json_lists.py": "data set, JSON",
    "prompts/limited_worker.py": "problems, Parquet; columns, Parquet; data set, CSV",
    "launcher/run_directory.py": "the lock, which is never read",
    "prompts/sources.py": "problems; data set, JSONL; data set, packed",
    "report/reading.py": "origin, comparison",
    "rewards/checks/reference_cache.py": "findings on references",
    "rpc/tls.py": "certificate, certificate's key, authorities",
    "simulator/costs/measured.py": "calibration",
    "simulator/scenarios/models.py": "config, simulator",
    "spec/yaml_input.py": "run file, RLJob, scenario",
    "tensor_files.py": "weights",
    "trainer/checkpointing/checkpoints.py": "checkpoint's place in the data",
    "trainer/megatron_backend/checkpoint.py": "checkpoint's state; its tensors: trainer/test_bad_disk.py",
    "trainer/checkpointing/checkpoint_export.py": "a checkpoint, whose checksums were compared before",
    "trainer/checkpointing/checksums.py": "checkpoint's checksums",
    "trainer/checkpointing/hf_folder.py": "the policy's config, copied before; README.md, which may be any text",
    "seams/versions.py": "two files of the package itself",
    "trainer/megatron_backend/kernels/choice.py": "a file of the package itself",
    "trainer/megatron_backend/training/initialisation.py": "tests/integration/trainer/test_megatron_backend.py",
    "trainer/service.py": "step's answer",
    "trainer/sft/training.py": "its own curves, of which lines that cannot be read are dropped",
    "weights/staging.py": "memory of a rank of the same node, whose tensors' checksums were compared",
}
