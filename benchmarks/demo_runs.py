"""Starts and watches runs for benchmarks, of the demo's run file unless another is named, and keeps what has finished.

What is kept is known by its settings and by the content of its models and data (`identify`), so that a benchmark never
takes the results of others for its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from specrl.files import cache_folder, write_text
from specrl.formats.reports import Phase
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import load_spec
from specrl.spec.yaml_input import quote_yaml

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo"
RUN_FILE = DEMO / "run.yaml"
SPECRL = Path(sys.executable).with_name("specrl")
GLANCE_S = 1.0
MODEL_FILES = ("config.json", "tokenizer.json")
SETTINGS = "settings"  # file in a folder of runs: what identifies the settings of the runs there


class Failed(Exception):
    """A command failed. The message names its log."""


def call(
    command: Sequence[str],
    log: Path,
    look: Callable[[], None] = lambda: None,
    glance_s: float = GLANCE_S,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command to its end, with its output in `log`. On Ctrl-C, SIGTERM and SIGHUP the command ends cleanly first.

    look: called every `glance_s` seconds meanwhile. environment: variables that the command has besides ours. Raises
    Failed, and KeyboardInterrupt for all three signals.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w", encoding="utf-8") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env={**os.environ, **(environment or {})}) as process,
        _forward_ends(process),
    ):
        try:
            while process.poll() is None:
                look()
                try:
                    process.wait(glance_s)
                except subprocess.TimeoutExpired:
                    continue
        except KeyboardInterrupt:
            process.wait()  # the command got the signal, too
            raise
    if process.returncode:
        raise Failed(f"exit code {process.returncode}; see {log}")


@contextmanager
def _forward_ends(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass SIGTERM and SIGHUP on to a command, and raise KeyboardInterrupt, while the context is open.

    A terminal sends Ctrl-C to both. These two may reach this process alone, and the command would go on beside the next
    one. A command that gets a signal twice ends at once.
    """

    def forward(_number: int, _frame: FrameType | None) -> None:
        process.terminate()
        raise KeyboardInterrupt

    # Not one that is ignored, as nohup does with SIGHUP.
    kept = [it for it in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(it) is not signal.SIG_IGN]
    before = [signal.signal(number, forward) for number in kept]
    try:
        yield
    finally:
        for number, handler in zip(kept, before, strict=True):
            signal.signal(number, handler)


def refuse_live_runs(runs: Path) -> None:
    """Raise Failed if a launcher still runs a run in a folder, which nobody may delete or measure beside."""
    for lock in runs.glob("*/lock"):
        if RunDirectory(lock.parent).has_launcher():
            raise Failed(f"{lock.parent} must have ended, got a run that another launcher is running; stop that one")


def overrides_of(fields: Mapping[str, str]) -> list[str]:
    """Format each field as `path=value`."""
    return [f"{path}={value}" for path, value in fields.items()]


def begin(fields: Mapping[str, str], runs: Path, *command: str, run_file: Path = RUN_FILE) -> list[str]:
    """Make the specrl command line for a run file with these fields."""
    settings = [word for override in overrides_of(fields) for word in ("--set", override)]
    return [str(SPECRL), *command, "-f", str(run_file), "--runs", str(runs), "--plain", *settings]


