"""Reads safetensors files: the shapes of their tensors, without torch, and tensors of a folder by name. Writes them.

Also says which files of a Hugging Face folder are read and copied. Invariant: they are regular files of known names,
inside the folder or in the same repository of Hugging Face's cache. Whoever opens such a folder calls `check_folder`.

The launcher reads shapes before a run, and the engine at its start. So both refuse the same files: truncated,
overlong and empty ones, Git LFS pointers, and headers that contradict themselves or the file's length.

The trainer reads tensors. Trainer, drafters and weight transfers write them with `save_tensors`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl.errors import CheckpointInvalid
from specrl.files import JSON_BYTES, check_regular, read_object, resolve_path

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "README.md",
    "LICENSE*",
    "NOTICE*",
)
"""Files beside the weights that a model's repository is fetched with, by name or pattern."""
KNOWN_FILES = (
    *NEEDED_FILES,
    "spiece.model",
    "*.tiktoken",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "USE_POLICY*",
)
"""Files beside the weights that are read and copied, by name or pattern. Others of a folder are neither."""
_MORE_TEMPLATES = "additional_chat_templates"
_CODE = ("configuration_*.py", "modeling_*.py", "tokenization_*.py", "processing_*.py", "image_processing_*.py")
"""A model's Python files, which exports have for engines that load them (MiMo's, by vLLM's --trust-remote-code). specrl
itself never runs them."""
_WEIGHT_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
CHUNK_ROWS = 4096  # rows that `read_rows` reads at once, to choose from


