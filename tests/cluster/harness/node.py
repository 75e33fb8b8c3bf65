"""A node: containerd, kubelet, kube-proxy and the policy controller, in namespaces of their own.

The node's network namespace is one of the e2e harness's pod networks, so control plane and registry run beside it, on
the machine, and are reached at the network's gateway. Its first process holds mount, process and other namespaces, and
reaps orphans. Whatever the node mounts, links or filters is in these namespaces and ends with them.

Some sysctls that kubelet sets are the whole machine's. The node has files of its own in their place.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from tests.cluster.harness import packages
from tests.cluster.programs.build import find_program
from tests.e2e.harness.api import Api, is_condition_true, wait_until
from tests.e2e.harness.network import Namespace, PodNetwork
from tests.e2e.harness.programs import Program

NODE = "node-0"
USERS = {f"system:node:{NODE}": "system:nodes", "system:kube-proxy": "", "netpol": ""}
"""Group of each user that the node's programs are."""
DNS_ADDRESS = "10.0.0.10"
PAUSE_IMAGE = "specrl.test/pause:1"
REGISTRY = "registry.test"
CONTAINERD = "/run/containerd/containerd.sock"
MACHINE_SYSCTLS = (
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
)
FIRST_PROCESS = """
set -e
hostname {node}
mount -t tmpfs tmpfs /run                 # sockets, runc's state, iptables' lock
mkdir -p /run/lock
mount --bind {folder}/varlog /var/log     # kubelet links containers' logs there
for name in {sysctls}; do
  file={folder}/sysctls/$(basename $name)
  cat /proc/sys/$name > $file
  mount --bind $file /proc/sys/$name
done
echo 1 > /proc/sys/net/ipv4/ip_forward
echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables || true  # absent until there is a bridge, on some kernels
touch {folder}/entered
exec {pause}
"""


