"""The coordinator's HTTP face: the live page, the REST API behind it, metrics for Prometheus, health for Kubernetes.

    page      /                      one page and its assets, which hold nothing of the run
    reads     /status /steps ...     JSON, and /stream: server-sent events
    actions   /pause /resume ...     for those alone who are admitted to act
    probes    /metrics /healthz /readyz

Who may read and who may act: `coordinator/admission.py`. Probes are for kubelets and scrapers, which have no token for
it: NetworkPolicies say who reaches them. All of it is described at /openapi.json.
"""

from specrl.coordinator.web.app import make_app

__all__ = ["make_app"]
