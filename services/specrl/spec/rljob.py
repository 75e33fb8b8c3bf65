"""RLJob: a run as a Kubernetes object. Its name is `metadata.name`; everything else of a RunSpec is its `spec`.

`load.py` reads manifests with this; `crd.py` writes the definition that an API server knows RLJobs by.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specrl.errors import Problem
from specrl.spec.run import RunSpec

GROUP = "specrl.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "RLJob"
PLURAL = "rljobs"


def is_rljob(raw: Mapping[str, Any]) -> bool:
    """Whether a mapping is a Kubernetes manifest of an RLJob, of whatever version."""
    return raw.get("kind") == KIND and "apiVersion" in raw


def envelope_problems(manifest: Mapping[str, Any]) -> Iterator[Problem]:
    """What is wrong with a manifest around its spec."""
    if manifest.get("apiVersion") != API_VERSION:
        yield Problem("apiVersion", f"must be {API_VERSION}, got {manifest.get('apiVersion')!r}", "write that one")
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        yield Problem("metadata.name", "must be given", "add it; it is the run's name")
    spec = manifest.get("spec")
    if not isinstance(spec, dict):
        yield Problem("spec", f"must be a mapping of sections, got {type(spec).__name__}", "see examples/ for an RLJob")
    elif "name" in spec:
        yield Problem("spec.name", "is not a field here", "remove it; metadata.name is the run's name")


def run_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The run file that a manifest without `envelope_problems` stands for."""
    return {"name": manifest["metadata"]["name"], **manifest["spec"]}


def manifest_of(spec: RunSpec, namespace: str | None = None) -> dict[str, Any]:
    """The RLJob of a run, with every default and without nulls, as an API server would store it."""
    fields = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    metadata = {"name": fields.pop("name")} | ({} if namespace is None else {"namespace": namespace})
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": fields}
