"""A stand-in for NVIDIA's DRA driver: the CRD of ComputeDomain, and the object that its controller creates.

The driver needs GPUs and is not built here. Only what placement depends on is modelled: for a ComputeDomain, whose spec
is immutable, the controller creates a ResourceClaimTemplate with the name in the spec, and deletes it with the
ComputeDomain. The driver's daemons, status and finalizer are not modelled. The scheduler allocates claims from real
ResourceSlices (nodes.py).
"""

from __future__ import annotations

from tests.e2e.harness.api import Api, Object, is_condition_true, wait_until
from tests.e2e.harness.nodes import IMEX_CLASS

KIND = "resource.nvidia.com/v1beta1/computedomains"
DEFINITIONS = "apiextensions.k8s.io/v1/customresourcedefinitions"
NAME = "computedomains.resource.nvidia.com"

_CHANNEL = {
    "type": "object",
    "required": ["resourceClaimTemplate"],
    "properties": {
        "allocationMode": {"type": "string", "enum": ["Single", "All"], "default": "Single"},
        "resourceClaimTemplate": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}},
        },
    },
}
_SPEC = {
    "type": "object",
    "required": ["numNodes", "channel"],
    "properties": {"numNodes": {"type": "integer"}, "channel": _CHANNEL},
    "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "a ComputeDomain's spec never changes"}],
}
_SCHEMA = {
    "type": "object",
    "properties": {"spec": _SPEC, "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
}
DEFINITION: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": NAME},
    "spec": {
        "group": "resource.nvidia.com",
        "scope": "Namespaced",
        "names": {"kind": "ComputeDomain", "plural": "computedomains", "singular": "computedomain"},
        "versions": [
            {
                "name": "v1beta1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": _SCHEMA},
                "subresources": {"status": {}},
            }
        ],
    },
}


def install_crd(api: Api) -> None:
    """Install the CRD. Our kubelet acts as the controller (`build_claim_template`)."""
    api.apply(DEFINITION)
    wait_until(lambda: is_condition_true(api.get(DEFINITIONS, NAME), "Established"), "ComputeDomain is served")


def uninstall_crd(api: Api) -> None:
    """Delete the CRD, and with it every ComputeDomain."""
    api.delete(DEFINITIONS, NAME)
    wait_until(lambda: api.find(DEFINITIONS, NAME) is None, "ComputeDomain is gone")


def build_claim_template(domain: Object) -> Object:
    """Build the template for claims of one channel that the controller creates for a ComputeDomain."""
    metadata = domain["metadata"]
    owner = {"apiVersion": domain["apiVersion"], "kind": domain["kind"], "name": metadata["name"]}
    requests = [{"name": "channel", "exactly": {"deviceClassName": IMEX_CLASS}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {
            "name": domain["spec"]["channel"]["resourceClaimTemplate"]["name"],
            "namespace": metadata["namespace"],
            "ownerReferences": [owner | {"uid": metadata["uid"], "controller": True}],
        },
        "spec": {"spec": {"devices": {"requests": requests}}},
    }
