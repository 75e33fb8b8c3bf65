"""Checks before a run starts: can the store be used, can every configured sink, and is the run's folder writable?

Called by the launcher's preflight; `main` checks the sinks again, and in a pod the folder. Separate from the sinks
themselves, because importing them would load their packages (TensorBoard, Weights & Biases, MLflow).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile

from specrl.coordinator.ledger import check_store_server
from specrl.errors import RunInvalid, SpecProblem, collect_problems
from specrl.models import RunModels
from specrl.spec import RunSpec
from specrl.spec.rules.rule import find_broken_rules
from specrl.spec.rules.run_rules import REDIS
from specrl.spec.sinks import WandbMode

_SINKS = ("tensorboard", "wandb", "mlflow")
"""Sinks that need a package. Its name, and that of the extra in pyproject.toml, is the sink's."""


def check(spec: RunSpec, _models: RunModels | None = None) -> list[SpecProblem]:
    """Return every problem of the store's server and of the sinks."""
    problems: list[SpecProblem] = []
    # A broken rule of `redis` is reported with the others of the run file, and leaves no address to connect to.
    if not any(find_broken_rules(spec, REDIS)):
        with collect_problems(problems):
            check_store_server(spec)
    return [*problems, *find_sink_problems(spec)]


def find_sink_problems(spec: RunSpec) -> Iterator[SpecProblem]:
    """Yield what each configured sink lacks on this machine: its package, its server's address or its API key."""
    chosen = spec.telemetry.sinks
    for name in _SINKS:
        if getattr(chosen, name) is not None and find_spec(name) is None:
            rule = f"must have its package installed where the coordinator runs, got no {name}"
            remedy = f"run `make sinks` in a clone, or install the extra `{name}` (docs/install.md); or remove the sink"
            yield SpecProblem(f"telemetry.sinks.{name}", rule, remedy)
    if chosen.mlflow is not None and chosen.mlflow.tracking_uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
        rule = "must be set here or as MLFLOW_TRACKING_URI in the environment, got neither"
        yield SpecProblem("telemetry.sinks.mlflow.trackingUri", rule, "give the URI of the tracking server")
    if chosen.wandb is not None and chosen.wandb.mode is WandbMode.ONLINE and not _has_wandb_key():
        rule = "must have an API key in WANDB_API_KEY or ~/.netrc, got none"
        yield SpecProblem("telemetry.sinks.wandb", rule, "set the key, or write mode: Offline")


def _has_wandb_key() -> bool:
    return bool(os.environ.get("WANDB_API_KEY")) or Path(os.environ.get("NETRC", "~/.netrc")).expanduser().is_file()


def check_writable(folder: Path) -> None:
    """Raise RunInvalid if this process may not write into a run's folder.

    In a pod the folder is on the user's claim. fsGroup opens it to the pod's group only for the volume types that
    support it, which a shared file system usually does not.
    """
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            return  # a full disk, or a server that does not answer, is no matter of rights
        raise RunInvalid(
            f"{folder} must be writable by uid {os.getuid()} and gid {os.getgid()}, got {os.strerror(error.errno)}; "
            "give the claim's root folder that group and mode 2770, or mount a claim that is not read-only"
        ) from error
