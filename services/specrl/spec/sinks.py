"""Section about sinks: other programs that are shown a run's steps, beside its own files. None is needed."""

from __future__ import annotations

from enum import StrEnum

from specrl.spec.base import Empty, PathText, Section, ShortText


class WandbMode(StrEnum):
    ONLINE = "Online"
    OFFLINE = "Offline"


class Wandb(Section):
    """A run of Weights & Biases. Its key comes from the environment (`WANDB_API_KEY`) or ~/.netrc."""

    project: ShortText = "specrl"
    """Project of the run there."""
    entity: ShortText | None = None
    """User or team that owns the project. Null: the key's own."""
    mode: WandbMode = WandbMode.ONLINE
    """`Offline` writes to the folder wandb in the run's folder, for `wandb sync`."""


class Mlflow(Section):
    """A run of MLflow. Its credentials come from the environment (`MLFLOW_TRACKING_USERNAME` and others)."""

    tracking_uri: PathText | None = None
    """Tracking server, as in http://mlflow:5000. Null: the environment's `MLFLOW_TRACKING_URI`."""
    experiment: ShortText = "specrl"
    """Experiment that the run belongs to; made where it is not there."""


class Sinks(Section):
    """Where the numbers of each step go besides metrics.jsonl; any of these. Each needs its extra to be installed where
    the coordinator runs (`pip install 'specrl[wandb]'`). One that fails or hangs holds nothing up, and catches up."""

    tensorboard: Empty | None = None
    """Event files in the folder tensorboard in the run's folder."""
    wandb: Wandb | None = None
    """Weights & Biases."""
    mlflow: Mlflow | None = None
    """MLflow."""
