"""Answers that attack the sandbox or the verdict end within their limits, get the right reward, and leave nothing.

The tests run in both isolations, against the real kernel. An answer that solves its task and attacks gets 1: a failed
attack does not change whether the answer is right.

No test depends on the load of the machine. Answers that end by themselves use `verifier`, whose limits are out of
reach. Answers that only a limit ends use `hurried`, which never finds the machine too busy.
"""

# ruff: noqa: E501 - a hostile program is read best on one line

from __future__ import annotations

import ast
import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.processor_load import WAIT_FOR_PROCESSOR, occupy_processor
from tests.requirements import SANDBOX
from tests.small_process import HostedVerifier, SmallProcess

from specrl.errors import SpecInvalid, VerifierFailed
from specrl.rewards import Ungraded
from specrl.rewards.choice import verifier_for
from specrl.rewards.code import Code
from specrl.rewards.sandbox import syscall_rules
from specrl.rewards.sandbox.syscall_numbers import NUMBERS
from specrl.rewards.verifier import Verifier
from specrl.spec.data import CodeVerifier, Isolation, Rewards

SUM = json.dumps({"inputs": ["1 2\n", "30 4\n"], "outputs": ["3\n", "34\n"]})
RIGHT = "a, b = map(int, input().split())\nprint(a + b)\n"
ADD = json.dumps({"fn_name": "add", "inputs": [[1, 2], [30, 4]], "outputs": [3, 34]})
ASSERTS = "assert add(1, 2) == 3\nassert add(30, 4) == 34\n"
MARK = f"specrl-hostile-{os.getpid()}"
"""Part of the name of every file that an answer tries to leave behind."""


def a_verifier(isolation: Isolation, **changes: object) -> Code:
    limits = {"isolation": isolation, "cpu_s": 60, "wall_s": 240, "memory_mib": 256, "output_kib": 256, **changes}
    found = verifier_for(Rewards(code=CodeVerifier.model_validate(limits)))
    assert isinstance(found, Code)
    return found


@pytest.fixture(scope="module")
def process() -> Iterator[SmallProcess]:
    """The process that grades."""
    found = SmallProcess()
    yield found
    found.close()


@pytest.fixture(scope="module", params=[Isolation.NAMESPACES, Isolation.LANDLOCK])
def isolation(request: pytest.FixtureRequest, process: SmallProcess) -> Isolation:
    """Each isolation that this machine permits."""
    found: Isolation = request.param
    try:
        HostedVerifier(a_verifier(found), process).prepare_worker()
    except SpecInvalid as error:
        SANDBOX.skip(f"{found}: {error}")
    return found


@pytest.fixture
def verifier(isolation: Isolation, process: SmallProcess) -> HostedVerifier:
    """A verifier for answers that end by themselves."""
    return HostedVerifier(a_verifier(isolation), process)


@pytest.fixture
def hurried(isolation: Isolation, process: SmallProcess) -> HostedVerifier:
    """A verifier for answers that only a limit ends. Waits for a processor never count, however long they are."""
    found = HostedVerifier(a_verifier(isolation, cpu_s=1, wall_s=2), process)
    return found.with_settings(time_limit__MAX_WAITING=100)


def open_descriptors(pid: int) -> set[tuple[str, str]]:
    """Number and target of each."""
    return {(descriptor.name, str(descriptor.readlink())) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}


