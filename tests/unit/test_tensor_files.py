"""Every incomplete file is refused with its name and a remedy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specrl import tensor_files
from specrl.errors import CheckpointInvalid
from specrl.hub.models import SMALL_FILES
from specrl.tensor_files import (
    INDEX,
    KNOWN_FILES,
    FolderReader,
    check_folder,
    check_links,
    copy_all_but_weights,
    read_tensor_shapes,
    read_weight_map,
    save_tensors,
)


def a_file(folder: Path, header: object, data_bytes: int) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(data_bytes))
    return path


def a_tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_shapes_of_every_dtype_are_read_without_torch(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "float": a_tensor([2, 3], 0, 24),
        "scalar": a_tensor([], 24, 28),
        "nothing": a_tensor([0, 4], 28, 28),
        "bfloat": a_tensor([2], 28, 32, "BF16"),
        "float8": a_tensor([4], 32, 36, "F8_E4M3"),
    }
    file = a_file(tmp_path, header, 36)
    shapes = {"float": (2, 3), "scalar": (), "nothing": (0, 4), "bfloat": (2,), "float8": (4,)}
    assert read_tensor_shapes(file, "the policy") == shapes
    script = (
        "import sys; from pathlib import Path; from specrl.tensor_files import read_tensor_shapes\n"
        f"read_tensor_shapes(Path({str(file)!r}), 'the policy'); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("header", "data_bytes"),
    [
        ({"a": a_tensor([2, 3], 0, 24)}, 23),
        ({"a": a_tensor([2, 3], 0, 24)}, 0),
        ({"a": a_tensor([2, 3], 0, 24)}, 25),
        ({}, 1),
        ({"a": a_tensor([2, 4], 0, 24)}, 24),
        ({"a": a_tensor([2, 3], 0, 24, "F16")}, 24),
        ({"a": a_tensor([2, 3], 8, 32)}, 32),
        ({"a": a_tensor([2, 3], 0, 24), "b": a_tensor([2, 3], 0, 24)}, 24),
        ({"a": a_tensor([-2, -3], 0, 24)}, 24),
        ({"a": a_tensor([2**40, 2**40], 0, 24)}, 24),
        ({"a": a_tensor([2, 3], 24, 0)}, 24),
        ({"a": a_tensor([2, 3], 0, 24, "X9")}, 24),
        ({"a": {"dtype": "F32", "shape": [6]}}, 24),
        ({"a": None}, 0),
        (b"[]", 0),
        (b"no json", 0),
        (b"\xff\xfe", 0),
        (b'{"a":' + b"[" * 10**5, 0),
    ],
)
def test_a_header_that_contradicts_itself_or_the_file_is_refused(
    tmp_path: Path, header: object, data_bytes: int
) -> None:
    """Shapes, offsets and the file's length must agree."""
    file = a_file(tmp_path, header, data_bytes)
    with pytest.raises(CheckpointInvalid) as caught:
        read_tensor_shapes(file, "the policy")
    assert str(caught.value).startswith(
        f"the policy must have whole safetensors files, got {file} of {file.stat().st_size} bytes: "
    )
    assert str(caught.value).endswith("; fetch the model again (a Git LFS pointer needs `git lfs pull`)")
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "content",
    [b"", b"\0" * 7, b"\0" * 8, b"\xff" * 64, (10**17).to_bytes(8, "little") + b"{}",
     b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"],
)  # fmt: skip
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=r"model\.path must have whole safetensors files, got .*git lfs pull"):
        read_tensor_shapes(file, "model.path")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointInvalid, match=r"model\.path must have all its weight files, got .*none\.safetensors: No"
    ):
        read_tensor_shapes(tmp_path / "none.safetensors", "model.path")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(CheckpointInvalid, match="must have all its weight files"):
        read_tensor_shapes(tmp_path / "folder.safetensors", "model.path")


