"""Where the programs of the control plane are: in KUBEBUILDER_ASSETS, or where `make controlplane` put them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.controlplane.build import MANIFESTS, cache_folder

CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")


@dataclass(frozen=True)
class Assets:
    """Folders that are searched in this order."""

    folders: tuple[Path, ...]

    @classmethod
    def of_environment(cls) -> Assets:
        """KUBEBUILDER_ASSETS first (envtest's has no scheduler, so what is missing there may come from the build)."""
        named = os.environ.get("KUBEBUILDER_ASSETS")
        return cls((*([Path(named)] if named else []), cache_folder()))

    def path(self, name: str) -> Path | None:
        """The program or manifest `name`, if some folder has it."""
        return next((folder / name for folder in self.folders if (folder / name).is_file()), None)

    def missing(self, *names: str) -> list[str]:
        """Those of `names` that no folder has."""
        return [name for name in names if self.path(name) is None]

    def has_workloads(self) -> bool:
        """JobSet and LeaderWorkerSet, with what must be applied beside them."""
        return not self.missing("jobset", "lws", *MANIFESTS)
