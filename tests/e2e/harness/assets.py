"""Find the programs of the control plane, in KUBEBUILDER_ASSETS or in the folder of `make controlplane`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.controlplane.build import CONTROL_PLANE as BUILD

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True)
class Assets:
    """Folders that are searched, in this order."""

    folders: tuple[Path, ...]

    @classmethod
    def of_environment(cls) -> Assets:
        """Search KUBEBUILDER_ASSETS first, then the build: envtest's assets have no scheduler."""
        named = os.environ.get("KUBEBUILDER_ASSETS")
        return cls((*([Path(named)] if named else []), BUILD.folder))

    def find_path(self, name: str) -> Path | None:
        """Return the path of the program or manifest `name`; None if no folder has it."""
        return next((folder / name for folder in self.folders if (folder / name).is_file()), None)

    def missing(self, *names: str) -> list[str]:
        """Return those of `names` that no folder has."""
        return [name for name in names if self.find_path(name) is None]

    def has_workloads(self) -> bool:
        """Whether the controllers of JobSet and LeaderWorkerSet, and their manifests, exist."""
        return not self.missing("jobset", "lws", *BUILD.manifests)