def test_rows_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No part has more rows than are read at once, and together they are the chosen ones in order."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    whole = torch.arange(60.0).view(20, 3)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    monkeypatch.setattr(tensor_files, "CHUNK_ROWS", 8)
    reader = FolderReader(tmp_path)
    rows = torch.tensor([0, 7, 8, 18, 19])
    parts = list(reader.read_rows("w", rows))
    assert [len(part) for part in parts] == [2, 1, 2]
    assert torch.equal(torch.cat(parts), whole[rows])
    assert torch.equal(reader.read_tensor("w"), whole)
    with pytest.raises(CheckpointInvalid, match="must have v in safetensors files"):
        reader.read_tensor("v")


def test_shards_without_an_index_are_read(tmp_path: Path) -> None:
    """Preflight and vLLM accepted such a folder. Then the trainer ended, as model.safetensors was missing."""
    shards = {"a": torch.ones(2), "b": torch.zeros(3)}
    for number, (name, tensor) in enumerate(shards.items(), 1):
        save_tensors({name: tensor}, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    reader = FolderReader(tmp_path)
    assert reader.list_names() == ["a", "b"]
    assert all(torch.equal(reader.read_tensor(name), tensor) for name, tensor in shards.items())
    with pytest.raises(CheckpointInvalid, match=r"must have c in safetensors files, got .*; complete it"):
        reader.read_tensor("c")


def test_a_folder_is_read_only_if_its_weights_are_those_that_the_engine_loads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="must have its weights as safetensors, got none"):
        FolderReader(tmp_path)
    for name in ("model", "adapter_model"):
        save_tensors({name: torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"beside model.safetensors without an index, got adapter_model"):
        FolderReader(tmp_path)


def a_cached_model(cache: Path) -> Path:
    """Make a folder as huggingface_hub's cache has it: links into `blobs`, and from there into the cache's store."""
    repository = cache / "models--team--tiny"
    folder = repository / "snapshots" / "abc"
    for made in (folder, repository / "blobs", cache / "blobs" / "00"):
        made.mkdir(parents=True)
    (repository / "blobs" / "1").write_text("{}")
    (cache / "blobs" / "00" / "2").write_text("weights")
    (repository / "blobs" / "2").symlink_to("../../blobs/00/2")
    (folder / "config.json").symlink_to("../../blobs/1")
    (folder / "model.safetensors").symlink_to("../../blobs/2")
    return folder


def test_links_of_a_cached_model_are_followed(tmp_path: Path) -> None:
    folder = a_cached_model(tmp_path / "hub")
    (folder / "tokenizer_config.json").symlink_to("config.json")
    check_links(folder, "model.path")
    (tmp_path / "mine").symlink_to(folder)  # the folder itself may be a link
    check_links(tmp_path / "mine", "model.path")


def test_a_folder_below_snapshots_in_the_root_is_no_cache() -> None:
    """A volume that is mounted there ended the trainer with an IndexError."""
    check_links(Path("/snapshots/policy"), "model.path")


@pytest.mark.parametrize("place", ["/etc/passwd", "../../../../secret", "../../../other/blobs/1", "../../refs", "sub"])
def test_a_link_to_another_place_is_refused(tmp_path: Path, place: str) -> None:
    """An export would have copied what it leads to: a private key, for example."""
    folder = a_cached_model(tmp_path / "hub")
    for made in ("hub/other/blobs", "hub/models--team--tiny/refs", "hub/models--team--tiny/snapshots/abc/sub"):
        (tmp_path / made).mkdir(parents=True)
    for made in ("secret", "hub/other/blobs/1"):
        (tmp_path / made).write_text("secret")
    (folder / "notes.txt").symlink_to(place)
    with pytest.raises(CheckpointInvalid, match=r"model\.path must have no links to other places, got .*notes\.txt"):
        check_links(folder, "model.path")


def test_a_blob_that_leads_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    folder = a_cached_model(tmp_path / "hub")
    (folder.parents[1] / "blobs" / "3").symlink_to("/etc/passwd")
    (folder / "notes.txt").symlink_to("../../blobs/3")
    with pytest.raises(CheckpointInvalid, match="which leads to /etc/passwd; copy the file into the folder"):
        check_links(folder, "model.path")


@pytest.mark.parametrize(
    "name",
    ["../private.safetensors", "/etc/private.safetensors", "sub/a.safetensors", "..", "", ".a.safetensors", "a.bin",
     "a\0.safetensors", "\ud800.safetensors", 7, None, ["a.safetensors"]],
)  # fmt: skip
def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path, name: object) -> None:
    """The policy was read from any file of the machine, and exported."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointInvalid, match="names of safetensors files in its own folder"):
        FolderReader(tmp_path / "model")
    with pytest.raises(CheckpointInvalid, match="names of safetensors files in its own folder"):
        read_weight_map(tmp_path / "model" / INDEX, "model.path")


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "chat_template.jinja", "model.safetensors", "additional_chat_templates/a.jinja"]
)
def test_a_folder_with_a_fifo_or_a_huge_file_is_refused(tmp_path: Path, name: str) -> None:
    """transformers and safetensors open these by name: they waited for ever, or read until memory was full."""
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    os.mkfifo(file)
    with pytest.raises(CheckpointInvalid, match=r"must have regular files .*, got .*: must be a re"):
        check_folder(tmp_path, "model.path")
    with pytest.raises(CheckpointInvalid, match="got a FIFO"):
        FolderReader(tmp_path)
    file.unlink()
    file.touch()
    os.truncate(file, 1 << 40)
    if file.suffix == ".safetensors":
        check_folder(tmp_path, "model.path")
    else:
        with pytest.raises(CheckpointInvalid, match="must be at most"):
            check_folder(tmp_path, "model.path")


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    """Path.resolve raised RuntimeError."""
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointInvalid, match="must have no links to other places"):
        check_links(tmp_path, "model.path")


def test_files_that_are_fetched_are_known() -> None:
    patterns = {*KNOWN_FILES, INDEX}
    assert set(SMALL_FILES) <= patterns, "an export would lack what a fetched folder has"


def test_exports_have_the_content_of_known_files(tmp_path: Path) -> None:
    """Everything but weights was copied: notebooks, archives, and whatever a user kept in the folder."""
    folder = a_cached_model(tmp_path / "hub")
    for name in (
        "LICENSE",
        "chat_template.jinja",
        "modeling_tiny.py",
        "notes.zip",
        "secret.txt",
        "credentials.json",
        "run.py",
        ".env",
        "model.safetensors.index.json",
    ):
        (folder / name).write_text(name)
    (tmp_path / "out").mkdir()
    copy_all_but_weights(folder, tmp_path / "out")
    copied = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert copied == ["LICENSE", "chat_template.jinja", "config.json", "modeling_tiny.py"]
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_an_export_has_nothing_of_what_a_link_leads_to(tmp_path: Path) -> None:
    """The author of a model's folder could have had a user's private file published with the policy."""
    folder = a_cached_model(tmp_path / "hub")
    (tmp_path / "secret").write_text("secret")
    (folder / "LICENSE").symlink_to(tmp_path / "secret")
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointInvalid, match=r"must have no links to other places, got .*LICENSE"):
        copy_all_but_weights(folder, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_a_written_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    """safetensors writes 0600, so a pod of another user could not read the policy that a run had exported."""
    before = os.umask(umask)
    try:
        save_tensors({"a": torch.zeros(2)}, tmp_path / "new.safetensors")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    written = (tmp_path / "new.safetensors").stat().st_mode
    assert written == (tmp_path / "plain").stat().st_mode
    assert written & 0o040
    assert load_file(tmp_path / "new.safetensors")["a"].shape == (2,)
