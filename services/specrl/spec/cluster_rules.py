"""The rules of a run on a cluster, an RLJob. A local run, which uses none of these fields, is not held to them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from pydantic.alias_generators import to_camel

from specrl.spec.base import Section
from specrl.spec.cluster import (
    Autoscaling,
    Gang,
    Layout,
    NvLink,
    OnTrainerFailure,
    PeerTls,
    Placement,
    Profile,
    Scheduling,
    TlsMode,
    Volume,
)
from specrl.spec.data import CodeVerifier, FileSource, PythonVerifier
from specrl.spec.generation import DraftModel, Eagle3, Generation
from specrl.spec.rule import Rule
from specrl.spec.run import Model, RunSpec, Transport
from specrl.spec.store import Secret, Tls
from specrl.spec.tools import CodeTool, PythonTool
from specrl.spec.trainer import ReferenceKl, Trainer

_OWN = r"^/+(etc|var/+lib)/+specrl(/|$)"
"""Where the operator mounts the run file and the run's folder."""


def _absolute(section: type[Section], name: str) -> Rule:
    """A relative path would be taken from the folder of a file that the user never sees."""
    field = to_camel(name)

    def got(holder: Section) -> str | None:
        path = getattr(holder, name)
        return repr(path) if path is not None and not path.startswith("/") else None

    cel = f"self.{field}.startsWith('/')"
    is_optional = not section.model_fields[name].is_required()
    return Rule(
        section,
        field,
        "must be an absolute path in an RLJob",
        "give the path in the pods, as below the mountPath of one of spec.volumes",
        got,
        f"!has(self.{field}) || {cel}" if is_optional else cel,
    )


PATHS = tuple(
    _absolute(section, name)
    for section, name in (
        (Model, "path"),
        (FileSource, "path"),
        (CodeVerifier, "packages"),
        (CodeTool, "packages"),
        (PythonVerifier, "folder"),
        (PythonTool, "folder"),
        (ReferenceKl, "path"),
        (Eagle3, "path"),
        (DraftModel, "path"),
        (Secret, "file"),
        (Tls, "ca_file"),
        (Tls, "cert_file"),
        (Tls, "key_file"),
    )
)


def _unless(is_broken: Callable[[Any], bool], got: Callable[[Any], object]) -> Callable[[Any], str | None]:
    return lambda section: str(got(section)) if is_broken(section) else None


def _volumes_got(spec: RunSpec) -> str | None:
    paths = [volume.mount_path for volume in spec.volumes]
    return ", ".join(sorted({path for path in paths if paths.count(path) > 1})) or None


STORAGE = (
    Rule(
        RunSpec,
        "volumes",
        "must each have a mountPath of its own",
        "mount one of them elsewhere",
        _volumes_got,
        "self.volumes.all(it, self.volumes.exists_one(other, other.mountPath == it.mountPath))",
    ),
    Rule(
        Volume,
        "mountPath",
        "must be an absolute path",
        "begin it with /",
        _unless(lambda volume: not volume.mount_path.startswith("/"), lambda volume: repr(volume.mount_path)),
        "self.mountPath.startsWith('/')",
    ),
    Rule(
        Volume,
        "mountPath",
        "must not lie in /etc/specrl or /var/lib/specrl",
        "mount it elsewhere; these are the run's own",
        _unless(lambda volume: re.search(_OWN, volume.mount_path) is not None, lambda volume: repr(volume.mount_path)),
        f"!self.mountPath.matches(r'{_OWN}')",
    ),
    Rule(
        RunSpec,
        "checkpoint.claimName",
        "must be given with failurePolicy.onTrainerFailure RestartFromCheckpoint",
        "name a claim that outlives the pods, or set onTrainerFailure: Fail",
        _unless(
            lambda spec: (
                spec.checkpoint.claim_name is None
                and spec.failure_policy.on_trainer_failure is OnTrainerFailure.RESTART
            ),
            lambda spec: "none",
        ),
        "has(self.checkpoint.claimName) || self.failurePolicy.onTrainerFailure != 'RestartFromCheckpoint'",
    ),
    Rule(
        RunSpec,
        "store.sqlite",
        "must come with checkpoint.claimName",
        "name a claim that outlives the pods, or leave store out: the operator starts a Redis server",
        _unless(
            lambda spec: (
                spec.checkpoint.claim_name is None and spec.store is not None and spec.store.sqlite is not None
            ),
            lambda spec: "none",
        ),
        "!has(self.store) || !has(self.store.sqlite) || has(self.checkpoint.claimName)",
    ),
    Rule(
        RunSpec,
        "weights.transport",
        "must not be Checkpoint without checkpoint.claimName",
        "name a claim that all nodes can mount, or use Auto",
        _unless(
            lambda spec: spec.checkpoint.claim_name is None and spec.weights.transport is Transport.CHECKPOINT,
            lambda spec: "no claim",
        ),
        "self.weights.transport != 'Checkpoint' || has(self.checkpoint.claimName)",
    ),
)


