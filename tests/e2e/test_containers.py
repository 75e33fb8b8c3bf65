"""Containers of our kubelet without a cluster: a program's environment, and how its exit is reported."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.e2e.harness.network import Namespace, NoNetwork, PodNetwork
from tests.e2e.kubelet.container import Plan, Running
from tests.e2e.kubelet.environment import expand
from tests.e2e.kubelet.names import hosts_file
from tests.e2e.kubelet.volumes import VolumeBind
from tests.requirements import NAMESPACES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def network() -> Iterator[PodNetwork]:
    try:
        found = PodNetwork.create()
    except NoNetwork as reason:
        NAMESPACES.skip(str(reason))
    yield found
    found.close()


@pytest.fixture
def pod(network: PodNetwork) -> Iterator[Namespace]:
    """The network of a pod."""
    found = network.open(network.next_address())
    yield found
    found.close()


def a_plan(
    folder: Path, pod: Namespace, *command: str, binds: tuple[VolumeBind, ...] = (), is_closed: bool = False
) -> Plan:
    return Plan(
        command=list(command),
        environment={"PATH": os.environ["PATH"], "COLOUR": "blue"},
        working_directory="/",
        hostname="own-name",
        binds=list(binds),
        read_only_root=is_closed,
        network=pod.path,
        scratch=str(folder / "scratch"),
    )


async def said_by(folder: Path, plan: Plan) -> tuple[int, list[str]]:
    """Run a container that exits by itself. Returns its exit code and output."""
    running = await Running.start(plan, folder / "log")
    async with asyncio.timeout(120):
        code = await running.wait()
    return code, (folder / "log").read_text().splitlines()


async def started(folder: Path, plan: Plan) -> Running:
    """Start a container, and wait until its program has written output."""
    running = await Running.start(plan, folder / "log")
    await until_said(folder, "up")
    return running


async def until_said(folder: Path, word: str) -> None:
    async with asyncio.timeout(120):
        while word not in (folder / "log").read_text():  # noqa: ASYNC110 - another process writes it
            await asyncio.sleep(0.05)


async def test_program_finds_its_own_machine(tmp_path: Path, pod: Namespace) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "word").write_text("hello\n")
    shell = "echo $COLOUR $HOME; hostname; cat /etc/made/up/word; echo $$; ls /proc | grep -c '^[0-9]'; hostname -I"
    binds = (VolumeBind(str(volume), "/etc/made/up", read_only=True),)
    code, lines = await said_by(tmp_path, a_plan(tmp_path, pod, "bash", "-c", shell, binds=binds))
    assert code == 0
    assert lines[:4] == ["blue", "own-name", "hello", "1"]
    assert int(lines[4]) < 6, "no process of the machine is to be seen"
    assert lines[5].strip() == pod.address


async def test_writes_outside_of_volumes_are_lost_with_the_container(tmp_path: Path, pod: Namespace) -> None:
    shell = "echo new > /etc/written-by-a-container && cat /etc/written-by-a-container; touch /dev/written"
    code, lines = await said_by(tmp_path, a_plan(tmp_path, pod, "bash", "-c", shell))
    assert (code, lines) == (0, ["new"])
    assert not any(map(os.path.exists, ("/etc/written-by-a-container", "/dev/written")))


async def test_a_read_only_root_and_read_only_volumes_refuse_writes(tmp_path: Path, pod: Namespace) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "data").mkdir()
    binds = (
        VolumeBind(str(tmp_path / "volume"), "/volume", read_only=True),
        VolumeBind(str(tmp_path / "data"), "/data", read_only=False),
    )
    shell = "touch /outside || echo 1; touch /volume/file || echo 2; touch /data/file || echo 3"
    plan = a_plan(tmp_path, pod, "bash", "-c", shell, binds=binds, is_closed=True)
    _, lines = await said_by(tmp_path, plan)
    assert [line for line in lines if len(line) == 1] == ["1", "2"]
    assert (tmp_path / "data" / "file").exists()


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$ & exec sleep 1", 0), ("exec nonesuch", 127)])
async def test_exit_code_is_the_programs(tmp_path: Path, pod: Namespace, command: str, code: int) -> None:
    """SIGKILL comes from outside, since process 1 cannot be killed from inside."""
    found, _ = await said_by(tmp_path, a_plan(tmp_path, pod, "bash", "-c", command))
    assert found == code


async def test_program_that_is_missing_says_so(tmp_path: Path, pod: Namespace) -> None:
    code, lines = await said_by(tmp_path, a_plan(tmp_path, pod, "nonesuch"))
    assert (code, lines) == (127, ["nonesuch: No such file or directory"])


async def test_sigterm_reaches_the_program_and_sigkill_ends_all_its_processes(tmp_path: Path, pod: Namespace) -> None:
    shell = "trap 'echo asked' TERM; echo up; while true; do sleep 6543 & wait; done"
    running = await started(tmp_path, a_plan(tmp_path, pod, "bash", "-c", shell))
    running.terminate()
    await until_said(tmp_path, "asked")
    running.kill()
    assert await running.wait() == 137
    sleepers = [each for each in psutil.process_iter(["cmdline"]) if each.info["cmdline"] == ["sleep", "6543"]]
    assert sleepers == []


async def test_a_command_is_executed_inside_the_container(tmp_path: Path, pod: Namespace) -> None:
    shell = "echo here > /etc/only-in-there; echo up; sleep 600"
    running = await started(tmp_path, a_plan(tmp_path, pod, "bash", "-c", shell))
    try:
        assert await running.execute(["test", "-e", "/etc/only-in-there"], 60) == 0
        assert await running.execute(["test", "-e", "/nowhere"], 60) == 1
        assert await running.execute(["sleep", "600"], 0.5) == 124
    finally:
        running.kill()
        await running.wait()


async def test_pods_listen_on_one_port_each_and_reach_each_other(tmp_path: Path, network: PodNetwork) -> None:
    pods = [network.open(network.next_address()) for _ in range(2)]
    listen = (
        "import socket; s = socket.create_server(('0.0.0.0', 8080)); print('up', flush=True); s.accept(); s.accept()"
    )
    running = []
    for number, each in enumerate(pods):
        folder = tmp_path / str(number)
        folder.mkdir()
        running.append(await started(folder, a_plan(folder, each, sys.executable, "-c", listen)))
    try:
        reach = f"import socket; print(socket.create_connection(('{pods[1].address}', 8080), 60).getsockname()[0])"
        inside = ["nsenter", f"--net={pods[0].path}", sys.executable, "-c", reach]
        for command, source in ((inside, pods[0].address), ([sys.executable, "-c", reach], network.gateway)):
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=120)
            assert done.stdout.strip() == source, done.stderr
    finally:
        for each in running:
            each.kill()
            await each.wait()
        for each in pods:
            each.close()


def test_nothing_is_left_when_the_kubelet_is_killed(tmp_path: Path, network: PodNetwork) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from tests.e2e.harness.network import PodNetwork\n"
        "from tests.e2e.test_containers import a_plan, started\n"
        "async def main():\n"
        "    pod = PodNetwork(int(sys.argv[2])).open(f'10.{sys.argv[2]}.200.9')\n"
        "    folder = Path(sys.argv[1])\n"
        "    await started(folder, a_plan(folder, pod, 'bash', '-c', 'echo up; sleep 6544 & sleep 6544'))\n"
        "    print('up', flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, tmp_path, str(network.number)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        said = starter.stdout.readline()
        family = psutil.Process(starter.pid).children(recursive=True)
        starter.send_signal(signal.SIGKILL)
    assert said == "up\n"
    assert len(family) >= 4, "the network's holder, the container's parent, its program, and that one's own"
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []


def test_references_are_expanded_as_kubernetes_does() -> None:
    assert expand("$(A)-$(B)-$$(A)-$A", {"A": "1"}) == "1-$(B)-$(A)-$A"


def test_hosts_have_ready_pods_of_every_service_and_names_of_those_behind_headless_ones() -> None:
    ready = {"addresses": ["10.1.0.2"], "conditions": {"ready": True}, "hostname": "gen-0"}
    late = {"addresses": ["10.1.0.3"], "conditions": {"ready": False}}
    labels = {"kubernetes.io/service-name": "gen"}
    endpoints = {"metadata": {"namespace": "a", "labels": labels}, "endpoints": [ready, late]}
    own = {"metadata": {"name": "me", "namespace": "a"}, "spec": {}}
    names = dict.fromkeys(("gen", "gen.a", "gen.a.svc", "gen.a.svc.cluster.local"))
    expected = f"10.1.0.2 {' '.join(names)}"
    lines = hosts_file(own, "10.1.0.9", [endpoints]).splitlines()
    assert lines[:2] == ["127.0.0.1 localhost", "10.1.0.9 me"]
    assert sorted(lines[2:]) == sorted([expected, f"10.1.0.2 {' '.join(f'gen-0.{name}' for name in names)}"])
    elsewhere = hosts_file(own | {"metadata": {"name": "me", "namespace": "b"}}, "10.1.0.9", [endpoints])
    assert " gen.a " in elsewhere
    assert " gen " not in elsewhere, "short names are of the pod's own namespace"
