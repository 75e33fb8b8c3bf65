"""The pods of a job: one template per role, hardened, with the user's own part merged over it. Pure.

Every pod runs as a user without rights, on a read-only root, and ends by itself within its grace period: a replica
drains for generation.drainS, a coordinator saves the run. Only the coordinator has a token for the API server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrl.spec.run import Transport
from specrl_operator import placement, tls
from specrl_operator.api import COORDINATOR, GENERATION, LEADER_LABEL, TRAINER, Job, Object
from specrl_operator.facts import Facts

GRPC_PORT, HTTP_PORT = 7000, 8080
REPLICA_PORT, TRAINER_PORT, MASTER_PORT = 7001, 7002, 29500
METRICS_PORT, TRAINER_METRICS_PORT = 8081, 8082
RUN_FOLDER, SPEC_FOLDER = "/var/lib/specrl/run", "/etc/specrl"
SPEC_FILE = f"{SPEC_FOLDER}/run.yaml"
STORE_PASSWORD = "SPECRL_STORE_PASSWORD"  # noqa: S105 - the name of the variable that holds it
USER = 65532
"""The images' user; `nonroot` of distroless images."""

SAVE_S = 90
"""Grace of a coordinator, which may take 60 s to save the run (`launcher/programs.py`)."""
STOP_S = 30
"""Grace of a trainer, and of a replica beyond its drain: a goodbye, and calls that are cut off after 2 s."""
STARTUP_S = 3600
"""Longest start of a container: images and weights of hundreds of gigabytes are read."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "HOME": "/tmp",  # noqa: S108 - the one place that may be written to
}
"""Of every pod; what local runs set, too (`launcher/environment.py`), and a home."""


def coordinator_pod(job: Job, facts: Facts) -> Object:
    """The coordinator's pod template."""
    command = [
        *("specrl-coordinator", "--spec", SPEC_FILE, "--run-directory", RUN_FOLDER),
        *("--host", "0.0.0.0", "--port", str(GRPC_PORT), "--http-port", str(HTTP_PORT)),  # noqa: S104 - in a pod
        *("--rljob", f"{job.namespace}/{job.name}", "--rljob-uid", job.uid),
    ]
    container = _container(COORDINATOR, facts.settings.control_image, command, facts)
    container["env"] = _environment({"OMP_NUM_THREADS": "1"})
    if needs_store(job):
        container["env"].append(
            {
                "name": STORE_PASSWORD,
                "valueFrom": {"secretKeyRef": {"name": job.child("store"), "key": "password"}},
            }
        )
    container["ports"] = [
        {"name": "grpc", "containerPort": GRPC_PORT},
        {"name": "http", "containerPort": HTTP_PORT},
    ]
    container["startupProbe"] = _http_probe(job, "/healthz", periodSeconds=5, failureThreshold=STARTUP_S // 5)
    container["readinessProbe"] = _http_probe(job, "/readyz", periodSeconds=5, timeoutSeconds=5)
    container["livenessProbe"] = _http_probe(job, "/healthz", periodSeconds=10, timeoutSeconds=10, failureThreshold=6)
    pod = _pod(job, facts, COORDINATOR, container, SAVE_S)
    pod["spec"]["automountServiceAccountToken"] = True
    pod["spec"]["serviceAccountName"] = job.name
    if tls.is_on(job):
        pod["metadata"]["labels"][tls.SCHEME_LABEL] = "https"
    return merged(pod, job.spec.coordinator.pod_template)


def trainer_pod(job: Job, facts: Facts, address: str) -> Object:
    """The trainer's pod template; `address` is the host name of the pod that holds rank 0."""
    trainer = job.spec.trainer
    ranks, pods = trainer.parallelism.world_size, trainer.num_nodes
    launcher: list[str] = []
    if pods > 1:
        launcher = [
            *("torchrun", f"--nnodes={pods}", f"--nproc-per-node={ranks // pods}"),
            *("--node-rank=$(JOB_COMPLETION_INDEX)", f"--master-addr={address}", f"--master-port={MASTER_PORT}"),
            "--no-python",
        ]
    elif ranks > 1:
        launcher = ["torchrun", "--standalone", f"--nproc-per-node={ranks}", "--no-python"]
    command = [
        *launcher,
        *("specrl-trainer", "--spec", SPEC_FILE, "--run-directory", RUN_FOLDER),
        *("--coordinator", f"{job.child(COORDINATOR)}:{GRPC_PORT}"),
        *("--host", "$(POD_IP)", "--port", str(TRAINER_PORT), "--until-dismissed"),
        *("--metrics-port", str(TRAINER_METRICS_PORT)),  # of rank 0
    ]
    container = _container(TRAINER, facts.settings.trainer_image, command, facts)
    own = {"OMP_NUM_THREADS": str(trainer.threads)}
    if not trainer.gpus_per_node:
        own["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's path on CPUs
    container["env"] = _environment(own)
    container["ports"] = [
        {"name": "grpc", "containerPort": TRAINER_PORT},
        {"name": "metrics", "containerPort": TRAINER_METRICS_PORT},
    ]
    pod = _pod(job, facts, TRAINER, container, STOP_S)
    pod["spec"]["restartPolicy"] = "Never"
    placement.place(pod, job, facts, TRAINER)
    return merged(pod, trainer.pod_template)


def replica_pod(job: Job, facts: Facts, *, is_leader: bool = True) -> Object:
    """The template of a replica's first pod, which serves, or of the others of a replica larger than a node.

    LeaderWorkerSet tells each pod where its group's first one is, and which one it is itself.
    """
    generation, nodes = job.spec.generation, placement.replica_shape(job).pods
    command = [
        *("specrl-generation", "--spec", SPEC_FILE, "--replica-id", "$(POD_NAME)"),
        *("--coordinator", f"{job.child(COORDINATOR)}:{GRPC_PORT}", "--host", "$(POD_IP)"),
    ]
    if is_leader:
        command += ["--port", str(REPLICA_PORT), "--metrics-port", str(METRICS_PORT)]
    if nodes > 1:
        command += [
            *(f"--nnodes={nodes}", f"--node-rank={0 if is_leader else '$(LWS_WORKER_INDEX)'}"),
            *("--master-addr=$(LWS_LEADER_ADDRESS)", f"--master-port={MASTER_PORT}"),
        ]
    container = _container(GENERATION, facts.settings.generation_image, command, facts)
    own = {"OMP_NUM_THREADS": str(generation.threads)}
    if not generation.gpus_per_replica:
        own["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # the pod's own cores are the limit
    container["env"] = _environment(own)
    if is_leader:
        container["ports"] = [
            {"name": "grpc", "containerPort": REPLICA_PORT},
            {"name": "metrics", "containerPort": METRICS_PORT},
        ]
        container["startupProbe"] = _port_probe(periodSeconds=10, failureThreshold=STARTUP_S // 10)
        container["readinessProbe"] = _port_probe(periodSeconds=5)
    pod = _pod(job, facts, GENERATION, container, generation.drain_s + STOP_S)
    if is_leader:
        pod["metadata"]["labels"][LEADER_LABEL] = "true"
    placement.place(pod, job, facts, GENERATION)
    return merged(pod, generation.pod_template)


def needs_store(job: Job) -> bool:
    """Whether the operator starts a Redis server for the job."""
    return job.spec.store is None


def container_security() -> Object:
    """What no container of a job may do."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security() -> Object:
    """Whom the processes of a pod run as."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


KEYS = {
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
"""Lists whose items are told apart by a field, as Kubernetes' own strategic merge does."""


def merged(pod: Object, part: Mapping[str, Any] | None) -> Object:
    """`pod` with a user's part of a template merged over it.

    Mappings are merged, so a GPU or a claim that the operator put into `resources` stays; lists are merged by the field
    that tells their items apart (KEYS), tolerations added to, other lists replaced; null removes a field.
    """
    found: Object = _merge(pod, part or {})
    return found


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Object:
    merged: Object = dict(base)
    for name, value in over.items():
        before = base.get(name)
        if value is None:
            merged.pop(name, None)
        elif isinstance(value, Mapping):
            merged[name] = _merge(before if isinstance(before, Mapping) else {}, value)
        elif isinstance(value, list) and isinstance(before, list) and name == "tolerations":
            merged[name] = before + value
        elif isinstance(value, list) and isinstance(before, list) and name in KEYS:
            merged[name] = _merge_items(before, value, KEYS[name])
        else:
            merged[name] = value
    return merged


def _merge_items(base: list[Object], over: list[Object], key: str) -> list[Object]:
    theirs = {item.get(key): item for item in over}
    kept = [_merge(item, theirs.pop(item.get(key), {})) for item in base]
    return kept + list(theirs.values())


def _pod(job: Job, facts: Facts, role: str, container: Object, grace_s: int) -> Object:
    """A pod template with what every role has: the run file, its folder, the user's volumes, a place for scratch."""
    claim = job.spec.checkpoint.claim_name
    shares_run = role != GENERATION or job.spec.weights.transport is Transport.CHECKPOINT
    volumes: list[Object] = [
        {"name": "spec", "configMap": {"name": job.child("run")}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Object] = [
        {"name": "spec", "mountPath": SPEC_FOLDER, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - an empty folder of the pod's own
    ]
    if shares_run:
        source = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
        volumes.append({"name": "run", **source})
        mounts.append({"name": "run", "mountPath": RUN_FOLDER, **({"subPath": job.run_name} if claim else {})})
    for number, volume in enumerate(job.spec.volumes):
        name = f"volume-{number}"
        volumes.append({"name": name, "persistentVolumeClaim": {"claimName": volume.claim_name, "readOnly": True}})
        mounts.append({"name": name, "mountPath": volume.mount_path, "readOnly": True})
    container["volumeMounts"] = mounts
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a namespace of a thousand Services would fill the environment
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": volumes,
    }
    if job.spec.scheduling.priority_class_name is not None:
        spec["priorityClassName"] = job.spec.scheduling.priority_class_name
    if facts.settings.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in facts.settings.pull_secrets]
    pod: Object = {"metadata": {"labels": job.labels(role)}, "spec": spec}
    tls.put_into(pod, job, role)
    return pod


def _container(name: str, image: str, command: list[str], facts: Facts) -> Object:
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": facts.settings.pull_policy,
        "command": command,
        # The last lines of its log become the pod's message when it fails, and the job's condition.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(),
    }


def _environment(own: Mapping[str, str]) -> list[Object]:
    values: list[Object] = [{"name": name, "value": value} for name, value in {**ENVIRONMENT, **own}.items()]
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP"}
    return values + [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()]


def _http_probe(job: Job, path: str, **timing: int) -> Object:
    scheme = {"scheme": "HTTPS"} if tls.is_on(job) else {}
    return {"httpGet": {"path": path, "port": "http", **scheme}, **timing}


def _port_probe(**timing: int) -> Object:
    """A replica listens once its engine computes."""
    return {"tcpSocket": {"port": "grpc"}, **timing}
