"""Models and data sets by name: the unpatched huggingface_hub against a stand-in for the hub."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from tests.gguf_writing import Kind, make_model, write_gguf
from tests.run_files import CONFIG, a_model_folder, a_run
from tests.stand_ins.hub import TOKEN, Fault, StandInHub, serve_hub

from specrl.spec import load_spec

ROOT = Path(__file__).parents[3]
NAME = "team/tiny"
Call = Callable[..., dict[str, Any]]


def hub_environment(hub: StandInHub, home: Path, **more: str) -> dict[str, str]:
    """The environment of a user of the stand-in hub: no proxy, no Xet, a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and name[:3] != "HF_"}
    return kept | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "SPECRL_CACHE_DIR": str(home / "specrl"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "services"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        **more,
    }


@contextmanager
def open_client(environment: dict[str, str]) -> Iterator[Call]:
    """Yield a function that makes a call in a process with this environment."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.hub.client_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def call(what: str, **given: Any) -> dict[str, Any]:
        stdin.write(json.dumps({"call": what, **given}) + "\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        return answer

    try:
        yield call
    finally:
        stdin.close()
        process.wait(60)
        stdout.close()


@pytest.fixture(scope="module")
def served() -> Iterator[StandInHub]:
    with serve_hub() as found:
        yield found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.fixture(scope="module")
def module_call(served: StandInHub, home: Path) -> Iterator[Call]:
    with open_client(hub_environment(served, home)) as call:
        yield call


@pytest.fixture
def call(served: StandInHub, module_call: Call) -> Call:
    """One process serves all tests: its start costs two seconds. Each test has repositories of its own."""
    served.requests.clear()
    served.faults.clear()
    return module_call


def refused(answer: dict[str, Any]) -> str:
    """The message of a call that was refused."""
    assert set(answer) == {"error", "class"}, answer
    return str(answer["error"])


def test_a_model_arrives_with_its_known_files_alone(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    """Neither code nor pickles are fetched, nor a second copy of the weights, nor what lies in folders."""
    others = {
        "pytorch_model.bin": b"pickle",
        "modeling_tiny.py": b"import os",
        "consolidated.safetensors": b"copy",
        "onnx/model.onnx": b"other",
        "README.md": b"# Tiny",
        "LICENSE": b"Apache-2.0",
    }
    commit = served.add_model("team/known", {**model_files, **others})
    found = call("model", name="team/known")
    assert found["commit"] == commit
    assert found["folder"].endswith(f"models--team--known/snapshots/{commit}")
    assert found["files"] == sorted([*model_files, "README.md", "LICENSE"])
    weights = Path(found["folder"]) / "model.safetensors"
    assert weights.read_bytes() == model_files["model.safetensors"]


def test_files_of_the_cdn_come_without_the_token(served: StandInHub, call: Call, model_files: dict[str, bytes]) -> None:
    served.add_model("team/private", model_files, is_private=True)
    call("model", name="team/private", token=TOKEN)
    by_host = {(it.host, it.has_token) for it in served.requests}
    assert by_host == {("127.0.0.1", True), ("localhost", False)}


def test_shards_are_those_of_the_index(served: StandInHub, call: Call, model_files: dict[str, bytes]) -> None:
    index = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00001.safetensors"}}
    files = {name: body for name, body in model_files.items() if name != "model.safetensors"} | {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00001.safetensors": model_files["model.safetensors"],
        "adapter_model.safetensors": b"adapter",
    }
    served.add_model("team/shards", files)
    assert "adapter_model.safetensors" not in (found := call("model", name="team/shards"))["files"]
    assert "model-00001-of-00001.safetensors" in found["files"]
    del files["model-00001-of-00001.safetensors"]
    served.add_model("team/shards", files)
    assert "must have every file of its index" in refused(call("model", name="team/shards"))


def test_shards_without_an_index_are_all_fetched(served: StandInHub, call: Call, model_files: dict[str, bytes]) -> None:
    """A folder with such shards was accepted, and a repository with them refused, or its GGUF file taken."""
    small = {name: body for name, body in model_files.items() if name != "model.safetensors"}
    shards = {f"model-0000{number}-of-00002.safetensors": b"shard" for number in (1, 2)}
    others = {
        "a-Q8_0.gguf": b"GGUF",
        "adapter_model.safetensors": b"adapter",
        "consolidated.safetensors": b"another format",
        "old/model.safetensors": b"older",
    }
    served.add_model("team/unindexed", {**small, **shards, **others})
    assert call("model", name="team/unindexed")["files"] == sorted([*small, *shards])
    del shards["model-00002-of-00002.safetensors"]
    del others["a-Q8_0.gguf"]
    served.add_model("team/unindexed", {**small, **shards, **others})
    assert "must have its weights as safetensors, got none" in refused(call("model", name="team/unindexed"))


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    first = served.add_model("team/moves", model_files)
    second = served.add_model("team/moves", {**model_files, "README.md": b"second"})
    served.repositories["models", "team/moves"].refs["v1"] = first
    assert call("model", name="team/moves")["commit"] == second
    assert call("model", name="team/moves", revision="v1")["commit"] == first
    assert call("model", name="team/moves", revision=second)["commit"] == second
    message = refused(call("model", name="team/moves", revision="v2"))
    assert message.startswith("model.revision must be a branch, tag or commit of team/moves, got v2")


def test_a_model_that_is_in_the_cache_is_not_fetched_again(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    commit = served.add_model("team/again", model_files)
    call("model", name="team/again")
    served.requests.clear()
    assert call("model", name="team/again")["commit"] == commit
    assert [it.path for it in served.requests] == ["/api/models/team/again"]
    served.requests.clear()
    assert call("model", name="team/again", revision=commit)["commit"] == commit
    assert served.requests == []


def test_a_file_that_was_cut_short_in_the_cache_is_fetched_again(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    served.add_model("team/short", model_files)
    weights = Path(call("model", name="team/short")["folder"]) / "model.safetensors"
    weights.resolve().write_bytes(b"half")
    call("model", name="team/short")
    assert weights.read_bytes() == model_files["model.safetensors"]


def test_a_connection_that_breaks_goes_on_where_it_was(served: StandInHub, call: Call) -> None:
    """huggingface_hub writes 10 MiB at once, so the first of them is what it has when the connection breaks."""
    body = as_jsonl([{"question": "x" * (11 << 20), "answer": "1"}])
    served.add_data_set("team/breaks", {"train.jsonl": body})
    served.faults.append(Fault("/cdn/", cut_at=len(body) - 1))
    found = call("data set", name="team/breaks")
    assert (Path(found["folder"]) / "train.jsonl").read_bytes() == body
    assert [it.first_byte for it in served.requests if it.path.startswith("/cdn/") and it.method == "GET"] == [
        0,
        10 << 20,
    ]


def test_a_body_that_ends_early_is_one_message(served: StandInHub, call: Call, model_files: dict[str, bytes]) -> None:
    served.add_model("team/ends", model_files)
    served.faults.append(Fault("/cdn/", cut_at=1000, times=6))
    message = refused(call("model", name="team/ends"))
    assert message.startswith(
        "model.path: the connection broke while model.safetensors of team/ends was fetched (Remote"
    )
    assert message.endswith("run the command again: files that are whole stay")


def test_the_next_call_fetches_what_the_last_one_could_not(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    served.add_model("team/resumes", model_files)
    served.faults.append(Fault("/cdn/", status=403))
    message = refused(call("model", name="team/resumes"))
    assert message.startswith("model.path must name a model on ")
    served.requests.clear()
    call("model", name="team/resumes")
    fetched = [it.path for it in served.requests if it.method == "HEAD"]
    assert fetched
    assert not [path for path in fetched if path.endswith("config.json")]  # it had arrived


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (401, "refuses to this anonymous request (401); set HF_TOKEN"),
        (429, "refuses more requests for now (429); wait some minutes, or set HF_TOKEN"),
        (500, "is out of order (500); try again later"),
        (503, "is out of order (503); try again later"),
        (418, "answers 418"),
    ],
)
def test_an_answer_that_is_no_success_becomes_one_message(
    served: StandInHub, call: Call, model_files: dict[str, bytes], status: int, said: str
) -> None:
    served.add_model(f"team/status-{status}", model_files)
    served.faults.append(Fault("/api/models/", status=status))
    message = refused(call("model", name=f"team/status-{status}"))
    assert message.startswith(f"model.path must name a model on {served.url}, got team/status-{status}")
    assert said in message


def test_a_hub_that_is_out_of_order_is_not_needed_for_what_the_cache_has(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    commit = served.add_model("team/down", model_files)
    call("model", name="team/down")
    served.faults.append(Fault("/api/models/", status=503))
    found = call("model", name="team/down")
    assert (found["commit"], found["notice"]) == (commit, "the hub is out of order (503)")


def test_a_file_that_fails_for_a_moment_is_asked_for_again(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    served.add_model("team/moment", model_files)
    served.faults.append(Fault("/resolve/", method="HEAD", status=503))
    assert "model.safetensors" in call("model", name="team/moment")["files"]


def test_a_name_that_does_not_exist_is_refused(call: Call) -> None:
    message = refused(call("model", name="team/none"))
    assert "got team/none, which does not exist there, or is private (401); check the spelling" in message
    assert message.endswith("or write ./team/none for a folder")


def test_a_token_that_is_not_valid_is_refused(served: StandInHub, call: Call, model_files: dict[str, bytes]) -> None:
    served.add_model("team/token", model_files)
    message = refused(call("model", name="team/token", token="hf_expired"))
    assert "refuses to this token (401); set HF_TOKEN to a valid token" in message


def test_a_gated_model_needs_an_account_that_agreed(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    served.add_model("team/gated", model_files, is_gated=True)
    message = refused(call("model", name="team/gated"))
    assert f"agree at {served.url}/team/gated, then set HF_TOKEN" in message
    served.faults.append(Fault("/resolve/", method="HEAD", status=403, code="GatedRepo", times=2))
    message = refused(call("model", name="team/gated", token=TOKEN))
    assert "which is gated (403)" in message
    assert "wait for the owner's consent" in message
    served.faults.clear()
    assert "config.json" in call("model", name="team/gated", token=TOKEN)["files"]


def test_a_model_that_cannot_be_trained_is_refused_before_its_weights(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    served.add_model("team/family", {**model_files, "config.json": b'{"model_type": "mamba"}'})
    assert "model_type must be one of" in refused(call("model", name="team/family"))
    assert served.count("GET", "/cdn/") == served.count("HEAD", "model.safetensors") == 0
    pickled = {name: body for name, body in model_files.items() if name != "model.safetensors"}
    served.add_model("team/pickled", {**pickled, "pytorch_model.bin": b"pickle"})
    assert "its .bin files may hold code and are not read" in refused(call("model", name="team/pickled"))
    served.add_model("team/gguf", {"a-Q4_0.gguf": b"GGUF", "a-Q8_0.gguf": b"GGUF"})
    message = refused(call("model", name="team/gguf"))
    assert "got team/gguf without a config.json; download one of its GGUF files from" in message


def test_the_progress_is_shown_while_nothing_arrives(
    served: StandInHub, call: Call, model_files: dict[str, bytes]
) -> None:
    """A slow network was silent: huggingface_hub reports every 10 MB that arrive."""
    served.add_model("team/slow", model_files)
    gate = threading.Event()
    served.faults.append(Fault("/cdn/", wait=gate))

    def open_late() -> None:
        """Let the weights arrive long after they were asked for, as the display counts time."""
        while not served.count("GET", "/cdn/"):
            time.sleep(0.01)
        time.sleep(1)
        gate.set()

    threading.Thread(target=open_late, daemon=True).start()
    shown = call("model", name="team/slow")["shown"]
    size = len(model_files["model.safetensors"])
    assert shown.count(["fetching team/slow", 0, size]) >= 2
    assert shown[-1] == ["fetching team/slow", size, size]


def test_two_processes_fetch_the_same_model_at_once(
    served: StandInHub, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    served.faults.clear()
    served.add_model("team/both", model_files)
    gate = threading.Event()
    served.faults.append(Fault("/cdn/", wait=gate, times=2))
    with ExitStack() as stack:
        calls = [stack.enter_context(open_client(hub_environment(served, tmp_path))) for _ in range(2)]
        found = list[dict[str, Any]]()
        threads = [
            threading.Thread(target=lambda call=call: found.append(call("model", name="team/both"))) for call in calls
        ]
        for thread in threads:
            thread.start()
        threading.Timer(1.0, gate.set).start()
        for thread in threads:
            thread.join(60)
    assert len(found) == 2
    assert found[0]["commit"] == found[1]["commit"]
    assert (Path(found[0]["folder"]) / "model.safetensors").read_bytes() == model_files["model.safetensors"]


ROWS = [{"question": f"{number} + 1?", "answer": f"so #### {number + 1}"} for number in range(3)]


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files: socratic/*.parquet
---
# Problems
"""


