"""The volumes that the user names: claims, container images, and what an init container fetches. Pure.

An init container for each `uri` runs `specrl fetch` in every pod that has the volume. It fetches into a folder of the
volume, which is named for the uri: pods and jobs that share a claim share what is fetched, and one of them fetches
(`specrl.hub.folders`). The pod's process mounts that folder alone, read only.
"""

from __future__ import annotations

import hashlib
import re

from specrl.spec.cluster import Volume
from specrl_operator.api import COORDINATOR, FETCH_PREFIX, Object
from specrl_operator.children.containers import FETCH_RESOURCES, build_container
from specrl_operator.plan.job_plan import JobPlan

FETCH_FOLDER = "/var/lib/specrl/fetched"
"""Mount of a whole volume in the init container that fetches into a folder of it."""
FETCH_ATTEMPTS = 10
"""Attempts of an init container whose source does not answer: about five minutes, without those of the libraries. Then
it fails, and its pod is started anew."""


def mount_volumes(spec: Object, plan: JobPlan, role: str) -> None:
    """Add the user's volumes to the spec of a pod, mounts to its only container, and init containers, in place."""
    written = {it.claim_name for it in plan.job.spec.volumes if it.uri is not None}
    fetching = []
    for number, volume in enumerate(plan.job.spec.volumes):
        name = f"volume-{number}"
        folder = "" if volume.uri is None else name_folder(volume.uri)
        if volume.claim_name is not None:
            # A claim is read only in the pod unless an init container fetches to it.
            is_read_only = volume.claim_name not in written
            name = _add_claim(spec, volume.claim_name, name, is_read_only=is_read_only)
        elif volume.image is not None:
            source = {"reference": volume.image, "pullPolicy": plan.settings.pull_policy}
            spec["volumes"].append({"name": name, "image": source})
        else:
            spec["volumes"].append({"name": name, "emptyDir": {}})
        if volume.uri is not None:
            fetching.append(_build_fetch(f"{FETCH_PREFIX}{number}", volume, name, plan, role))
        _mount(spec, name, volume.mount_path, folder, is_read_only=True)
    if fetching:
        spec["initContainers"] = fetching


def mount_claim(spec: Object, claim: str, path: str, name: str, *, is_read_only: bool = False) -> None:
    """Mount a claim in a pod's only container. spec: of the pod. name: of a new volume."""
    _mount(spec, _add_claim(spec, claim, name, is_read_only=is_read_only), path, is_read_only=is_read_only)


def _add_claim(spec: Object, claim: str, name: str, *, is_read_only: bool) -> str:
    """Return the volume that a pod has of a claim; one of this name is added if it has none.

    A pod that names one claim in two volumes may hang.
    """
    for volume in spec["volumes"]:
        if volume.get("persistentVolumeClaim", {}).get("claimName") == claim:
            return str(volume["name"])
    source = {"claimName": claim} | ({"readOnly": True} if is_read_only else {})
    spec["volumes"].append({"name": name, "persistentVolumeClaim": source})
    return name


def _mount(spec: Object, name: str, path: str, folder: str = "", *, is_read_only: bool) -> None:
    mount: Object = {"name": name, "mountPath": path}
    mount |= ({"subPath": folder} if folder else {}) | ({"readOnly": True} if is_read_only else {})
    spec["containers"][0]["volumeMounts"].append(mount)


def name_folder(uri: str) -> str:
    """Return the name of the folder, on its volume, of what a uri names. It is the same for every job."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", uri).strip("-")[:64].strip("-")
    return f"{readable}-{hashlib.sha256(uri.encode()).hexdigest()[:8]}"


def _build_fetch(name: str, volume: Volume, mounted: str, plan: JobPlan, role: str) -> Object:
    """Build the init container of a volume. mounted: the pod's volume that it fetches to."""
    assert volume.uri is not None
    out = f"{FETCH_FOLDER}/{name_folder(volume.uri)}"
    command = ["specrl", "fetch", volume.uri, "--out", out, "--plain", f"--attempts={FETCH_ATTEMPTS}"]
    if role == COORDINATOR:
        command.append("--skip-weights")  # it reads config and tokenizer, and has no GPU's share of the node's disk
    if plan.job.spec.model.path != volume.mount_path:
        command.append("--drafter")  # of any family
    container = build_container(name, plan.settings.control_image, command, plan)
    variables = {"HOME": "/tmp", "HF_HUB_DISABLE_TELEMETRY": "1"}  # noqa: S108 - an empty folder of the pod's own
    container["env"] = [{"name": variable, "value": value} for variable, value in variables.items()]
    if volume.secret_name is not None:
        container["envFrom"] = [{"secretRef": {"name": volume.secret_name}}]
    container["resources"] = FETCH_RESOURCES
    container["volumeMounts"] = [
        {"name": mounted, "mountPath": FETCH_FOLDER},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
    ]
    return container
