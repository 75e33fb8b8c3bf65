"""Whether this machine can isolate programs: a trial program that tries what must be impossible."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from specrl.errors import Problem, SpecInvalid
from specrl.rewards.code.trial import Sandbox, Trial
from specrl.rewards.sandbox.confine import CannotConfine
from specrl.rewards.verifier import Ungraded
from specrl.spec.data import Isolation

_TRIAL_S = 30
"""Longest trial of the sandbox on a loaded machine, in seconds, also of the processor; 0.1 on an idle one."""


def check_machine(sandbox: Sandbox) -> None:
    """Run a program that tries what it must not be able to do. Raises SpecInvalid when it can, or cannot start.

    It has time of its own: whether the machine isolates is not the question of how long an answer may take.
    """
    packages = sandbox.limits.packages
    if packages is not None and not Path(packages).is_dir():
        rule = f"must be a folder, got {packages}"
        raise SpecInvalid((Problem(f"{sandbox.path}.packages", rule, "check the path, or leave it out"),))
    patient = replace(sandbox, wall_s=_TRIAL_S, limits=replace(sandbox.limits, cpu_s=_TRIAL_S))
    try:
        run = Trial(patient).run("program.py", _PROBE.format(path=__file__), "")
    except Ungraded as error:
        raise SpecInvalid((_busy(sandbox, str(error)),)) from error
    except CannotConfine as error:
        if isinstance(error.__cause__, TimeoutError):
            raise SpecInvalid((_busy(sandbox, str(error)),)) from error
        raise SpecInvalid((_refusal(sandbox, str(error)),)) from error
    if not run.is_success:
        raise SpecInvalid((_busy(sandbox, f"a trial program that {run.how}"),))
    if run.said != b"confined":
        raise SpecInvalid((_refusal(sandbox, f"a trial program: {run.said.decode(errors='replace')}"),))


def _busy(sandbox: Sandbox, reason: str) -> Problem:
    rule = f"must run a trial program to its end within {_TRIAL_S} s, got {reason}"
    return Problem(sandbox.path, rule, "try again when the machine is less busy, or run elsewhere")


def _refusal(sandbox: Sandbox, reason: str) -> Problem:
    remedy = "permit what it names, or run elsewhere"
    if sandbox.limits.isolation is Isolation.NAMESPACES:
        remedy = (
            "permit user namespaces (sysctl user.max_user_namespaces, "
            "kernel.apparmor_restrict_unprivileged_userns; in a cluster the pod's seccomp profile), or accept less "
            "with isolation: Landlock"
        )
    rule = f"must be possible on this machine, got {sandbox.limits.isolation}: {reason}"
    return Problem(f"{sandbox.path}.isolation", rule, remedy)


_PROBE = """
import os, socket
faults = []
try:
    open({path!r}).close()
    faults.append("can read the host's files")
except OSError:
    pass
for place in ("/", "/dev/shm", "/var/tmp"):
    try:
        open(os.path.join(place, "specrl-probe"), "w").close()
        os.unlink(os.path.join(place, "specrl-probe"))
        faults.append("can write " + place)
    except OSError:
        pass
try:
    socket.socket(socket.AF_INET).close()
    faults.append("can open internet sockets")
except OSError:
    pass
print("; ".join(faults) or "confined", end="")
"""