def test_a_card_names_the_files_of_a_split(served: StandInHub, call: Call) -> None:
    served.add_data_set(
        "team/card",
        {
            "README.md": CARD.encode(),
            "main/train-00000-of-00002.parquet": as_parquet(ROWS[:2]),
            "main/train-00001-of-00002.parquet": as_parquet(ROWS[2:]),
            "main/test-00000-of-00001.parquet": as_parquet(ROWS),
            "socratic/all.parquet": as_parquet(ROWS),
            "load.py": b"import os",
        },
    )
    found = call("data set", name="team/card", config="main")
    assert found["split"] == ["main/train-00000-of-00002.parquet", "main/train-00001-of-00002.parquet"]
    assert found["files"] == ["README.md", *found["split"]]
    message = refused(call("data set", name="team/card"))
    assert message.startswith("prompts.source.dataset.config must be given for team/card, got none")
    assert "main, socratic" in message
    message = refused(call("data set", name="team/card", config="main", split="dev"))
    assert message.startswith("prompts.source.dataset.split must be a split of team/card, got dev")
    assert message.endswith("train, test")


def test_a_data_set_that_a_script_makes_is_refused(served: StandInHub, call: Call) -> None:
    served.add_data_set("team/scripted", {"scripted.py": b"import os", "README.md": b"# Scripted"})
    message = refused(call("data set", name="team/scripted"))
    assert "its script would have to be run, which specrl does not do" in message
    assert "prompts.source.dataset.revision: refs/convert/parquet" in message