def children(pid: int) -> Iterator[int]:
    """List the descendants of a process, as the kernel does; psutil would read every process of the machine."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from children(int(child))


@pytest.fixture(autouse=True)
def nothing_is_left(process: SmallProcess) -> Iterator[None]:
    """Check that no process, descriptor or file outlives a verdict."""
    descriptors = open_descriptors(process.pid)
    yield
    assert not list(children(process.pid))
    assert open_descriptors(process.pid) == descriptors
    for folder in ("/", "/tmp", "/var/tmp", "/dev/shm", Path(__file__).parent):  # noqa: S108 - where it would be left
        assert not list(Path(folder).glob(f"*{MARK}*"))


ALLOWED = "allowed = []\n"
VERDICT_IF_ALLOWED = "print(sum(map(int, input().split())) if allowed else '')\n"


def tried(*attempts: str) -> str:
    """Build an answer that is right only if one of its attempts succeeds."""
    tries = "".join(
        f"try:\n    {attempt}\n    allowed.append({number})\nexcept Exception:\n    pass\n"
        for number, attempt in enumerate(attempts)
    )
    return f"import ctypes, fcntl, mmap, os, resource, select, signal, socket, subprocess, sys\n{ALLOWED}{tries}{VERDICT_IF_ALLOWED}"


BREAKS_A_LIMIT = {
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
    "orphans without end": (
        "import os\nwhile True:\n    try:\n        if os.fork() == 0:\n            while True:\n                if os.fork():\n"
        "                    os._exit(0)\n    except OSError:\n        pass\n"
    ),
    "thread bomb": (
        "import threading, time\nwhile True:\n    try:\n"
        "        threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError:\n        pass\n"
    ),
    "sleep": "import time\ntime.sleep(1000)\n",
    "sleeps, and spins when its time is up": "import time\ntime.sleep(1.5)\nwhile True:\n    pass\n",
    "prints a little now and then": "import time\nwhile True:\n    print(end='\\n', flush=True)\n    time.sleep(0.01)\n",
    "closes its output and stays": "import os, time\nprint(3)\nos.close(1)\ntime.sleep(1000)\n",
    "ignores every signal": (
        "import signal\nfor s in signal.valid_signals():\n    try:\n        signal.signal(s, signal.SIG_IGN)\n"
        "    except OSError:\n        pass\nwhile True:\n    pass\n"
    ),
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n",
    "huge output": "while True:\n    print('x' * 65536)\n",
    "huge output after the right one": RIGHT + "print('\\n' * 10 ** 9)\n",
    "memory bomb": "kept = []\nwhile True:\n    kept.append(bytearray(2 ** 20))\n",
}
IS_BUSY = {
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(n):\n    return [f(n + 1)]\nf(0)\n",
    "deep recursion in C": "import sys\nsys.setrecursionlimit(10 ** 9)\nx = None\nfor _ in range(10 ** 7):\n    x = [x]\nrepr(x)\n",
    "regular expression": "import re\nre.match('(a+)+$', 'a' * 64 + '!')\n",
}
"""Ways to keep one Python thread busy. One isolation is enough: both use the same limit of the kernel."""


@pytest.mark.parametrize("name", BREAKS_A_LIMIT)
def test_an_answer_that_breaks_a_limit_is_wrong(hurried: HostedVerifier, name: str) -> None:
    assert hurried.compute_reward(SUM, BREAKS_A_LIMIT[name]) == 0.0


@pytest.mark.parametrize("isolation", [Isolation.NAMESPACES], indirect=True)
@pytest.mark.parametrize("name", IS_BUSY)
def test_an_answer_that_is_busy_forever_is_wrong(hurried: HostedVerifier, name: str) -> None:
    assert hurried.compute_reward(SUM, IS_BUSY[name]) == 0.0


IMITATES = {
    "words": "print('PASSED')\nprint('{\"verdict\": 1.0}')\nprint(1.0)\n",
    "the guardian's report": (
        "import os\nfor fd in range(1, 300):\n    try:\n        os.write(fd, b'>0 0.001')\n    except OSError:\n"
        "        pass\nos._exit(0)\n"
    ),
    "an early exit": "import os\nos._exit(0)\n",
    "an early, polite exit": "import sys\nsys.exit(0)\n",
    "right once": "print(3)\n",
    "right, then fails": RIGHT + "raise SystemExit(3)\n",
    "right, then dies": RIGHT + "import os, sys\nsys.stdout.flush()\nos.abort()\n",
    "nothing": "",
    "no Python": "This problem cannot be solved.",
    "other bytes": "\x00\udcff",
}


@pytest.mark.parametrize("name", IMITATES)
def test_a_program_that_imitates_a_verdict_is_wrong(verifier: Verifier, name: str) -> None:
    assert verifier.compute_reward(SUM, IMITATES[name]) == 0.0


def test_an_attempt_that_succeeds_is_detected(verifier: Verifier) -> None:
    assert verifier.compute_reward(SUM, tried("1 / 0")) == 0.0
    assert verifier.compute_reward(SUM, tried("1 / 1")) == 1.0


FORBIDDEN = [
    attempt
    for attempts in [
        ["open('/etc/passwd').read()", f"open({__file__!r}).read()", "os.listdir('/etc')", "os.listdir('/var')"],
        ["open('/proc/self/environ').read()", "open('/proc/1/cmdline').read()", "os.listdir('/proc')"],
        ["os.symlink('/etc/passwd', 'link'); open('link').read()", "os.link('/etc/passwd', 'hard')"],
        ["os.symlink('/', 'root'); os.listdir('root/etc')", "os.chroot('.')", "open('/../../etc/passwd')"],
        [f"open('/{MARK}', 'w')", f"open('/dev/shm/{MARK}', 'w')", f"open('/var/tmp/{MARK}', 'w')"],
        [f"os.mkdir({str(Path(__file__).with_name(MARK))!r})", "os.chmod('/', 0o777)", "os.utime('/')"],
        [f"open({sys.executable!r}, 'ab')", "os.rename('/programs', '/gone')", "os.unlink('/programs/program.py')"],
        ["socket.socket(socket.AF_INET)", "socket.socket(socket.AF_INET6)", "socket.socket(socket.AF_NETLINK, 3)"],
        ["socket.socket(socket.AF_VSOCK)", "socket.create_connection(('127.0.0.1', 22), 1)"],
        ["socket.getaddrinfo('localhost.example', 80)", "subprocess.run(['/bin/sh', '-c', 'true'], check=True)"],
        ["resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"],
        ["resource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))"],
        ["os.setuid(1)", "os.setgroups([0])", "os.nice(-5)", "os.sched_setscheduler(0, 1, os.sched_param(1))"],
        ["os.memfd_create('x')", "resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))"],
        ["os.kill(os.getppid(), 0) if os.getuid() != 65534 else 1 / 0", "os.kill(-1, 9)", "os.killpg(1, 9)"],
        [
            f"c = ctypes.CDLL(None); 1 / (c.{call} == 0)"
            for call in ("unshare(0x10000000)", "unshare(0)", "mount(0, b'/tmp', b'tmpfs', 0, 0)", "ptrace(0, 0, 0, 0)")
        ],
        [f"1 / (ctypes.CDLL(None).syscall({number}, 0, 0, 0, 0, 0) >= 0)" for number in (425, 442, 428)],
        ["fcntl.flock(open(os.__file__), fcntl.LOCK_EX)", "fcntl.lockf(open(os.__file__), fcntl.LOCK_SH)"],
        ["select.epoll()", "os.eventfd(0)", "mmap.mmap(-1, 2 ** 21, flags=0x40022)", "os.pidfd_open(os.getpid())"],
        ["fcntl.fcntl(os.pipe()[1], 1031, 2 ** 20)", "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"],
        ["socket.socketpair()[0].setsockopt(1, 7, 2 ** 22)", "socket.socketpair()[0].sendmsg([b'x'])"],
        ["fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, 0)", "os.mkfifo('/tmp/fifo')"],
        [f"1 / (ctypes.CDLL(None).prctl({option}, 0, 0, 0, 0) == 0)" for option in (1, 4, 36)],
    ]
    for attempt in attempts
]


def test_forbidden_operations_are_refused(verifier: HostedVerifier) -> None:
    run = verifier.run_program(tried(*FORBIDDEN) + "print('allowed:', *allowed)\n", "1 2")
    said = run.output.decode().splitlines()[-1].split()
    assert said == ["allowed:"], [FORBIDDEN[int(number)] for number in said[1:]]


def test_the_kernel_refuses_every_call_that_is_not_allowed(verifier: HostedVerifier, isolation: Isolation) -> None:
    """The unit tests interpret the filter. Here the kernel does: no call with one of these numbers is made."""
    column = ["x86_64", "aarch64"].index(os.uname().machine)
    allowed = syscall_rules.list_allowed_calls(has_namespaces=isolation is Isolation.NAMESPACES)
    # Linux 6.14 filters neither of these two, which only a debugger's code uses: any other caller gets SIGILL.
    left_out = allowed | {"uprobe", "uretprobe"}
    refused = [numbers[column] for name, numbers in NUMBERS.items() if name not in left_out]
    refused += [*range(470, 520)]
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nfound = {}\n"
        f"for number in {[number for number in refused if number is not None]}:\n"
        "    result = libc.syscall(number, 0, 0, 0, 0, 0, 0)\n    found[number] = ctypes.get_errno() if result else 0\n"
        "print(found)\n"
    )
    found = ast.literal_eval(verifier.run_program(program).output.decode())
    names = {numbers[column]: name for name, numbers in NUMBERS.items()}
    for number, error in found.items():
        name = names.get(number, "")
        if name in syscall_rules.SUCCEEDS:
            assert error == 0, name
        else:
            is_absent = not name or name in syscall_rules.ABSENT
            assert error == (errno.ENOSYS if is_absent else errno.EPERM), (name, number)


FILLS_BUFFERS = """
import fcntl, os, socket
held = 0
kept = []

