"""Sections about sinks: programs that get the metrics of each step, besides the run's own files. All are optional."""

from __future__ import annotations

from enum import StrEnum

from specrl.spec.base import EmptySection, PathText, Section, ShortText


class WandbMode(StrEnum):
    ONLINE = "Online"
    OFFLINE = "Offline"


class Wandb(Section):
    """A run in Weights & Biases. The API key comes from the environment (`WANDB_API_KEY`) or ~/.netrc."""

    project: ShortText = "specrl"
    """Project that the run belongs to."""
    entity: ShortText | None = None
    """User or team that owns the project. Null: the default entity of the API key."""
    mode: WandbMode = WandbMode.ONLINE
    """`Online`: sends to the server. `Offline`: writes to the folder wandb in the run's folder, for `wandb sync`."""


class Mlflow(Section):
    """A run in MLflow. Credentials come from the environment (`MLFLOW_TRACKING_USERNAME` and others)."""

    tracking_uri: PathText | None = None
    """URL of the tracking server, such as http://mlflow:5000. Null: the variable `MLFLOW_TRACKING_URI`."""
    experiment: ShortText = "specrl"
    """Experiment that the run belongs to. It is created if it does not exist."""


class Sinks(Section):
    """Programs that get the metrics of each step, besides metrics.jsonl; any number of members. Each needs its extra,
    installed where the coordinator runs (docs/install.md). A sink that fails or hangs does not delay the run, and
    catches up later."""

    tensorboard: EmptySection | None = None
    """Writes event files to the folder tensorboard in the run's folder."""
    wandb: Wandb | None = None
    """Writes to Weights & Biases."""
    mlflow: Mlflow | None = None
    """Writes to MLflow."""
