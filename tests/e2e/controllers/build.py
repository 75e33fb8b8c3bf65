"""Builds controllers of others that the e2e tests run against specrl: Kueue.

    python -m tests.e2e.controllers.build [kueue ...]        what `make controllers` runs

Each has a Go module of its own below `pins`, since their dependencies disagree. CRDs and webhook configurations come
from the same modules as the programs. tests/e2e/go_programs.py says where the result is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.e2e.go_programs import GoPrograms

PINS = Path(__file__).resolve().parent / "pins"
KUEUE_CRDS = (
    *("admissionchecks", "clusterqueues", "cohorts", "localqueues", "multikueueclusters", "multikueueconfigs"),
    *("provisioningrequestconfigs", "resourceflavors", "topologies", "workloadpriorityclasses", "workloads"),
)
KUEUE = GoPrograms(
    "kueue",
    PINS / "kueue",
    {"kueue": "sigs.k8s.io/kueue/cmd/kueue"},
    {
        f"{name}.yaml": ("sigs.k8s.io/kueue", f"config/components/crd/bases/kueue.x-k8s.io_{name}.yaml")
        for name in KUEUE_CRDS
    }
    | {"webhooks.yaml": ("sigs.k8s.io/kueue", "config/components/webhook/manifests.yaml")},
)
ALL = {each.name: each for each in (KUEUE,)}

if __name__ == "__main__":
    for name in sys.argv[1:] or ALL:
        ALL[name].build()
