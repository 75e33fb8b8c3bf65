"""Cross-field rules of RLJobs only. They do not apply to local runs, which ignore the fields about the cluster.

The form of a rule is in `rule.py`. `load.py` and `rljob/crd.py` read CLUSTER_RULES.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic.alias_generators import to_camel

from specrl.spec import cluster
from specrl.spec.base import COMMIT_PATTERN, HubName, RelativePath, Section, is_gguf, is_optional, walk_section_types
from specrl.spec.cluster import Gang, Layout, NvLink, OnTrainerFailure, Profile, TlsMode
from specrl.spec.data import HubSource
from specrl.spec.generation import Generation
from specrl.spec.rules.rule import Rule, compare_fields
from specrl.spec.run import RunSpec, Transport
from specrl.spec.trainer import Trainer

# `/+`, because a path may repeat its slashes.
_OWN_FOLDERS = r"^/+(etc|var/+lib)/+specrl(/|$)"
"""Folders in which the operator mounts the run file and the run's folder (`children/pods.py` of the operator)."""
_SYSTEM_FOLDERS = (
    r"^/+($|(bin|dev|lib|lib64|proc|root|run|sbin|sys|tmp|usr)(/|$)|(etc|opt|var|var/+lib)/*$|opt/+specrl(/|$))"
)
"""Folders whose content the processes need: the image's, with the packages in /opt/specrl, the kernel's, /dev/shm, and
the scratch folder /tmp. A volume would hide it."""


def _require_absolute(section: type[Section], name: str) -> Rule[Section]:
    """Build the rule that a path is absolute. A relative one would be resolved in a folder that only the pods have."""
    field = to_camel(name)

    def holds(holder: Section) -> bool:
        path = getattr(holder, name)
        return path is None or path.startswith("/")

    guard = f"!has(self.{field}) || " if is_optional(section.model_fields[name]) else ""
    remedy = "give a path in the pods, such as one below a mountPath of spec.volumes"
    if HubName.ALLOWED in section.model_fields[name].metadata:
        remedy += "; for a name on the hub give the volume the uri hf://OWNER/NAME@COMMIT (docs/hub.md)"
    return Rule(
        section,
        field,
        "must be an absolute path in an RLJob",
        remedy,
        holds,
        f"{guard}self.{field}.startsWith('/')",
    )


# Every path that a run file may give relative to itself, found by its mark.
PATHS = tuple(
    _require_absolute(section, name)
    for section in dict.fromkeys(section for _, section in walk_section_types(RunSpec))
    for name, field in section.model_fields.items()
    if RelativePath.TO_RUN_FILE in field.metadata
)


def _refuse_gguf(section: type[Section]) -> Rule[Any]:
    """Build the rule that a model is no GGUF file."""
    guard = "!has(self.path) || " if is_optional(section.model_fields["path"]) else ""
    return Rule(
        section,
        "path",
        "must not be a GGUF file in an RLJob",
        "pods convert nothing: convert it to a folder on the volume with specrl fetch FILE --out DIR (docs/hub.md)",
        lambda holder: holder.path is None or not is_gguf(holder.path),
        f"{guard}!self.path.endsWith('.gguf')",
    )


# Every model that a local run may name, found by its mark.
HUB = (
    *(
        _refuse_gguf(section)
        for section in dict.fromkeys(section for _, section in walk_section_types(RunSpec))
        if any(HubName.ALLOWED in field.metadata for field in section.model_fields.values())
    ),
    Rule(
        HubSource,
        "files",
        "must be absolute paths in an RLJob",
        "give a volume the uri hf://datasets/OWNER/NAME@COMMIT, and name its files below the mountPath (docs/hub.md)",
        lambda source: any(file.startswith("/") for file in source.files),
        "self.files.exists(file, file.startsWith('/'))",
        lambda source: ", ".join(source.files) or "none",
    ),
)


def _list_shared_mounts(spec: RunSpec) -> list[str]:
    paths = [volume.mount_path for volume in spec.volumes]
    return sorted({path for path in paths if paths.count(path) > 1})


