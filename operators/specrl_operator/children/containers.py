"""The containers of a job: their security context, and requests and limits, which are derived from the spec. Pure.

Without requests a pod is BestEffort: the first to be evicted and killed, also a coordinator that must lose nothing. And
a namespace with a quota refuses it. Requests are what a part needs at least, so that a small machine can run a small
job. Limits leave room: they stop a leak, and are no statement about need. docs/operator.md has the table.

A quantity that the user's podTemplate names, as request or as limit, is left to the user.
"""

from __future__ import annotations

from specrl_operator.api import COORDINATOR, STORE, TRAINER, Object
from specrl_operator.plan.job_plan import JobPlan

MIB = 1
GIB = 1024
"""Sizes are counted in MiB."""


def build_container_security() -> Object:
    """Build the security context of every container of a job ("restricted" Pod Security Standard)."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def build_container(name: str, image: str, command: list[str], plan: JobPlan) -> Object:
    """Build a container. command: with its arguments."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": plan.settings.pull_policy,
        "command": command,
        # The message of a container that fails is what it wrote to /dev/termination-log (`specrl.termination`), else
        # the end of its log. `observed.find_last_exit` reads it.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": build_container_security(),
    }


def set_default_resources(pod: Object, plan: JobPlan, role: str) -> None:
    """Set requests and limits of the role's container in a merged pod template, in place."""
    container = next(it for it in pod["spec"]["containers"] if it["name"] == role)
    given = container.setdefault("resources", {})
    requests, limits = _derive(plan, role)
    named = {*(given.get("requests") or {}), *(given.get("limits") or {})}
    for kind, values in (("requests", requests), ("limits", limits)):
        given[kind] = {**(given.get(kind) or {}), **{name: it for name, it in values.items() if name not in named}}


def _derive(plan: JobPlan, role: str) -> tuple[Object, Object]:
    """Return the requests and limits of a role's container."""
    spec = plan.job.spec
    if role == STORE:
        return _quantities(100, 256 * MIB, 64 * MIB), _quantities(2000, 8 * GIB, GIB)
    # Without a claim, checkpoints are in the pod's own folder.
    scratch = 20 * GIB if spec.checkpoint.claim_name is not None else 200 * GIB
    if role == COORDINATOR:
        pools = [spec.reward_pool, *([spec.tools.pool] if spec.tools is not None else [])]
        workers = sum(pool.workers for pool in pools)
        # A worker's address space is limited to memoryMib, and few come near it.
        most_mib = sum(pool.memory_mib * pool.workers for pool in pools)
        return (
            _quantities(250 + 100 * workers, 512 * MIB + 128 * MIB * workers, GIB),
            _quantities(2000 + 1000 * workers, 8 * GIB + most_mib * MIB, scratch),
        )
    gpus = plan.shape_of(role).gpus_per_pod
    if gpus:
        # Fits nodes of 8 H100 (96 cores, 1 TiB and more) and of 4 GB200 (144 cores, 960 GB).
        return (
            _quantities(8000 * gpus, 48 * GIB * gpus, 10 * GIB),
            _quantities(16000 * gpus, 200 * GIB * gpus, 100 * GIB + scratch),
        )
    if role == TRAINER:
        processes = spec.trainer.parallelism.world_size // spec.trainer.num_nodes
        threads = spec.trainer.threads
    else:
        processes = spec.generation.tensor_parallel
        threads = spec.generation.threads
    return (
        _quantities(250 * threads * processes, GIB * processes, GIB),
        _quantities(1000 * (threads + 1) * processes, 16 * GIB * processes, scratch),
    )


def _quantities(cpu_m: int, memory_mib: int, storage_mib: int) -> Object:
    """Build quantities in Kubernetes' canonical form. cpu_m: thousandths of a CPU; the others in MiB."""
    return {
        "cpu": f"{cpu_m}m" if cpu_m % 1000 else str(cpu_m // 1000),
        "memory": _size(memory_mib),
        "ephemeral-storage": _size(storage_mib),
    }


def _size(mib: int) -> str:
    return f"{mib}Mi" if mib % GIB else f"{mib // GIB}Gi"


FETCH_RESOURCES: Object = {
    "requests": _quantities(100, 256 * MIB, 64 * MIB),
    "limits": _quantities(4000, 4 * GIB, 20 * GIB),
}
"""Of an init container that fetches a volume. Its pod's process has more, so the pod asks for no more because of it.
Files that are fetched without a claim count against the pod's limit of ephemeral storage."""