def a_run_file_by_name(folder: Path, source: dict[str, Any], **model: Any) -> Path:
    """Write a run file that names a model and a data set on the hub."""
    run = a_run(folder, model={"path": NAME, "dtype": "float32", "maxLength": 128, **model})
    run["prompts"]["source"] = {"dataset": source}
    folder.mkdir(exist_ok=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(run))
    return file


@pytest.mark.parametrize(
    "data",
    [
        ("train.jsonl", as_jsonl(ROWS)),
        ("train.jsonl.gz", gzip.compress(as_jsonl(ROWS))),
        ("data/train.json", json.dumps(ROWS).encode()),
        ("train.csv", b'question,answer\n"0 + 1?","so #### 1"\n1 + 1?,2\n2 + 1?,3\n'),
        ("data/train-00000-of-00001.parquet", as_parquet(ROWS)),
    ],
)
def test_a_run_file_gets_folders_and_files_for_names(
    served: StandInHub, call: Call, tmp_path: Path, model_files: dict[str, bytes], data: tuple[str, bytes]
) -> None:
    model = served.add_model(NAME, model_files)
    commit = served.add_data_set("team/sums", dict([data]))
    written = a_run_file_by_name(tmp_path / "a", {"name": "team/sums"})
    (tmp_path / "run").mkdir()
    found = call("run", file=str(written), run=str(tmp_path / "run"))
    assert Path(found["path"]).name == model
    assert (found["count"], found["first"]) == (3, ["0 + 1?", "so #### 1"])
    assert found["place"] == "team/sums:train:1"
    notices = [notice.partition(", in ")[0] for notice in found["notices"]]
    assert notices == [
        f"model.path: {NAME} at commit {model[:12]}",
        f"prompts.source.dataset.name: team/sums at commit {commit[:12]}",
    ]
    stored = yaml.safe_load((tmp_path / "run/run.yaml").read_text())
    assert stored["prompts"]["source"]["dataset"]["revision"] == commit
    assert "revision" not in stored["model"]


