"""A pod's volumes as folders on this machine, and their mounts in its containers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.e2e.harness.api import Object, path_of
from tests.e2e.kubelet.client import Client
from tests.e2e.kubelet.environment import ObjectMissing, data_of, expand, field_of


@dataclass(frozen=True)
class VolumeBind:
    """A mount of a folder or file of this machine at a path in a container."""

    source: str
    target: str
    read_only: bool


async def create_volumes(client: Client, pod: Object, folder: Path, facts: dict[str, str]) -> dict[str, Path]:
    """Create the pod's volumes below `folder`. Returns paths by name. Raises ObjectMissing if an object is missing."""
    found = {}
    for volume in pod["spec"].get("volumes", []):
        own = folder / volume["name"]
        if "hostPath" in volume:
            found[volume["name"]] = Path(volume["hostPath"]["path"])
        elif "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            found[volume["name"]] = await _claimed(client, claim, pod["metadata"]["namespace"])
        else:
            own.mkdir(parents=True, exist_ok=True)
            for path, content in (await _files(client, pod, volume, facts)).items():
                (own / path).parent.mkdir(parents=True, exist_ok=True)
                (own / path).write_bytes(content)
            found[volume["name"]] = own
    return found


def binds_of(container: Object, volumes: dict[str, Path], variables: dict[str, str]) -> list[VolumeBind]:
    """Return the container's mounts, shallow targets first. Creates folders of subPaths."""
    binds = []
    for mount in container.get("volumeMounts", []):
        source = volumes[mount["name"]]
        below = mount.get("subPath") or expand(mount.get("subPathExpr", ""), variables)
        if below:
            source = source / below
            if not source.exists():
                source.mkdir(parents=True)
        binds.append(VolumeBind(str(source), mount["mountPath"], mount.get("readOnly", False)))
    return sorted(binds, key=lambda bind: bind.target.count("/"))


async def _files(client: Client, pod: Object, volume: Object, facts: dict[str, str]) -> dict[str, bytes]:
    """Return a volume's files: content by relative path; empty for an emptyDir."""
    if "emptyDir" in volume:
        return {}
    if "projected" in volume:
        files: dict[str, bytes] = {}
        for source in volume["projected"]["sources"]:
            files |= await _projected(client, pod, source, facts)
        return files
    if "configMap" in volume:
        return await _keys(client, pod, "v1/configmaps", volume["configMap"])
    if "secret" in volume:
        secret = volume["secret"]
        return await _keys(client, pod, "v1/secrets", secret | {"name": secret["secretName"]})
    if "downwardAPI" in volume:
        return _fields(pod, volume["downwardAPI"], facts)
    raise ObjectMissing(f"volume {volume['name']} is of a kind that this kubelet does not model: {sorted(volume)}")


async def _projected(client: Client, pod: Object, source: Object, facts: dict[str, str]) -> dict[str, bytes]:
    if "serviceAccountToken" in source:
        wanted = source["serviceAccountToken"]
        return {wanted["path"]: (await _token(client, pod, wanted)).encode()}
    if "configMap" in source:
        return await _keys(client, pod, "v1/configmaps", source["configMap"])
    if "secret" in source:
        return await _keys(client, pod, "v1/secrets", source["secret"])
    return _fields(pod, source["downwardAPI"], facts)


async def _keys(client: Client, pod: Object, kind: str, source: Object) -> dict[str, bytes]:
    namespace = pod["metadata"]["namespace"]
    optional = source.get("optional", False)
    data = await data_of(client, kind, source["name"], namespace, optional)
    if "items" not in source:
        return data
    missing = [item["key"] for item in source["items"] if item["key"] not in data]
    if missing and not optional:
        raise ObjectMissing(f"{kind.partition('/')[2]} {source['name']} has no key {missing[0]}")
    return {item["path"]: data[item["key"]] for item in source["items"] if item["key"] in data}


def _fields(pod: Object, source: Object, facts: dict[str, str]) -> dict[str, bytes]:
    return {
        item["path"]: field_of(pod, item["fieldRef"]["fieldPath"], facts).encode()
        for item in source["items"]
        if "fieldRef" in item
    }


async def _token(client: Client, pod: Object, wanted: Object) -> str:
    """Request a token bound to this pod, which is invalid once the pod is deleted."""
    metadata = pod["metadata"]
    bound = {"kind": "Pod", "apiVersion": "v1", "name": metadata["name"], "uid": metadata["uid"]}
    audiences = [wanted["audience"]] if wanted.get("audience") else None
    spec = {
        "audiences": audiences,
        "expirationSeconds": wanted.get("expirationSeconds", 3600),
        "boundObjectRef": bound,
    }
    account = pod["spec"].get("serviceAccountName", "default")
    path = path_of("v1/serviceaccounts", metadata["namespace"], account, "token")
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    answer = await client.call("POST", path, body)
    token: str = answer["status"]["token"]
    return token


async def _claimed(client: Client, name: str, namespace: str) -> Path:
    """Return the folder of the claim's PersistentVolume."""
    claim = await client.find("v1/persistentvolumeclaims", name, namespace)
    if claim is None or claim.get("status", {}).get("phase") != "Bound":
        raise ObjectMissing(f"persistentvolumeclaim {namespace}/{name} is not bound")
    volume = await client.find("v1/persistentvolumes", claim["spec"]["volumeName"])
    if volume is None or "hostPath" not in volume["spec"]:
        raise ObjectMissing(f"persistentvolume {claim['spec']['volumeName']} has no hostPath")
    return Path(volume["spec"]["hostPath"]["path"])
