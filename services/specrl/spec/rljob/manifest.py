"""The RLJob manifest: `metadata.name` is the run's name, and `spec` has all other fields of a RunSpec.

`spec/load.py` reads manifests with this module; `crd.py` generates the definition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from specrl.errors import SpecProblem

GROUP = "specrl.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "RLJob"
PLURAL = "rljobs"


def is_rljob(raw: Mapping[str, Any]) -> bool:
    """Whether a mapping is a manifest of an RLJob, of any API version."""
    return raw.get("kind") == KIND and "apiVersion" in raw


def find_envelope_problems(manifest: Mapping[str, Any]) -> Iterator[SpecProblem]:
    """Find the problems of a manifest outside its spec."""
    if manifest.get("apiVersion") != API_VERSION:
        got = manifest.get("apiVersion")
        yield SpecProblem(
            "apiVersion", f"must be {API_VERSION}, got {got!r}", "use the version that this specrl supports"
        )
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("name"), str):
        yield SpecProblem("metadata.name", "must be given", "add it; it is the run's name")
    spec = manifest.get("spec")
    if not isinstance(spec, dict):
        yield SpecProblem(
            "spec", f"must be a mapping of sections, got {type(spec).__name__}", "see examples/ for an RLJob"
        )
    elif "name" in spec:
        yield SpecProblem("spec.name", "is not a field here", "remove it; metadata.name is the run's name")


def extract_run_fields(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest's fields as those of a run file. The manifest must have no `find_envelope_problems`."""
    return {"name": manifest["metadata"]["name"], **manifest["spec"]}
