"""Builds controllers of others that the e2e tests run against specrl: Kueue, cert-manager and KEDA.

    python -m tests.e2e.controllers.build [kueue|cert-manager|keda ...]        what `make controllers` runs

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
CERT_MANAGER_CRDS = (
    *("acme.cert-manager.io_challenges", "acme.cert-manager.io_orders", "cert-manager.io_certificaterequests"),
    *("cert-manager.io_certificates", "cert-manager.io_clusterissuers", "cert-manager.io_issuers"),
)
KEDA_CRDS = (
    *("keda.sh_clustertriggerauthentications", "keda.sh_scaledjobs", "keda.sh_scaledobjects"),
    *("keda.sh_triggerauthentications", "eventing.keda.sh_cloudeventsources"),
    "eventing.keda.sh_clustercloudeventsources",
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
CERT_MANAGER = GoPrograms(
    "cert-manager",
    PINS / "cert-manager",
    {"controller": "./controller"},
    {
        f"{name}.yaml": ("github.com/cert-manager/cert-manager", f"deploy/crds/{name}.yaml")
        for name in CERT_MANAGER_CRDS
    },
)
KEDA = GoPrograms(
    "keda",
    PINS / "keda",
    {name: f"github.com/kedacore/keda/v2/cmd/{name}" for name in ("operator", "adapter")},
    {f"{name}.yaml": ("github.com/kedacore/keda/v2", f"config/crd/bases/{name}.yaml") for name in KEDA_CRDS},
)
ALL = {each.name: each for each in (KUEUE, CERT_MANAGER, KEDA)}

if __name__ == "__main__":
    for name in sys.argv[1:] or ALL:
        ALL[name].build()