def _ranks(trainer: Trainer) -> int:
    return trainer.parallelism.world_size


_RANKS = " * ".join(f"self.parallelism.{name}" for name in ("tensor", "context", "pipeline", "data"))
_GPUS = (
    Rule(
        Generation,
        "gpusPerReplica",
        "must be 0 or >= tensorParallel",
        "raise it, or lower tensorParallel",
        _unless(
            lambda it: 0 < it.gpus_per_replica < it.tensor_parallel,
            lambda it: f"{it.gpus_per_replica} < {it.tensor_parallel}",
        ),
        "self.gpusPerReplica == 0 || self.gpusPerReplica >= self.tensorParallel",
    ),
    Rule(
        Trainer,
        "numNodes",
        "must divide the ranks, parallelism.tensor x context x pipeline x data",
        "every node computes the same number of ranks",
        _unless(lambda it: _ranks(it) % it.num_nodes != 0, lambda it: f"{it.num_nodes} nodes for {_ranks(it)} ranks"),
        f"{_RANKS} % self.numNodes == 0",
    ),
    Rule(
        Trainer,
        "gpusPerNode",
        "must be 0 or, times numNodes, the ranks, parallelism.tensor x context x pipeline x data",
        "every rank computes on a GPU of its own",
        _unless(
            lambda it: it.gpus_per_node != 0 and it.gpus_per_node * it.num_nodes != _ranks(it),
            lambda it: f"{it.gpus_per_node} x {it.num_nodes} for {_ranks(it)} ranks",
        ),
        f"self.gpusPerNode == 0 || self.gpusPerNode * self.numNodes == {_RANKS}",
    ),
    Rule(
        RunSpec,
        "weights.transport",
        "must not be Nccl without GPUs on both sides",
        "give trainer.gpusPerNode and generation.gpusPerReplica, or use Auto",
        _unless(
            lambda spec: (
                spec.weights.transport is Transport.NCCL
                and 0 in (spec.trainer.gpus_per_node, spec.generation.gpus_per_replica)
            ),
            lambda spec: f"{spec.trainer.gpus_per_node} and {spec.generation.gpus_per_replica} GPUs",
        ),
        "self.weights.transport != 'Nccl' || (self.trainer.gpusPerNode > 0 && self.generation.gpusPerReplica > 0)",
    ),
)


def _accelerated(field: str, gpus: Callable[[RunSpec], int]) -> Rule:
    """The profile is about nodes that have GPUs."""
    return Rule(
        RunSpec,
        field,
        "must be > 0 with placement.profile GB200",
        "give the GPUs, or use profile Generic",
        _unless(lambda spec: spec.placement.profile is Profile.GB200 and gpus(spec) == 0, gpus),
        f"self.placement.profile != 'GB200' || self.{field} > 0",
    )


def _most_replicas(spec: RunSpec) -> int:
    scaling = spec.generation.autoscaling
    return max(spec.generation.replicas, scaling.max_replicas if scaling is not None else 0)


def _all_gpus(spec: RunSpec) -> int:
    trainer = spec.trainer.num_nodes * spec.trainer.gpus_per_node
    return trainer + _most_replicas(spec) * spec.generation.gpus_per_replica


def _domain_gpus(spec: RunSpec) -> int:
    return spec.placement.nodes_per_domain * spec.placement.gpus_per_node


