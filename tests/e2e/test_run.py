"""An applied RLJob trains a policy in pods that run as processes.

All programs are the real ones: operator, coordinator, vLLM, Megatron-Core and Redis. The kubelet of tests/e2e/kubelet
starts them from the operator's objects; this machine replaces the images. The services use mutual TLS, and only users
who may read the job can read the run's pages.
"""

from __future__ import annotations

import base64
import ssl
from pathlib import Path

import httpx2
import pytest
from tests.certificates import Authority
from tests.e2e.harness.api import RLJOBS, Api, Object, find_condition, is_condition_true, wait_until
from tests.e2e.harness.kubelet_process import KubeletProcess
from tests.e2e.harness.nodes import OURS
from tests.e2e.harness.release import Release
from tests.e2e.jobs import PLAYED, build_claim, describe_job, list_remaining_objects, pods_of, until_condition
from tests.requirements import REDIS_TLS
from tests.rljob_cases import a_job

RUN_S = 1500.0
REAL: Object = {"spec": {"nodeSelector": {OURS: "processes"}}}
STEPS = 2
CERTIFICATES = "certificates-of-tiny"


@pytest.mark.slow
@pytest.mark.needs(REDIS_TLS)
@pytest.mark.timeout(3000)
def test_job_that_is_applied_trains_and_completes(
    admin: Api, release: Release, kubelet: KubeletProcess, namespace: str, tmp_path: Path
) -> None:
    for name in ("models", "runs"):
        admin.create(build_claim(name, namespace))
    folders = {
        name: wait_until(lambda name=name: _folder(admin, name, namespace), "bound") for name in ("models", "runs")
    }  # type: ignore[misc]
    _make_policy(folders["models"] / "policy")
    job = admin.create(_tiny_job(namespace))
    said = find_condition(until_condition(admin, job, "Accepted", "False", "SecretMissing"), "Accepted")["message"]
    assert f"{CERTIFICATES}, which does not exist; create it" in said
    authority = Authority(tmp_path / "authority")
    admin.create(_certificates(authority, namespace))

    def ended() -> Object | None:
        found = admin.get(RLJOBS, "tiny", namespace)
        return found if is_condition_true(found, "Complete") or is_condition_true(found, "Failed") else None

    found = wait_until(ended, "the run ends", RUN_S, lambda: _everything(admin, kubelet, job))
    assert is_condition_true(found, "Complete"), _everything(admin, kubelet, job)
    progress = found["status"]["progress"]
    assert progress["step"] == STEPS
    assert progress["policyVersion"] == STEPS
    assert found["status"].get("restarts", 0) == 0, _everything(admin, kubelet, job)
    for component in ("coordinator", "trainer", "generation"):
        assert kubelet.logs_of(namespace, f"tiny-{component}"), f"logs of {component}"
    _only_readers_of_the_job_read_its_run(admin, job, authority)
    exported = list(folders["runs"].rglob("*.safetensors"))
    assert exported, "the trained policy is on the claim"
    wait_until(
        lambda: find_condition(admin.get(RLJOBS, "tiny", namespace), "Complete")["status"] == "True", "it stays so"
    )
    admin.delete(RLJOBS, "tiny", namespace)
    wait_until(
        lambda: not list_remaining_objects(admin, job),
        "nothing is left",
        explain=lambda: list_remaining_objects(admin, job),
    )
    assert exported[0].exists(), "what was trained is the user's"


def test_job_with_an_unknown_model_fails_and_says_which(
    admin: Api, release: Release, kubelet: KubeletProcess, namespace: str
) -> None:
    """The real coordinator refuses the run with an exit code that fails the job, and is not restarted."""
    admin.create(build_claim("runs", namespace))
    played = {f"{role}.podTemplate": PLAYED for role in ("generation", "trainer")}
    changes = {"model.path": "/nowhere/policy", "store": {"sqlite": {}}, "coordinator.podTemplate": REAL}
    job = a_job(played | changes, "lost")
    job["metadata"]["namespace"] = namespace
    admin.create(job)
    found = until_condition(admin, job, "Failed", timeout_s=600)
    assert "/nowhere/policy" in find_condition(found, "Failed")["message"]
    wait_until(lambda: not pods_of(admin, job), "its pods are gone", explain=lambda: _everything(admin, kubelet, job))


