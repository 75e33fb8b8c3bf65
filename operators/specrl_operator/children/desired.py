"""The list of all children that a job should have, in the order in which they are applied. Pure.

    access, network, certificates, run file -> store -> ComputeDomain, gang -> trainer -> generation -> coordinator
    -> autoscaler

Workloads come after the objects that they need. For example, Kueue reads the ComputeDomain's claim template when it
sees the trainer. `reconcile.py` applies the list and deletes the children that are not in it.
"""

from __future__ import annotations

import hashlib

from specrl.spec import RunSpec, dump_spec
from specrl.spec.cluster import Profile
from specrl.spec.run import Dtype
from specrl.spec.store import Durability, RedisStore, Secret, Store
from specrl_operator import kinds
from specrl_operator.api import COORDINATOR, GENERATION, RUN_FILE_ANNOTATION, STORE, TRAINER, Job, Object
from specrl_operator.children import pods, workloads
from specrl_operator.children.access import build_coordinator_access
from specrl_operator.children.affinity import build_compute_domain
from specrl_operator.children.autoscaler import build_autoscaler
from specrl_operator.children.network import build_network_policies
from specrl_operator.children.schedulers import assign_scheduler, find_workloads, list_pod_templates
from specrl_operator.children.tls import build_certificates
from specrl_operator.plan.decision import Decision, DesiredState, TrainerAction
from specrl_operator.plan.job_plan import JobPlan


def build_children(plan: JobPlan, decision: Decision) -> list[Object]:
    """Build all children of the job, without owner, namespace and hashes, which `revision.py` adds.

    The trainer is among them only if it may be created (`TrainerAction.CREATE`).
    """
    job = plan.job
    state = decision.state
    run_file = build_run_file(plan)
    children = [
        *build_coordinator_access(job),
        *build_network_policies(plan),
        *build_certificates(job),
        run_file,
    ]
    children += [build_service(job, COORDINATOR, {"grpc": pods.GRPC_PORT, "http": pods.HTTP_PORT}, is_headless=False)]
    children += [build_service(job, GENERATION, {"grpc": pods.REPLICA_PORT, "metrics": pods.METRICS_PORT})]
    if plan.has_own_store:
        children += [build_service(job, STORE, {"redis": pods.STORE_PORT}), workloads.build_store(plan, state)]
    if plan.has_compute_domain:
        children.append(build_compute_domain(plan))
    if plan.is_plain_trainer and state not in (DesiredState.WAITING, DesiredState.STOPPED):
        children.append(build_service(job, TRAINER, {"grpc": pods.TRAINER_PORT}))  # a JobSet creates its own Service
    if decision.trainer is TrainerAction.CREATE:
        children.append(workloads.build_trainer(plan))
    if decision.replicas is not None:
        children.append(workloads.build_generation(plan, decision.replicas))
    children.append(workloads.build_coordinator(plan, state))
    if state is DesiredState.RUNNING and plan.settings.has_disruption_budgets:
        children.append(workloads.build_disruption_budget(plan))
    autoscaling = job.spec.generation.autoscaling
    if state is DesiredState.RUNNING and autoscaling is not None:
        children.append(build_autoscaler(plan, autoscaling))
    coordinator = [child for child in children if kinds.DEPLOYMENT.is_kind_of(child)]
    _mount_run_file([*find_workloads(children), *coordinator], run_file["metadata"]["name"])
    return assign_scheduler(children, plan)


def _mount_run_file(workloads: list[Object], name: str) -> None:
    """Complete the volume of the run file in the pod templates of workloads with its ConfigMap's name, in place."""
    for workload in workloads:
        workload["metadata"]["annotations"] = {RUN_FILE_ANNOTATION: name}
        for template in list_pod_templates(workload):
            volume = next(it for it in template["spec"]["volumes"] if it["name"] == pods.SPEC_VOLUME)
            volume["configMap"] = {"name": name}


def build_run_file(plan: JobPlan) -> Object:
    """Build the immutable ConfigMap with the run file of the job's pods.

    Its precision is chosen, and it has the job's own store if the spec names none.

    Its name has a hash of the content, and pod templates refer to it by name. So a pod that is created again reads the
    run file that it was started with, which the version in its image understands. A run file of a newer operator comes
    with the new templates, which running pods do not get.
    """
    job = plan.job
    spec = _resolve_dtype(job.spec)
    if plan.has_own_store:
        redis = RedisStore(
            addresses=(f"{job.child_name(STORE)}:{pods.STORE_PORT}",),
            password=Secret(environment=pods.STORE_PASSWORD),
            key_prefix=f"specrl:{job.name}",
            durability=Durability.EVERY_WRITE,
        )
        spec = spec.model_copy(update={"store": Store(redis=redis)})
    elif spec.redis is not None and spec.redis.key_prefix is None:
        # Other jobs may share the server, and a later job of the same name must not continue this run.
        redis = spec.redis.model_copy(update={"key_prefix": f"specrl:{job.namespace}/{job.run_name}"})
        spec = spec.model_copy(update={"store": Store(redis=redis)})
    content = dump_spec(spec)
    digest = hashlib.sha256(content.encode()).hexdigest()[:8]
    metadata = {"name": job.child_name(f"run-{digest}"), "labels": job.build_labels()}
    return kinds.CONFIG_MAP.build_object(metadata, immutable=True, data={"run.yaml": content})


def _resolve_dtype(spec: RunSpec) -> RunSpec:
    """Return the run with bfloat16 for Auto if trainer and replicas request GPUs, else with float32.

    The operator does not see the CPUs of nodes, and pods may run on different ones. So it never relies on their units.
    The fields are the same after a restart of the operator, and so is the choice.
    """
    if spec.model.dtype is not Dtype.AUTO:
        return spec
    dtype = Dtype.FLOAT32 if spec.placement.profile is Profile.CPU else Dtype.BFLOAT16
    return spec.model_copy(update={"model": spec.model.model_copy(update={"dtype": dtype})})


def build_service(job: Job, component: str, ports: dict[str, int], *, is_headless: bool = True) -> Object:
    """Build a component's Service. Headless: DNS returns the addresses of its pods instead of one virtual address."""
    spec: Object = {
        "selector": job.build_selector(component),
        # The coordinator becomes ready only after trainer and replicas have found it by this Service.
        "publishNotReadyAddresses": True,
        "ports": [{"name": name, "port": port, "targetPort": port} for name, port in ports.items()],
    }
    if is_headless:
        spec["clusterIP"] = "None"
    return kinds.SERVICE.build_object(job.build_metadata(component), spec=spec)