def run(
    fields: Mapping[str, str],
    runs: Path,
    trained: Callable[[int], None] = lambda _: None,
    run_file: Path = RUN_FILE,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Return the folder of the finished run with these fields, below `runs`. A finished run is not repeated, unless the
    content of its policy, drafter or data has changed.

    trained: called every second with the number of steps that the run has trained. environment: variables that the run
    has besides ours. Raises Failed.
    """
    refuse_live_runs(runs)
    wanted = identify_run(fields, run_file)
    found = find_finished(runs) if read_settings(runs) == wanted else None
    if found is None:
        clear_runs(runs, wanted)
        log = runs.with_suffix(".log")
        command = begin(fields, runs, "run", run_file=run_file)
        call(command, log, lambda: trained(_steps(runs)), environment=environment)
        found = find_finished(runs)
        if found is None:
            raise Failed(f"no finished run; see {log}")
        for unread in ("checkpoints", "export"):  # tens of MB per run
            shutil.rmtree(found / unread, ignore_errors=True)
    return found


def make_own_cache(folder: Path) -> dict[str, str]:
    """Make a cache folder without step costs of earlier runs, and return the variable that names it.

    It shares everything else with the user's cache. From kept costs an adaptive draft length starts as an earlier run
    ended, so a run would depend on those before it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (cache_folder() / "references").mkdir(parents=True, exist_ok=True)  # or each run would check all references
    for shared in cache_folder().iterdir():
        if shared.name != "draft-costs":
            (folder / shared.name).symlink_to(shared.resolve())
    return {"SPECRL_CACHE_DIR": str(folder)}


def make_drafter(policy: Path, out: Path, look: Callable[[], None] = lambda: None) -> Path:
    """Initialise an EAGLE-3 head for the policy at `out`/drafter, unless it is there.

    look: called every second meanwhile. Raises Failed.
    """
    initialise_drafter({"model.path": quote_yaml(policy)}, out / "drafter", look)
    return out / "drafter"


def initialise_drafter(
    fields: Mapping[str, str], out: Path, look: Callable[[], None] = lambda: None, run_file: Path = RUN_FILE
) -> None:
    """Run `specrl drafter init`, or go on with an interrupted one of the same settings, unless `out` is there.

    look: called every second meanwhile. Raises Failed, also if `out` was initialised with other settings.
    """
    wanted = identify_run(fields, run_file)
    settings = out.with_name(f"{out.name}.settings")
    if out.exists():
        if not settings.exists() or settings.read_text(encoding="utf-8") != wanted:
            raise Failed(
                f"{out} must be a drafter of these settings, got one of others or of an older version; delete it, or "
                "use another --out"
            )
        return
    runs = out.with_name(f"{out.name}-run")
    refuse_live_runs(runs)
    started = [file.parent for file in runs.glob("*/run.yaml")] if read_settings(runs) == wanted else []
    if started:
        command = [str(SPECRL), "drafter", "init", "--plain", "--resume", str(started[0]), "--out", str(out)]
    else:
        clear_runs(runs, wanted)
        command = begin(fields, runs, "drafter", "init", "--out", str(out), run_file=run_file)
    settings.write_text(wanted, encoding="utf-8")
    call(command, out.with_name(f"{out.name}.log"), look)
    shutil.rmtree(runs, ignore_errors=True)


def identify_run(fields: Mapping[str, str], run_file: Path = RUN_FILE) -> str:
    """Return a digest of all settings of a run, with the content of its policy, drafter and data."""
    spec = load_spec(run_file, overrides_of(fields))
    # Without defaults, so that a field that a newer version adds changes no digest.
    return identify(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True))


def identify(settings: Any) -> str:
    """Return a digest of settings. Existing absolute paths count by their content, and not by their names.

    So a folder may move, also to another machine, and other inputs give another digest.
    """
    text = json.dumps(_replace_paths(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_kept(file: Path, settings: str) -> dict[str, Any] | None:
    """Return the results that `write_kept` left; None without a file. settings: what `identify` returned for them.

    Raises Failed if the file has results of others.
    """
    if not file.exists():
        return None
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("settings") != settings:
        raise Failed(f"{file} must have results of these settings, models and data, got others; name another file")
    return found


def write_kept(file: Path, settings: str, content: Mapping[str, Any]) -> None:
    """Replace the results in a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps({"settings": settings, **content}, indent=1) + "\n")


def _replace_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _replace_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_paths(inner) for inner in value]
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith("/") and os.path.exists(value)):  # noqa: PTH110 - a text that is no path, too
        return [_digest_file(file, file.stat().st_mtime_ns) for file in _list_content(Path(value))]
    return value


def _list_content(path: Path) -> list[Path]:
    """List what a path leads to: itself, the weights of a model with their configuration, or a folder's files."""
    if path.is_file():
        return [path]
    files = sorted(file for file in path.iterdir() if file.is_file())
    weights = [file for file in files if file.suffix == ".safetensors"]
    # Without reports, which have times in them.
    return [*weights, *(file for file in files if file.name in MODEL_FILES)] if weights else files


@cache
def _digest_file(file: Path, _changed_ns: int) -> str:
    """Hash a file. A policy of 540 MB takes a second, and all rows of a benchmark have it."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def read_settings(runs: Path) -> str:
    """Return what identifies the settings of the runs in a folder; empty if nothing does."""
    file = runs / SETTINGS
    return file.read_text(encoding="utf-8") if file.exists() else ""


def clear_runs(runs: Path, settings: str) -> None:
    """Empty a folder for a run with these settings.

    The run's own file cannot tell later what was asked for: `specrl run` replaces names on the hub by folders.
    """
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    (runs / SETTINGS).write_text(settings, encoding="utf-8")


def find_finished(runs: Path) -> Path | None:
    """Return the finished run in a folder; None if there is none."""
    for status in runs.glob("*/status.json"):
        if json.loads(status.read_text(encoding="utf-8"))["phase"] == Phase.FINISHED:
            return status.parent
    return None


def _steps(runs: Path) -> int:
    return sum(len(file.read_bytes().splitlines()) for file in runs.glob("*/metrics.jsonl"))