def grow(end, number):
    for attempt in (lambda: fcntl.fcntl(number, 1031, 2 ** 20), lambda: end.setsockopt(1, 7, 2 ** 24)):
        try:
            attempt()
        except (OSError, AttributeError):
            pass

def fill(number):
    global held
    os.set_blocking(number, False)
    try:
        while True:
            held += os.write(number, bytes(65536))
    except OSError:
        pass

try:
    while True:
        kept.append(socket.socketpair() if len(kept) % 3 else os.pipe())
        for end in kept[-1]:
            number = end if isinstance(end, int) else end.fileno()
            grow(end, number)
            fill(number)
except OSError:
    pass
print(held)
"""


def test_buffers_in_the_kernel_are_bounded(verifier: HostedVerifier) -> None:
    """One process used to hold 470 MiB in the buffers of sockets, beside its limit of memory."""
    assert 2**20 < int(verifier.run_program(FILLS_BUFFERS).output) < 16 * 2**20


QUEUES_SIGNALS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
try:
    for _ in range(1000):
        os.kill(os.getpid(), signal.SIGRTMIN)
except PermissionError:
    pass
queued = 0
while signal.sigtimedwait({signal.SIGRTMIN}, 0):
    queued += 1
print(queued)
"""


def test_signals_are_not_queued(verifier: HostedVerifier) -> None:
    """The kernel counts them for the user: whose other programs could then queue none."""
    assert int(verifier.run_program(QUEUES_SIGNALS).output) <= 1


USES = """
import asyncio, os, random, signal, sqlite3, time
async def one():
    await asyncio.sleep(0.001)
    return 1
async def all_of_them():
    return sum(await asyncio.gather(*(one() for _ in range(9))))
assert asyncio.run(all_of_them()) == 9
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
time.sleep(0.001)
assert os.urandom(8) and os.cpu_count() and random.SystemRandom().random()
assert sqlite3.connect(":memory:").execute("select 3").fetchall() == [(3,)]
"""
USES_WITH_NAMESPACES = """
import concurrent.futures, mmap, os, shutil, subprocess, sys, tempfile
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    assert [*pool.map(abs, [-1, 2])] == [1, 2]
assert subprocess.run([sys.executable, "-c", "print(3)"], stdout=-1).stdout == b"3\\n"
if os.fork() == 0:
    os._exit(0)
os.wait()
with tempfile.TemporaryDirectory() as folder:
    with open(folder + "/a", "w+b") as file:
        file.write(b"x" * 9999)
        file.flush()
        os.fsync(file.fileno())
        with mmap.mmap(file.fileno(), 0) as memory:
            memory[0] = 5
            memory.flush()
    os.chmod(folder + "/a", 0o600)
    shutil.copy2(folder + "/a", folder + "/b")
    os.rename(folder + "/b", folder + "/c")
"""


def test_what_answers_use_is_allowed(verifier: HostedVerifier, isolation: Isolation) -> None:
    """A list of allowed calls that lacks one of these would fail right answers."""
    uses = USES + (USES_WITH_NAMESPACES if isolation is Isolation.NAMESPACES else "")
    assert verifier.run_program(f"import os\nos.dup2(1, 2)\n{uses}\nprint('done')\n").output == b"done\n"