# Volumes, and what needs storage that outlives a pod or is shared by pods.
STORAGE = (
    Rule(
        RunSpec,
        "volumes",
        "must each have a mountPath of its own",
        "give one of them another mountPath",
        lambda spec: not _list_shared_mounts(spec),
        "self.volumes.all(it, self.volumes.exists_one(other, other.mountPath == it.mountPath))",
        lambda spec: ", ".join(_list_shared_mounts(spec)),
    ),
    Rule(
        cluster.Volume,
        "mountPath",
        "must be an absolute path",
        "start it with /",
        lambda volume: volume.mount_path.startswith("/"),
        "self.mountPath.startsWith('/')",
    ),
    Rule(
        cluster.Volume,
        "mountPath",
        "must not be in /etc/specrl or /var/lib/specrl",
        "use another path; the operator mounts the run's own files there",
        lambda volume: re.search(_OWN_FOLDERS, volume.mount_path) is None,
        f"!self.mountPath.matches(r'{_OWN_FOLDERS}')",
    ),
    Rule(
        cluster.Volume,
        "mountPath",
        "must not be a folder of the system or of the image",
        "use another path, such as /models; the volume would hide what the processes need",
        lambda volume: re.search(_SYSTEM_FOLDERS, volume.mount_path) is None,
        f"!self.mountPath.matches(r'{_SYSTEM_FOLDERS}')",
    ),
    Rule(
        cluster.Volume,
        "claimName",
        "must be given without image and uri",
        "name a PersistentVolumeClaim, an image, or the uri of what is to be fetched",
        lambda volume: not (volume.claim_name is None and volume.image is None and volume.uri is None),
        "has(self.claimName) || has(self.image) || has(self.uri)",
    ),
    Rule(
        cluster.Volume,
        "image",
        "must not be given with claimName or uri",
        "make two volumes of it",
        lambda volume: volume.image is None or (volume.claim_name is None and volume.uri is None),
        "!has(self.image) || (!has(self.claimName) && !has(self.uri))",
    ),
    Rule(
        cluster.Volume,
        "uri",
        "must end with @ and a commit of 40 digits, without claimName",
        "`specrl fetch OWNER/NAME`, with --data-set for data, prints the commit; every pod fetches for itself, and a "
        "branch may move in between",
        lambda volume: (
            volume.uri is None
            or volume.claim_name is not None
            or not volume.uri.startswith("hf://")
            or re.search(COMMIT_PATTERN, volume.uri) is not None
        ),
        "!has(self.uri) || has(self.claimName) || !self.uri.startsWith('hf://') || "
        f"self.uri.matches('{COMMIT_PATTERN}')",
    ),
    Rule(
        cluster.Volume,
        "secretName",
        "must not be given without uri",
        "remove it; it has the credentials of what is fetched. Images are pulled with the chart's images.pullSecrets",
        lambda volume: volume.secret_name is None or volume.uri is not None,
        "!has(self.secretName) || has(self.uri)",
    ),
    Rule(
        RunSpec,
        "checkpoint.claimName",
        "must be given with failurePolicy.onTrainerFailure RestartFromCheckpoint",
        "name a PersistentVolumeClaim, or set onTrainerFailure: Fail; without a claim, checkpoints die with their pod",
        lambda spec: (
            spec.checkpoint.claim_name is not None or spec.failure_policy.on_trainer_failure is OnTrainerFailure.FAIL
        ),
        "has(self.checkpoint.claimName) || self.failurePolicy.onTrainerFailure != 'RestartFromCheckpoint'",
    ),
    Rule(
        RunSpec,
        "cacheClaimName",
        "must not be a claim of volumes",
        "name another claim; volumes are mounted read only",
        lambda spec: (
            spec.cache_claim_name is None or spec.cache_claim_name not in {it.claim_name for it in spec.volumes}
        ),
        "!has(self.cacheClaimName) || "
        "!self.volumes.exists(it, has(it.claimName) && it.claimName == self.cacheClaimName)",
    ),
    Rule(
        RunSpec,
        "store.sqlite",
        "must come with checkpoint.claimName",  # otherwise the file would be lost with the coordinator's pod
        "name a PersistentVolumeClaim, or leave store out, and the operator starts a Redis server",
        lambda spec: spec.store is None or spec.store.sqlite is None or spec.checkpoint.claim_name is not None,
        "!has(self.store) || !has(self.store.sqlite) || has(self.checkpoint.claimName)",
        lambda spec: "none",
    ),
    Rule(
        RunSpec,
        "storeServer.podTemplate",
        "must not be given with store",
        "remove it, or leave store out; the operator starts no server for a job that has a store of its own",
        lambda spec: spec.store_server.pod_template is None or spec.store is None,
        "!has(self.storeServer.podTemplate) || !has(self.store)",
        lambda spec: "both",
    ),
    Rule(
        RunSpec,
        "weights.transport",
        "must not be Checkpoint without checkpoint.claimName",  # replicas read the files that the trainer wrote
        "name a PersistentVolumeClaim that all nodes can mount, or use Auto",
        lambda spec: spec.weights.transport is not Transport.CHECKPOINT or spec.checkpoint.claim_name is not None,
        "self.weights.transport != 'Checkpoint' || has(self.checkpoint.claimName)",
        lambda spec: "no claim",
    ),
)


