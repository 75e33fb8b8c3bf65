"""The pod templates of a job: one per role, hardened, with the user's podTemplate merged over it. Pure.

Every pod runs as an unprivileged user on a read-only root file system, and exits within its grace period. In that time
a replica drains for generation.drainS, and a coordinator saves the run. Only the coordinator has a token for the API
server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrl.spec.run import Transport
from specrl.telemetry.hosts import ALL_ADDRESSES
from specrl_operator.api import COORDINATOR, GENERATION, LEADER_LABEL, STORE, TRAINER, Job, Object
from specrl_operator.children import tls
from specrl_operator.children.affinity import bind_to_nodes
from specrl_operator.children.containers import build_container, build_container_security, set_default_resources
from specrl_operator.children.volumes import mount_claim, mount_volumes
from specrl_operator.plan.job_plan import JobPlan

GRPC_PORT = 7000
HTTP_PORT = 8080
REPLICA_PORT = 7001
TRAINER_PORT = 7002
MASTER_PORT = 29500
METRICS_PORT = 8081
TRAINER_METRICS_PORT = 8082
STORE_PORT = 6379
RUN_FOLDER = "/var/lib/specrl/run"
ORIGIN_FOLDER = "/var/lib/specrl/origin"
"""Mount of the claim with the other run's checkpoint, `checkpoint.from`. The whole claim: a subPath that is misspelt
would be created, and the trainer could not say which folders there are."""
CACHE_FOLDER = "/var/cache/specrl"
"""Mount of `cacheClaimName`."""
COMPILER_CACHES = {
    "VLLM_CACHE_ROOT": f"{CACHE_FOLDER}/vllm",  # torch.compile's graphs, and autotuning
    "TORCHINDUCTOR_CACHE_DIR": f"{CACHE_FOLDER}/inductor",
    "TRITON_CACHE_DIR": f"{CACHE_FOLDER}/triton",
    "FLASHINFER_WORKSPACE_BASE": f"{CACHE_FOLDER}/flashinfer",
}
"""Variables of the compilers. Each names its files by their content and renames them into place, so pods may share."""
SPEC_FOLDER = "/etc/specrl"
SPEC_FILE = f"{SPEC_FOLDER}/run.yaml"
SPEC_VOLUME = "spec"
"""Volume of the run file. `desired.py` sets its ConfigMap."""
STORE_PASSWORD = "SPECRL_STORE_PASSWORD"  # noqa: S105 - the name of the variable that holds it
# The image may be Valkey's or Redis'. `-`: the server reads the password from its standard input, as everybody on the
# node may read its command line.
STORE_START = f"""exec $(command -v valkey-server || command -v redis-server) - "$@" <<END
requirepass ${STORE_PASSWORD}
END
"""
USER_ID = 65532
"""Uid and gid of the images' user (`deploy/docker/Dockerfile`); the same as `nonroot` of distroless images."""

SAVE_S = 900
"""Grace period of a coordinator, in seconds. The trainer finishes its step first, and then writes a checkpoint. If both
take longer, the next coordinator trains the steps since the last checkpoint again. A job can give more by
`coordinator.podTemplate`."""
STOP_S = 30
"""Grace period of a trainer, and of a replica beyond its drain, in seconds. Both leave the run by an RPC and cut off
running calls after 2 s."""
STARTUP_S = 3600
"""Longest start of a container, in seconds. It may load hundreds of gigabytes of weights."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "HOME": "/tmp",  # noqa: S108 - the only writable folder
}
"""Environment of every pod: as of local runs (`launcher/processes/environment.py`), and a home."""


KEPT_IN_PLACE = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations of every pod: autoscalers of nodes must not move it to save a node. A moved trainer repeats the steps
since its checkpoint, and a moved replica loads its model anew. `kubectl drain` and spot interruptions do not ask."""
REPLACEABLE = {"kueue.x-k8s.io/safe-to-forcefully-delete": "true"}
"""Annotation of pods that may be replaced before the kubelet of a lost node has said that they ended. Kueue's failure
recovery replaces them. A pod that still runs there does no harm: a superseded coordinator ends, and a coordinator calls
only the trainer and the replicas that registered last. The store's pod is not among them: two servers must not write to
one volume."""