def test_a_socket_of_the_host_is_out_of_reach(verifier: Verifier, tmp_path: Path) -> None:
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM)
    addresses = [f"\0{MARK}", str(tmp_path / "socket")]
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as opened:
        attempts = [f"socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 1)"]
        for kind in kinds:
            for address in addresses:
                name = f"{address}-{kind.name}"
                listener = opened.enter_context(socket.socket(socket.AF_UNIX, kind))
                listener.bind(name)
                if kind is socket.SOCK_STREAM:
                    listener.listen()
                attempts.append(f"socket.socket(socket.AF_UNIX, {kind.value}).connect({name!r})")
                attempts.append(f"socket.socketpair(socket.AF_UNIX, {kind.value})[0].connect({name!r})")
                attempts.append(f"socket.socketpair(socket.AF_UNIX, {kind.value})[0].sendto(b'x', {name!r})")
        assert verifier.compute_reward(SUM, tried(*attempts)) == 0.0


def test_an_answer_cannot_make_the_kernel_signal_other_processes(verifier: Verifier) -> None:
    """F_SETOWN makes descriptors send signals. For a process outside it must be refused or have no effect."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim:
        attack = (
            f"import fcntl, os, time\nr, w = os.pipe()\nfor end in (r, w):\n    for command, value in ((10, 9), (8, {victim.pid})):\n"
            "        try:\n            fcntl.fcntl(end, command, value)\n        except OSError:\n            pass\n"
            "    fcntl.fcntl(end, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)\nos.write(w, b'x')\nos.read(r, 1)\ntime.sleep(0.2)\n"
        )
        try:
            assert verifier.compute_reward(SUM, attack + RIGHT) == 1.0
            assert victim.poll() is None
        finally:
            victim.kill()


ATTACKS_AND_SOLVES = {
    "kills its guardian": (
        "import os, signal\nfor pid in (1, os.getppid(), -1, 2, 3, 4):\n"
        "    for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):\n        try:\n"
        "            pid == os.getpid() or os.kill(pid, signum)\n        except OSError:\n            pass\n"
    ),
    "leaves children behind": (
        "import os, sys, time\ntry:\n    for _ in range(2):\n        if os.fork() == 0:\n            os.setsid()\n"
        "            os.close(0)\n            time.sleep(1000)\nexcept OSError:\n    pass\n"
    ),
    "leaves a daemon behind": (
        "import os, time\ntry:\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n"
        "            while True:\n                time.sleep(1000)\n        os._exit(0)\nexcept OSError:\n    pass\n"
    ),
    "takes all processes": (
        "import os, time\nmade = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(1000)\n"
        "        made += 1\nexcept OSError:\n    assert made < 4\n"
    ),
    "fills the disk": (
        "import os\nwritten = 0\ntry:\n    for number in range(1000):\n        with open(f'/tmp/"
        + MARK
        + "-{number}', 'wb', buffering=0) as file:\n            for _ in range(64):\n"
        "                written += file.write(bytes(2 ** 16))\nexcept OSError:\n    pass\nassert written <= 2 ** 24\n"
    ),
    "fills the disk with names": (
        "made = 0\ntry:\n    for made in range(10 ** 6):\n        open(f'/tmp/"
        + MARK
        + "-{made}', 'w').close()\nexcept OSError:\n    pass\nassert made < 5000\n"
    ),
    "takes all descriptors": (
        "import os\nopened = []\ntry:\n    while True:\n        opened.append(os.dup(0))\nexcept OSError:\n    pass\n"
        "assert len(opened) < 64\nfor number in opened:\n    os.close(number)\n"
    ),
    "writes to standard error": "import sys\nsys.stderr.write('x' * 10 ** 7)\n",
}


@pytest.mark.parametrize("name", ATTACKS_AND_SOLVES)
def test_a_failed_attack_changes_no_verdict(verifier: Verifier, name: str) -> None:
    assert verifier.compute_reward(SUM, ATTACKS_AND_SOLVES[name] + RIGHT) == 1.0
    assert verifier.compute_reward(SUM, ATTACKS_AND_SOLVES[name] + "print(4)\n") == 0.0


LIES = {
    "an object that equals everything": "class E:\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return E()\n",
    "a number that equals everything": "class I(int):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return I(0)\n",
    "a text that equals everything": "class S(str):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return S()\n",
    "a list of such": "class L(list):\n    def __eq__(self, o): return True\n    __hash__ = None\ndef add(a, b): return L()\n",
    "not a number": "def add(a, b): return float('nan')\n",
    "nothing": "def add(a, b): return None\n",
    "a truth": "def add(a, b): return True\n",
    "another name": "def plus(a, b): return a + b\n",
    "an exit when loaded": "import os\nos._exit(0)\n",
    "the exit status of a pass": "import os\ndef add(a, b): os._exit(10)\n",
    "a polite exit with it": "import sys\ndef add(a, b): sys.exit(10)\n",
    "an exception": "def add(a, b): raise AssertionError\n",
    "the end of a loop": "def add(a, b): raise StopIteration\n",
    "changed built-ins": (
        "import builtins, sys\nbuiltins.all = lambda *_: True\nbuiltins.AssertionError = KeyError\n"
        "sys.modules['codec'].encode = lambda v: {'passed': True}\ndef add(a, b): return 0\n"
    ),
    "a changed caller": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        frame.f_globals.update(PASSED=True, FAILED=10)\n        frame = frame.f_back\n    return 0\n"
    ),
    "forged frames": (
        "import os, struct\ndef add(a, b):\n    for said in (b'{\"passed\": true}', b'{\"failed\": \"\"}', b'10'):\n"
        "        os.write(3, struct.pack('!I', len(said)) + said)\n    return 0\n"
    ),
    "a frame without end": "import os\ndef add(a, b):\n    while True:\n        os.write(3, b'\\xff' * 65536)\n",
    "too deep a result": "import sys\nsys.setrecursionlimit(10 ** 6)\ndef add(a, b):\n    x = []\n    for _ in range(20000):\n        x = [x]\n    return x\n",
    "a frame that is too deep": "import os, struct\ndef add(a, b):\n    s = b'[' * 100000\n    os.write(3, struct.pack('!I', len(s)) + s)\n",
    "a huge number": "def add(a, b): return 1 << (10 ** 8)\n",
    "a large number": "def add(a, b): return 1 << (10 ** 5)\n",
    "digits without end": "import os, struct\ndef add(a, b):\n    s = b'{\"result\": ' + b'9' * 200000 + b'}'\n    os.write(3, struct.pack('!I', len(s)) + s)\n",
    "a class": "class add: pass\n",
    "a class whose objects equal everything": "class add:\n    def __init__(self, a, b): pass\n    def __eq__(self, o): return True\n    __hash__ = None\n",
    "a value": "add = 3\n",
    "a value that is no data": "add = object()\n",
    "an import that is missing": "import a_module_that_is_not_there\n",
    "an import that is missing, later": "def add(a, b): import a_module_that_is_not_there\n",
    "an exception that ends interpreters": "def add(a, b): raise KeyboardInterrupt\n",
    "no memory": "def add(a, b): raise MemoryError\n",
    "too much memory for the tests": "def add(a, b): return [[]] * 60000\n",
    "a process that stops itself": "import ctypes\ndef add(a, b): ctypes.string_at(0)\n",
}  # fmt: skip
ENDLESS_LIES = {
    "a loop": "def add(a, b):\n    while True: pass\n",
    "sleep, and a loop when the time is up": "import time\ndef add(a, b):\n    time.sleep(1.5)\n    while True: pass\n",
    "a frame that does not come": "import os, time\ndef add(a, b):\n    os.write(3, b'\\0\\0\\1')\n    time.sleep(99)\n",
}
ALL = "assert all(map(lambda c: add(*c[:2]) == c[2], [(1, 2, 3), (30, 4, 34)]))"
KINDS_OF_TESTS = {"calls": ADD, "asserts": ASSERTS, "asserts at once": ALL}
ISOLATION_OF_KINDS = [
    ("calls", Isolation.NAMESPACES),
    ("asserts", Isolation.LANDLOCK),
    ("asserts at once", Isolation.NAMESPACES),
]
"""The protocol is the same in both isolations, so each kind of tests and each isolation is tried only once."""


FRAMES = {
    "a list": "[]",
    "a text": '"result"',
    "a number": "3",
    "nothing": "null",
    "no result": "{}",
    "an object of the answer's": '{"object": 0}',
    "an object without a number": '{"object": "0"}',
    "a dict that is no list": '{"result": {"dict": 3}}',
    "a dict of triples": '{"result": {"dict": [[1, 2, 3]]}}',
    "a dict with lists as keys": '{"result": {"dict": [[[1], 2]]}}',
    "a tuple that is a number": '{"result": {"tuple": 3}}',
    "an integer that is a list": '{"result": {"int": [3]}}',
    "an integer that is none": '{"result": {"int": "0xg"}}',
    "a set of lists": '{"result": {"set": [[1]]}}',
    "a kind that there is not": '{"result": {"class": "int"}}',
    "two kinds": '{"result": {"int": "0x3", "float": "3"}}',
    "an exception that is a list": '{"raised": [], "said": {}}',
    "arguments that are none": '{"result": 4, "arguments": 7}',
    "integers of one hash": '{"result": {"set": [' + ", ".join(f'{{"int": "{number * (2**61 - 1):#x}"}}' for number in range(9000)) + "]}}",
    "keys of one hash": '{"result": {"dict": [' + ", ".join(f'[{{"int": "{number * (2**61 - 1):#x}"}}, 0]' for number in range(8000)) + "]}}",
}  # fmt: skip
"""Frames that an answer sends instead of a result. Two of them would take quadratic time to hash."""


@pytest.mark.parametrize(
    "isolation", [Isolation.NAMESPACES], indirect=True
)  # the attack is on the judge, not on the sandbox
@pytest.mark.parametrize("tests", [ADD, ASSERTS], ids=["calls", "asserts"])
@pytest.mark.parametrize("name", FRAMES)
def test_a_forged_frame_is_wrong(verifier: Verifier, tests: str, name: str) -> None:
    """A frame `[]` used to raise a TypeError in the worker, and a set of equal hashes kept it busy past every limit."""
    frame = FRAMES[name]
    answer = (
        f"import os, struct\nframe = {frame!r}.encode()\nframe = memoryview(struct.pack('!I', len(frame)) + frame)\n"
        "def add(a, b):\n    sent = 0\n    while sent < len(frame):\n        sent += os.write(3, frame[sent:])\n    return 4\n"
    )
    assert verifier.compute_reward(tests, answer) == 0.0


@pytest.mark.parametrize("name", LIES)
@pytest.mark.parametrize(("kind", "isolation"), ISOLATION_OF_KINDS, indirect=["isolation"])
def test_a_function_that_lies_is_wrong(verifier: Verifier, name: str, kind: str) -> None:
    assert verifier.compute_reward(KINDS_OF_TESTS[kind], LIES[name]) == 0.0


@pytest.mark.parametrize("name", ENDLESS_LIES)
@pytest.mark.parametrize(("kind", "isolation"), ISOLATION_OF_KINDS, indirect=["isolation"])
def test_a_function_that_does_not_return_is_wrong(hurried: HostedVerifier, name: str, kind: str) -> None:
    assert hurried.compute_reward(KINDS_OF_TESTS[kind], ENDLESS_LIES[name]) == 0.0


@pytest.mark.parametrize("end", ["os._exit(0)", "ctypes.string_at(0)"], ids=["exits", "crashes"])
def test_an_answer_that_exits_is_graded_at_once(verifier: HostedVerifier, end: str) -> None:
    """With namespaces, a helper process kept the descriptors open, so the judge waited until the time was up."""
    answer = f"import ctypes, os\ndef add(a, b): {end}\n"
    assert verifier.grade(ADD, answer, {}).reason == "its process ended, or sent no reply"
    assert verifier.grade(ASSERTS, answer, {}).reason == "fails a test"


def test_an_answer_that_exits_does_not_pass_tests_that_expect_errors(verifier: Verifier) -> None:
    tests = "try:\n    add(1, None)\nexcept Exception:\n    pass\nelse:\n    assert False\n"
    assert verifier.compute_reward(tests, "def add(a, b): return a + b\n") == 1.0
    assert verifier.compute_reward(tests, "import os\ndef add(a, b): os._exit(0)\n") == 0.0
    assert (
        verifier.compute_reward(tests.replace("Exception", "BaseException"), "import os\ndef add(a, b): os._exit(0)\n")
        == 0.0
    )


@pytest.mark.parametrize(
    "tests",
    [
        json.dumps({"fn_name": "secret", "inputs": [[7], [8]], "outputs": [918273645, 918273646]}),
        "expected = {7: 918273645, 8: 918273646}\nfor given in expected:\n    assert secret(given) == expected[given]\n",
    ],
)
def test_expected_results_are_not_in_the_answers_memory(verifier: Verifier, tests: str) -> None:
    search = (
        "import gc, sys\ndef secret(given):\n    seen = [sys._getframe(1).f_globals, sys._getframe(1).f_locals]\n"
        "    seen += [sys._getframe(2).f_globals, sys._getframe(2).f_locals]\n"
        "    for place in [*seen, *gc.get_objects()]:\n        if isinstance(place, dict):\n"
        "            place = [*place.values()]\n        if isinstance(place, (list, tuple, set)):\n"
        "            for found in place:\n                if type(found) is int and str(found)[:6] == '918273':\n"
        "                    return found - found % 10 + given - 2\n    return 0\n"
    )
    solve = "def secret(given):\n    return 918273640 + given - 2\n"
    assert verifier.compute_reward(tests, solve) == 1.0
    assert verifier.compute_reward(tests, search + f"kept = [{918273645}]\n") == 1.0, "what is there, the search finds"
    assert verifier.compute_reward(tests, search) == 0.0


def test_an_answer_sees_neither_the_tests_nor_other_answers(verifier: Verifier) -> None:
    """Files that one answer leaves in its scratch folder or in shared memory are gone for the next one."""
    write = "try:\n    open('/tmp/note', 'w').write('x')\nexcept OSError:\n    pass\n"
    assert verifier.compute_reward(SUM, write + RIGHT) == 1.0
    assert verifier.compute_reward(SUM, tried("open('/tmp/note').read()")) == 0.0


UNDOES_EVERY_TIE = """
import ctypes, os, resource, signal, time
libc = ctypes.CDLL(None)

