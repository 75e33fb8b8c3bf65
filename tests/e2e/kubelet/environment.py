"""The environment of a container: env, envFrom, the downward API, and $(NAME) in its command."""

from __future__ import annotations

import base64
import re
from typing import Any

from tests.e2e.harness.api import Object
from tests.e2e.kubelet.client import Client

REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)")


class ObjectMissing(Exception):
    """An object that the pod references does not exist. The kubelet waits for it, as Kubernetes' does."""


async def variables_of(client: Client, pod: Object, container: Object, facts: dict[str, str]) -> dict[str, str]:
    """Build the variables: envFrom, then env. `facts` are status fields that the kubelet decides (podIP, hostIP)."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        for name, value in (await _data_of_source(client, pod, source)).items():
            found[source.get("prefix", "") + name] = value
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            value = await _value_from(client, pod, container, variable["valueFrom"], facts)
            if value is not None:
                found[variable["name"]] = value
        else:
            found[variable["name"]] = expand(variable.get("value", ""), found)
    return found


def expand(text: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) where NAME is known, and $$ by a dollar sign."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return variables.get(match[1], match[0])

    return REFERENCE.sub(one, text)


async def data_of(client: Client, kind: str, name: str, namespace: str, optional: bool) -> dict[str, bytes]:
    """Return the data of a ConfigMap or Secret; empty if it is optional and missing."""
    found = await client.find(kind, name, namespace)
    if found is None:
        if optional:
            return {}
        raise ObjectMissing(f"{kind.partition('/')[2]} {namespace}/{name} not found")
    text = {key: value.encode() for key, value in (found.get("data") or {}).items()} if "config" in kind else {}
    encoded = found.get("binaryData") if "config" in kind else found.get("data")
    return text | {key: base64.b64decode(value) for key, value in (encoded or {}).items()}


def field_of(pod: Object, path: str, facts: dict[str, str]) -> str:
    """Return a field of the downward API."""
    if path in facts:
        return facts[path]
    name, _, key = path.partition("['")
    here: Any = pod
    for word in name.split("."):
        here = here.get(word, {})
    if key:
        return str(here.get(key.removesuffix("']"), ""))
    if isinstance(here, dict):
        return "\n".join(f'{word}="{value}"' for word, value in sorted(here.items()))
    return str(here)


async def _data_of_source(client: Client, pod: Object, source: Object) -> dict[str, str]:
    kind, reference = (
        ("v1/configmaps", source["configMapRef"]) if "configMapRef" in source else ("v1/secrets", source["secretRef"])
    )
    namespace = pod["metadata"]["namespace"]
    optional = reference.get("optional", False)
    data = await data_of(client, kind, reference["name"], namespace, optional)
    return {name: value.decode() for name, value in data.items()}


async def _value_from(
    client: Client, pod: Object, container: Object, source: Object, facts: dict[str, str]
) -> str | None:
    if "fieldRef" in source:
        return field_of(pod, source["fieldRef"]["fieldPath"], facts)
    if "resourceFieldRef" in source:
        where, _, resource = source["resourceFieldRef"]["resource"].partition(".")
        resources = container.get("resources", {})
        return str(resources.get(where, {}).get(resource) or resources.get("requests", {}).get(resource, "0"))
    kind, reference = (
        ("v1/configmaps", source["configMapKeyRef"])
        if "configMapKeyRef" in source
        else ("v1/secrets", source["secretKeyRef"])
    )
    optional = reference.get("optional", False)
    data = await data_of(client, kind, reference["name"], pod["metadata"]["namespace"], optional)
    if reference["key"] in data:
        return data[reference["key"]].decode()
    if optional:
        return None
    raise ObjectMissing(f"{kind.partition('/')[2]} {reference['name']} has no key {reference['key']}")
