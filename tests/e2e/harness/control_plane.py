"""A Kubernetes control plane on this machine alone: etcd, API server, controller manager, scheduler.

Everything is real except the nodes (nodes.py) and their kubelet (tests/e2e/kubelet): RBAC, admission, CEL, garbage
collection and scheduling are Kubernetes' own. Missing are kube-proxy, DNS, admission plugins beyond the default, and
encryption at rest. etcd does not sync to disk. Aggregated APIs are reached at their endpoints, for lack of kube-proxy.
"""

from __future__ import annotations

import contextlib
import secrets
import ssl
import subprocess
from pathlib import Path

import httpx2
from tests.certificates import Authority
from tests.e2e.harness.api import Api, Refused
from tests.e2e.harness.assets import CONTROL_PLANE, Assets
from tests.e2e.harness.network import NoNetwork, PodNetwork
from tests.e2e.harness.programs import Program

from specrl.launcher.processes.ports import find_free_port

ISSUER = "https://kubernetes.default.svc.cluster.local"
SERVICES = "10.0.0.0/16"
"""Addresses of Services. The pods' are 10.64.0.0 and up."""
AGGREGATOR = "aggregator"
"""Name in the API server's certificate for aggregated APIs."""
QPS = 500
"""Requests per second of controllers and scheduler. The defaults, 20 and 50, protect shared API servers."""