_RANKS = " * ".join(f"self.parallelism.{name}" for name in ("tensor", "context", "pipeline", "data"))
# GPUs of the roles: enough for the ranks, the same number on every node.
_GPUS = (
    Rule(
        Generation,
        "gpusPerReplica",
        "must be 0 or >= tensorParallel",  # with 0, all ranks compute on CPUs
        "raise it, or lower tensorParallel",
        lambda it: it.gpus_per_replica == 0 or it.gpus_per_replica >= it.tensor_parallel,
        "self.gpusPerReplica == 0 || self.gpusPerReplica >= self.tensorParallel",
        lambda it: f"{it.gpus_per_replica} < {it.tensor_parallel}",
    ),
    Rule(
        Trainer,
        "numNodes",
        "must divide the ranks, parallelism.tensor x context x pipeline x data",
        "choose numNodes so that every node gets the same number of ranks",
        lambda it: it.parallelism.world_size % it.num_nodes == 0,
        f"{_RANKS} % self.numNodes == 0",
        lambda it: f"{it.num_nodes} nodes for {it.parallelism.world_size} ranks",
    ),
    Rule(
        Trainer,
        "gpusPerNode",
        "must be 0 or, times numNodes, the ranks, parallelism.tensor x context x pipeline x data",
        "give every rank its own GPU",
        lambda it: it.gpus_per_node == 0 or it.gpus_per_node * it.num_nodes == it.parallelism.world_size,
        f"self.gpusPerNode == 0 || self.gpusPerNode * self.numNodes == {_RANKS}",
        lambda it: f"{it.gpus_per_node} x {it.num_nodes} for {it.parallelism.world_size} ranks",
    ),
    Rule(
        RunSpec,
        "weights.transport",
        "must not be Nccl with placement.profile CPU",
        "use Auto; NCCL sends between GPUs alone",
        lambda it: it.weights.transport is not Transport.NCCL or it.placement.profile is not Profile.CPU,
        "self.weights.transport != 'Nccl' || self.placement.profile != 'CPU'",
    ),
)


def _bind_gpus_to_profile(field: str, gpus: Callable[[RunSpec], int]) -> tuple[Rule[RunSpec], Rule[RunSpec]]:
    """Build the rules that a role has GPUs, or the job says that it has none: 0 is the default of both roles."""
    return (
        Rule(
            RunSpec,
            field,
            "must be > 0 unless placement.profile is CPU",
            "give the number of GPUs, or set profile: CPU to train and generate on CPUs",
            lambda spec: spec.placement.profile is Profile.CPU or gpus(spec) > 0,
            f"self.placement.profile == 'CPU' || self.{field} > 0",
        ),
        Rule(
            RunSpec,
            field,
            "must be 0 with placement.profile CPU",
            "remove it, or use another profile",
            lambda spec: spec.placement.profile is not Profile.CPU or gpus(spec) == 0,
            f"self.placement.profile != 'CPU' || self.{field} == 0",
        ),
    )


def _count_all_gpus(spec: RunSpec) -> int:
    # The placement must hold for the largest number of replicas that users or the autoscaler may set.
    scaling = spec.generation.autoscaling
    replicas = max(spec.generation.replicas, scaling.max_replicas if scaling is not None else 0)
    return spec.trainer.num_nodes * spec.trainer.gpus_per_node + replicas * spec.generation.gpus_per_replica


def _takes_whole_nodes(spec: RunSpec, gpus: int) -> bool:
    """Whether pods with so many GPUs may have an NVLink channel, or get none."""
    return spec.placement.nvlink is NvLink.DISABLED or gpus == 0 or gpus >= spec.placement.node_gpus