def read_tensor_shapes(file: Path, owner: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor by name. owner: names the model in errors.

    Raises CheckpointInvalid for a file that is missing, incomplete or not a safetensors file.
    """
    from safetensors import SafetensorError  # imported here: most runs of the launcher read no model

    try:
        with open_tensors(file, "np") as tensors:  # checks the header against the file's length
            return {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    except OSError as error:
        raise CheckpointInvalid(
            f"{owner} must have all its weight files, got {file}: {error.strerror or error}; fetch the model again"
        ) from error
    except SafetensorError as error:
        raise CheckpointInvalid(
            f"{owner} must have whole safetensors files, got {file} of {file.stat().st_size} bytes: {error}; "
            "fetch the model again (a Git LFS pointer needs `git lfs pull`)"
        ) from error


def copy_all_but_weights(source: Path, target: Path) -> None:
    """Copy config, tokenizer, licence and other known files of a Hugging Face folder.

    The copies are files with the content, also of links. Raises OSError, and CheckpointInvalid as `check_folder` does.
    """
    check_folder(source, "the model's folder")
    for path in source.iterdir():
        if any(fnmatchcase(path.name, known) for known in (*KNOWN_FILES, *_CODE)):
            shutil.copyfile(path, target / path.name)


def read_weight_map(index: Path, owner: str) -> dict[str, str]:
    """Read which file has which tensor from an index. owner: names the model in errors.

    Raises CheckpointInvalid, also for a file that is not in the folder of the index itself.
    """
    try:
        found = read_object(index).get("weight_map")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not a JSON object ({error})"
        raise CheckpointInvalid(
            f"{owner} must have a readable {index.name}, got {index}: {reason}; fetch the model again"
        ) from error
    if not isinstance(found, Mapping):
        raise CheckpointInvalid(
            f"{owner} must have a weight_map of file names, got another in {index}; fetch the model again"
        )
    wrong = [name for name in found.values() if not is_weight_file(name)]
    if wrong:
        raise CheckpointInvalid(
            f"{owner} must have a weight_map of names of safetensors files in its own folder, got "
            f"{str(wrong[0])[:200]!r} in {index}; fetch the model again"
        )
    return dict(found)


def locate_tensors(folder: Path, owner: str) -> dict[str, str]:
    """Find the name of the file of each tensor of a model: as its index says, or in all files if there is no index.

    The engine loads the same files. owner: names the model in errors. Raises CheckpointInvalid, also for files beside
    model.safetensors without an index.
    """
    index = folder / INDEX
    if index.exists():
        # Only its files count: a folder may also hold a second copy of the weights in one file.
        places = read_weight_map(index, owner)
    else:
        files = sorted(folder.glob("*.safetensors"))
        others = [file.name for file in files if file.name != "model.safetensors"]
        if 0 < len(others) < len(files):
            raise CheckpointInvalid(
                f"{owner} must have no safetensors beside model.safetensors without an index, got {', '.join(others)} "
                f"in {folder}, which the engine would load, too; move them to another folder"
            )
        places = {name: file.name for file in files for name in read_tensor_shapes(file, owner)}
    if not places:
        raise CheckpointInvalid(
            f"{owner} must have its weights as safetensors, got none in {folder}; convert or fetch the model again"
        )
    return places


def is_weight_file(name: object) -> bool:
    """Whether a name of an index is a bare name of a safetensors file: no path, no NUL, nothing hidden."""
    return isinstance(name, str) and _WEIGHT_FILE.fullmatch(name) is not None


def open_tensors(file: Path, framework: str) -> Any:
    """Open a safetensors file, as the library does. It never waits. Raises OSError and SafetensorError."""
    from safetensors import safe_open  # imported here: most runs of the launcher read no model

    check_regular(file)
    return safe_open(file, framework=framework)


def load_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a safetensors file. Needs torch. Raises OSError and SafetensorError."""
    with open_tensors(file, "pt") as content:
        return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no mapping


def check_folder(folder: Path, owner: str) -> None:
    """Raise CheckpointInvalid if a known file of a model's folder must not be read. owner: names the model in errors.

    Libraries read these files by name and whole: a FIFO would make them wait, and a huge file would fill the memory.
    """
    check_links(folder, owner)
    for path in _list_entries(folder):
        is_known = path.parent != folder or any(
            fnmatchcase(path.name, known) for known in (*KNOWN_FILES, *_CODE, INDEX, "*.safetensors")
        )
        if not is_known or not path.exists():  # a link to nothing is reported by whoever needs the file
            continue
        try:
            check_regular(path, None if path.suffix == ".safetensors" else JSON_BYTES)
        except OSError as error:
            raise CheckpointInvalid(
                f"{owner} must have regular files that are not too large, got {path}: {error.strerror}; fetch the "
                "model again"
            ) from error


def check_links(folder: Path, owner: str) -> None:
    """Raise CheckpointInvalid if a link of a model's folder leads elsewhere. owner: names the model in errors.

    A link may lead to a regular file in the folder itself, or in the `blobs` folder of the same repository in Hugging
    Face's cache. There, newer versions link on to the cache's own store, which repositories share.
    """
    home = resolve_path(folder)
    blobs = home.parent.parent / "blobs"  # of CACHE/models--OWNER--NAME/snapshots/COMMIT
    is_cached = home.parent.name == "snapshots" and len(home.parents) > 2
    store = home.parents[2] / "blobs" if is_cached else None
    for link in (path for path in _list_entries(folder) if path.is_symlink()):
        # The first step, with the links among its own folders followed, and the end of all steps.
        step = resolve_path(link.parent) / link.readlink()
        step = resolve_path(step.parent) / step.name
        end = resolve_path(link)
        may_step = home in step.parents or (is_cached and blobs in step.parents)
        may_end = home in end.parents or (is_cached and (blobs in end.parents or store in end.parents))
        if not (may_step and may_end) or not _may_be_a_file(end):
            raise CheckpointInvalid(
                f"{owner} must have no links to other places, got {link}, which leads to {end}; copy the file into the "
                "folder, or name the folder that holds the files"
            )


def _may_be_a_file(path: Path) -> bool:
    """Whether a path leads to a regular file, or to nothing, which is reported by whoever needs the file."""
    try:
        check_regular(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _list_entries(folder: Path) -> list[Path]:
    """List what a folder contains, and its folder of further chat templates, which transformers reads, too."""
    try:
        found = list(folder.iterdir())
    except OSError:  # reported by whoever reads the folder
        return []
    templates = folder / _MORE_TEMPLATES
    return [*found, *(templates.iterdir() if templates.is_dir() else [])]


class FolderReader:
    """Reads tensors of a Hugging Face folder by name, from one file or several. Needs torch.

    Making one raises CheckpointInvalid, as `check_folder` and `locate_tensors` do.
    """

    def __init__(self, path: Path, owner: str = "the model folder") -> None:
        """owner: names the model in errors."""
        check_folder(path, owner)
        self.path = path
        self._owner = owner
        self._open: dict[str, Any] = {}
        self._files = locate_tensors(path, owner)

    def list_names(self) -> list[str]:
        """List the names of all tensors."""
        return [*self._files]

    def read_all(self) -> dict[str, torch.Tensor]:
        """Read all tensors, by name. Raises CheckpointInvalid."""
        return {name: self.read_tensor(name) for name in self._files}

    def read_tensor(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises CheckpointInvalid."""
        tensor: torch.Tensor = self._read(name, "get_tensor")
        return tensor

    def read_rows(self, name: str, rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield some rows of a tensor, a part of them at a time. rows: ascending indices. Raises CheckpointInvalid.

        The tensor is never in memory whole.
        """
        part = self._read(name, "get_slice")
        for first in range(0, part.get_shape()[0], CHUNK_ROWS):
            chosen = rows[(rows >= first) & (rows < first + CHUNK_ROWS)]
            if len(chosen):
                yield part[first : first + CHUNK_ROWS][chosen - first]

    def _read(self, name: str, method: str) -> Any:
        """Call a method of the open file that has the tensor. Raises CheckpointInvalid."""
        from safetensors import SafetensorError  # imported here, as above

        file = self._files.get(name)
        if file is None:
            raise CheckpointInvalid(
                f"{self._owner} must have {name} in safetensors files, got {self.path}; complete it"
            )
        try:
            if file not in self._open:
                self._open[file] = open_tensors(self.path / file, "pt")
            return getattr(self._open[file], method)(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointInvalid(
                f"{self._owner} must have {name} in safetensors files, got {self.path / file}: {error}; complete it"
            ) from error


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions of any other file: those that the process's umask leaves.

    safetensors writes files of mode 0600 whatever the umask. Then nobody else can read an exported policy: not a
    serving pod of another user, nor a pod whose image was built by root.
    """
    from safetensors.torch import save_file  # loads torch, which most readers of this module do without

    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, dict(metadata) if metadata is not None else None)
    path.chmod(mode & 0o777)
