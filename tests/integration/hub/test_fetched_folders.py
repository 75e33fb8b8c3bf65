"""`specrl fetch URI --out DIR`, as the init container of a pod runs it (H9).

A process against the stand-in hub, a local folder as an object store, and moto's S3.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.hub.test_hub import hub_environment, run_command
from tests.stand_ins.hub import TOKEN, Fault, StandInHub
from tests.stand_ins.s3 import ENDPOINT, serve_s3

NAME = "team/tiny"
URI = f"hf://{NAME}"


@pytest.fixture
def environment(hub: StandInHub, tmp_path: Path) -> dict[str, str]:
    return hub_environment(hub, tmp_path / "hf")


def start(environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specrl.cli", "fetch", *words]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(hub: StandInHub, part: str) -> None:
    deadline = time.monotonic() + 60
    while not hub.count("GET", part):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def read_folder(out: Path) -> dict[str, bytes]:
    """Read the files that a pod's process sees: all but the scratch folder."""
    found = [path for path in out.rglob("*") if path.is_file() and ".fetch" not in path.parts]
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in found}


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_fetch_that_was_killed_goes_on_with_the_same_commit(
    hub: StandInHub, environment: dict[str, str], model_files: dict[str, bytes], tmp_path: Path, end: signal.Signals
) -> None:
    commit = hub.add_model(NAME, model_files)
    hub.faults.append(Fault("/cdn/", wait=(ready := threading.Event())))
    out = tmp_path / "out"
    process = start(environment, URI, "--out", str(out))
    wait_for(hub, "/cdn/")
    process.send_signal(end)
    process.communicate(timeout=60)
    ready.set()
    assert process.returncode == -end
    arrived = read_folder(out)
    assert "config.json" in arrived
    assert "model.safetensors" not in arrived

    hub.add_model(NAME, {**model_files, "config.json": b"{}"})  # the branch moves
    hub.requests.clear()
    done = run_command(environment, "fetch", URI, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2].startswith(f"{URI} at commit {commit}: {len(model_files)} files, ")
    assert read_folder(out) == model_files
    assert not hub.count("HEAD", "config.json"), "it had arrived"
    assert not list(out.rglob("*.incomplete"))