class Node:
    """A node that is registered with a control plane."""

    def __init__(self, folder: Path, network: PodNetwork, cgroup: str) -> None:
        self.folder = folder
        self.cgroup = cgroup
        self.address = network.next_address()
        self.pods = f"10.{network.number}.128.0/24"
        self._network = network
        self._namespace: Namespace | None = None
        self._first: Program | None = None
        self._programs: list[Program] = []

    def enter(self) -> None:
        """Make the namespaces. Raises NoNetwork."""
        for name in ("varlog", "sysctls", "kubelet", "cni/net.d", "volumes", "logs", "registries"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._namespace = self._network.open(self.address)
        subprocess.run(["ip", "route", "add", self.pods, "via", self.address], check=True, timeout=60)
        script = FIRST_PROCESS.format(
            node=NODE, folder=self.folder, sysctls=" ".join(MACHINE_SYSCTLS), pause=find_program("pause")
        )
        enter = ["nsenter", f"--net={self._namespace.path}", "unshare", "--mount", "--pid", "--uts", "--ipc"]
        enter += ["--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
        self._first = Program("first process", enter, self.folder / "logs" / "first-process.log")
        self._first.start()
        self._first.wait_until((self.folder / "entered").exists, "namespaces")

    def start_containerd(self, registry: str) -> None:
        """Start containerd. registry: URL of the server that is meant by REGISTRY in images' names."""
        bin_folder = Path("/usr/lib/cni")
        (self.folder / "containerd.toml").write_text(_containerd_settings(self.folder, bin_folder))
        (self.folder / "cni" / "net.d" / "10-pods.conflist").write_text(json.dumps(_pod_network(self)))
        named = self.folder / "registries" / REGISTRY
        named.mkdir(exist_ok=True)
        hosts = f'server = "{registry}"\n[host."{registry}"]\n  capabilities = ["pull", "resolve"]\n'
        (named / "hosts.toml").write_text(hosts)
        containerd = find_program("containerd")
        # containerd finds its shim beside itself only by the PATH.
        path = f"{containerd.parent}:/usr/sbin:/usr/bin:/sbin:/bin"
        self._start("containerd", containerd, "--config", self.folder / "containerd.toml", PATH=path).wait_until(
            lambda: self.run("sh", "-c", f"test -S {CONTAINERD}", check=False).returncode == 0, "socket"
        )

    def start_kubelet(self, users: Callable[[str], Api], client_authority: Path) -> None:
        """Start kubelet and kube-proxy. users: a client of the API server, by the user's name."""
        (self.folder / "resolv.conf").touch()  # pods have the cluster's DNS alone: no way out of the machine
        settings = {"kubelet": self._kubelet_settings(client_authority), "kube-proxy": self._proxy_settings(users)}
        for name, content in settings.items():
            (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
        kubelet = users(f"system:node:{NODE}")
        self._start(
            "kubelet",
            find_program("kubelet"),
            f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={kubelet.kubeconfig(self.folder / 'kubelet.kubeconfig')}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'kubelet-pki'}",
            f"--hostname-override={NODE}",
            f"--node-ip={self.address}",
        )
        self._start("kube-proxy", find_program("kube-proxy"), f"--config={self.folder / 'kube-proxy.yaml'}")

    def start_policies(self, users: Callable[[str], Api]) -> None:
        """Start the controller that enforces NetworkPolicies. Its user must have its rights, and the node exist."""
        kubeconfig = users("netpol").kubeconfig(self.folder / "netpol.kubeconfig")
        self._start("netpol", find_program("netpol"), "--kubeconfig", kubeconfig, "--node", NODE)

    def wait_until_ready(self, admin: Api) -> None:
        """Wait until the node is Ready, as long as kubelet runs."""
        self._find("kubelet").wait_until(
            lambda: is_condition_true(admin.find("v1/nodes", NODE) or {}, "Ready"), "Ready node"
        )

    def kill(self, program: str) -> None:
        """Kill one of the node's programs. Containers go on without kubelet."""
        self.run("sh", "-c", f"kill -KILL $(pgrep -x {program})")  # of this node, whose processes have a namespace
        self._find(program).wait(60)

    def start_again(self, program: str) -> None:
        """Start a program that was killed."""
        self._find(program).start()

    def load_image(self, archive: Path) -> None:
        """Import an OCI archive into containerd, where kubelet finds it."""
        self.run(self.ctr, "--address", CONTAINERD, "--namespace", "k8s.io", "images", "import", archive)

    @property
    def ctr(self) -> Path:
        """containerd's own client."""
        return find_program("ctr")

    def run(self, *command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program in the node's namespaces. Fails with its output."""
        done = subprocess.run(self._inside(*command), capture_output=True, text=True, timeout=600, check=False)
        assert not check or done.returncode == 0, f"{command[0]}: {done.stderr}\n{done.stdout}"
        return done

    def stop(self) -> None:
        """Kill the node: the kernel ends all processes with the first, and removes what is in the namespaces."""
        if self._first is not None and self._first.is_running():
            first = Path("/proc", str(self._find_first_pid()))
            self._first.stop(grace_s=0)
            # It is gone when all others of its process namespace are.
            wait_until(lambda: not first.exists(), "the node's processes have ended")
        for program in self._programs:
            program.stop()
        if self._namespace is not None:
            self._namespace.close()

    def tail(self, program: str) -> str:
        """Return the end of a program's log."""
        return self._find(program).tail()

    def _find(self, program: str) -> Program:
        return next(each for each in self._programs if each.name == program)

    def _start(self, name: str, *command: str | Path, **environment: str) -> Program:
        program = Program(name, self._inside(*command), self.folder / "logs" / f"{name}.log", **environment)
        self._programs.append(program)
        program.start()
        return program

    def _inside(self, *command: str | Path) -> list[str]:
        namespaces = ["--mount", "--net", "--pid", "--uts", "--ipc"]
        return ["nsenter", "--target", str(self._find_first_pid()), *namespaces, "--", *map(str, command)]

    def _find_first_pid(self) -> int:
        """Process id of the first process: the only child of `unshare`."""
        assert self._first is not None
        parent = self._first.pid
        deadline = time.monotonic() + 10
        file = Path(f"/proc/{parent}/task/{parent}/children")
        while not (children := file.read_text(encoding="utf-8").split()):
            assert time.monotonic() < deadline, self._first.tail()
            time.sleep(0.01)
        return int(children[0])

    def _kubelet_settings(self, client_authority: Path) -> dict[str, object]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(client_authority)},
            },
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{CONTAINERD}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.cgroup}",
            "failCgroupV1": False,  # 1.35 and later refuse version 1 otherwise
            "failSwapOn": False,
            "seccompDefault": True,
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.folder / "resolv.conf"),
            "podLogsDir": str(self.folder / "varlog" / "pods"),
            "volumePluginDir": str(self.folder / "kubelet-plugins"),
            "imageGCHighThresholdPercent": 100,  # imported images cannot be pulled again
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1Gi",
                "imagefs.available": "1Gi",
                "nodefs.inodesFree": "1%",
            },
            "nodeStatusUpdateFrequency": "5s",
        }

    def _proxy_settings(self, users: Callable[[str], Api]) -> dict[str, object]:
        kubeconfig = users("system:kube-proxy").kubeconfig(self.folder / "kube-proxy.kubeconfig")
        return {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "hostnameOverride": NODE,
            "mode": "iptables",
            "clusterCIDR": self.pods,
            # The table of connections is the machine's; zero leaves its size alone.
            "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
            "oomScoreAdj": 0,
        }


def _containerd_settings(folder: Path, bin_folder: Path) -> str:
    runc = packages.find("runc")
    lowers_scores = str(not _may_lower_oom_scores()).lower()
    return f"""\
version = 3
root = "{folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.zfs", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
address = "{CONTAINERD}"
[plugins."io.containerd.internal.v1.opt"]
path = "{folder}/opt"
[plugins."io.containerd.nri.v1.nri"]
disable = true
[plugins."io.containerd.cri.v1.images"]
discard_unpacked_layers = true  # the registry has them; engines would need 3.4 GB more
use_local_image_pull = true  # the other way of pulling cannot discard them
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{folder}/registries"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = {lowers_scores}
tolerate_missing_hugetlb_controller = true
disable_hugetlb_controller = true
disable_apparmor = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{bin_folder}"]
conf_dir = "{folder}/cni/net.d"
"""


def _may_lower_oom_scores() -> bool:
    """Whether this process has CAP_SYS_RESOURCE (capability 24), which containers on some machines lack."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    line = next(line for line in status if line.startswith("CapEff"))
    return bool(int(line.split()[1], 16) & 1 << 24)


def _pod_network(node: Node) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": str(node.folder / "cni" / "data"),
        "ranges": [[{"subnet": node.pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": "cni0", "isGateway": True, "hairpinMode": True, "ipam": addresses}
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, ports]}
