"""Builds the control plane that the e2e tests start: etcd, three Kubernetes programs, JobSet and LeaderWorkerSet.

    python -m tests.e2e.controlplane.build        what `make controlplane` runs

JobSet's and LeaderWorkerSet's CRDs and webhook configurations are taken from the same modules as their controllers.
tests/e2e/go_programs.py says where the result is kept.
"""

from __future__ import annotations

from pathlib import Path

from tests.e2e.go_programs import GoPrograms

CONTROL_PLANE = GoPrograms(
    "controlplane",
    Path(__file__).resolve().parent,
    {
        "etcd": "./etcd",
        "kube-apiserver": "./kube-apiserver",
        "kube-controller-manager": "./kube-controller-manager",
        "kube-scheduler": "./kube-scheduler",
        "jobset": "sigs.k8s.io/jobset",
        "lws": "sigs.k8s.io/lws/cmd",
    },
    {
        "jobset-crd.yaml": ("sigs.k8s.io/jobset", "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"),
        "jobset-webhooks.yaml": ("sigs.k8s.io/jobset", "config/components/webhook/manifests.yaml"),
        "lws-crd.yaml": ("sigs.k8s.io/lws", "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
        "lws-disaggregated-crd.yaml": (
            "sigs.k8s.io/lws",
            "config/crd/bases/disaggregatedset.x-k8s.io_disaggregatedsets.yaml",
        ),
        "lws-webhooks.yaml": ("sigs.k8s.io/lws", "config/webhook/manifests.yaml"),
    },
)

if __name__ == "__main__":
    CONTROL_PLANE.build()
