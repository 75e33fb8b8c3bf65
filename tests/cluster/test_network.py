"""The network of pods: Services, names, and policies that are enforced."""

from __future__ import annotations

import json

from tests.cluster.harness.kubectl import Kubectl
from tests.cluster.harness.pods import build_pod, build_server, connect, wait_until_ready
from tests.e2e.harness.api import Api, Object, wait_until

POLICY_S = 120.0  # for the controller to apply a policy on a busy machine


def build_service(name: str, namespace: str, **spec: object) -> Object:
    """Build a Service of the pods labelled `app: NAME`: port 80 leads to `http`."""
    ports = [{"name": "http", "port": 80, "targetPort": "http"}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"app": name}, "ports": ports} | spec,
    }


def test_a_service_leads_to_its_pods_by_name(admin: Api, namespace: str, kubectl: Kubectl) -> None:
    """kube-proxy translates port 80 to 8080, CoreDNS the name. A headless Service's name is the pod's address."""
    server = build_server("server", namespace)
    admin.create(server)
    admin.create(build_service("server", namespace))
    headless = build_service("headless", namespace, clusterIP="None", selector={"app": "server"})
    admin.create(headless)
    client = build_server("client", namespace)
    admin.create(client)
    wait_until_ready(admin, server)
    wait_until_ready(admin, client)
    target = f"server.{namespace}.svc.cluster.local:80"
    wait_until(lambda: connect(kubectl, namespace, "client", target) == "", "the Service answers")
    assert connect(kubectl, namespace, "client", "server:80") == ""
    assert connect(kubectl, namespace, "client", "headless:8080") == ""
    assert connect(kubectl, namespace, "client", "nobody:80").startswith("DNS")
    # An HTTP request from one pod to the other, asked for through the API server.
    asked = f"/api/v1/namespaces/{namespace}/pods/client:8080/proxy/dial"
    said = admin.get_text(asked, host="server", port="80", request="hostname", protocol="http", tries="1")
    assert json.loads(said) == {"responses": ["server"]}


def test_the_api_server_is_reached_at_the_address_of_its_service(admin: Api, namespace: str, kubectl: Kubectl) -> None:
    client = build_server("client", namespace)
    admin.create(client)
    wait_until_ready(admin, client)
    assert connect(kubectl, namespace, "client", "kubernetes.default:443") == ""


def test_a_policy_lets_friends_in_and_refuses_strangers(admin: Api, namespace: str, kubectl: Kubectl) -> None:
    server = build_server("server", namespace)
    pods = [server, *(build_server(each, namespace, labels={"role": each}) for each in ("friend", "stranger"))]
    for pod in pods:
        admin.create(pod)
    admin.create(build_service("server", namespace))
    for pod in pods:
        wait_until_ready(admin, pod)
    wait_until(lambda: connect(kubectl, namespace, "stranger", "server:80") == "", "no policy, no refusal")
    friends = {"from": [{"podSelector": {"matchLabels": {"role": "friend"}}}], "ports": [{"port": "http"}]}
    spec = {"podSelector": {"matchLabels": {"app": "server"}}, "policyTypes": ["Ingress"], "ingress": [friends]}
    metadata = {"name": "friends", "namespace": namespace}
    admin.create({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec})
    wait_until(
        lambda: connect(kubectl, namespace, "stranger", "server:80") in {"REFUSED", "TIMEOUT"},
        "the stranger is refused",
        timeout_s=POLICY_S,
    )
    assert connect(kubectl, namespace, "friend", "server:80") == ""
    assert wait_until_ready(admin, server)["status"]["containerStatuses"][0]["restartCount"] == 0


def test_pods_cannot_leave_the_machine(admin: Api, namespace: str, kubectl: Kubectl) -> None:
    """Their names are the cluster's alone, so a test cannot depend on what the machine reaches."""
    client = build_pod("client", namespace, "pause")
    admin.create(client)
    wait_until_ready(admin, client)
    assert connect(kubectl, namespace, "client", "kubernetes.io:443").startswith("DNS")