def _tiny_job(namespace: str) -> Object:
    """Build a job of two steps with two prompts for two cores, with speculation and the job's own store."""
    job = a_job(
        {
            "model": {"path": "/models/policy", "dtype": "float32", "maxLength": 128},
            "volumes": [{"claimName": "models", "mountPath": "/models"}],
            "prompts": {"source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 80},
            "rewards": {"exact": {}},
            "generation": {"replicas": 1, "sampling": {"maxTokens": 16}, "speculation": {"ngram": {}}},
            "trainer": {"optimizer": {"learningRate": "1e-3"}, "microBatchTokens": 512},
            "schedule": {"steps": STEPS, "promptsPerStep": 2, "groupSize": 2},
            "tls": {"mode": "ExistingSecret", "secretName": CERTIFICATES},
            **{f"{role}.podTemplate": REAL for role in ("coordinator", "generation", "trainer")},
        },
        "tiny",
    )
    job["metadata"]["namespace"] = namespace
    return job


def _certificates(authority: Authority, namespace: str) -> Object:
    """Create one certificate for all roles, as a user without cert-manager does."""
    names = [f"{role}.tiny.{namespace}.specrl" for role in ("coordinator", "generation", "trainer")]
    data = {name: base64.b64encode(content).decode() for name, content in authority.secret(names).items()}
    metadata = {"name": CERTIFICATES, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": metadata, "data": data}


def _only_readers_of_the_job_read_its_run(admin: Api, job: Object, authority: Authority) -> None:
    """The finished run's page is served by HTTPS, to users whom the API server permits."""
    namespace = job["metadata"]["namespace"]
    for account in ("reader", "stranger"):
        metadata = {"name": account, "namespace": namespace}
        admin.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})
    group = "rbac.authorization.k8s.io"
    rule = {"apiGroups": ["specrl.dev"], "resources": ["rljobs"], "resourceNames": ["tiny"], "verbs": ["get"]}
    metadata = {"name": "reader", "namespace": namespace}
    admin.create({"apiVersion": f"{group}/v1", "kind": "Role", "metadata": metadata, "rules": [rule]})
    role = {"apiGroup": group, "kind": "Role", "name": "reader"}
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": namespace}
    admin.create(
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": role,
            "subjects": [subject],
        }
    )
    address = pods_of(admin, job, "coordinator")[0]["status"]["podIP"]
    trusted = ssl.create_default_context(cafile=str(authority.file))

    def answer(path: str, token: str | None) -> httpx2.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with httpx2.Client(verify=trusted, trust_env=False, timeout=30) as client:
            return client.get(
                f"https://{address}:8080{path}",
                headers=headers,
                extensions={"sni_hostname": f"coordinator.tiny.{namespace}.specrl"},
            )

    token = admin.token_of("reader", namespace, "specrl.dev")
    found = answer("/status", token)
    assert (found.status_code, found.json().get("phase")) == (200, "finished"), found.text
    _check_generation_seconds(
        admin.get(RLJOBS, "tiny", namespace)["status"]["progress"], answer("/steps", token).json()
    )
    assert answer("/status", None).status_code == 401
    assert answer("/status", admin.token_of("reader", namespace)).status_code == 401, "meant for the API server"
    refused = answer("/status", admin.token_of("stranger", namespace, "specrl.dev"))
    assert refused.status_code == 403, refused.text
    assert "must be allowed to get rljobs.specrl.dev tiny" in refused.text
    assert answer("/metrics", None).status_code == 200


def _check_generation_seconds(progress: Object, reports: list[Object]) -> None:
    """The job's status has the seconds of the last step's report; those of all steps are consistent."""
    assert len(reports) == STEPS
    last = reports[-1]
    shown = {
        "exposedGenerationSeconds": last["exposedGeneration"],
        "generationUnderWaySeconds": last["generationUnderWay"],
        "hiddenGenerationSeconds": last["hiddenGeneration"],
        "weightSyncSeconds": last["phases"]["prepare"],
    }
    assert {name: progress[name] for name in shown} == {name: f"{seconds:.2f}" for name, seconds in shown.items()}
    assert progress["exposedGenerationShare"] == f"{last['exposedGeneration'] / sum(last['phases'].values()):.2f}"
    for report in reports:
        assert 0 <= report["hiddenGeneration"] <= report["generationUnderWay"] <= sum(report["phases"].values())
        assert report["phases"]["prepare"] > 0
    # The first step waits for a whole generation, whatever the policy lag.
    first = reports[0]
    assert 0 < first["generationUnderWay"] - first["hiddenGeneration"] <= first["exposedGeneration"]


def _make_policy(path: Path) -> None:
    from tests.tiny_models import make_policy

    make_policy(path)


def _folder(api: Api, name: str, namespace: str) -> Path | None:
    """Return the folder of a claim's volume on this machine; None until it is bound."""
    bound = api.get("v1/persistentvolumeclaims", name, namespace)
    if bound["status"].get("phase") != "Bound":
        return None
    return Path(api.get("v1/persistentvolumes", bound["spec"]["volumeName"])["spec"]["hostPath"]["path"])


def _everything(api: Api, kubelet: KubeletProcess, job: Object) -> str:
    """Return conditions, pods, and the end of every pod's log."""
    namespace = job["metadata"]["namespace"]
    ends = [f"--- {name}\n{text[-3000:]}" for name, text in kubelet.logs_of(namespace, job["metadata"]["name"]).items()]
    statuses = [str(pod["status"].get("containerStatuses")) for pod in pods_of(api, job)]
    return "\n".join([describe_job(api, job), *statuses, *ends])
