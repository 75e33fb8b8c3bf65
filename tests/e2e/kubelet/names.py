"""Name resolution inside a pod: an /etc/hosts in place of cluster DNS and kube-proxy.

A Service's name resolves to the addresses of its pods, headless or not, so its port must equal its targetPort. The
addresses come from the EndpointSlices of Kubernetes' own controller.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.e2e.harness.api import Object

SERVICE = "kubernetes.io/service-name"


def hosts_file(pod: Object, address: str, slices: Iterable[Object]) -> str:
    """Build /etc/hosts of `pod` with `address`: the pod itself, and every Service of every namespace."""
    lines = []
    for each in slices:
        forms = _forms(each, pod["metadata"]["namespace"])
        for endpoint in each.get("endpoints") or []:
            if endpoint.get("conditions", {}).get("ready"):
                where = endpoint["addresses"][0]
                lines.append(f"{where} {' '.join(forms)}")
                if "hostname" in endpoint:  # the pod's subdomain is this service
                    own = [f"{endpoint['hostname']}.{form}" for form in forms]
                    lines.append(f"{where} {' '.join(own)}")
    return "\n".join(["127.0.0.1 localhost", f"{address} {hostname_of(pod)}", *sorted(lines)]) + "\n"


def hostname_of(pod: Object) -> str:
    """Return the pod's host name."""
    name: str = pod["spec"].get("hostname") or pod["metadata"]["name"]
    return name[:63]


def _forms(endpoints: Object, here: str) -> list[str]:
    name = endpoints["metadata"].get("labels", {}).get(SERVICE, "")
    namespace = endpoints["metadata"]["namespace"]
    full = f"{name}.{namespace}"
    return [*([name] if namespace == here else []), full, f"{full}.svc", f"{full}.svc.cluster.local"]
