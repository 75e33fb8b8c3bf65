"""GGUF files are converted once for each content, whole or not at all, and a run records what it was given."""

from __future__ import annotations

import fcntl
import hashlib
import json
import multiprocessing
import os
import queue
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.gguf_writing import Kind, TinyModel, make_model, write_gguf
from tests.run_files import a_run

from specrl.errors import CheckpointInvalid, FetchFailed, MemoryTooSmall, RunInvalid
from specrl.hub import fetch_run_sources, gguf_models, read_sources, write_sources
from specrl.hub.fetching import SPARE_BYTES, FetchDisplay
from specrl.hub.gguf_models import GgufWish, convert_gguf
from specrl.spec import RunSpec, load_spec
from specrl.spec.load import parse_spec

TINY = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}


def tiny(seed: int = 0) -> TinyModel:
    return make_model("qwen3", seed=seed, **TINY)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tiny(), tmp_path / "policy.gguf", Kind.Q8_0)


def test_a_content_is_converted_once(cache: Path, file: Path) -> None:
    shown = list[tuple[str, int, int]]()
    first = convert_gguf(GgufWish(file, "model.path"), FetchDisplay(lambda *what: shown.append(what), 0.001))
    assert first.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert first.folder == cache / f"{first.sha256}-{gguf_models.CONVERSION}"
    assert first.kinds == "Q8_0"
    before = (first.folder / "model.safetensors").stat()
    copy = shutil.copy(file, file.with_name("copy.gguf"))
    again = convert_gguf(GgufWish(copy, "model.path"))
    assert again.folder == first.folder
    assert (first.folder / "model.safetensors").stat() == before
    # Other users of the machine can read the folder, as other files that the process makes.
    assert before.st_mode == (first.folder / "config.json").stat().st_mode


def test_another_content_has_another_folder(cache: Path, file: Path) -> None:
    first = convert_gguf(GgufWish(file, "model.path")).folder
    write_gguf(tiny(1), file, Kind.Q8_0)
    assert convert_gguf(GgufWish(file, "model.path")).folder not in {first, None}
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 2