# The CEL form of `_count_all_gpus`.
_REPLICAS = "self.generation.replicas"
_MAX = "self.generation.autoscaling.maxReplicas"
_MOST = f"(has(self.generation.autoscaling) && {_MAX} > {_REPLICAS} ? {_MAX} : {_REPLICAS})"
_ALL_GPUS = f"self.trainer.numNodes * self.trainer.gpusPerNode + {_MOST} * self.generation.gpusPerReplica"
# The CEL forms of `Placement.node_gpus` and `Placement.gpus_per_domain`.
_NODE = (
    "(has(self.placement.gpusPerNode) ? self.placement.gpusPerNode : "
    f"self.placement.profile == 'GB200' ? {cluster.GB200_GPUS} : {cluster.MOST_GPUS})"
)
_DOMAIN = f"self.placement.nodesPerDomain * {_NODE}"
_WHOLE_NODES = "use whole nodes, or set nvlink: Disabled; a node has an NVLink channel for one pod only"
PLACEMENT = (
    *_GPUS,
    Rule(
        cluster.Placement,
        "nvlink",
        "must be Disabled unless profile is GB200",
        "use profile GB200; only such nodes have NVLink between nodes",
        lambda it: it.nvlink is NvLink.DISABLED or it.profile is Profile.GB200,
        "self.nvlink == 'Disabled' || self.profile == 'GB200'",
    ),
    Rule(
        cluster.Placement,
        "layout",
        "must be SameDomain with nvlink Required",
        "use SameDomain, or nvlink: Preferred; between domains there is no NVLink, so weights could not use it",
        lambda it: it.nvlink is not NvLink.REQUIRED or it.layout is Layout.SAME_DOMAIN,
        "self.nvlink != 'Required' || self.layout == 'SameDomain'",
    ),
    *_bind_gpus_to_profile("trainer.gpusPerNode", lambda spec: spec.trainer.gpus_per_node),
    *_bind_gpus_to_profile("generation.gpusPerReplica", lambda spec: spec.generation.gpus_per_replica),
    Rule(
        RunSpec,
        "trainer.gpusPerNode",
        "must be <= placement.gpusPerNode",
        "use more nodes, or set placement.gpusPerNode to the GPUs that a node has",
        lambda it: it.trainer.gpus_per_node <= it.placement.node_gpus,
        f"self.trainer.gpusPerNode <= {_NODE}",
        lambda it: f"{it.trainer.gpus_per_node} > {it.placement.node_gpus}",
    ),
    Rule(
        RunSpec,
        "generation.gpusPerReplica",
        "must be <= placement.gpusPerNode or a multiple of it",
        "choose a part of one node, or whole nodes; set placement.gpusPerNode to the GPUs that a node has",
        lambda it: (
            it.generation.gpus_per_replica <= it.placement.node_gpus
            or it.generation.gpus_per_replica % it.placement.node_gpus == 0
        ),
        f"self.generation.gpusPerReplica <= {_NODE} || self.generation.gpusPerReplica % {_NODE} == 0",
        lambda it: f"{it.generation.gpus_per_replica} at {it.placement.node_gpus} a node",
    ),
    Rule(
        RunSpec,
        "generation.gpusPerReplica",
        "must equal tensorParallel if it is more than placement.gpusPerNode",
        "set both to the same number; a replica of several nodes has a rank on every GPU",
        lambda it: (
            it.generation.gpus_per_replica <= it.placement.node_gpus
            or it.generation.gpus_per_replica == it.generation.tensor_parallel
        ),
        f"self.generation.gpusPerReplica <= {_NODE} || "
        "self.generation.gpusPerReplica == self.generation.tensorParallel",
        lambda it: f"{it.generation.gpus_per_replica} with {it.generation.tensor_parallel}",
    ),
    # NVLink between nodes needs an IMEX channel. A node has one channel to give out, so a pod must take the whole node.
    Rule(
        RunSpec,
        "trainer.gpusPerNode",
        "must equal placement.gpusPerNode with placement.nvlink Preferred or Required",
        _WHOLE_NODES,
        lambda it: _takes_whole_nodes(it, it.trainer.gpus_per_node),
        f"self.placement.nvlink == 'Disabled' || self.trainer.gpusPerNode == 0 || self.trainer.gpusPerNode >= {_NODE}",
        lambda it: f"{it.trainer.gpus_per_node} of {it.placement.node_gpus}",
    ),
    Rule(
        RunSpec,
        "generation.gpusPerReplica",
        "must be >= placement.gpusPerNode with placement.nvlink Preferred or Required",
        _WHOLE_NODES,
        lambda it: _takes_whole_nodes(it, it.generation.gpus_per_replica),
        "self.placement.nvlink == 'Disabled' || self.generation.gpusPerReplica == 0 || "
        f"self.generation.gpusPerReplica >= {_NODE}",
        lambda it: f"{it.generation.gpus_per_replica} of {it.placement.node_gpus}",
    ),
    Rule(
        RunSpec,
        "generation.gpusPerReplica",
        "must be <= placement.nodesPerDomain x placement.gpusPerNode with profile GB200",
        "lower it; a replica must not straddle NVLink domains",
        lambda it: (
            it.placement.profile is not Profile.GB200 or it.generation.gpus_per_replica <= it.placement.gpus_per_domain
        ),
        f"self.placement.profile != 'GB200' || self.generation.gpusPerReplica <= {_DOMAIN}",
        lambda it: f"{it.generation.gpus_per_replica} > {it.placement.gpus_per_domain}",
    ),
    Rule(
        RunSpec,
        "trainer.numNodes",
        "must be <= placement.nodesPerDomain with layout SeparateDomains",
        "use fewer nodes, or let the trainer straddle domains with layout Any",
        lambda it: (
            it.placement.layout is not Layout.SEPARATE_DOMAINS or it.trainer.num_nodes <= it.placement.nodes_per_domain
        ),
        "self.placement.layout != 'SeparateDomains' || self.trainer.numNodes <= self.placement.nodesPerDomain",
        lambda it: f"{it.trainer.num_nodes} > {it.placement.nodes_per_domain}",
    ),
    Rule(
        RunSpec,
        "placement.layout",
        "must not be SameDomain if trainer and replicas have more GPUs than one NVLink domain",
        "lower generation.replicas or autoscaling.maxReplicas, or use Any or SeparateDomains",
        lambda it: it.placement.layout is not Layout.SAME_DOMAIN or _count_all_gpus(it) <= it.placement.gpus_per_domain,
        f"self.placement.layout != 'SameDomain' || {_ALL_GPUS} <= {_DOMAIN}",
        lambda it: f"{_count_all_gpus(it)} > {it.placement.gpus_per_domain}",
    ),
)