_REPLICAS = "self.generation.replicas"
_MAX = "self.generation.autoscaling.maxReplicas"
_MOST = f"(has(self.generation.autoscaling) && {_MAX} > {_REPLICAS} ? {_MAX} : {_REPLICAS})"
_DOMAIN = "self.placement.nodesPerDomain * self.placement.gpusPerNode"
PLACEMENT = (
    *_GPUS,
    Rule(
        Placement,
        "nvlink",
        "must be Disabled with profile Generic",
        "use profile GB200: NVLink between nodes is a matter of such nodes",
        _unless(
            lambda it: it.nvlink is not NvLink.DISABLED and it.profile is Profile.GENERIC, lambda it: it.nvlink.value
        ),
        "self.nvlink == 'Disabled' || self.profile == 'GB200'",
    ),
    _accelerated("trainer.gpusPerNode", lambda spec: spec.trainer.gpus_per_node),
    _accelerated("generation.gpusPerReplica", lambda spec: spec.generation.gpus_per_replica),
    Rule(
        RunSpec,
        "trainer.gpusPerNode",
        "must be <= placement.gpusPerNode",
        "use more nodes, or say how many GPUs a node has",
        _unless(
            lambda spec: spec.trainer.gpus_per_node > spec.placement.gpus_per_node,
            lambda spec: f"{spec.trainer.gpus_per_node} > {spec.placement.gpus_per_node}",
        ),
        "self.trainer.gpusPerNode <= self.placement.gpusPerNode",
    ),
    Rule(
        RunSpec,
        "generation.gpusPerReplica",
        "must be <= placement.gpusPerNode or a multiple of it",
        "a replica takes a part of one node, or whole nodes",
        _unless(
            lambda spec: (
                spec.generation.gpus_per_replica > spec.placement.gpus_per_node
                and spec.generation.gpus_per_replica % spec.placement.gpus_per_node != 0
            ),
            lambda spec: f"{spec.generation.gpus_per_replica} at {spec.placement.gpus_per_node} a node",
        ),
        "self.generation.gpusPerReplica <= self.placement.gpusPerNode || "
        "self.generation.gpusPerReplica % self.placement.gpusPerNode == 0",
    ),
    Rule(
        RunSpec,
        "generation.gpusPerReplica",
        "must be tensorParallel where it is more than placement.gpusPerNode",
        "a replica of several nodes has a rank on every GPU of them",
        _unless(
            lambda spec: (
                spec.generation.gpus_per_replica > spec.placement.gpus_per_node
                and spec.generation.gpus_per_replica != spec.generation.tensor_parallel
            ),
            lambda spec: f"{spec.generation.gpus_per_replica} with {spec.generation.tensor_parallel}",
        ),
        "self.generation.gpusPerReplica <= self.placement.gpusPerNode || "
        "self.generation.gpusPerReplica == self.generation.tensorParallel",
    ),
    # A node's IMEX channel, which NVLink between nodes needs, goes to one pod.
    Rule(
        RunSpec,
        "trainer.gpusPerNode",
        "must be placement.gpusPerNode with placement.nvlink Preferred or Required",
        "take whole nodes, or set nvlink: Disabled; a node's NVLink channel goes to one pod",
        _unless(
            lambda spec: (
                spec.placement.nvlink is not NvLink.DISABLED
                and 0 < spec.trainer.gpus_per_node < spec.placement.gpus_per_node
            ),
            lambda spec: f"{spec.trainer.gpus_per_node} of {spec.placement.gpus_per_node}",
        ),
        "self.placement.nvlink == 'Disabled' || self.trainer.gpusPerNode == 0 || "
        "self.trainer.gpusPerNode >= self.placement.gpusPerNode",
    ),
    Rule(
        RunSpec,
        "generation.gpusPerReplica",
        "must be >= placement.gpusPerNode with placement.nvlink Preferred or Required",
        "take whole nodes, or set nvlink: Disabled; a node's NVLink channel goes to one pod",
        _unless(
            lambda spec: (
                spec.placement.nvlink is not NvLink.DISABLED
                and 0 < spec.generation.gpus_per_replica < spec.placement.gpus_per_node
            ),
            lambda spec: f"{spec.generation.gpus_per_replica} of {spec.placement.gpus_per_node}",
        ),
        "self.placement.nvlink == 'Disabled' || self.generation.gpusPerReplica == 0 || "
        "self.generation.gpusPerReplica >= self.placement.gpusPerNode",
    ),
    Rule(
        RunSpec,
        "generation.gpusPerReplica",
        "must be <= placement.nodesPerDomain x placement.gpusPerNode with profile GB200",
        "lower it: a replica does not straddle NVLink domains",
        _unless(
            lambda spec: (
                spec.placement.profile is Profile.GB200 and spec.generation.gpus_per_replica > _domain_gpus(spec)
            ),
            lambda spec: f"{spec.generation.gpus_per_replica} > {_domain_gpus(spec)}",
        ),
        f"self.placement.profile != 'GB200' || self.generation.gpusPerReplica <= {_DOMAIN}",
    ),
    Rule(
        RunSpec,
        "trainer.numNodes",
        "must be <= placement.nodesPerDomain with layout SeparateDomains or nvlink Required",
        "use fewer nodes, or let it straddle domains: layout Any, nvlink Preferred",
        _unless(
            lambda spec: (
                spec.trainer.num_nodes > spec.placement.nodes_per_domain
                and (spec.placement.layout is Layout.SEPARATE_DOMAINS or spec.placement.nvlink is NvLink.REQUIRED)
            ),
            lambda spec: f"{spec.trainer.num_nodes} > {spec.placement.nodes_per_domain}",
        ),
        "(self.placement.layout != 'SeparateDomains' && self.placement.nvlink != 'Required') || "
        "self.trainer.numNodes <= self.placement.nodesPerDomain",
    ),
    Rule(
        RunSpec,
        "placement.layout",
        "must not be SameDomain where trainer and replicas have more GPUs than one NVLink domain",
        "lower generation.replicas or autoscaling.maxReplicas, or use Any or SeparateDomains",
        _unless(
            lambda spec: spec.placement.layout is Layout.SAME_DOMAIN and _all_gpus(spec) > _domain_gpus(spec),
            lambda spec: f"{_all_gpus(spec)} > {_domain_gpus(spec)}",
        ),
        "self.placement.layout != 'SameDomain' || self.trainer.numNodes * self.trainer.gpusPerNode + "
        f"{_MOST} * self.generation.gpusPerReplica <= {_DOMAIN}",
    ),
)