def test_a_conversion_that_fails_leaves_nothing(
    cache: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: Path, size: int) -> None:
        assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"
        raise MemoryTooSmall(f"{size} bytes do not fit")

    with pytest.raises(MemoryTooSmall, match="do not fit"):
        convert_gguf(GgufWish(file, "model.path", check=check))
    assert not [path for path in cache.iterdir() if path.is_dir()]
    with pytest.raises(MemoryTooSmall):
        convert_gguf(GgufWish(file, "model.path", check=check, target=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    free = shutil.disk_usage(tmp_path)._replace(free=SPARE_BYTES + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)
    with pytest.raises(FetchFailed, match=r"model.path must fit on the disk of .*/gguf, got .* set SPECRL_CACHE_DIR"):
        convert_gguf(GgufWish(file, "model.path"))


def test_what_a_killed_process_left_is_cleared_away(cache: Path, file: Path) -> None:
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    left = cache / f".{sha256}-{gguf_models.CONVERSION}.tmp"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    folder = convert_gguf(GgufWish(file, "model.path")).folder
    assert (folder / "config.json").exists()
    assert not left.exists()


def test_a_file_that_changes_meanwhile_is_refused(cache: Path, file: Path) -> None:
    def change(_folder: Path, _size: int) -> None:
        os.utime(file, (1, 1))

    with pytest.raises(CheckpointInvalid, match=r"model\.path must not change while it is converted"):
        convert_gguf(GgufWish(file, "model.path", check=change))


def test_a_cache_that_cannot_be_written_to_is_named(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").write_text("a file")
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path / "plain"))
    with pytest.raises(FetchFailed, match="set SPECRL_CACHE_DIR to another folder"):
        convert_gguf(GgufWish(file, "model.path"))


def _convert_slowly(file: Path, started: Any, counted: Any) -> None:
    def check(_folder: Path, _size: int) -> None:
        with counted.get_lock():
            counted.value += 1
        started.set()

    convert_gguf(GgufWish(file, "model.path", check=check))


def test_two_processes_convert_the_same_file_once(cache: Path, file: Path) -> None:
    fork = multiprocessing.get_context("fork")
    started, counted = fork.Event(), fork.Value("i", 0)
    both = [fork.Process(target=_convert_slowly, args=(file, started, counted)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert counted.value == 1
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 1


def test_a_process_that_waits_for_a_conversion_says_so(cache: Path, file: Path) -> None:
    """It showed nothing for as long as the other process converted, which takes minutes for a large file."""
    folder = convert_gguf(GgufWish(file, "model.path")).folder
    shown = queue.Queue[tuple[str, int, int]]()
    display = FetchDisplay(lambda *what: shown.put(what), 0.001)
    with ThreadPoolExecutor() as pool, folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = pool.submit(convert_gguf, GgufWish(file, "model.path"), display)
        expected = ("waiting for another process, which converts policy.gguf", 0)
        while shown.get(timeout=60)[:2] != expected:
            pass
        assert not waiting.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert waiting.result(60).folder == folder


def a_spec(folder: Path, path: Path | str) -> RunSpec:
    return parse_spec(a_run(folder, model={"path": str(path), "dtype": "float32", "maxLength": 128}))


def test_a_run_gets_the_folder_and_records_the_file(cache: Path, file: Path, tmp_path: Path) -> None:
    spec = a_spec(tmp_path, file)
    fetched = fetch_run_sources(spec)
    assert not fetched.problems
    folder = Path(fetched.spec.model.path)
    assert folder.parent == cache
    (notice,) = fetched.notices
    assert notice.startswith(f"model.path: {file} SHA-256 ")
    assert notice.endswith(
        "converted; its weights are quantised (Q8_0), so they are less precise than the original model's"
    )
    run = tmp_path / "run"
    run.mkdir()
    write_sources(run, fetched.sources)
    (source,) = known = read_sources(run)
    assert (source.name, source.gguf, source.folder) == (str(file), "Q8_0", str(folder))
    # A resumed run has the folder in its run file, and does not need the file.
    file.rename(tmp_path / "elsewhere.gguf")
    assert fetch_run_sources(fetched.spec, known).spec == fetched.spec
    # What has left the cache is converted again, into the same folder.
    (tmp_path / "elsewhere.gguf").rename(file)
    shutil.rmtree(folder)
    again = fetch_run_sources(fetched.spec, known)
    assert (again.spec, again.problems) == (fetched.spec, ())
    assert (folder / "model.safetensors").exists()
    # Another content under the same name is another model.
    shutil.rmtree(folder)
    write_gguf(tiny(1), file)
    (problem,) = fetch_run_sources(fetched.spec, known).problems
    assert "model.path must be the file that the run began with" in str(problem)
    assert not folder.exists()


def test_files_of_drafters_and_references_are_converted(cache: Path, file: Path, tmp_path: Path) -> None:
    raw = a_run(tmp_path, model={"path": str(file), "dtype": "float32", "maxLength": 128})
    raw["generation"]["speculation"] = {"draftModel": {"path": str(file)}}
    raw["trainer"]["loss"] = {"referenceKl": {"coefficient": "0.1", "path": str(file)}}
    fetched = fetch_run_sources(parse_spec(raw))
    assert not fetched.problems
    draft = fetched.spec.generation.speculation.draft_model
    kl = fetched.spec.trainer.loss.reference_kl
    assert draft is not None
    assert kl is not None
    assert draft.path == kl.path == fetched.spec.model.path
    assert [it.field for it in fetched.sources] == [
        "model.path",
        "generation.speculation.draftModel.path",
        "trainer.loss.referenceKl.path",
    ]


def test_a_file_that_is_not_there_is_refused_with_its_field(cache: Path, tmp_path: Path) -> None:
    (problem,) = fetch_run_sources(a_spec(tmp_path, tmp_path / "none.gguf")).problems
    assert "model.path must be a readable GGUF file" in str(problem)


def test_a_relative_path_to_a_file_is_never_a_name(tmp_path: Path) -> None:
    run = a_run(tmp_path, model={"path": "models/none.gguf", "dtype": "float32", "maxLength": 128})
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    assert load_spec(tmp_path / "run.yaml").model.path == str(tmp_path / "models/none.gguf")


def test_sources_with_a_digest_of_another_length_are_refused(tmp_path: Path) -> None:
    entry = {"field": "model.path", "name": "/a.gguf", "revision": None, "commit": "0" * 40, "folder": "/b"}
    (tmp_path / "sources.json").write_text(json.dumps([entry]))
    with pytest.raises(RunInvalid, match="the SHA-256 of a file 64"):
        read_sources(tmp_path)