class ControlPlane:
    """A running control plane: four processes, their folder, and an administrator's client."""

    def __init__(
        self, assets: Assets, folder: Path, port: int = 0, users: dict[str, str] | None = None, **flags: object
    ) -> None:
        """port: of the API server; 0 takes a free one. users: group of each user besides the administrator.

        flags: of the API server, over those that are set here.
        """
        missing = assets.missing(*CONTROL_PLANE)
        assert not missing, missing
        self.folder = folder
        self._assets = assets
        self.network: PodNetwork | None = None
        self.port = port or find_free_port()
        self._flags = flags
        self._groups = {"admin": "system:masters"} | (users or {})
        self.tokens = {user: secrets.token_hex(16) for user in self._groups}
        self._programs: list[Program] = []

    @property
    def server(self) -> str:
        return f"https://{self._address}:{self.port}"

    @property
    def _address(self) -> str:
        """Address at which pods reach the API server; None if this machine cannot run pods."""
        return self.network.gateway if self.network is not None else "127.0.0.1"

    def start(self) -> Api:
        """Start all processes. Returns when pods can be created: the API and default service accounts are ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._write_keys()
        with contextlib.suppress(NoNetwork):  # then no pods can run as processes
            self.network = PodNetwork.create()
        try:
            self._start_etcd()
            self._start_api_server()
            self.admin = Api(self.server, self.folder / "apiserver" / "apiserver.crt", self.tokens["admin"])
            self.kubeconfig = self.admin.kubeconfig(self.folder / "admin.kubeconfig")
            self._start_controllers()
        except BaseException:
            self.stop()
            raise
        return self.admin

    def stop(self) -> None:
        """Stop the processes in reverse order: without etcd, the API server would hang in its shutdown."""
        if hasattr(self, "admin"):
            self.admin.close()
        while self._programs:
            self._programs.pop().stop()
        if self.network is not None:
            self.network.close()

    def _write_keys(self) -> None:
        key = self.folder / "service-accounts.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=60)
        command = ["openssl", "rsa", "-in", key, "-pubout", "-out", key.with_suffix(".pub")]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        lines = [f'{self.tokens[user]},{user},{user},"{group}"\n' for user, group in self._groups.items()]
        (self.folder / "tokens.csv").write_text("".join(lines))
        # With it the API server tells the servers behind it, such as KEDA's, who asks.
        Authority(self.folder / "front-proxy").sign(AGGREGATOR, [f"DNS:{AGGREGATOR}"])

    def _start_etcd(self) -> None:
        client = find_free_port()
        peer = find_free_port()
        self._etcd = f"http://127.0.0.1:{client}"
        program = self._program(
            "etcd",
            data_dir=self.folder / "etcd",
            listen_client_urls=self._etcd,
            advertise_client_urls=self._etcd,
            listen_peer_urls=f"http://127.0.0.1:{peer}",
            initial_advertise_peer_urls=f"http://127.0.0.1:{peer}",
            initial_cluster=f"default=http://127.0.0.1:{peer}",
            unsafe_no_fsync="true",
            log_level="warn",
        )
        program.wait_until(lambda: _answers(f"{self._etcd}/health"), "answer")

    def _start_api_server(self) -> None:
        key = self.folder / "service-accounts.key"
        proxy = self.folder / "front-proxy"
        flags: dict[str, object] = {
            "etcd_servers": self._etcd,
            "bind_address": self._address,
            "advertise_address": self._address,
            "secure_port": self.port,
            "cert_dir": self.folder / "apiserver",
            "token_auth_file": self.folder / "tokens.csv",
            "authorization_mode": "RBAC",
            "allow_privileged": "true",
            "service_cluster_ip_range": SERVICES,
            "service_account_issuer": ISSUER,
            "service_account_key_file": key.with_suffix(".pub"),
            "service_account_signing_key_file": key,
            "endpoint_reconciler_type": "none",  # it would publish the server's address, which must not be loopback
            "enable_aggregator_routing": "true",
            "proxy_client_cert_file": proxy / f"{AGGREGATOR}.pem",
            "proxy_client_key_file": proxy / f"{AGGREGATOR}.key",
            "requestheader_client_ca_file": proxy / "ca.pem",
            "requestheader_allowed_names": AGGREGATOR,
            "requestheader_username_headers": "X-Remote-User",
            "requestheader_group_headers": "X-Remote-Group",
            "requestheader_extra_headers_prefix": "X-Remote-Extra-",
            "profiling": "false",
        }
        program = self._program("kube-apiserver", **flags | self._flags)
        certificate = self.folder / "apiserver" / "apiserver.crt"
        program.wait_until(lambda: certificate.is_file() and _answers(f"{self.server}/livez", certificate), "answer")

    def _start_controllers(self) -> None:
        self._program(
            "kube-controller-manager",
            kubeconfig=self.kubeconfig,
            authentication_kubeconfig=self.kubeconfig,
            authorization_kubeconfig=self.kubeconfig,
            bind_address="127.0.0.1",
            secure_port=find_free_port(),
            leader_elect="false",
            service_account_private_key_file=self.folder / "service-accounts.key",
            root_ca_file=self.folder / "apiserver" / "apiserver.crt",
            kube_api_qps=QPS,
            kube_api_burst=2 * QPS,
            profiling="false",
        ).wait_until(self._makes_accounts, "default service account")
        port = find_free_port()
        self._program(
            "kube-scheduler",
            kubeconfig=self.kubeconfig,
            authentication_kubeconfig=self.kubeconfig,
            authorization_kubeconfig=self.kubeconfig,
            bind_address="127.0.0.1",
            secure_port=port,
            leader_elect="false",
            kube_api_qps=QPS,
            kube_api_burst=2 * QPS,
            profiling="false",
        ).wait_until(lambda: _answers(f"https://127.0.0.1:{port}/healthz", verify=False), "answer")

    def _makes_accounts(self) -> bool:
        try:
            self.admin.get_text("/readyz")
            return self.admin.find("v1/serviceaccounts", "default", "default") is not None
        except (Refused, httpx2.HTTPError):
            return False

    def _program(self, name: str, **flags: object) -> Program:
        words = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
        path = self._assets.find_path(name)
        assert path is not None
        program = Program(name, [path, *words], self.folder / f"{name}.log")
        self._programs.append(program)
        program.start()
        return program


def _answers(url: str, ca: Path | None = None, *, verify: bool = True) -> bool:
    """Whether the server answers. A refusal counts, too: health may need credentials."""
    context = ssl.create_default_context(cafile=str(ca)) if ca else verify
    try:
        httpx2.get(url, verify=context, timeout=5, trust_env=False)
    except (httpx2.HTTPError, OSError):
        return False
    return True