def build_coordinator_pod(plan: JobPlan) -> Object:
    """Build the coordinator's pod template."""
    job = plan.job
    command = [
        *("specrl-coordinator", "--spec", SPEC_FILE, "--run-directory", RUN_FOLDER),
        *("--host", ALL_ADDRESSES, "--port", str(GRPC_PORT), "--http-port", str(HTTP_PORT)),
        *("--rljob", f"{job.namespace}/{job.name}", "--rljob-uid", job.uid),
    ]
    container = build_container(COORDINATOR, plan.settings.control_image, command, plan)
    container["env"] = _build_environment({"OMP_NUM_THREADS": "1"})
    if plan.has_own_store:
        container["env"].append(_refer_to_password(job))
    container["ports"] = [
        {"name": "grpc", "containerPort": GRPC_PORT},
        {"name": "http", "containerPort": HTTP_PORT},
    ]
    container["startupProbe"] = _build_http_probe(job, "/healthz", periodSeconds=5, failureThreshold=STARTUP_S // 5)
    container["readinessProbe"] = _build_http_probe(job, "/readyz", periodSeconds=5, timeoutSeconds=5)
    container["livenessProbe"] = _build_http_probe(
        job, "/healthz", periodSeconds=10, timeoutSeconds=10, failureThreshold=6
    )
    pod = _build_pod(plan, COORDINATOR, container, SAVE_S)
    pod["spec"]["automountServiceAccountToken"] = True
    pod["spec"]["serviceAccountName"] = job.name
    if tls.is_enabled(job):
        pod["metadata"]["labels"][tls.SCHEME_LABEL] = "https"
    return _complete_pod(pod, job.spec.coordinator.pod_template, plan, COORDINATOR)


def build_trainer_pod(plan: JobPlan, address: str) -> Object:
    """Build the trainer's pod template. address: host name of the pod with rank 0."""
    job = plan.job
    trainer = plan.job.spec.trainer
    ranks = trainer.parallelism.world_size
    pods = trainer.num_nodes
    command = [
        *("specrl-trainer", "--spec", SPEC_FILE, "--run-directory", RUN_FOLDER),
        *("--coordinator", f"{job.child_name(COORDINATOR)}:{GRPC_PORT}"),
        *("--host", "$(POD_IP)", "--port", str(TRAINER_PORT), "--until-dismissed"),
        *("--metrics-port", str(TRAINER_METRICS_PORT)),  # rank 0 alone serves metrics
    ]
    if ranks > 1:
        command.append(f"--ranks={ranks // pods}")
    if pods > 1:
        command += [
            *(f"--nnodes={pods}", "--node-rank=$(JOB_COMPLETION_INDEX)"),
            *(f"--master-addr={address}", f"--master-port={MASTER_PORT}"),
        ]
    origin = job.spec.checkpoint.origin
    if origin is not None:
        command.append(f"--checkpoint={ORIGIN_FOLDER}/{origin.folder}")
    container = build_container(TRAINER, plan.settings.trainer_image, command, plan)
    own = {"OMP_NUM_THREADS": str(trainer.threads)}
    if trainer.gpus_per_node:
        own["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # micro-batches have other sizes in every step
    else:
        own["TORCHDYNAMO_DISABLE"] = "1"  # Megatron decorates with torch.compile; on CPUs its functions run eagerly
    container["env"] = _build_environment(own)
    container["ports"] = [
        {"name": "grpc", "containerPort": TRAINER_PORT},
        {"name": "metrics", "containerPort": TRAINER_METRICS_PORT},
    ]
    container["readinessProbe"] = _build_trainer_probe(pods)
    pod = _build_pod(plan, TRAINER, container, STOP_S)
    if origin is not None:
        mount_claim(pod["spec"], origin.claim_name, ORIGIN_FOLDER, "origin", is_read_only=True)
    pod["spec"]["restartPolicy"] = "Never"  # ranks restart together: JobSet or the operator creates all pods again
    bind_to_nodes(pod, plan, TRAINER)
    return _complete_pod(pod, trainer.pod_template, plan, TRAINER)


def build_replica_pod(plan: JobPlan, *, is_leader: bool = True) -> Object:
    """Build the pod template of a replica's leader, which serves, or of its workers if it is larger than a node.

    LeaderWorkerSet sets LWS_LEADER_ADDRESS and LWS_WORKER_INDEX in each pod.
    """
    job = plan.job
    nodes = plan.replica.pods
    generation = job.spec.generation
    command = [
        *("specrl-generation", "--spec", SPEC_FILE, "--replica-id", "$(POD_NAME)"),
        *("--coordinator", f"{job.child_name(COORDINATOR)}:{GRPC_PORT}", "--host", "$(POD_IP)"),
    ]
    if is_leader:
        command += ["--port", str(REPLICA_PORT), "--metrics-port", str(METRICS_PORT)]
    if nodes > 1:
        command += [
            *(f"--nnodes={nodes}", f"--node-rank={0 if is_leader else '$(LWS_WORKER_INDEX)'}"),
            *("--master-addr=$(LWS_LEADER_ADDRESS)", f"--master-port={MASTER_PORT}"),
        ]
    container = build_container(GENERATION, plan.settings.generation_image, command, plan)
    own = {"OMP_NUM_THREADS": str(generation.threads)}
    if not generation.gpus_per_replica:
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the pod's own cores are the limit
    container["env"] = _build_environment(own)
    if is_leader:
        container["ports"] = [
            {"name": "grpc", "containerPort": REPLICA_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ]
        container["startupProbe"] = _build_port_probe(periodSeconds=10, failureThreshold=STARTUP_S // 10)
        container["readinessProbe"] = _build_port_probe(periodSeconds=5)
    pod = _build_pod(plan, GENERATION, container, generation.drain_s + STOP_S)
    if is_leader:
        pod["metadata"]["labels"][LEADER_LABEL] = "true"
    bind_to_nodes(pod, plan, GENERATION)
    return _complete_pod(pod, generation.pod_template, plan, GENERATION)


def build_store_pod(plan: JobPlan) -> Object:
    """Build the pod template of the job's own Redis server, which loses no acknowledged write."""
    settings = plan.settings
    container = {
        "name": STORE,
        "image": settings.store_image,
        "imagePullPolicy": settings.pull_policy,
        "command": ["sh", "-c", STORE_START, "store"],
        "args": [
            *("--dir", "/data", "--appendonly", "yes", "--appendfsync", "always", "--save", ""),
            # Protected mode would refuse other pods. The password and the NetworkPolicy protect the server.
            *("--protected-mode", "no"),
        ],
        "env": [_refer_to_password(plan.job)],
        "ports": [{"name": "redis", "containerPort": STORE_PORT}],
        "readinessProbe": {"tcpSocket": {"port": "redis"}, "periodSeconds": 5},
        "securityContext": build_container_security(),
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    pod = {"metadata": _build_pod_metadata(plan.job, STORE), "spec": _build_pod_spec(plan, container, STOP_S)}
    return _complete_pod(pod, plan.job.spec.store_server.pod_template, plan, STORE)


def _refer_to_password(job: Job) -> Object:
    """Build the variable with the password of the job's own store."""
    secret = {"name": job.child_name(STORE), "key": "password"}
    return {"name": STORE_PASSWORD, "valueFrom": {"secretKeyRef": secret}}


MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "ports": "name",
    "volumeMounts": "mountPath",
    "resourceClaims": "name",
    "claims": "name",
    "imagePullSecrets": "name",
}
"""Lists that are merged item by item, and the field that identifies an item, as in Kubernetes' strategic merge."""

NEVER_REMOVED = ("metadata", "labels", "spec", "containers", "volumes")
"""Fields that every pod of a job needs. Null, as an empty key is in YAML, leaves them as they are."""


def merge_pod_template(pod: Object, part: Mapping[str, Any] | None) -> Object:
    """Merge a user's part of a template over a pod template.

    Mappings are merged, so GPUs and claims that the operator put into `resources` stay. Lists in MERGE_KEYS are merged
    item by item. Tolerations are appended, since they have no key. Other lists are replaced. Null removes a field, but
    none of NEVER_REMOVED.
    """
    found: Object = _merge_mappings(pod, part or {})
    return found


def _complete_pod(pod: Object, part: Mapping[str, Any] | None, plan: JobPlan, role: str) -> Object:
    """Merge the user's part over a role's pod template, then set what it left open and what it must not change."""
    merged = merge_pod_template(pod, part)
    # Selectors go by these labels, those of NetworkPolicies included.
    merged["metadata"]["labels"] |= pod["metadata"]["labels"]
    set_default_resources(merged, plan, role)
    return merged


def _merge_mappings(base: Mapping[str, Any], over: Mapping[str, Any]) -> Object:
    merged: Object = dict(base)
    for name, value in over.items():
        before = base.get(name)
        if value is None:
            if name not in NEVER_REMOVED:
                merged.pop(name, None)
        elif isinstance(value, Mapping):
            merged[name] = _merge_mappings(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(before, list) and name == "tolerations":
            merged[name] = before + value
        elif isinstance(value, list) and isinstance(before, list) and name in MERGE_KEYS:
            merged[name] = _merge_items(before, value, MERGE_KEYS[name])
        else:
            merged[name] = value
    return merged


def _merge_items(base: list[Object], over: list[Object], key: str) -> list[Object]:
    theirs = {item.get(key): item for item in over}
    kept = [_merge_mappings(item, theirs.pop(item.get(key), {})) for item in base]
    return kept + list(theirs.values())


def _build_pod(plan: JobPlan, role: str, container: Object, grace_s: int) -> Object:
    """Build a pod template with what every role has: run file, run folder, the user's volumes, a scratch folder."""
    job = plan.job
    claim = job.spec.checkpoint.claim_name
    shares_run = role != GENERATION or job.spec.weights.transport is Transport.CHECKPOINT
    volumes: list[Object] = [
        {"name": SPEC_VOLUME},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Object] = [
        {"name": SPEC_VOLUME, "mountPath": SPEC_FOLDER, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - an empty folder of the pod's own
    ]
    if shares_run:
        source = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
        volumes.append({"name": "run", **source})
        mounts.append({"name": "run", "mountPath": RUN_FOLDER, **({"subPath": job.run_name} if claim else {})})
    container["volumeMounts"] = mounts
    spec = _build_pod_spec(plan, container, grace_s) | {"volumes": volumes}
    mount_volumes(spec, plan, role)
    cache = job.spec.cache_claim_name
    if cache is not None and role in (TRAINER, GENERATION):
        mount_claim(spec, cache, CACHE_FOLDER, "cache")
        container["env"] += [{"name": variable, "value": folder} for variable, folder in COMPILER_CACHES.items()]
    pod: Object = {"metadata": _build_pod_metadata(job, role), "spec": spec}
    tls.mount_certificate(pod, job, role)
    return pod


def _build_pod_metadata(job: Job, role: str) -> Object:
    notes = KEPT_IN_PLACE if role == STORE else KEPT_IN_PLACE | REPLACEABLE
    return {"labels": job.build_labels(role), "annotations": dict(notes)}


def _build_pod_spec(plan: JobPlan, container: Object, grace_s: int) -> Object:
    """Build what the specs of all pods have ("restricted" Pod Security Standard)."""
    spec: Object = {
        "automountServiceAccountToken": False,
        # Kubernetes would otherwise set seven or more variables for every Service of the namespace.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    if plan.job.spec.scheduling.priority_class_name is not None:
        spec["priorityClassName"] = plan.job.spec.scheduling.priority_class_name
    if plan.settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in plan.settings.pull_secrets]
    return spec


def _build_environment(own: Mapping[str, str]) -> list[Object]:
    values: list[Object] = [{"name": name, "value": value} for name, value in {**ENVIRONMENT, **own}.items()]
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    return values + [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _build_http_probe(job: Job, path: str, **timing: int) -> Object:
    scheme = {"scheme": "HTTPS"} if tls.is_enabled(job) else {}
    return {"httpGet": {"path": path, "port": "http", **scheme}, **timing}


def _build_port_probe(**timing: int) -> Object:
    """Build a probe of the gRPC port. Replicas and trainers listen only when they have loaded their model."""
    return {"tcpSocket": {"port": "grpc"}, **timing}


def _build_trainer_probe(pods: int) -> Object:
    """Build the readiness probe of a trainer of so many pods, which have one template.

    Rank 0 listens when all ranks have loaded. Of several pods only its own can be probed; the others are ready at once.
    """
    if pods == 1:
        return _build_port_probe(periodSeconds=5)
    listens = f"test $JOB_COMPLETION_INDEX != 0 || true < /dev/tcp/$POD_IP/{TRAINER_PORT}"
    return {"exec": {"command": ["bash", "-c", listens]}, "periodSeconds": 5, "timeoutSeconds": 5}