def attempt(function, *arguments):
    try:
        return function(*arguments)
    except (OSError, ValueError):
        return None

def undo_ties():
    for option, value in ((1, 0), (1, signal.SIGCONT), (4, 1), (36, 1), (38, 0)):
        libc.prctl(option, value, 0, 0, 0)
    attempt(os.setsid)
    attempt(os.setpgid, 0, 0)
    for user in (0, 1, 65534):
        attempt(os.setresuid, user, user, user)
    for signum in signal.valid_signals():
        attempt(signal.signal, signum, signal.SIG_IGN)
    attempt(signal.pthread_sigmask, signal.SIG_BLOCK, signal.valid_signals())
    for pid in {1, os.getppid()} - {os.getpid()}:
        attempt(os.sched_setaffinity, pid, {0})
        attempt(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
        attempt(os.setpriority, os.PRIO_PROCESS, pid, 19)
        attempt(resource.prlimit, pid, resource.RLIMIT_CPU, (1, 1))
        attempt(os.setpgid, pid, 0)

def signal_guardian():
    for pid in {1, os.getppid()} - {os.getpid()}:
        for signum in range(1, 65):
            attempt(os.kill, pid, signum)

undo_ties()
signal_guardian()
libc.syscall(56 if os.uname().machine == "x86_64" else 220, 0x8011, 0, 0, 0, 0)  # with the guardian as its parent
if attempt(os.fork) == 0:
    undo_ties()
    attempt(os.fork)
    undo_ties()
for number in range(3, 64):
    attempt(os.close, number)
for number in (0, 1, 2):
    attempt(os.dup2, attempt(os.open, "/dev/null", os.O_RDONLY) or 0, number)
attempt(os.execv, "/nowhere", ["x"])
libc.prctl(15, b"untied", 0, 0, 0)
while True:
    time.sleep(1)
"""


@contextlib.contextmanager
def untied_programs(changes: str = "") -> Iterator[list[tuple[psutil.Process, list[psutil.Process]]]]:
    """Start such a program in each isolation. Yields their workers, each with all processes below it.

    changes: lines of Python that the workers run first.
    """
    program = (
        "import os, sys\nfrom specrl.rewards.choice import verifier_for\n"
        f"from specrl.spec.data import CodeVerifier, Isolation, Rewards\n{changes}\n"
        "for isolation in (Isolation.NAMESPACES, Isolation.LANDLOCK):\n    if os.fork() == 0:\n"
        "        verifier = verifier_for(Rewards(code=CodeVerifier(cpu_s=60, wall_s=3600, isolation=isolation)))\n"
        f"        verifier.compute_reward({SUM!r}, sys.argv[1])\n        os._exit(0)\n"
        "print('started', flush=True)\nos.wait()\nos.wait()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, UNDOES_EVERY_TIE], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "started\n"
            workers = psutil.Process(process.pid).children()
            assert len(workers) == 2
            found = []
            for worker in workers:
                below: list[psutil.Process] = []
                while not any(name_of(one) == "untied" for one in below):
                    assert worker.status() != psutil.STATUS_ZOMBIE
                    time.sleep(0.05)
                    below = worker.children(recursive=True)
                found.append((worker, below))
            try:
                yield found
            finally:
                for one in [one for _, below in found for one in below]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
        finally:
            process.kill()


def find_guardian(processes: list[psutil.Process]) -> psutil.Process:
    """Find the parent of the first process of the program."""
    parents = [one.parent() for one in processes if name_of(one) == "untied"]
    return next(parent for parent in parents if parent is not None and name_of(parent) != "untied")


def check_ended(processes: list[psutil.Process]) -> None:
    """Wait until all have ended. A process that nobody has reaped yet has ended, too."""
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not [left for left in alive if left.status() != psutil.STATUS_ZOMBIE]


ALLOWS_PRCTL = (
    "from specrl.rewards.sandbox import syscall_rules\nsyscall_rules.RULES = {**syscall_rules.RULES, 'prctl': ()}"
)


@pytest.mark.parametrize("changes", ["", ALLOWS_PRCTL], ids=["as it is", "a program that can clear its signal"])
def test_killing_a_worker_ends_programs_that_undo_every_tie(changes: str) -> None:
    """With Landlock, a program that had cleared its parent-death signal used to outlive its worker.

    The leash of the guardian alone is enough: also for a program that the filter does not keep from clearing it, and
    for a guardian that gets no processor until its worker is gone.
    """
    with untied_programs(changes) as found:
        for worker, below in found:
            guardian = find_guardian(below)
            guardian.suspend()
            worker.kill()
            worker.wait(60)
            with contextlib.suppress(psutil.NoSuchProcess):  # with namespaces it ends with the process above it
                guardian.resume()
            check_ended(below)


def test_killing_a_guardian_ends_programs_that_undo_every_tie() -> None:
    """The machine may end the guardian, as when its memory is full. Then nobody reads the leash."""
    with untied_programs() as found:
        for _, below in found:
            find_guardian(below).kill()
            check_ended([one for one in below if name_of(one) == "untied"])


def name_of(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""


ANSWERS = {
    "right": "def add(a, b): return a + b\n",
    "wrong": "def add(a, b): return 0\n",
    "hostile": "class add: pass\n",
}


ENDLESS_TESTS = "while True: pass\nassert add(1, 2) == 3"


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ("import a_module_that_is_not_there\nassert add(1, 2) == 3", "ModuleNotFoundError: No module named"),
        ("from math import a_name\nassert add(1, 2) == 3", "ImportError: cannot import name"),
        ("def check():\n    import a_module_that_is_not_there\nassert add(1, 2) == 3", "ModuleNotFoundError"),
        ("1 / 0\nassert add(1, 2) == 3", "ZeroDivisionError"),
        ("import os\nos._exit(0)\nassert add(1, 2) == 3", "ended with exit status 0 before it used"),
        (ENDLESS_TESTS, "a program that"),
        ("def never_called(): return add(1, 2)", "never use"),
    ],
)
def test_tests_that_cannot_test_any_answer_leave_it_ungraded(
    verifier: HostedVerifier, hurried: HostedVerifier, tests: str, said: str
) -> None:
    """Tests are loaded without an answer, so no answer can cause the failure."""
    judge = hurried if tests == ENDLESS_TESTS else verifier
    for answer in ANSWERS.values():
        with pytest.raises(Ungraded, match=said):
            judge.compute_reward(tests, answer)
    with pytest.raises(VerifierFailed, match=said):
        judge.try_reference(tests, None)


@pytest.mark.parametrize(
    ("tests", "answer"),
    [
        ("add(1, 2)\nimport os; os._exit(0)", "def add(a, b): return 3"),
        ("def check(f): assert f(lambda x: x, 3) == 3\ncheck(apply)", "def apply(f, x): return f(x)"),
        ("assert add(1, 2) == 3", "def add(a, b): return a - b"),
        (ADD, "def add(a, b): return a - b"),
        (SUM, "print(3)"),
    ],
)
def test_a_solution_that_fails_its_tests_is_found_before_the_run(
    verifier: HostedVerifier, tests: str, answer: str
) -> None:
    """Failures of tests that run with an answer count against it. Only the data set's own solution reveals bad tests."""
    verifier.try_reference(tests, None)
    assert verifier.compute_reward(tests, answer) == 0.0
    with pytest.raises(VerifierFailed, match=r"the data's own solution must pass its tests, got: .+; correct the data"):
        verifier.try_reference(tests, answer)


def test_tests_that_hang_with_the_data_sets_solution_are_found_before_the_run(hurried: HostedVerifier) -> None:
    tests = "add(1, 2)\nwhile True: pass"
    hurried.try_reference(tests, None)
    with pytest.raises(VerifierFailed, match=r"the data's own solution must pass its tests, got: .+; correct the data"):
        hurried.try_reference(tests, "def add(a, b): return 3")  # its verdict is 0, or it would pass


def test_a_solution_that_passes_its_tests_is_accepted(verifier: HostedVerifier) -> None:
    for tests, answer in [(ASSERTS, ANSWERS["right"]), (ADD, ANSWERS["right"]), (SUM, RIGHT)]:
        verifier.try_reference(tests, answer)


def test_tests_may_use_objects_of_the_answers_classes(verifier: Verifier) -> None:
    """Tests may use methods and plain attributes. Operators are Python's own: an answer's `__eq__` would decide tests."""
    tests = (
        "stack = Stack(2)\nstack.push(3)\nassert stack.pop() == 3\nassert stack.size == 0\n"
        "try:\n    stack.pop()\nexcept IndexError:\n    pass\nelse:\n    assert False\n"
    )
    right = (
        "class Stack:\n    def __init__(self, most): self.held = []\n    def push(self, x): self.held.append(x)\n"
        "    def pop(self): return self.held.pop()\n    @property\n    def size(self): return len(self.held)\n"
    )
    assert verifier.compute_reward(tests, right) == 1.0
    assert verifier.compute_reward(tests, right.replace("held.pop()", "held.pop() + 1")) == 0.0
    assert verifier.compute_reward(tests, "def Stack(most): return most") == 0.0
    lies = "class Stack:\n    def __init__(self, most): pass\n    def __getattr__(self, name): return self\n    __call__ = __init__\n    def __eq__(self, other): return True\n"
    assert verifier.compute_reward(tests, lies) == 0.0


def test_a_machine_without_user_namespaces_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from specrl.rewards.sandbox import kernel

    def refuse(flags: int) -> None:
        raise PermissionError(1, "unshare: Operation not permitted")

    monkeypatch.setattr(kernel, "unshare", refuse)
    with pytest.raises(SpecInvalid, match=r"rewards.code.isolation: must be possible .* unshare.*isolation: Landlock"):
        a_verifier(Isolation.NAMESPACES).prepare_worker()


@pytest.mark.parametrize(
    ("probe", "trial_s", "said"),
    [
        ("while True: pass", 1, r"a trial program that (ran longer than 1 s|was killed by SIGKILL)"),
        ("import time\ntime.sleep(99)", 1, "a trial program that ran longer than 1 s"),
        ("raise SystemExit(3)", 300, "a trial program that ended with exit status 3"),
    ],
)
def test_a_trial_that_does_not_end_is_not_reported_as_a_missing_permission(
    hurried: HostedVerifier, probe: str, trial_s: int, said: str
) -> None:
    hurried = hurried.with_settings(machine_check___TRIAL_S=trial_s, machine_check___PROBE=probe)
    with pytest.raises(SpecInvalid, match=r"rewards\.code: must run a trial program .*less busy") as caught:
        hurried.prepare_worker()
    assert re.search(f"got {said}", str(caught.value))
    assert "permit" not in str(caught.value)


def test_a_trial_has_more_time_than_an_answer(verifier: HostedVerifier) -> None:
    """On a loaded machine, starting Python may take longer than the limit of an answer."""
    probe = "import time\ntime.sleep(2)\nprint('confined', end='')"
    verifier.with_limits(wall_s=1).with_settings(machine_check___PROBE=probe).prepare_worker()


def test_a_sandbox_that_cannot_start_leaves_the_answer_ungraded(monkeypatch: pytest.MonkeyPatch) -> None:
    from specrl.rewards.sandbox import seccomp

    def refuse(**_: object) -> None:
        raise OSError(22, "seccomp: Invalid argument")

    monkeypatch.setattr(seccomp, "install_filter", refuse)
    for isolation in (Isolation.NAMESPACES, Isolation.LANDLOCK):
        for tests in (SUM, ADD, ASSERTS):
            with pytest.raises(Ungraded, match=r"the sandbox must start, got .*seccomp"):
                a_verifier(isolation).compute_reward(tests, "def add(a, b): return a + b\n" + RIGHT)


ONE_SUM = json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]})
WAITED_S = 3
"""The limit in the next two tests. An answer that waits longer would exceed it if waits counted."""


