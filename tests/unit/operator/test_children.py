"""Children of typical jobs, compared with golden files, so that every change of them is reviewed as a diff.

`SPECRL_WRITE_GOLDEN=1 pytest tests/unit/operator/test_children.py` rewrites the files.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.operator.builders import ALL, GB200, LARGE, PAPER, ClusterFacts, a_job, children_of, plan_job

from specrl.generation.main import parse_arguments
from specrl.generation.nodes import ReplicaNodes
from specrl.launcher.processes import environment
from specrl.spec import digest_spec, load_process_spec, load_spec
from specrl.spec.cluster import Placement
from specrl.spec.run import Dtype
from specrl_operator import main
from specrl_operator.api import (
    COMPONENT_LABEL,
    COORDINATOR,
    GENERATION,
    JOB_LABEL,
    LEADER_LABEL,
    MANAGED_LABEL,
    STORE,
    TRAINER,
    Job,
    Object,
)
from specrl_operator.children import pods, volumes
from specrl_operator.children.affinity import build_nccl_environment
from specrl_operator.children.schedulers import KUEUE_QUEUE_LABEL, find_workloads, list_pod_templates
from specrl_operator.kinds import (
    CLAIM_TEMPLATE,
    COMPUTE_DOMAIN,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    JOB_SET,
    LEADER_WORKER_SET,
    NETWORK_POLICY,
    STATEFUL_SET,
    Kind,
)
from specrl_operator.plan.acceptance import find_refusal, list_notes
from specrl_operator.plan.decision import DesiredState
from specrl_operator.plan.job_plan import Settings

PVC = "persistentVolumeClaim"
GOLDEN = Path(__file__).parent / "golden"
NONE: frozenset[Kind] = frozenset()
SEPARATE = {"placement": {"layout": "SeparateDomains", "nvlink": "Preferred"}}
ANY = {"placement": {"layout": "Any", "nvlink": "Preferred"}}
RDMA = {"placement": {"rdma": {"resourceName": "rdma/ib", "count": 4}}}
ONE_NODE = {"trainer": {"numNodes": 1, "parallelism": {"tensor": 4, "data": 1}}}
COMMIT = "0123456789abcdef" * 2 + "01234567"
FETCHED = {
    "model": {"path": "/models/qwen"},
    "volumes": [
        {"mountPath": "/models/qwen", "uri": f"hf://Qwen/Qwen3-0.6B@{COMMIT}", "secretName": "hub"},
        {"mountPath": "/models/head", "uri": "s3://models/heads/qwen", "claimName": "models"},
        {"mountPath": "/data", "image": "registry.example.com/data/gsm8k:1"},
    ],
}

CASES: dict[str, tuple[list[Object], ClusterFacts]] = {
    "minimal": ([], ClusterFacts(frozenset({JOB_SET}))),
    "gb200-same-domain": ([PAPER], ClusterFacts()),
    "gb200-separate-domains": ([PAPER, SEPARATE], ClusterFacts()),
    "gb200-any": ([PAPER, ANY, RDMA], ClusterFacts()),
    "gb200-one-node-trainer": ([PAPER, ANY, ONE_NODE], ClusterFacts()),
    "multi-node-replica": ([PAPER, LARGE], ClusterFacts()),
    "kueue": ([PAPER, LARGE, {"scheduling": {"queueName": "team-a"}}], ClusterFacts(ALL)),
    "kai": ([PAPER, {"scheduling": {"queueName": "team-a", "gang": "KAI"}}], ClusterFacts(ALL)),
    "volcano": ([PAPER, {"scheduling": {"gang": "Volcano", "priorityClassName": "high"}}], ClusterFacts(ALL)),
    "autoscaled-hpa": ([{"generation": {"autoscaling": {"maxReplicas": 8}}}], ClusterFacts()),
    "autoscaled-keda": (
        [{"generation": {"autoscaling": {"maxReplicas": 8, "by": "KEDA"}}}],
        ClusterFacts(ALL, Settings(prometheus_url="http://prometheus:9090", metrics_namespaces=("monitoring",))),
    ),
    "tls-cert-manager": ([{"tls": {"mode": "CertManager", "issuer": {"name": "cluster-ca"}}}], ClusterFacts(ALL)),
    "tls-existing-secret": ([{"tls": {"mode": "ExistingSecret", "secretName": "mine"}}], ClusterFacts()),
    "fetched-volumes": ([FETCHED], ClusterFacts()),
    "no-jobset": ([], ClusterFacts(NONE)),
    "no-compute-domain": ([PAPER, {"placement": {"nvlink": "Preferred"}}], ClusterFacts(GB200 - {COMPUTE_DOMAIN})),
    "suspended": ([], ClusterFacts()),
}


class _Readable(yaml.SafeDumper):
    """Writes run files as blocks of lines, and no YAML aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Readable.add_representer(str, _Readable.represent_text)


