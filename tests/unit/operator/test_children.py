"""Children of typical jobs, held against files: a change of what a cluster is given is reviewed as a diff.

`SPECRL_WRITE_GOLDEN=1 pytest tests/unit/operator/test_children.py` writes them anew.
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
from tests.unit.operator.builders import ALL, GB200, LARGE, PAPER, a_job, facts

from specrl.generation.main import parse
from specrl.generation.nodes import Nodes
from specrl.launcher import environment
from specrl.spec import digest, load_spec
from specrl_operator import placement, pods
from specrl_operator.acceptance import notes_of, refusal_of
from specrl_operator.api import (
    CLAIM_TEMPLATE,
    COMPONENT_LABEL,
    COMPUTE_DOMAIN,
    COORDINATOR,
    DEPLOYMENT,
    GENERATION,
    JOB_LABEL,
    JOB_SET,
    LEADER_LABEL,
    LEADER_WORKER_SET,
    MANAGED_LABEL,
    STATEFUL_SET,
    TRAINER,
    Job,
    Kind,
    Object,
)
from specrl_operator.children import desired
from specrl_operator.facts import Facts, Settings, Want
from specrl_operator.schedulers.templates import templates, workloads

GOLDEN = Path(__file__).parent / "golden"
NONE: frozenset[Kind] = frozenset()
SEPARATE = {"placement": {"layout": "SeparateDomains", "nvlink": "Preferred"}}
ANY = {"placement": {"layout": "Any", "nvlink": "Preferred"}}

CASES: dict[str, tuple[list[Object], Facts]] = {
    "minimal": ([], facts(frozenset({JOB_SET}))),
    "gb200-same-domain": ([PAPER], facts()),
    "gb200-separate-domains": ([PAPER, SEPARATE], facts()),
    "gb200-any": ([PAPER, ANY], facts()),
    "multi-node-replica": ([PAPER, LARGE], facts()),
    "kueue": ([PAPER, LARGE, {"scheduling": {"queueName": "team-a"}}], facts(ALL)),
    "kai": ([PAPER, {"scheduling": {"queueName": "team-a", "gang": "KAI"}}], facts(ALL)),
    "volcano": ([PAPER, {"scheduling": {"gang": "Volcano", "priorityClassName": "high"}}], facts(ALL)),
    "autoscaled-hpa": ([{"generation": {"autoscaling": {"maxReplicas": 8}}}], facts()),
    "autoscaled-keda": (
        [{"generation": {"autoscaling": {"maxReplicas": 8, "by": "KEDA"}}}],
        Facts(Settings(prometheus_url="http://prometheus:9090", metrics_namespaces=("monitoring",)), ALL),
    ),
    "tls-cert-manager": ([{"tls": {"mode": "CertManager", "issuer": {"name": "cluster-ca"}}}], facts(ALL)),
    "tls-existing-secret": ([{"tls": {"mode": "ExistingSecret", "secretName": "mine"}}], facts()),
    "no-jobset": ([], facts(NONE)),
    "no-compute-domain": ([PAPER, {"placement": {"nvlink": "Preferred"}}], facts(GB200 - {COMPUTE_DOMAIN})),
    "suspended": ([], facts(want=Want.STOPPED)),
}


class _Readable(yaml.SafeDumper):
    """Run files line by line, and nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_text(self, data: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Readable.add_representer(str, _Readable.represent_text)


@pytest.mark.parametrize("case", CASES)
def test_the_children_are_those_that_were_reviewed(case: str) -> None:
    changes, given_facts = CASES[case]
    objects = desired(a_job(*changes, name="qwen3-8b"), given_facts)
    text = yaml.dump_all(objects, Dumper=_Readable, sort_keys=False, width=120)
    path = GOLDEN / f"{case}.yaml"
    if os.environ.get("SPECRL_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


def find(objects: list[Object], kind: Kind, component: str) -> Object:
    return next(it for it in objects if kind.is_of(it) and it["metadata"]["labels"].get(COMPONENT_LABEL) == component)


def containers(job: Job, given_facts: Facts) -> dict[str, Object]:
    """The container of each role."""
    found = {}
    for item in desired(job, given_facts):
        spec = item.get("spec", {})
        if DEPLOYMENT.is_of(item):
            found[COORDINATOR] = spec["template"]["spec"]["containers"][0]
        for workload in workloads([item]):
            component = workload["metadata"]["labels"][COMPONENT_LABEL]
            found[component] = templates(workload)[0]["spec"]["containers"][0]
    return found


def variables(container: Object) -> dict[str, str]:
    return {it["name"]: it.get("value", "") for it in container["env"]}


# -- invariants ------------------------------------------------------------------------------------------------------

names = st.from_regex(r"[a-z]([-a-z0-9]{0,32}[a-z0-9])?", fullmatch=True)


@st.composite
def jobs(draw: Any) -> Job:
    """Jobs of all shapes that the spec's rules allow."""
    per_node = draw(st.sampled_from([1, 4, 8]))
    nodes = draw(st.sampled_from([1, 2, 4, 16, 512]))
    on_gpus = draw(st.booleans())
    profile = draw(st.sampled_from(["Generic", "GB200"])) if on_gpus else "Generic"
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
            "layout": draw(st.sampled_from(["Any", "SameDomain", "SeparateDomains"])) if on_gpus else "Any",
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
    given_facts = facts(served)
    for item in desired(job, given_facts):
        name = item["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name), name
        assert len(name) <= 63
        for value in item["metadata"]["labels"].values():
            assert len(value) <= 63
        if JOB_SET.is_of(item):  # <jobset>-<job>-0-<pod>-<five letters>
            assert len(f"{name}-node-0-{job.spec.trainer.num_nodes - 1}-xxxxx") <= 63
        elif STATEFUL_SET.is_of(item):  # also the label controller-revision-hash: <name>-<ten letters>
            assert len(f"{name}-{job.spec.generation.replicas - 1}") <= 63
            assert len(f"{name}-xxxxxxxxxx") <= 63
        elif LEADER_WORKER_SET.is_of(item):
            assert len(f"{name}-{job.spec.generation.replicas - 1}-{placement.replica_shape(job).pods}") <= 63
        elif DEPLOYMENT.is_of(item):
            assert len(f"{name}-xxxxxxxxxx-xxxxx") <= 63


@settings(max_examples=25)
@given(jobs(), everything)
def test_objects_are_told_apart_and_carry_their_job(job: Job, served: frozenset[Kind]) -> None:
    objects = desired(job, facts(served))
    twice = [key for key, count in Counter((it["kind"], it["metadata"]["name"]) for it in objects).items() if count > 1]
    assert twice == []
    for item in objects:
        assert item["metadata"]["labels"][JOB_LABEL] == job.name
        assert item["metadata"]["labels"][MANAGED_LABEL] == "specrl-operator"


@settings(max_examples=25)
@given(jobs(), everything)
def test_both_ends_of_the_weight_communicator_are_told_the_same(job: Job, served: frozenset[Kind]) -> None:
    given_facts = facts(served)
    found = containers(job, given_facts)
    if job.spec.trainer.gpus_per_node == 0:
        assert not any(name.startswith("NCCL") for role in found for name in variables(found[role]))
        return
    ends = [
        {name: value for name, value in variables(found[role]).items() if name.startswith("NCCL")}
        for role in (TRAINER, GENERATION)
    ]
    assert ends[0] == ends[1] == placement.nccl_environment(job, given_facts)


@settings(max_examples=25)
@given(jobs(), everything)
def test_a_pod_with_a_channel_takes_a_whole_node_in_a_clique_that_no_other_job_is_in(
    job: Job, served: frozenset[Kind]
) -> None:
    given_facts = facts(served)
    for workload in workloads(desired(job, given_facts)):
        for template in templates(workload):
            spec = template["spec"]
            claims = spec.get("resourceClaims", [])
            assert bool(claims) == placement.has_domain(job, given_facts)
            if not claims:
                continue
            resources = spec["containers"][0]["resources"]
            assert resources["limits"]["nvidia.com/gpu"] == str(job.spec.placement.gpus_per_node)
            assert resources["claims"] == [{"name": "imex"}]
            terms = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert any("namespaceSelector" in term for term in terms)


@settings(max_examples=25)
@given(jobs(), everything)
def test_no_replica_straddles_a_clique(job: Job, served: frozenset[Kind]) -> None:
    """Pods of one replica are bound to one domain: by the replica's own group, or by that of the whole job."""
    shape = placement.replica_shape(job)
    for workload in workloads(desired(job, facts(served))):
        if workload["metadata"]["labels"][COMPONENT_LABEL] != GENERATION or shape.pods == 1:
            continue
        assert LEADER_WORKER_SET.is_of(workload)
        assert workload["spec"]["leaderWorkerTemplate"]["size"] == shape.pods
        for template in templates(workload):
            terms = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert {term["topologyKey"] for term in terms} == {job.spec.placement.topology_key}
            own, wanted = template["metadata"]["labels"], terms[0]["labelSelector"]["matchLabels"]
            assert wanted.items() <= own.items()  # it matches itself: the first pod may choose
            assert ("matchLabelKeys" in terms[0]) == (job.spec.placement.layout.value != "SameDomain")


@settings(max_examples=25)
@given(jobs(), everything, st.sampled_from(list(Want)))
def test_the_same_job_and_facts_give_the_same_children(job: Job, served: frozenset[Kind], want: Want) -> None:
    given_facts = facts(served, want=want)
    assert desired(job, given_facts) == desired(job, given_facts)


@settings(max_examples=25)
@given(jobs(), everything)
def test_what_is_stopped_has_no_pods(job: Job, served: frozenset[Kind]) -> None:
    for item in desired(job, facts(served, want=Want.STOPPED)):
        assert not JOB_SET.is_of(item)
        assert item.get("spec", {}).get("replicas", 0) == 0


# -- single facts ----------------------------------------------------------------------------------------------------


def test_a_pod_has_time_to_drain_before_it_is_killed() -> None:
    job = a_job({"generation": {"drainS": 500}})
    found = find(desired(job, facts()), STATEFUL_SET, GENERATION)
    assert found["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 500


def test_every_pod_is_hardened_and_one_alone_has_a_token() -> None:
    for item in desired(a_job(PAPER), facts()):
        spec = item.get("spec", {})
        found = [spec["template"]] if "template" in spec else []
        if JOB_SET.is_of(item):
            found = templates(item)
        for template in found:
            pod = template["spec"]
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["automountServiceAccountToken"] is (item["metadata"]["name"].endswith("coordinator"))
            for container in pod["containers"]:
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
                assert container["securityContext"]["allowPrivilegeEscalation"] is False
                assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_pods_are_told_what_local_processes_are_told() -> None:
    """Beside what a launcher inherits: the same offline switches, threads and CPU settings."""
    found = containers(a_job({"generation": {"threads": 3}}), facts())
    local = environment.replica_environment(3, ())
    assert {name: local[name] for name in variables(found[GENERATION]) if name in local and name not in ("HOME",)} == {
        name: value for name, value in variables(found[GENERATION]).items() if name in local and name not in ("HOME",)
    }
    assert variables(found[TRAINER])["TORCHDYNAMO_DISABLE"] == "1"


def test_the_run_file_is_the_run_with_the_job_s_own_store(tmp_path: Path) -> None:
    job = a_job(PAPER, name="qwen3-8b")
    run_file = next(it for it in desired(job, facts()) if it["metadata"]["name"] == "qwen3-8b-run")
    (tmp_path / "run.yaml").write_text(run_file["data"]["run.yaml"])
    spec = load_spec(tmp_path / "run.yaml")
    assert spec.name == "qwen3-8b"
    assert spec.redis is not None
    assert spec.redis.addresses == ("qwen3-8b-store:6379",)
    assert spec.redis.password is not None
    assert spec.redis.password.environment == pods.STORE_PASSWORD
    assert spec.placement == a_job().spec.placement  # what only the operator reads stays with it
    scaled = a_job(PAPER, {"generation": {"replicas": 13}, "suspend": True}, name="qwen3-8b")
    other = next(it for it in desired(scaled, facts()) if it["metadata"]["name"] == "qwen3-8b-run")
    (tmp_path / "other.yaml").write_text(other["data"]["run.yaml"])
    assert digest(load_spec(tmp_path / "other.yaml")) == digest(spec)


@pytest.mark.parametrize(
    ("endpoint", "port"),
    [("http://collector.monitoring:4318", 4318), ("https://collector.example/otlp", 443), ("http://[fd00::1]/", 80)],
)
def test_every_pod_may_send_traces_to_the_collector_and_to_no_other_port(endpoint: str, port: int) -> None:
    def reached(*changes: Object) -> list[Object]:
        children = desired(a_job(*changes), facts())
        (policy,) = [child for child in children if child["metadata"]["name"].endswith("-peers")]
        return [rule for rule in policy["spec"]["egress"] if "to" not in rule]

    names, collector = reached({"telemetry": {"traces": {"endpoint": endpoint}}})
    assert reached() == reached({"telemetry": {"traces": {}}}) == [names]
    assert collector == {"ports": [{"protocol": "TCP", "port": port}]}


def test_two_jobs_on_one_redis_server_do_not_meet() -> None:
    store = {"store": {"redis": {"addresses": ["redis.infra:6379"]}}}
    prefixes = set()
    for name in ("one", "two"):
        objects = desired(a_job(store, name=name), facts())
        text = next(it for it in objects if it["metadata"]["name"] == f"{name}-run")["data"]["run.yaml"]
        prefixes.add(yaml.safe_load(text)["store"]["redis"]["keyPrefix"])
    assert len(prefixes) == 2


def test_users_add_to_pods_what_the_operator_does_not_know_of() -> None:
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
    template = find(desired(job, facts()), STATEFUL_SET, GENERATION)["spec"]["template"]
    first, second = template["spec"]["containers"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"][JOB_LABEL] == "tiny"
    assert {"mine", "nvidia.com/gpu"} <= {it["key"] for it in template["spec"]["tolerations"]}
    assert first["image"] == "mine:1"
    assert first["command"][0] == "specrl-generation"
    assert variables(first)["NCCL_IB_HCA"] == "mlx5"
    assert variables(first)["HOME"] == "/home"
    assert variables(first)["NCCL_MNNVL_ENABLE"] == "1"
    assert first["resources"]["requests"] == {"nvidia.com/gpu": "4", "memory": "1Gi"}
    assert first["resources"]["claims"] == [{"name": "imex"}]
    assert {"/mine", "/etc/specrl"} <= {it["mountPath"] for it in first["volumeMounts"]}
    assert second == {"name": "sidecar", "image": "side:1"}


def test_a_runtime_class_reaches_the_pod_that_runs_the_policys_programs_and_no_other() -> None:
    job = a_job(PAPER, {"coordinator": {"podTemplate": {"spec": {"runtimeClassName": "kata"}}}})
    objects = desired(job, facts())
    template = find(objects, DEPLOYMENT, COORDINATOR)["spec"]["template"]
    assert template["spec"]["runtimeClassName"] == "kata"
    assert str(objects).count("runtimeClassName") == 1


def test_null_in_a_users_part_removes_a_field() -> None:
    part = {"spec": {"securityContext": {"runAsUser": None}}}
    job = a_job({"coordinator": {"podTemplate": part}})
    template = find(desired(job, facts()), DEPLOYMENT, COORDINATOR)["spec"]["template"]
    assert "runAsUser" not in template["spec"]["securityContext"]
    assert template["spec"]["securityContext"]["runAsNonRoot"] is True


# -- what a cluster lacks --------------------------------------------------------------------------------------------


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
def test_what_is_missing_is_named_with_a_way_out(changes: list[Object], served: frozenset[Kind], named: str) -> None:
    job = a_job(*changes)
    refusal, with_all = refusal_of(job, facts(served)), refusal_of(job, facts(ALL))
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
        ([PAPER, SEPARATE], GB200, "layout is not SameDomain"),
        (
            [{"checkpoint": None, "failurePolicy": {"onTrainerFailure": "Fail"}}],
            GB200,
            "checkpoint.claimName is not set",
        ),
    ],
)
def test_what_a_job_does_without_is_said(changes: list[Object], served: frozenset[Kind], note: str) -> None:
    job, given_facts = a_job(*changes), facts(served)
    assert refusal_of(job, given_facts) is None
    assert any(note in it for it in notes_of(job, given_facts))


def test_a_replica_of_several_nodes_is_one_engine_that_its_leader_serves() -> None:
    job = a_job(PAPER, LARGE)
    assert refusal_of(job, facts()) is None
    group = find(desired(job, facts()), LEADER_WORKER_SET, GENERATION)["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "RecreateGroupOnPodRestart")
    pods = [group["leaderTemplate"], group["workerTemplate"]]
    told = {"$(LWS_LEADER_ADDRESS)": "gen-0.gen.rl", "$(LWS_WORKER_INDEX)": "1", "$(POD_IP)": "10.0.0.7"}
    for rank, pod in enumerate(pods):
        (container,) = pod["spec"]["containers"]
        command = [re.sub(r"\$\(\w+\)", lambda it: told.get(it[0], it[0]), word) for word in container["command"]]
        options = parse(command[1:])  # as the program itself reads them
        assert options.nodes == Nodes(2, rank, "gen-0.gen.rl", 29500, "10.0.0.7")
        assert ("readinessProbe" in container) == ("ports" in container) == (rank == 0)
        assert pod["metadata"]["labels"].get(LEADER_LABEL) == ("true" if rank == 0 else None)
    assert variables(pods[0]["spec"]["containers"][0]) == variables(pods[1]["spec"]["containers"][0])  # NCCL's, too


def test_multi_node_nvlink_is_on_only_where_all_ranks_share_a_domain() -> None:
    def active(*changes: Object, served: frozenset[Kind] = GB200) -> bool:
        return placement.nccl_environment(a_job(PAPER, *changes), facts(served))["NCCL_MNNVL_ENABLE"] == "1"

    assert active()
    assert not active(SEPARATE)
    assert not active(ANY)
    assert not active({"placement": {"nvlink": "Preferred"}}, served=GB200 - {COMPUTE_DOMAIN})
    assert not active({"placement": {"nvlink": "Disabled"}})


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
    seen = facts()
    seen = replace(seen, settings=replace(seen.settings, api_server_ports=(6443,)))

    def reachable(changes: list[Object]) -> set[int]:
        children = desired(a_job(*changes), seen)
        policies = [child for child in children if child["kind"] == "NetworkPolicy"]
        (rules,) = [p["spec"]["egress"] for p in policies if p["metadata"]["name"].endswith(COORDINATOR)]
        return {port["port"] for rule in rules for port in rule["ports"]}

    assert reachable([{"telemetry": {"sinks": sinks}}]) == reachable([]) | ports
    assert not reachable([]) & {80, 443, 5000}