def _minimum(spec: RunSpec) -> int:
    return spec.failure_policy.min_generation_replicas


SCALE = (
    Rule(
        Autoscaling,
        "minReplicas",
        "must be <= maxReplicas",
        "swap the two",
        _unless(lambda it: it.min_replicas > it.max_replicas, lambda it: f"{it.min_replicas} > {it.max_replicas}"),
        "self.minReplicas <= self.maxReplicas",
    ),
    Rule(
        RunSpec,
        "failurePolicy.minGenerationReplicas",
        "must be <= generation.replicas",
        "lower it, or ask for more replicas",
        _unless(
            lambda spec: _minimum(spec) > spec.generation.replicas,
            lambda spec: f"{_minimum(spec)} > {spec.generation.replicas}",
        ),
        "self.failurePolicy.minGenerationReplicas <= self.generation.replicas",
    ),
    Rule(
        RunSpec,
        "failurePolicy.minGenerationReplicas",
        "must be <= generation.autoscaling.minReplicas",
        "lower it, or raise minReplicas",
        _unless(
            lambda spec: spec.generation.autoscaling and _minimum(spec) > spec.generation.autoscaling.min_replicas,
            lambda spec: f"{_minimum(spec)} > {spec.generation.autoscaling.min_replicas}",
        ),
        "!has(self.generation.autoscaling) || "
        "self.failurePolicy.minGenerationReplicas <= self.generation.autoscaling.minReplicas",
    ),
)

MODES = (
    Rule(
        Scheduling,
        "queueName",
        "must be given with gang Kueue",
        "name a LocalQueue, or use another gang",
        _unless(lambda it: it.gang is Gang.KUEUE and it.queue_name is None, lambda it: "none"),
        "self.gang != 'Kueue' || has(self.queueName)",
    ),
    Rule(
        Scheduling,
        "queueName",
        "must not be given with gang None",
        "remove it, or let gang be Auto: a job that names a queue never runs past it",
        _unless(lambda it: it.gang is Gang.NONE and it.queue_name is not None, lambda it: repr(it.queue_name)),
        "self.gang != 'None' || !has(self.queueName)",
    ),
    Rule(
        PeerTls,
        "issuer",
        "must be given with mode CertManager, and with it alone",
        "name the issuer of certificates, or change the mode",
        _unless(
            lambda it: (it.issuer is not None) != (it.mode is TlsMode.CERT_MANAGER),
            lambda it: f"{'none' if it.issuer is None else it.issuer.name} with mode {it.mode.value}",
        ),
        "has(self.issuer) == (self.mode == 'CertManager')",
    ),
    Rule(
        PeerTls,
        "secretName",
        "must be given with mode ExistingSecret, and with it alone",
        "name the secret, or change the mode",
        _unless(
            lambda it: (it.secret_name is not None) != (it.mode is TlsMode.EXISTING_SECRET),
            lambda it: f"{it.secret_name or 'none'} with mode {it.mode.value}",
        ),
        "has(self.secretName) == (self.mode == 'ExistingSecret')",
    ),
)

CLUSTER_RULES: tuple[Rule, ...] = (*PATHS, *STORAGE, *PLACEMENT, *SCALE, *MODES)