@pytest.mark.parametrize(
    ("isolation", "tests"),
    [(Isolation.NAMESPACES, ONE_SUM), (Isolation.LANDLOCK, ADD), (Isolation.NAMESPACES, ASSERTS)],
    indirect=["isolation"],
    ids=["program", "calls", "asserts"],
)
def test_time_that_an_answer_waits_for_a_processor_does_not_count(
    hurried: HostedVerifier, process: SmallProcess, tests: str
) -> None:
    """A loaded machine used to make right answers wrong, depending on its load when the time was up."""
    patient = hurried.with_limits(wall_s=WAITED_S, cpu_s=60)
    solution = RIGHT if tests == ONE_SUM else ANSWERS["right"]
    with occupy_processor(7, beside=process.pid):
        assert patient.compute_reward(tests, WAIT_FOR_PROCESSOR.format(seconds=1.05 * WAITED_S) + solution) == 1.0


@pytest.mark.parametrize(
    ("isolation", "tests"), [(Isolation.NAMESPACES, SUM), (Isolation.LANDLOCK, ADD)], indirect=["isolation"]
)
def test_an_answer_that_hardly_gets_a_processor_is_ungraded(
    hurried: HostedVerifier, process: SmallProcess, tests: str
) -> None:
    """Waits add at most MAX_WAITING times the limit. Beyond that, the verdict would be a guess."""
    quick = hurried.with_limits(wall_s=WAITED_S).with_settings(time_limit__MAX_WAITING=0.5)
    with (
        occupy_processor(7, beside=process.pid),
        pytest.raises(Ungraded, match=r"got \d+ s of waiting for one; the machine is too busy"),
    ):
        quick.compute_reward(tests, "while True:\n    pass\n")


def test_an_answer_cannot_extend_its_time_by_waiting(verifier: Verifier) -> None:
    """With a lower priority or on a busy processor, an answer would get extra time for waits that it caused itself."""
    attempts = [
        "os.nice(5)",
        "os.sched_setaffinity(0, {0})",
        "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
    ]
    assert verifier.compute_reward(SUM, tried(*attempts)) == 0.0