@pytest.mark.parametrize("case", CASES)
def test_children_equal_the_golden_files(case: str) -> None:
    changes, given_facts = CASES[case]
    state = DesiredState.STOPPED if case == "suspended" else DesiredState.RUNNING
    objects = children_of(a_job(*changes, name="qwen3-8b"), given_facts, state)
    text = yaml.dump_all(objects, Dumper=_Readable, sort_keys=False, width=120)
    path = GOLDEN / f"{case}.yaml"
    if os.environ.get("SPECRL_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


def find(objects: list[Object], kind: Kind, component: str) -> Object:
    return next(
        it for it in objects if kind.is_kind_of(it) and it["metadata"]["labels"].get(COMPONENT_LABEL) == component
    )


def find_run_file(objects: list[Object]) -> Object:
    return next(it for it in objects if CONFIG_MAP.is_kind_of(it))


def containers(job: Job, given_facts: ClusterFacts) -> dict[str, Object]:
    """Return the container of each role."""
    found = {}
    for item in children_of(job, given_facts):
        spec = item.get("spec", {})
        if DEPLOYMENT.is_kind_of(item):
            found[COORDINATOR] = spec["template"]["spec"]["containers"][0]
        for workload in find_workloads([item]):
            component = workload["metadata"]["labels"][COMPONENT_LABEL]
            found[component] = list_pod_templates(workload)[0]["spec"]["containers"][0]
    return found


def variables(container: Object) -> dict[str, str]:
    return {it["name"]: it.get("value", "") for it in container["env"]}


# -- invariants ------------------------------------------------------------------------------------------------------

_EVERY = ["Any", "SameDomain", "SeparateDomains"]
LAYOUTS = {"Disabled": _EVERY, "Preferred": _EVERY, "Required": ["SameDomain"]}
names = st.from_regex(r"[a-z]([-a-z0-9]{0,32}[a-z0-9])?", fullmatch=True)


@st.composite
def jobs(draw: Any) -> Job:
    """Generate jobs of all shapes that the spec's rules allow."""
    per_node = draw(st.sampled_from([1, 4, 8]))
    nodes = draw(st.sampled_from([1, 2, 4, 16, 512]))
    on_gpus = draw(st.booleans())
    profile = draw(st.sampled_from(["Generic", "GB200"])) if on_gpus else "CPU"
    nvlink = (
        draw(st.sampled_from(["Disabled", "Preferred", "Required"])) if on_gpus and profile == "GB200" else "Disabled"
    )
    whole = draw(st.sampled_from([1, 2, 3])) * per_node
    gpus = whole if nvlink != "Disabled" or draw(st.booleans()) else draw(st.integers(1, per_node))
    replicas = draw(st.integers(1, 300))
    change = {
        "generation": {
            "replicas": replicas,
            "gpusPerReplica": gpus if on_gpus else 0,
            "tensorParallel": gpus if on_gpus and gpus > per_node else 1,
        },
        "trainer": {
            "numNodes": nodes if on_gpus else 1,
            "gpusPerNode": per_node if on_gpus else 0,
            "parallelism": {"data": nodes * per_node if on_gpus else draw(st.integers(1, 4))},
        },
        "placement": {
            "profile": profile,
            "nvlink": nvlink,
            "layout": draw(st.sampled_from(LAYOUTS[nvlink])) if on_gpus else "Any",
            "gpusPerNode": per_node,
            "nodesPerDomain": 1024,
        },
    }
    if change["placement"]["layout"] == "SameDomain":
        change["generation"]["replicas"] = 1
        change["trainer"]["numNodes"] = min(nodes, 16) if on_gpus else 1
        change["trainer"]["parallelism"] = {"data": change["trainer"]["numNodes"] * per_node if on_gpus else 1}
    return a_job(change, name=draw(names))


everything = st.sampled_from([NONE, GB200, ALL, GB200 - {COMPUTE_DOMAIN}, GB200 - {CLAIM_TEMPLATE}])


@settings(max_examples=25)
@given(jobs(), everything)
def test_names_of_all_objects_and_pods_are_within_kubernetes_limits(job: Job, served: frozenset[Kind]) -> None:
    given_facts = ClusterFacts(served)
    for item in children_of(job, given_facts):
        name = item["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), name
        assert len(name) <= 63
        for value in item["metadata"]["labels"].values():
            assert len(value) <= 63
        if JOB_SET.is_kind_of(item):  # <jobset>-<job>-0-<pod>-<five letters>
            assert len(f"{name}-node-0-{job.spec.trainer.num_nodes - 1}-xxxxx") <= 63
        elif STATEFUL_SET.is_kind_of(item):  # also the label controller-revision-hash: <name>-<ten letters>
            assert len(f"{name}-{job.spec.generation.replicas - 1}") <= 63
            assert len(f"{name}-xxxxxxxxxx") <= 63
        elif LEADER_WORKER_SET.is_kind_of(item):
            assert len(f"{name}-{job.spec.generation.replicas - 1}-{plan_job(job, given_facts).replica.pods}") <= 63
        elif DEPLOYMENT.is_kind_of(item):
            assert len(f"{name}-xxxxxxxxxx-xxxxx") <= 63


@settings(max_examples=25)
@given(jobs(), everything)
def test_objects_have_distinct_names_and_the_jobs_labels(job: Job, served: frozenset[Kind]) -> None:
    objects = children_of(job, ClusterFacts(served))
    twice = [key for key, count in Counter((it["kind"], it["metadata"]["name"]) for it in objects).items() if count > 1]
    assert twice == []
    for item in objects:
        assert item["metadata"]["labels"][JOB_LABEL] == job.name
        assert item["metadata"]["labels"][MANAGED_LABEL] == "specrl-operator"


@settings(max_examples=25)
@given(jobs(), everything)
def test_both_ends_of_the_weight_communicator_get_the_same_nccl_settings(job: Job, served: frozenset[Kind]) -> None:
    given_facts = ClusterFacts(served)
    found = containers(job, given_facts)
    if job.spec.trainer.gpus_per_node == 0:
        assert not any(name.startswith("NCCL") for role in found for name in variables(found[role]))
        return
    ends = [
        {name: value for name, value in variables(found[role]).items() if name.startswith("NCCL")}
        for role in (TRAINER, GENERATION)
    ]
    assert ends[0] == ends[1] == build_nccl_environment(plan_job(job, given_facts))


@settings(max_examples=25)
@given(jobs(), everything)
def test_a_pod_with_a_channel_takes_a_whole_node_in_a_clique_that_no_other_job_is_in(
    job: Job, served: frozenset[Kind]
) -> None:
    given_facts = ClusterFacts(served)
    for workload in find_workloads(children_of(job, given_facts)):
        for template in list_pod_templates(workload):
            spec = template["spec"]
            claims = spec.get("resourceClaims", [])
            assert bool(claims) == plan_job(job, given_facts).has_compute_domain
            if not claims:
                continue
            resources = spec["containers"][0]["resources"]
            assert resources["limits"]["nvidia.com/gpu"] == str(job.spec.placement.node_gpus)
            assert resources["claims"] == [{"name": "imex"}]
            terms = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert any("namespaceSelector" in term for term in terms)


@settings(max_examples=25)
@given(jobs(), everything)
def test_no_replica_straddles_a_clique(job: Job, served: frozenset[Kind]) -> None:
    """Whether affinity binds a replica's pods to one domain, by a term of the replica or of the whole job."""
    shape = plan_job(job, ClusterFacts(served)).replica
    for workload in find_workloads(children_of(job, ClusterFacts(served))):
        if workload["metadata"]["labels"][COMPONENT_LABEL] != GENERATION or shape.pods == 1:
            continue
        assert LEADER_WORKER_SET.is_kind_of(workload)
        assert workload["spec"]["leaderWorkerTemplate"]["size"] == shape.pods
        for template in list_pod_templates(workload):
            terms = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert {term["topologyKey"] for term in terms} == {job.spec.placement.topology_key}
            own = template["metadata"]["labels"]
            wanted = terms[0]["labelSelector"]["matchLabels"]
            assert wanted.items() <= own.items()  # the term matches the pod itself, so the first pod may choose
            assert ("matchLabelKeys" in terms[0]) == (job.spec.placement.layout.value != "SameDomain")


@settings(max_examples=25)
@given(jobs(), everything, st.sampled_from(list(DesiredState)))
def test_equal_inputs_give_equal_children(job: Job, served: frozenset[Kind], state: DesiredState) -> None:
    given_facts = ClusterFacts(served)
    assert children_of(job, given_facts, state) == children_of(job, given_facts, state)


@settings(max_examples=25)
@given(jobs(), everything)
def test_a_stopped_job_has_no_pods(job: Job, served: frozenset[Kind]) -> None:
    for item in children_of(job, ClusterFacts(served), DesiredState.STOPPED):
        assert not JOB_SET.is_kind_of(item)
        assert item.get("spec", {}).get("replicas", 0) == 0


# -- single facts ----------------------------------------------------------------------------------------------------


def test_a_pod_has_time_to_drain_before_it_is_killed() -> None:
    job = a_job({"generation": {"drainS": 500}})
    found = find(children_of(job, ClusterFacts()), STATEFUL_SET, GENERATION)
    assert found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 500


def test_every_pod_is_hardened_and_only_the_coordinator_has_a_token() -> None:
    for item in children_of(a_job(PAPER), ClusterFacts()):
        spec = item.get("spec", {})
        found = [spec["template"]] if "template" in spec else []
        if JOB_SET.is_kind_of(item):
            found = list_pod_templates(item)
        for template in found:
            pod = template["spec"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["automountServiceAccountToken"] is (item["metadata"]["name"].endswith("coordinator"))
            for container in pod["containers"]:
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                # None is added: IPC_LOCK, which GPU pods once asked for, is none of those that "restricted" permits.
                assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_pods_get_the_environment_of_local_processes() -> None:
    """Pods and local processes get the same offline switches, thread counts and CPU settings."""
    found = containers(a_job({"generation": {"threads": 3}}), ClusterFacts())
    local = environment.replica_environment(3, ())
    assert {name: local[name] for name in variables(found[GENERATION]) if name in local and name not in ("HOME",)} == {
        name: value for name, value in variables(found[GENERATION]).items() if name in local and name not in ("HOME",)
    }
    assert variables(found[TRAINER])["TORCHDYNAMO_DISABLE"] == "1"


def test_a_trainer_on_gpus_may_compile_and_gets_segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo was off in local trainers on GPUs, too, so that torch.compile did nothing there without a word."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # a test that imports Megatron's shim has set it
    pod = variables(containers(a_job(PAPER), ClusterFacts())[TRAINER])
    local = environment.rank_environment(1, 0, 1, 1, ("0",))
    for found in (pod, local):
        assert "TORCHDYNAMO_DISABLE" not in found
        assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_run_file_is_the_run_with_the_job_s_own_store(tmp_path: Path) -> None:
    job = a_job(PAPER, name="qwen3-8b")
    run_file = find_run_file(children_of(job, ClusterFacts()))
    (tmp_path / "run.yaml").write_text(run_file["data"]["run.yaml"])
    spec = load_spec(tmp_path / "run.yaml")
    assert spec.name == "qwen3-8b"
    assert spec.redis is not None
    assert spec.redis.addresses == ("qwen3-8b-store:6379",)
    assert spec.redis.password is not None
    assert spec.redis.password.environment == pods.STORE_PASSWORD
    assert spec.placement == Placement()  # cluster fields are not in the pods' run file
    scaled = a_job(PAPER, {"generation": {"replicas": 13}, "suspend": True}, name="qwen3-8b")
    other = find_run_file(children_of(scaled, ClusterFacts()))
    (tmp_path / "other.yaml").write_text(other["data"]["run.yaml"])
    assert digest_spec(load_spec(tmp_path / "other.yaml")) == digest_spec(spec)


@pytest.mark.parametrize(
    ("change", "dtype"),
    [(PAPER, Dtype.BFLOAT16), ({}, Dtype.FLOAT32)],
)
def test_the_precision_of_a_job_is_chosen_by_its_gpus(change: Object, dtype: Dtype, tmp_path: Path) -> None:
    """Processes must not choose it: pods on nodes with other CPUs would choose differently."""
    objects = children_of(a_job(change, {"model": {"dtype": None}}), ClusterFacts())
    run_file = find_run_file(objects)
    (tmp_path / "run.yaml").write_text(run_file["data"]["run.yaml"])
    assert load_process_spec(tmp_path / "run.yaml").model.dtype is dtype


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector.monitoring:4318", 4318), ("https://collector.example/otlp", 443), ("http://[fd00::1]/", 80)],
)
def test_every_pod_may_send_traces_to_the_collector_and_to_no_other_port(endpoint: str, port: int) -> None:
    def reached(*changes: Object) -> list[Object]:
        children = children_of(a_job(*changes), ClusterFacts())
        (policy,) = [child for child in children if child["metadata"]["name"].endswith("-peers")]
        return [rule for rule in policy["spec"]["egress"] if "to" not in rule]

    names, collector = reached({"telemetry": {"traces": {"endpoint": endpoint}}})
    assert reached() == reached({"telemetry": {"traces": {}}}) == [names]
    assert collector == {"ports": [{"protocol": "TCP", "port": port}]}


def test_two_jobs_on_one_redis_server_have_different_keys() -> None:
    store = {"store": {"redis": {"addresses": ["redis.infra:6379"]}}}
    prefixes = set()
    for name in ("one", "two"):
        objects = children_of(a_job(store, name=name), ClusterFacts())
        text = find_run_file(objects)["data"]["run.yaml"]
        prefixes.add(yaml.safe_load(text)["store"]["redis"]["keyPrefix"])
    assert len(prefixes) == 2


def test_users_can_add_any_field_to_pods() -> None:
    part = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "tolerations": [{"key": "mine", "operator": "Exists"}],
            "runtimeClassName": "gvisor",
            "containers": [
                {
                    "name": "generation",
                    "image": "mine:1",
                    "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}, {"name": "HOME", "value": "/home"}],
                    "resources": {"requests": {"memory": "1Gi"}},
                    "volumeMounts": [{"name": "mine", "mountPath": "/mine"}],
                },
                {"name": "sidecar", "image": "side:1"},
            ],
            "volumes": [{"name": "mine", "emptyDir": {}}],
        },
    }
    job = a_job(PAPER, {"generation": {"podTemplate": part}})
    template = find(children_of(job, ClusterFacts()), STATEFUL_SET, GENERATION)["spec"]["template"]
    first, second = template["spec"]["containers"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"][JOB_LABEL] == "tiny"
    assert {"mine", "nvidia.com/gpu"} <= {it["key"] for it in template["spec"]["tolerations"]}
    assert first["image"] == "mine:1"
    assert first["command"][0] == "specrl-generation"
    assert variables(first)["NCCL_IB_HCA"] == "mlx5"
    assert variables(first)["HOME"] == "/home"
    assert variables(first)["NCCL_MNNVL_ENABLE"] == "1"
    derived = {"cpu": "32", "ephemeral-storage": "10Gi"}
    assert first["resources"]["requests"] == {"nvidia.com/gpu": "4", "memory": "1Gi"} | derived
    assert first["resources"]["claims"] == [{"name": "imex"}]
    assert {"/mine", "/etc/specrl"} <= {it["mountPath"] for it in first["volumeMounts"]}
    assert second == {"name": "sidecar", "image": "side:1"}


def test_a_runtime_class_reaches_the_pod_that_runs_the_policys_programs_and_no_other() -> None:
    job = a_job(PAPER, {"coordinator": {"podTemplate": {"spec": {"runtimeClassName": "kata"}}}})
    objects = children_of(job, ClusterFacts())
    template = find(objects, DEPLOYMENT, COORDINATOR)["spec"]["template"]
    assert template["spec"]["runtimeClassName"] == "kata"
    assert str(objects).count("runtimeClassName") == 1


def test_null_in_a_users_template_removes_a_field() -> None:
    part = {"spec": {"securityContext": {"runAsUser": None}}}
    job = a_job({"coordinator": {"podTemplate": part}})
    template = find(children_of(job, ClusterFacts()), DEPLOYMENT, COORDINATOR)["spec"]["template"]
    assert "runAsUser" not in template["spec"]["securityContext"]
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize(
    "part",
    [
        {"metadata": None, "spec": None},
        {"metadata": {"labels": None, "annotations": None}},
        {"spec": {"containers": None, "volumes": None}},
        {"spec": {"containers": [{"name": "trainer", "resources": None, "env": None, "ports": None}]}},
        {"spec": {"containers": [{"name": "trainer", "resources": {"requests": None, "limits": None}}]}},
    ],
)
@pytest.mark.parametrize("gang", ["Kueue", "KAI", "Volcano"])
def test_an_empty_key_in_a_users_template_is_ignored(part: Object, gang: str) -> None:
    """`labels:` without a value, as an editor or Helm may leave it, was a failure of the operator without end."""
    job = a_job(PAPER, {"trainer": {"podTemplate": part}, "scheduling": {"queueName": "a", "gang": gang}})
    plain = a_job(PAPER, {"scheduling": {"queueName": "a", "gang": gang}})
    found, expected = (
        list_pod_templates(find(children_of(it, ClusterFacts(served=ALL)), JOB_SET, TRAINER))[0] for it in (job, plain)
    )
    assert found["metadata"]["labels"] == expected["metadata"]["labels"]
    assert [it["name"] for it in found["spec"]["containers"]] == [TRAINER]
    assert found["spec"]["volumes"] == expected["spec"]["volumes"]


# -- missing dependencies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "served", "named"),
    [
        ([PAPER, LARGE], GB200 - {LEADER_WORKER_SET}, "LeaderWorkerSet"),
        ([PAPER], GB200 - {COMPUTE_DOMAIN}, "ComputeDomain"),
        ([PAPER], GB200 - {CLAIM_TEMPLATE}, "ResourceClaimTemplate"),
        ([{"scheduling": {"queueName": "a"}}], GB200, "LocalQueue"),
        ([{"scheduling": {"gang": "KAI"}}], GB200, "Queue of scheduling.run.ai"),
        ([{"tls": {"mode": "CertManager", "issuer": {"name": "ca"}}}], GB200, "Certificate of cert-manager.io/v1"),
        ([{"scheduling": {"gang": "Volcano"}}], GB200, "PodGroup"),
        ([{"generation": {"autoscaling": {"maxReplicas": 2, "by": "KEDA"}}}], GB200, "ScaledObject"),
    ],
    ids=["lws", "compute-domain", "dra", "kueue", "kai", "cert-manager", "volcano", "keda"],
)
def test_missing_dependencies_are_named_with_a_remedy(
    changes: list[Object], served: frozenset[Kind], named: str
) -> None:
    job = a_job(*changes)
    refusal = find_refusal(plan_job(job, ClusterFacts(served)))
    with_all = find_refusal(plan_job(job, ClusterFacts(ALL)))
    assert refusal is not None
    assert refusal.reason == "DependencyMissing"
    assert named in refusal.message
    assert ", or " in refusal.message
    assert with_all is None or with_all.reason != "DependencyMissing"