def test_a_complete_folder_needs_no_network_and_a_changed_one_is_mended(
    hub: StandInHub, environment: dict[str, str], model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add_model(NAME, model_files)
    out = tmp_path / "out"
    assert run_command(environment, "fetch", URI, "--out", str(out)).returncode == 0
    unreachable = environment | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    again = run_command(unreachable, "fetch", URI, "--out", str(out))
    assert again.returncode == 0, again.stderr
    (out / "model.safetensors").unlink()
    assert run_command(unreachable, "fetch", URI, "--out", str(out)).returncode == 1
    assert run_command(environment, "fetch", URI, "--out", str(out)).returncode == 0
    assert read_folder(out) == model_files
    other = run_command(environment, "fetch", "hf://team/other", "--out", str(out))
    assert other.returncode == 2
    assert f"{out} must be empty, or have files of hf://team/other, got those of {URI}; name another" in other.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_with_a_wrong_checksum_is_refused_and_fetched_again(
    hub: StandInHub, environment: dict[str, str], model_files: dict[str, bytes], tmp_path: Path, name: str
) -> None:
    """Of a large file the hub says the SHA-256, of a small one git's hash. Its size alone was compared."""
    hub.add_model(NAME, model_files)
    hub.faults.append(
        Fault("/cdn/" if name == "model.safetensors" else f"/api/resolve-cache/models/{NAME}", damages=True)
    )
    out = tmp_path / "out"
    refused = run_command(environment, "fetch", URI, "--out", str(out))
    assert refused.returncode == 2
    assert f"specrl: uri must come as it is on {hub.url}, got " in refused.stderr
    assert f" of {NAME} with the checksum " in refused.stderr
    assert "it is deleted: run the command again" in refused.stderr
    assert name not in read_folder(out)
    done = run_command(environment, "fetch", URI, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert read_folder(out) == model_files


def test_pods_that_share_a_claim_fetch_once_and_the_coordinator_waits_for_no_weights(
    hub: StandInHub, environment: dict[str, str], model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add_model(NAME, model_files)
    out = tmp_path / "out"
    coordinator = run_command(environment, "fetch", URI, "--out", str(out), "--skip-weights")
    assert coordinator.returncode == 0, coordinator.stderr
    assert "config.json" in read_folder(out)
    assert not hub.count("GET", "/cdn/"), "the weights are the only file of the CDN"
    hub.faults.append(Fault("/cdn/", wait=(ready := threading.Event())))
    first = start(environment, URI, "--out", str(out))
    wait_for(hub, "/cdn/")
    second = start(environment, URI, "--out", str(out))
    assert second.stdout is not None
    assert second.stdout.readline() == f"another process fetches into {out}; waiting for it\n"
    ready.set()
    for process in (first, second):
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said
    assert hub.count("GET", "/cdn/") == 1
    assert read_folder(out) == model_files


def test_what_a_pod_cannot_fetch_is_one_message(
    hub: StandInHub, environment: dict[str, str], model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add_model("team/gated", model_files, is_gated=True)

    def refuse(uri: str, out: Path = tmp_path / "out", **more: str) -> tuple[int, str]:
        done = run_command(environment | more, "fetch", uri, "--out", str(out), "--attempts", "2")
        return done.returncode, done.stderr.splitlines()[-1]

    assert refuse("hf://team/none") == (
        2,
        f"specrl: uri must name a model on {hub.url}, got team/none, which does not exist there, or is private (401); "
        "check the spelling, set HF_TOKEN, in an RLJob in the Secret of secretName for a private one",
    )
    code, said = refuse("hf://team/gated", tmp_path / "gated")
    assert (code, f"agree at {hub.url}/team/gated, then set HF_TOKEN, in an RLJob in the Secret" in said) == (2, True)
    assert (
        run_command(
            environment | {"HF_TOKEN": TOKEN}, "fetch", "hf://team/gated", "--out", str(tmp_path / "gated")
        ).returncode
        == 0
    )
    # A restart of the container may help, after the attempts of the process itself.
    code, said = refuse(URI, tmp_path / "silent", HF_ENDPOINT="http://127.0.0.1:9")
    assert (code, "the hub does not answer" in said) == (1, True)
    assert refuse("hf://team") == (
        2,
        "specrl: uri must be as in hf://OWNER/NAME@REVISION or hf://datasets/OWNER/NAME, got hf://team",
    )
    (tmp_path / "file").write_text("")
    code, said = refuse(URI, tmp_path / "file")
    assert (code, f"{tmp_path}/file must be a folder that uid {os.getuid()} and gid" in said) == (2, True)


def test_a_data_set_keeps_its_folders(hub: StandInHub, environment: dict[str, str], tmp_path: Path) -> None:
    body = b'{"problem": "1 + 1?", "answer": "2"}\n'
    hub.add_data_set("team/sums", {"main/train.jsonl": body, "load.py": b"import os"})
    done = run_command(environment, "fetch", "team/sums", "--data-set", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert read_folder(tmp_path / "out") == {"main/train.jsonl": body}


# -- object stores ---------------------------------------------------------------------------------------------------


def write_sums(files: dict[str, bytes]) -> bytes:
    """Write what `sha256sum *` prints."""
    return "".join(f"{hashlib.sha256(body).hexdigest()}  {name}\n" for name, body in files.items()).encode()


@pytest.fixture(scope="module")
def s3_environment() -> Iterator[dict[str, str]]:
    """The variables of a pod whose Secret has credentials, for moto's server."""
    with serve_s3() as variables:
        yield variables


class Store:
    """A folder of an object store with a model in it."""

    def __init__(self, uri: str, variables: dict[str, str]) -> None:
        import fsspec

        self.uri = uri
        self.variables = variables
        where = {"endpoint_url": variables[ENDPOINT], "key": "a", "secret": "b"} if variables else {}
        self._files, self._root = fsspec.core.url_to_fs(uri, **where)
        self._files.makedirs(self._root, exist_ok=True)

    def write(self, name: str, body: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{name}", body)


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Store(f"file://{tmp_path}/store/qwen", {})
    variables = request.getfixturevalue("s3_environment")
    return Store(f"s3://{hashlib.md5(os.fsencode(tmp_path), usedforsecurity=False).hexdigest()}/qwen", variables)


def test_an_object_store_s_folder_is_continued_where_it_was_and_compared_with_its_sums(
    store: Store, environment: dict[str, str], model_files: dict[str, bytes], tmp_path: Path
) -> None:
    for name, body in (model_files | {"modeling_tiny.py": b"import os", "SHA256SUMS": write_sums(model_files)}).items():
        store.write(name, body)
    out = tmp_path / "out"
    environment |= store.variables
    coordinator = run_command(environment, "fetch", store.uri, "--out", str(out), "--skip-weights")
    assert coordinator.returncode == 0, coordinator.stderr
    small = {name: body for name, body in model_files.items() if name != "model.safetensors"}
    assert read_folder(out) == small

    # A process that was killed has left the first bytes. That they are wrong shows that they are used.
    kill_after(environment, store.uri, out, 100)
    damaged = run_command(environment, "fetch", store.uri, "--out", str(out))
    assert damaged.returncode == 2
    assert f"uri must come as its SHA256SUMS says, got model.safetensors of {store.uri} with the SHA" in damaged.stderr
    assert read_folder(out) == small
    done = run_command(environment, "fetch", store.uri, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2].startswith(f"{store.uri}: {len(model_files)} files, ")
    assert read_folder(out) == model_files


def kill_after(environment: dict[str, str], uri: str, out: Path, size: int) -> None:
    """Leave the scratch file of a process that was killed: `size` zeros. Its name is asked of the process itself."""
    code = (
        "import sys; from pathlib import Path; from specrl.hub import object_stores as it; "
        "found = it.list_files(*it.open_store(sys.argv[1])); "
        "print(next(file.version for file in found if file.name == 'model.safetensors'))"
    )
    command = [sys.executable, "-c", code, uri]
    name = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    part = out / ".fetch" / "parts" / name
    part.parent.mkdir(parents=True, exist_ok=True)
    part.write_bytes(bytes(size))


def test_what_an_object_store_lacks_is_one_message(
    store: Store, environment: dict[str, str], model_files: dict[str, bytes], tmp_path: Path
) -> None:
    environment |= store.variables
    empty = run_command(environment, "fetch", store.uri, "--out", str(tmp_path / "out"))
    assert empty.returncode == 2
    assert f"got {store.uri}, which does not exist or has neither; check the spelling" in empty.stderr
    store.write("config.json", model_files["config.json"])
    store.write("SHA256SUMS", write_sums(model_files))
    partial = run_command(environment, "fetch", store.uri, "--out", str(tmp_path / "out"))
    assert partial.returncode == 2
    assert "specrl: uri must have every file of its SHA256SUMS, got none named model.safetensors in" in partial.stderr
    store.write("SHA256SUMS", write_sums({"tokenizer.json": model_files["tokenizer.json"]}))
    store.write("tokenizer.json", model_files["tokenizer.json"])
    unlisted = run_command(environment, "fetch", store.uri, "--out", str(tmp_path / "out"))
    assert unlisted.returncode == 2
    assert "must have a SHA256SUMS that lists every file, got none of config.json in" in unlisted.stderr


def test_a_store_without_its_library_is_named(environment: dict[str, str], tmp_path: Path) -> None:
    done = run_command(environment, "fetch", "gs://bucket/qwen", "--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "uri must be a URI whose file system is installed, got gs://bucket/qwen: " in done.stderr