# Replica counts: the minimum for Ready must be reachable, with and without the autoscaler.
_FEWEST = "failurePolicy.minGenerationReplicas"
SCALE = (
    compare_fields(cluster.Autoscaling, "minReplicas", "<=", "maxReplicas", "swap the two"),
    compare_fields(RunSpec, _FEWEST, "<=", "generation.replicas", "lower it, or ask for more replicas"),
    compare_fields(RunSpec, _FEWEST, "<=", "generation.autoscaling.minReplicas", "lower it, or raise minReplicas"),
)

# Fields that belong to one mode of a section and must not be given with another.
MODES = (
    Rule(
        cluster.Scheduling,
        "queueName",
        "must be given with gang Kueue",
        "name a LocalQueue, or use another gang",
        lambda it: it.gang is not Gang.KUEUE or it.queue_name is not None,
        "self.gang != 'Kueue' || has(self.queueName)",
    ),
    Rule(
        cluster.Scheduling,
        "queueName",
        "must not be given with gang None",
        "remove it, or set gang: Auto; a job that names a queue must be admitted by it",
        lambda it: it.gang is not Gang.NONE or it.queue_name is None,
        "self.gang != 'None' || !has(self.queueName)",
    ),
    Rule(
        cluster.Rdma,
        "count",
        "must be 1 without resourceName",
        "name the extended resource, or remove count",
        lambda it: it.count == 1 or it.resource_name is not None,
        "self.count == 1 || has(self.resourceName)",
    ),
    Rule(
        cluster.PeerTls,
        "issuer",
        "must be given with mode CertManager, and with no other mode",
        "name a cert-manager issuer, or change the mode",
        lambda it: (it.issuer is not None) == (it.mode is TlsMode.CERT_MANAGER),
        "has(self.issuer) == (self.mode == 'CertManager')",
        lambda it: f"{'none' if it.issuer is None else it.issuer.name} with mode {it.mode.value}",
    ),
    Rule(
        cluster.PeerTls,
        "secretName",
        "must be given with mode ExistingSecret, and with no other mode",
        "name the Secret, or change the mode",
        lambda it: (it.secret_name is not None) == (it.mode is TlsMode.EXISTING_SECRET),
        "has(self.secretName) == (self.mode == 'ExistingSecret')",
        lambda it: f"{it.secret_name or 'none'} with mode {it.mode.value}",
    ),
)

CLUSTER_RULES: tuple[Rule[Any], ...] = (*PATHS, *HUB, *STORAGE, *PLACEMENT, *SCALE, *MODES)