@pytest.mark.parametrize(
    ("changes", "served", "note"),
    [
        ([], NONE, "JobSet is not installed"),
        ([PAPER, {"placement": {"nvlink": "Preferred"}}], GB200 - {COMPUTE_DOMAIN}, "ComputeDomain is not installed"),
        ([PAPER, SEPARATE], GB200, "weights may cross NVLink domains"),
        ([PAPER, ANY, ONE_NODE], GB200, "trainer and each replica fit one node"),
        (
            [{"checkpoint": None, "failurePolicy": {"onTrainerFailure": "Fail"}}],
            GB200,
            "checkpoint.claimName is not set",
        ),
    ],
)
def test_features_that_a_job_runs_without_are_noted(changes: list[Object], served: frozenset[Kind], note: str) -> None:
    plan = plan_job(a_job(*changes), ClusterFacts(served))
    assert find_refusal(plan) is None
    assert any(note in it for it in list_notes(plan))


def test_a_replica_of_several_nodes_is_one_engine_that_its_leader_serves() -> None:
    job = a_job(PAPER, LARGE)
    assert find_refusal(plan_job(job, ClusterFacts())) is None
    group = find(children_of(job, ClusterFacts()), LEADER_WORKER_SET, GENERATION)["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    pods = [group["leaderTemplate"], group["workerTemplate"]]
    told = {"$(LWS_LEADER_ADDRESS)": "gen-0.gen.rl", "$(LWS_WORKER_INDEX)": "1", "$(POD_IP)": "10.0.0.7"}
    for rank, pod in enumerate(pods):
        (container,) = pod["spec"]["containers"]
        command = [re.sub(r"\$\(\w+\)", lambda it: told.get(it[0], it[0]), word) for word in container["command"]]
        options = parse_arguments(command[1:])  # with the program's own parser
        assert options.nodes == ReplicaNodes(2, rank, "gen-0.gen.rl", 29500, "10.0.0.7")
        assert ("readinessProbe" in container) == ("ports" in container) == (rank == 0)
        assert pod["metadata"]["labels"].get(LEADER_LABEL) == ("true" if rank == 0 else None)
    assert variables(pods[0]["spec"]["containers"][0]) == variables(pods[1]["spec"]["containers"][0])  # NCCL's, too


def test_nccl_finds_nvlink_domains_by_itself_where_all_pods_have_channels() -> None:
    """The variable was 0 with every layout but SameDomain, so a trainer in one domain used the network."""

    def setting(*changes: Object, served: frozenset[Kind] = GB200) -> tuple[str | None, str | None]:
        found = build_nccl_environment(plan_job(a_job(PAPER, *changes), ClusterFacts(served)))
        return found.get("NCCL_MNNVL_ENABLE"), found.get("NCCL_CUMEM_ENABLE")

    assert setting() == ("1", "1")
    assert setting(SEPARATE) == setting(ANY) == (None, "1")
    assert setting({"placement": {"nvlink": "Preferred"}}, served=GB200 - {COMPUTE_DOMAIN}) == ("0", None)
    assert setting({"placement": {"nvlink": "Disabled"}}) == ("0", None)
    assert setting(ANY, ONE_NODE) == ("0", None)


def test_a_compute_domain_is_made_only_where_pods_exchange_data_in_one_domain() -> None:
    """A domain that nothing uses kept other jobs out of its nodes."""

    def has_domain(*changes: Object) -> bool:
        return plan_job(a_job(PAPER, *changes), ClusterFacts(GB200)).has_compute_domain

    assert has_domain(ANY)  # the trainer's nodes
    assert has_domain(ANY, ONE_NODE, LARGE)  # the nodes of a replica
    assert has_domain(ONE_NODE)  # trainer and replicas
    assert not has_domain(ANY, ONE_NODE)
    assert not has_domain(SEPARATE, ONE_NODE)


@pytest.mark.parametrize(
    ("sinks", "ports"),
    [
        ({"tensorboard": {}, "wandb": {"mode": "Offline"}}, set()),
        ({"wandb": {}}, {443}),
        ({"mlflow": {}}, {443}),
        ({"mlflow": {"trackingUri": "http://mlflow.tools:5000/below"}}, {5000}),
        ({"mlflow": {"trackingUri": "http://mlflow"}}, {80}),
        ({"mlflow": {"trackingUri": "databricks"}}, {443}),
    ],
)
def test_the_coordinator_may_reach_the_sinks_that_its_run_names(sinks: dict[str, Any], ports: set[int]) -> None:
    seen = ClusterFacts()
    seen = replace(seen, settings=replace(seen.settings, api_server_ports=(6443,)))

    def reachable(changes: list[Object]) -> set[int]:
        children = children_of(a_job(*changes), seen)
        policies = [child for child in children if child["kind"] == "NetworkPolicy"]
        (rules,) = [p["spec"]["egress"] for p in policies if p["metadata"]["name"].endswith(COORDINATOR)]
        return {port["port"] for rule in rules for port in rule["ports"]}

    assert reachable([{"telemetry": {"sinks": sinks}}]) == reachable([]) | ports
    assert not reachable([]) & {80, 443, 5000}


@settings(max_examples=25)
@given(jobs(), everything)
def test_every_container_has_requests_and_limits_that_a_quota_can_count(job: Job, served: frozenset[Kind]) -> None:
    """Every pod was BestEffort: the coordinator and the store, which must lose nothing, were evicted first."""
    for item in children_of(job, ClusterFacts(served)):
        if "template" not in item.get("spec", {}) and item["kind"] not in ("JobSet", "LeaderWorkerSet"):
            continue
        for template in list_pod_templates(item):
            (container,) = template["spec"]["containers"]
            both = container["resources"]
            for name in ("cpu", "memory", "ephemeral-storage"):
                assert parse_quantity(both["requests"][name]) <= parse_quantity(both["limits"][name])


def parse_quantity(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(m|Mi|Gi)?", text).groups()  # type: ignore[union-attr]
    return int(number) * {None: 1, "m": 0.001, "Mi": 2**20, "Gi": 2**30}[unit]


def test_a_quantity_that_the_user_names_is_the_users_alone() -> None:
    """A default request above a user's limit would be refused by the API server."""
    part = {"spec": {"containers": [{"name": "coordinator", "resources": {"limits": {"memory": "100Mi"}}}]}}
    found = find(children_of(a_job({"coordinator": {"podTemplate": part}}), ClusterFacts()), DEPLOYMENT, COORDINATOR)
    resources = found["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["memory"] == "100Mi"
    assert "memory" not in resources["requests"]
    assert {"cpu", "ephemeral-storage"} <= resources["requests"].keys()


def test_a_small_job_fits_a_small_machine() -> None:
    """The local example, on two cores that also run the cluster."""
    small = a_job({"generation": {"replicas": 2}, "trainer": {"parallelism": {"data": 2}}})
    total = 0.0
    for item in children_of(small, ClusterFacts()):
        if "template" in item.get("spec", {}) or JOB_SET.is_kind_of(item):
            (container,) = list_pod_templates(item)[0]["spec"]["containers"]
            total += item["spec"].get("replicas", 1) * parse_quantity(container["resources"]["requests"]["cpu"])
    assert total < 1.75


def test_the_stores_pod_can_be_shaped() -> None:
    part = {
        "metadata": {"labels": {"team": "a", "specrl.dev/rljob": "other"}},
        "spec": {"tolerations": [{"key": "cpu", "operator": "Exists"}], "priorityClassName": "high"},
    }
    job = a_job({"storeServer": {"podTemplate": part}})
    children = children_of(job, ClusterFacts())
    store = next(it for it in children if STATEFUL_SET.is_kind_of(it) and it["metadata"]["name"] == "tiny-store")
    template = store["spec"]["template"]
    assert template["spec"]["priorityClassName"] == "high"
    assert template["spec"]["tolerations"] == [{"key": "cpu", "operator": "Exists"}]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"]["specrl.dev/rljob"] == "tiny", "it stays in the job's network policies"


def test_a_replica_of_eight_gpus_is_one_pod_where_nobody_said_otherwise() -> None:
    """The GB200's four GPUs a node were the default of all: on nodes of eight H100 a replica became two pods of four,
    and a trainer of eight was refused."""
    eight = {"generation": {"gpusPerReplica": 8, "tensorParallel": 8}, "placement": {"profile": "Generic"}}
    trainer = {"trainer": {"gpusPerNode": 8, "parallelism": {"tensor": 8}}}
    assert plan_job(a_job(eight, trainer), ClusterFacts()).replica.pods == 1
    four = {"placement": {"gpusPerNode": 4}, "trainer": {"gpusPerNode": 1}}
    assert plan_job(a_job(eight, four), ClusterFacts()).replica.pods == 2
    assert plan_job(a_job(PAPER, LARGE), ClusterFacts()).replica.pods == 2


@pytest.mark.parametrize(
    ("claim", "volume"),
    [("runs", "run"), ("models", "volume-0"), ("old", "origin")],
)
def test_the_trainer_mounts_the_claim_of_the_checkpoint_to_start_from(claim: str, volume: str) -> None:
    """One claim is one volume of a pod, as a pod that names it in two may hang."""
    start = {"claimName": claim, "folder": "old-1a2b3c4d/checkpoints/step-000010"}
    change = {"checkpoint": {"from": start}, "volumes": [{"claimName": "models", "mountPath": "/models"}]}
    children = children_of(a_job(change), ClusterFacts())
    (template,) = list_pod_templates(find(children, JOB_SET, TRAINER))
    container = template["spec"]["containers"][0]
    assert "--checkpoint=/var/lib/specrl/origin/old-1a2b3c4d/checkpoints/step-000010" in container["command"]
    mount = next(it for it in container["volumeMounts"] if it["mountPath"] == pods.ORIGIN_FOLDER)
    assert mount == {"name": volume, "mountPath": pods.ORIGIN_FOLDER, "readOnly": True}
    claims = [it[PVC]["claimName"] for it in template["spec"]["volumes"] if PVC in it]
    assert sorted(claims) == sorted({"runs", "models", claim})
    (replica,) = list_pod_templates(find(children, STATEFUL_SET, GENERATION))
    assert pods.ORIGIN_FOLDER not in str(replica)
    assert "from" not in yaml.safe_load(find_run_file(children)["data"]["run.yaml"])["checkpoint"]


def egress_of(objects: list[Object], name: str) -> list[Object]:
    """Return the egress rules of the NetworkPolicy of a name; none if there is no such policy."""
    policies = [it for it in objects if NETWORK_POLICY.is_kind_of(it) and it["metadata"]["name"] == name]
    return [rule for policy in policies for rule in policy["spec"]["egress"]]


@pytest.mark.parametrize(
    ("mirror", "ports"), [("s3://bucket/run", [443]), ("abfs://c/run", [443]), ("file:///mnt/run", []), (None, [])]
)
def test_a_trainer_with_a_mirror_elsewhere_may_reach_it(mirror: str | None, ports: list[int]) -> None:
    """H4: trainers could reach their own job and DNS, and nothing else."""
    job = a_job({"checkpoint": {"mirror": mirror}} if mirror else {})
    rules = egress_of(children_of(job, ClusterFacts()), "tiny-trainer")
    assert [each["port"] for rule in rules for each in rule["ports"]] == ports


def test_all_pods_of_a_job_get_the_egress_of_the_operators_flags() -> None:
    rule = {"ports": [{"port": 9000}]}
    objects = children_of(a_job(), ClusterFacts(settings=Settings(job_egress=(rule,))))
    assert rule in egress_of(objects, "tiny-peers")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "9000"])
def test_an_egress_rule_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty rule would allow everything."""
    with pytest.raises(SystemExit):
        main.parse_arguments([f"--job-egress={text}"])
    assert "argument --job-egress: must be" in capsys.readouterr().err


def test_kueue_admits_each_replica_by_itself_so_that_they_can_be_scaled() -> None:
    """C6: Kueue refuses to scale a StatefulSet that has its label."""
    queued = {"scheduling": {"queueName": "team-a"}}
    workload = find(children_of(a_job(queued), ClusterFacts(ALL)), STATEFUL_SET, GENERATION)
    (template,) = list_pod_templates(workload)
    assert KUEUE_QUEUE_LABEL not in workload["metadata"]["labels"]
    assert template["metadata"]["labels"][KUEUE_QUEUE_LABEL] == "team-a"
    groups = find(children_of(a_job(PAPER, LARGE, queued), ClusterFacts(ALL)), LEADER_WORKER_SET, GENERATION)
    assert groups["metadata"]["labels"][KUEUE_QUEUE_LABEL] == "team-a"
    trainer = find(children_of(a_job(queued), ClusterFacts(ALL)), JOB_SET, TRAINER)
    assert trainer["metadata"]["labels"][KUEUE_QUEUE_LABEL] == "team-a"


@pytest.mark.parametrize(("change", "expected"), [({}, 3), ({"store": {"sqlite": {}}}, 2), (PAPER, 6)])
def test_a_drain_waits_for_every_pod_without_which_the_run_stops(change: Object, expected: int) -> None:
    """M7: coordinator, trainer and store; a replica may go."""
    children = children_of(a_job(change), ClusterFacts())
    (budget,) = (it for it in children if DISRUPTION_BUDGET.is_kind_of(it))
    assert budget["spec"]["minAvailable"] == expected
    (components,) = budget["spec"]["selector"]["matchExpressions"]
    assert GENERATION not in components["values"]


@pytest.mark.parametrize("state", [it for it in DesiredState if it is not DesiredState.RUNNING])
def test_a_job_that_does_not_run_keeps_no_node_from_being_drained(state: DesiredState) -> None:
    """A finished run's coordinator stays until the job is deleted."""
    assert not any(DISRUPTION_BUDGET.is_kind_of(it) for it in children_of(a_job(), ClusterFacts(), state))


def test_the_operators_flags_leave_budgets_out() -> None:
    settings = main.read_settings(main.parse_arguments(["--no-disruption-budgets"]))
    assert not any(DISRUPTION_BUDGET.is_kind_of(it) for it in children_of(a_job(), ClusterFacts(settings=settings)))


def test_autoscalers_of_nodes_leave_every_pod_in_place_unless_its_template_says_otherwise() -> None:
    """M7: consolidation moved the coordinator at will."""
    over = {"metadata": {"annotations": {"karpenter.sh/do-not-disrupt": None}}}
    for item in children_of(a_job({"generation": {"podTemplate": over}}), ClusterFacts()):
        if "template" in item.get("spec", {}) or JOB_SET.is_kind_of(item):
            (template,) = list_pod_templates(item)
            notes = template["metadata"]["annotations"]
            assert notes["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
            is_replica = template["metadata"]["labels"][COMPONENT_LABEL] == GENERATION
            assert notes.get("karpenter.sh/do-not-disrupt") == (None if is_replica else "true")


def test_every_pod_has_the_jobs_priority() -> None:
    """The store's pod had none. Its preemption stops the run as that of any other."""
    found = {}
    for item in children_of(a_job({"scheduling": {"priorityClassName": "high"}}), ClusterFacts()):
        if "template" in item.get("spec", {}) or JOB_SET.is_kind_of(item):
            (template,) = list_pod_templates(item)
            found[template["metadata"]["labels"][COMPONENT_LABEL]] = template["spec"].get("priorityClassName")
    assert found == dict.fromkeys((COORDINATOR, TRAINER, GENERATION, STORE), "high")


def test_a_coordinator_has_room_for_the_workers_of_its_tools() -> None:
    """Only those of the reward pool were counted, so 16 workers of a tool had one CPU."""
    tools = {"answeredBy": {"python": {"function": "mine:answer"}}, "maxOutputTokens": 4}
    limits = []
    for workers in (1, 16):
        job = a_job({"tools": tools | {"pool": {"workers": workers, "memoryMib": 1024}}})
        (template,) = list_pod_templates(find(children_of(job, ClusterFacts()), DEPLOYMENT, COORDINATOR))
        limits.append(template["spec"]["containers"][0]["resources"]["limits"])
    assert [int(it["cpu"]) for it in limits] == [2 + 1 + 1, 2 + 1 + 16]
    assert [it["memory"] for it in limits] == ["13Gi", "28Gi"]


def test_every_pod_but_the_stores_may_be_replaced_before_a_lost_node_answers() -> None:
    """H2. Two servers must not write to one volume."""
    found = {}
    for item in children_of(a_job(), ClusterFacts()):
        if "template" in item.get("spec", {}) or JOB_SET.is_kind_of(item):
            (template,) = list_pod_templates(item)
            component = template["metadata"]["labels"][COMPONENT_LABEL]
            found[component] = "kueue.x-k8s.io/safe-to-forcefully-delete" in template["metadata"]["annotations"]
    assert found == {COORDINATOR: True, TRAINER: True, GENERATION: True, STORE: False}


HOST: Object = {
    "placement": {"profile": "Generic", "rdma": {"hostNetwork": "Enabled"}},
    "trainer": {"gpusPerNode": 1},
    "generation": {"gpusPerReplica": 1},
}


def test_pods_in_the_host_network_are_known_by_the_addresses_of_the_nodes() -> None:
    """H5: policies select pods, which these are not. So coordinator and store dropped trainer and replicas."""
    facts = ClusterFacts(settings=Settings(node_cidrs=("10.0.0.0/16",)))
    assert find_refusal(plan_job(a_job(HOST), facts)) is None
    policies = {
        it["metadata"]["name"]: it["spec"] for it in children_of(a_job(HOST), facts) if NETWORK_POLICY.is_kind_of(it)
    }
    nodes = [{"ipBlock": {"cidr": "10.0.0.0/16"}}]
    (ingress,) = policies["tiny-nodes"]["ingress"]
    (egress,) = policies["tiny-nodes"]["egress"]
    assert (ingress["from"], egress["to"]) == (nodes, nodes)
    assert {it["port"] for it in ingress["ports"]} == {pods.GRPC_PORT, pods.STORE_PORT}
    assert {it["port"] for it in egress["ports"]} == {pods.REPLICA_PORT, pods.TRAINER_PORT}
    assert not egress_of(children_of(a_job(), facts), "tiny-nodes")


def test_a_job_in_the_host_network_is_refused_where_the_nodes_addresses_are_not_known() -> None:
    refused = find_refusal(plan_job(a_job(HOST), ClusterFacts()))
    assert refused is not None
    assert refused.reason == "Unsupported"
    assert "networkPolicy.nodeCidrs" in refused.message
    on_cpus = {"placement": {"rdma": {"hostNetwork": "Enabled"}}}
    assert find_refusal(plan_job(a_job(on_cpus), ClusterFacts())) is None, "no pod of it is in the host network"


@pytest.mark.parametrize(("claim", "volume"), [("kernels", "cache"), ("runs", "run")])
def test_what_trainer_and_replicas_compile_outlives_their_pods(claim: str, volume: str) -> None:
    """M10: torch.compile, Triton and FlashInfer began anew in each pod."""
    job = a_job({"cacheClaimName": claim, "weights": {"transport": "Checkpoint"}})
    for role, container in containers(job, ClusterFacts()).items():
        mounts = {it["mountPath"]: it for it in container["volumeMounts"]}
        compiles = role in (TRAINER, GENERATION)
        assert mounts.get(pods.CACHE_FOLDER) == ({"name": volume, "mountPath": pods.CACHE_FOLDER} if compiles else None)
        assert (pods.COMPILER_CACHES.items() <= variables(container).items()) is compiles
    assert not any("CACHE_DIR" in name for name in variables(containers(a_job(), ClusterFacts())[TRAINER]))


def test_what_a_pod_fetches_is_in_a_folder_of_its_own_before_its_process_starts() -> None:
    """H9: weights had to be on a claim, and nobody said how they got there."""
    children = children_of(a_job(FETCHED), ClusterFacts())
    (template,) = list_pod_templates(find(children, STATEFUL_SET, GENERATION))
    policy, head = template["spec"]["initContainers"]
    main = template["spec"]["containers"][0]
    assert policy["command"][:3] == ["specrl", "fetch", f"hf://Qwen/Qwen3-0.6B@{COMMIT}"]
    assert "--drafter" not in policy["command"], "it must be of a family that specrl trains"
    assert "--drafter" in head["command"]
    assert policy["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert "envFrom" not in main, "the pod's process has no credentials of what is fetched"
    mounts = {it["mountPath"]: it for it in main["volumeMounts"]}
    for container, path in ((policy, "/models/qwen"), (head, "/models/head")):
        out = container["command"][container["command"].index("--out") + 1]
        assert mounts[path]["readOnly"] is True
        assert f"{volumes.FETCH_FOLDER}/{mounts[path]['subPath']}" == out
        assert container["volumeMounts"][0] == {"name": mounts[path]["name"], "mountPath": volumes.FETCH_FOLDER}
        assert container["securityContext"] == main["securityContext"]
    sources = {it["name"]: it for it in template["spec"]["volumes"]}
    assert sources["volume-0"]["emptyDir"] == {}
    assert sources["volume-1"][PVC] == {"claimName": "models"}
    assert sources["volume-2"]["image"]["reference"] == "registry.example.com/data/gsm8k:1"
    assert egress_of(children, "tiny-fetch") == [{"ports": [{"protocol": "TCP", "port": 443}]}]


def test_the_coordinator_fetches_no_weights_and_the_store_nothing() -> None:
    children = children_of(a_job(FETCHED), ClusterFacts())
    coordinator = [item for item in children if DEPLOYMENT.is_kind_of(item)]
    skips = {}
    for workload in [*find_workloads(children), *coordinator]:
        spec = list_pod_templates(workload)[0]["spec"]
        role = workload["metadata"]["labels"][COMPONENT_LABEL]
        skips[role] = ["--skip-weights" in it["command"] for it in spec.get("initContainers", [])]
    (store,) = (item for item in children if STATEFUL_SET.is_kind_of(item) and item["metadata"]["name"].endswith(STORE))
    skips[STORE] = store["spec"]["template"]["spec"].get("initContainers", [])
    assert skips == {COORDINATOR: [True, True], TRAINER: [False, False], GENERATION: [False, False], STORE: []}


def test_jobs_that_share_a_claim_share_what_is_fetched() -> None:
    names = [volumes.name_folder(uri) for uri in (f"hf://a/b@{COMMIT}", f"hf://a/b@{COMMIT}", "hf://a/b", "hf://a-b/")]
    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert all(re.fullmatch(r"[A-Za-z0-9-]{1,80}", name) for name in names)


def test_a_claim_is_one_volume_of_a_pod_and_is_written_to_only_where_something_is_fetched() -> None:
    """A pod that names one claim in two volumes may hang."""
    both = [{"claimName": "m", "mountPath": "/a"}, {"claimName": "m", "mountPath": "/b"}]
    fetched = [*both, {"claimName": "m", "mountPath": "/c", "uri": "s3://models/c"}]
    for named, source in ((both, {"claimName": "m", "readOnly": True}), (fetched, {"claimName": "m"})):
        children = children_of(a_job({"volumes": named}), ClusterFacts())
        spec = list_pod_templates(find(children, STATEFUL_SET, GENERATION))[0]["spec"]
        assert [it[PVC] for it in spec["volumes"] if PVC in it] == [source]
        mounts = [it for it in spec["containers"][0]["volumeMounts"] if it["mountPath"] in ("/a", "/b", "/c")]
        assert all(it["readOnly"] for it in mounts)
        assert len(mounts) == len(named)
