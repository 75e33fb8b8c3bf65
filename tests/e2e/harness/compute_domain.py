"""A stand-in for NVIDIA's DRA driver: ComputeDomain's definition, and what its controller makes of one.

The driver itself needs GPUs and is not built here. What is modelled is what placement depends on: a ComputeDomain
whose spec never changes leads to a ResourceClaimTemplate of the name that it gives, and goes with it. Its daemons, its
status and its finalizer are not. The devices that claims are made on are real ones to the scheduler (nodes.py).
"""

from __future__ import annotations

from tests.e2e.harness.api import Api, Object, holds, until
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


def install(api: Api) -> None:
    """Serve the definition; the kubelet plays the controller (`claim_template`)."""
    api.apply(DEFINITION)
    until(lambda: holds(api.get(DEFINITIONS, NAME), "Established"), "ComputeDomain is served")


def uninstall(api: Api) -> None:
    """Take it away, with every ComputeDomain."""
    api.delete(DEFINITIONS, NAME)
    until(lambda: api.find(DEFINITIONS, NAME) is None, "ComputeDomain is gone")


def claim_template(domain: Object) -> Object:
    """What the controller makes of a ComputeDomain: a template for claims of one channel."""
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