def test_a_resumed_run_keeps_its_commits_without_a_request(
    served: StandInHub, call: Call, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    """A branch may move between two starts. What has left the cache comes back, in the same commit and folder."""
    first = served.add_model(NAME, model_files)
    served.add_data_set("team/moving", {"train.jsonl": as_jsonl(ROWS)})
    written = a_run_file_by_name(tmp_path / "a", {"name": "team/moving"})
    run = tmp_path / "run"
    run.mkdir()
    call("run", file=str(written), run=str(run))
    served.add_model(NAME, {**model_files, "README.md": b"moved"})
    served.add_data_set("team/moving", {"train.jsonl": as_jsonl(ROWS[:1])})
    served.requests.clear()
    found = call("run", file=str(run / "run.yaml"), run=str(run))
    assert (Path(found["path"]).name, found["count"], served.requests) == (first, 3, [])
    # Another start of the same run file, as `specrl sft` has it: the commits that were recorded.
    assert Path(call("run", file=str(written), run=str(run))["path"]).name == first
    for path in (*Path(found["path"]).iterdir(), *Path(found["path"]).parents[1].glob("blobs/*")):
        path.unlink()
    found = call("run", file=str(run / "run.yaml"), run=str(run))
    assert Path(found["path"]).name == first
    assert (Path(found["path"]) / "model.safetensors").stat().st_size == len(model_files["model.safetensors"])


def test_names_of_drafters_and_references_become_folders_as_the_policys_does(
    served: StandInHub, call: Call, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    """A draft model may be of a family that specrl does not train; a reference policy may not."""
    policy = served.add_model(NAME, model_files)
    foreign = json.dumps({**CONFIG, "model_type": "gpt2"}).encode()
    small = served.add_model("team/small", {**model_files, "config.json": foreign})
    data = served.add_data_set("team/sums", {"train.jsonl": as_jsonl(ROWS)})
    written = a_run_file_by_name(tmp_path / "a", {"name": "team/sums"})
    raw = yaml.safe_load(written.read_text())
    raw["generation"]["speculation"] = {"draftModel": {"path": "team/small", "revision": "main"}}
    raw["trainer"]["loss"] = {"referenceKl": {"coefficient": "0.1", "path": NAME}}
    written.write_text(yaml.safe_dump(raw))
    run = tmp_path / "run"
    run.mkdir()
    found = call("run", file=str(written), run=str(run))
    assert [notice.partition(", in ")[0] for notice in found["notices"]] == [
        f"model.path: {NAME} at commit {policy[:12]}",
        f"prompts.source.dataset.name: team/sums at commit {data[:12]}",
        f"generation.speculation.draftModel.path: team/small at commit {small[:12]} (main)",
        f"trainer.loss.referenceKl.path: {NAME} at commit {policy[:12]}",
    ]
    stored = yaml.safe_load((run / "run.yaml").read_text())
    draft = stored["generation"]["speculation"]["draftModel"]
    assert (Path(draft["path"]).name, "revision" in draft) == (small, False)
    assert stored["trainer"]["loss"]["referenceKl"]["path"] == found["path"]
    # A resumed run asks nobody, and what has left the cache comes back in the same commit.
    served.add_model("team/small", {**model_files, "config.json": foreign, "README.md": b"moved"})
    served.requests.clear()
    assert call("run", file=str(run / "run.yaml"), run=str(run))["path"] == found["path"]
    assert served.requests == []
    for path in (*Path(draft["path"]).iterdir(), *Path(draft["path"]).parents[1].glob("blobs/*")):
        path.unlink()
    call("run", file=str(run / "run.yaml"), run=str(run))
    assert (Path(draft["path"]) / "model.safetensors").exists()
    # The head of another run, by name; and a reference that cannot be trained.
    raw["generation"]["speculation"] = {"eagle3": {"path": "team/small"}}
    raw["trainer"]["loss"]["referenceKl"]["path"] = "team/small"
    written.write_text(yaml.safe_dump(raw))
    (problem,) = call("run", file=str(written), run=str(tmp_path / "a"))["problems"]
    assert "model_type must be one of" in problem


def test_the_one_gguf_file_of_a_repository_is_converted(served: StandInHub, call: Call, tmp_path: Path) -> None:
    content = write_gguf(make_model("qwen3", hidden_size=64, head_dim=16), tmp_path / "a.gguf", Kind.Q8_0).read_bytes()
    commit = served.add_model("team/packed", {"a-Q8_0.gguf": content, "README.md": b"packed"})
    served.add_data_set("team/sums", {"train.jsonl": as_jsonl(ROWS)})
    written = a_run_file_by_name(tmp_path / "a", {"name": "team/sums"}, path="team/packed")
    run = tmp_path / "run"
    run.mkdir()
    found = call("run", file=str(written), run=str(run))
    begin = f"model.path: team/packed at commit {commit[:12]}, in {found['path']}, converted"
    assert found["notices"][0].startswith(begin)
    (before, *_) = json.loads((run / "sources.json").read_text())
    assert (before["commit"], before["gguf"], before["folder"]) == (commit, "Q8_0", found["path"])
    served.requests.clear()
    shutil.rmtree(found["path"])
    assert call("run", file=str(run / "run.yaml"), run=str(run))["path"] == found["path"]
    assert (Path(found["path"]) / "model.safetensors").exists()
    assert served.count("GET", "a-Q8_0.gguf") == 0  # the file itself is still in the cache


def test_an_existing_folder_wins(served: StandInHub, call: Call, tmp_path: Path, model_files: dict[str, bytes]) -> None:
    served.add_data_set("team/sums", {"train.jsonl": as_jsonl(ROWS)})
    written = a_run_file_by_name(tmp_path / "a", {"name": "team/sums"})
    a_model_folder(tmp_path / "a" / NAME)
    (tmp_path / "run").mkdir()
    assert call("run", file=str(written), run=str(tmp_path / "run"))["path"] == str(tmp_path / "a" / NAME)
    assert served.count("GET", "/api/models/") == 0
    written = a_run_file_by_name(tmp_path / "a", {"name": "team/sums"}, revision="v1")
    (problem,) = call("run", file=str(written), run=str(tmp_path / "run"))["problems"]
    assert problem.startswith("model.revision must not be given for a folder, got v1")


def test_everything_that_cannot_be_fetched_is_reported_at_once(served: StandInHub, call: Call, tmp_path: Path) -> None:
    served.repositories.pop(("models", NAME), None)
    written = a_run_file_by_name(tmp_path / "a", {"name": "team/unknown"})
    problems = call("run", file=str(written), run=str(tmp_path))["problems"]
    assert [problem.partition(" must ")[0] for problem in problems] == ["model.path", "prompts.source.dataset.name"]


def test_a_chat_needs_a_template_before_the_weights_are_fetched(
    served: StandInHub, call: Call, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    served.add_model("team/base", {**model_files, "README.md": b"base"})
    served.add_data_set("team/sums", {"train.jsonl": as_jsonl(ROWS)})
    written = a_run_file_by_name(tmp_path / "a", {"name": "team/sums"}, path="team/base")
    run = yaml.safe_load(written.read_text())
    run["prompts"]["format"] = "Chat"
    written.write_text(yaml.safe_dump(run))
    (problem,) = call("run", file=str(written), run=str(tmp_path))["problems"]
    assert "team/base: must have a chat template for prompts.format Chat, got none" in problem
    assert served.count("HEAD", "model.safetensors") == 0


def run_command(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specrl.cli", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_specrl_fetch_prints_the_folder_and_needs_no_network_afterwards(
    hub: StandInHub, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    commit = hub.add_model(NAME, model_files)
    environment = hub_environment(hub, tmp_path / "hf")
    done = run_command(environment, "fetch", NAME)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[-2].startswith(f"{NAME} at commit {commit}: {len(model_files)} files, ")
    assert said[-1] == f"{tmp_path}/hf/hub/models--team--tiny/snapshots/{commit}"
    offline = run_command(environment | {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}, "fetch", NAME)
    assert offline.returncode == 0, offline.stderr
    assert "this is the newest commit in the cache, since HF_HUB_OFFLINE is set" in offline.stdout
    assert offline.stdout.splitlines()[-1] == said[-1]


def test_specrl_fetch_says_what_to_do_without_a_network(hub: StandInHub, tmp_path: Path) -> None:
    environment = hub_environment(hub, tmp_path / "hf", HF_ENDPOINT="http://127.0.0.1:9")
    done = run_command(environment, "fetch", "team/data", "--data-set")
    assert done.returncode == 2
    assert done.stderr.startswith("specrl: NAME must name a data set on http://127.0.0.1:9, got team/data, but the hub")
    assert "check the network, its proxy and HF_ENDPOINT, or run `specrl fetch team/data --data-set`" in done.stderr


def test_specrl_init_writes_names_that_a_run_takes(
    hub: StandInHub, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    hub.add_model(
        NAME, {**model_files, "config.json": json.dumps({**CONFIG, "max_position_embeddings": 2048}).encode()}
    )
    hub.add_data_set("team/sums", {"main/train.csv": b"problem,answer\n0 + 1?,1\n1 + 1?,2\n"})
    environment = hub_environment(hub, tmp_path / "hf")
    out = str(tmp_path / "run.yaml")
    done = run_command(environment, "init", "--model", NAME, "--data-set", "team/sums", "--out", out)
    assert done.returncode == 0, done.stderr
    spec = load_spec(tmp_path / "run.yaml")
    assert (spec.name, spec.model.path) == ("sums", NAME)
    assert spec.prompts.source.dataset is not None
    assert (spec.prompts.source.dataset.name, spec.prompts.source.dataset.fields.question) == ("team/sums", "problem")
    fetched = run_command(environment | {"HF_HUB_OFFLINE": "1"}, "fetch", "-f", out)
    assert fetched.returncode == 0, fetched.stderr
    assert [line.partition(" at ")[0] for line in fetched.stdout.splitlines()] == [
        f"model.path: {NAME}",
        "prompts.source.dataset.name: team/sums",
    ]


def test_specrl_fetch_takes_drafters_of_any_family_and_converts_files(
    hub: StandInHub, tmp_path: Path, model_files: dict[str, bytes]
) -> None:
    foreign = json.dumps({**CONFIG, "model_type": "gpt2"}).encode()
    commit = hub.add_model("team/small", {**model_files, "config.json": foreign})
    environment = hub_environment(hub, tmp_path / "hf")
    refused = run_command(environment, "fetch", "team/small")
    assert "model_type must be one of" in refused.stderr
    done = run_command(environment, "fetch", "team/small", "--drafter")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith(commit)
    file = write_gguf(make_model("qwen3", hidden_size=64, head_dim=16), tmp_path / "a.gguf", Kind.Q8_0)
    done = run_command(environment, "fetch", str(file), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [
        "a.gguf is converted; its weights are quantised (Q8_0), so they are less precise than the original model's",
        str(tmp_path / "out"),
    ]
    assert (tmp_path / "out/tokenizer.json").exists()
    again = run_command(environment, "fetch", str(file), "--out", str(tmp_path / "out"))
    assert (again.returncode, "--out must not exist" in again.stderr) == (2, True)
