"""Check that this machine isolates programs, by running a program that tries what must be impossible.

Called by the verifier `code` and by the code tool before a run, in a separate process. It also chooses for
`isolation: Auto`: Namespaces, or Landlock where the machine does not permit them. A busy machine never changes the
choice: it is an error.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from specrl.errors import SpecInvalid, SpecProblem
from specrl.rewards.code.sandbox_runner import SandboxOptions, SandboxRunner
from specrl.rewards.sandbox.confine import CannotConfine
from specrl.rewards.verifier import SandboxChoice, Ungraded
from specrl.spec.data import Isolation

_TRIAL_S = 30
"""Limit for wall time and processor time of the trial program on a loaded machine. It takes 0.1 s on an idle one."""


def check_machine(sandbox: SandboxOptions) -> None:
    """Check that programs are isolated here. Raises SpecInvalid if not."""
    if sandbox.limits.isolation is Isolation.AUTO:
        settle_isolation(sandbox)
    else:
        _run_trial(sandbox)


@lru_cache
def settle_isolation(sandbox: SandboxOptions) -> SandboxOptions:
    """Choose an isolation that this machine permits, for `isolation: Auto`. Others are returned as they are.

    Raises SpecInvalid if the machine permits none.
    """
    if sandbox.limits.isolation is not Isolation.AUTO:
        return sandbox
    strong = replace(sandbox, limits=replace(sandbox.limits, isolation=Isolation.NAMESPACES))
    try:
        _run_trial(strong)
    except _IsolationMissing as error:
        reason = error.reason
    else:
        return strong
    weak = replace(sandbox, limits=replace(sandbox.limits, isolation=Isolation.LANDLOCK), weaker_because=reason)
    try:
        _run_trial(weak)
    except _IsolationMissing as error:
        rule = f"must be possible on this machine, got {Isolation.NAMESPACES}: {reason}; {error.isolation}: "
        problem = SpecProblem(f"{sandbox.path}.isolation", f"{rule}{error.reason}", _PERMIT_NAMESPACES)
        raise SpecInvalid((problem,)) from error
    return weak


def describe_choice(sandbox: SandboxOptions) -> SandboxChoice:
    """Describe the isolation of a sandbox, for `WorkerSetup.list_sandboxes`."""
    return SandboxChoice(sandbox.path, sandbox.limits.isolation, sandbox.weaker_because)


class _IsolationMissing(SpecInvalid):
    """The machine does not permit an isolation. reason: the step that failed."""

    def __init__(self, sandbox: SandboxOptions, reason: str) -> None:
        super().__init__((_build_isolation_problem(sandbox, reason),))
        self.isolation = sandbox.limits.isolation
        self.reason = reason


def _run_trial(sandbox: SandboxOptions) -> None:
    """Run a program that tries forbidden actions. Raises SpecInvalid if one succeeds or the program cannot start.

    It has its own time limit: the run's limits for answers may be too short for a loaded machine.
    """
    packages = sandbox.limits.packages
    if packages is not None and not Path(packages).is_dir():
        rule = f"must be a folder, got {packages}"
        raise SpecInvalid((SpecProblem(f"{sandbox.path}.packages", rule, "check the path, or leave it out"),))
    patient = replace(sandbox, wall_s=_TRIAL_S, limits=replace(sandbox.limits, cpu_s=_TRIAL_S))
    try:
        run = SandboxRunner(patient).run_script("program.py", _PROBE.format(path=__file__), "")
    except (Ungraded, CannotConfine) as error:
        if isinstance(error, Ungraded) or isinstance(error.__cause__, TimeoutError):
            raise SpecInvalid((_build_busy_problem(sandbox, str(error)),)) from error
        raise _IsolationMissing(sandbox, str(error)) from error
    if not run.is_success:  # the probe catches every OSError that it expects, so it ran out of time or was killed
        raise SpecInvalid((_build_busy_problem(sandbox, f"a trial program that {run.exit_description}"),))
    if run.output != b"confined":
        said = run.output.decode(errors="replace")
        raise _IsolationMissing(sandbox, f"a trial program: {said}")


_PERMIT_NAMESPACES = (
    "permit user namespaces (sysctl user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a "
    "cluster the pod's seccomp profile)"
)


def _build_busy_problem(sandbox: SandboxOptions, reason: str) -> SpecProblem:
    rule = f"must run a trial program to its end within {_TRIAL_S} s, got {reason}"
    return SpecProblem(sandbox.path, rule, "try again when the machine is less busy, or use another machine")


def _build_isolation_problem(sandbox: SandboxOptions, reason: str) -> SpecProblem:
    remedy = "permit what it names, or use another machine"
    if sandbox.limits.isolation is Isolation.NAMESPACES:
        remedy = f"{_PERMIT_NAMESPACES}, or accept weaker isolation with isolation: Auto or isolation: Landlock"
    rule = f"must be possible on this machine, got {sandbox.limits.isolation}: {reason}"
    return SpecProblem(f"{sandbox.path}.isolation", rule, remedy)


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
