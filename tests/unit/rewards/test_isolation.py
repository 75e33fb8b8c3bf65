"""`isolation: Auto` takes the strongest isolation that a machine permits, and says why it took another."""

from __future__ import annotations

import pytest
from rich.console import Console

from specrl.agent_tools import tool_for
from specrl.errors import SpecInvalid, SpecProblem
from specrl.formats.reports import Phase, StatusReport
from specrl.launcher.terminal.view import live_area
from specrl.rewards.choice import verifier_for
from specrl.rewards.code import machine_check
from specrl.rewards.code.sandbox_runner import SandboxOptions
from specrl.rewards.verifier import SandboxChoice
from specrl.rewards.verifier_set import VerifierSet, WeightedVerifier
from specrl.spec.data import CodeVerifier, Isolation, MathVerifier, Rewards
from specrl.spec.tools import AnsweredBy, CodeTool, Tools

NO_NAMESPACES = "unshare: Operation not permitted"
NO_LANDLOCK = "Landlock: the kernel has none"


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> dict[Isolation, str]:
    """Why a trial in each isolation fails, on the machine of the test. "busy": it took too long."""
    reasons: dict[Isolation, str] = {}

    def run_trial(sandbox: SandboxOptions) -> None:
        reason = reasons.get(sandbox.limits.isolation)
        if reason == "busy":
            raise SpecInvalid((SpecProblem(sandbox.path, "must run a trial program", "try again"),))
        if reason is not None:
            raise machine_check._IsolationMissing(sandbox, reason)

    monkeypatch.setattr(machine_check, "_run_trial", run_trial)
    machine_check.settle_isolation.cache_clear()
    return reasons


def choose(isolation: Isolation = Isolation.AUTO) -> SandboxChoice:
    verifier = verifier_for(Rewards(code=CodeVerifier(isolation=isolation)))
    (choice,) = verifier.settle_on_machine().list_sandboxes()
    return choice


def test_auto_is_the_default_of_verifiers_and_tools() -> None:
    assert CodeVerifier().isolation is CodeTool().isolation is Isolation.AUTO


def test_auto_takes_namespaces_where_the_machine_permits_them(trials: dict[Isolation, str]) -> None:
    assert choose() == SandboxChoice("rewards.code", Isolation.NAMESPACES)
    assert choose().describe_notice() == ""


def test_auto_takes_landlock_elsewhere_and_says_why(trials: dict[Isolation, str]) -> None:
    trials[Isolation.NAMESPACES] = NO_NAMESPACES
    assert choose() == SandboxChoice("rewards.code", Isolation.LANDLOCK, NO_NAMESPACES)
    assert choose().describe_notice() == (
        f"rewards.code runs programs with isolation: Landlock, the weaker one, since {NO_NAMESPACES}"
    )


def test_a_machine_that_permits_neither_is_refused_with_both_reasons(trials: dict[Isolation, str]) -> None:
    trials |= {Isolation.NAMESPACES: NO_NAMESPACES, Isolation.LANDLOCK: NO_LANDLOCK}
    with pytest.raises(SpecInvalid, match=r"isolation: must be possible .*unshare.*Landlock: .*permit user namesp"):
        choose()


def test_a_busy_machine_does_not_weaken_the_isolation(trials: dict[Isolation, str]) -> None:
    trials[Isolation.NAMESPACES] = "busy"
    with pytest.raises(SpecInvalid, match="must run a trial program"):
        choose()


def test_a_named_isolation_is_kept(trials: dict[Isolation, str]) -> None:
    trials[Isolation.NAMESPACES] = NO_NAMESPACES
    assert choose(Isolation.NAMESPACES).isolation is Isolation.NAMESPACES  # and its workers refuse to start
    assert choose(Isolation.LANDLOCK).reason == ""
    with pytest.raises(SpecInvalid, match="or accept weaker isolation with isolation: Auto"):
        verifier_for(Rewards(code=CodeVerifier(isolation=Isolation.NAMESPACES))).prepare_worker()


def test_all_sandboxes_of_a_run_are_listed(trials: dict[Isolation, str]) -> None:
    verifier = verifier_for(Rewards(code=CodeVerifier()), "rewards.sum.terms.1.verifier")
    terms = VerifierSet((WeightedVerifier(verifier_for(Rewards(math=MathVerifier()))), WeightedVerifier(verifier)))
    tool = tool_for(Tools(answered_by=AnsweredBy(code=CodeTool())))
    found = [*terms.settle_on_machine().list_sandboxes(), *tool.settle_on_machine().list_sandboxes()]
    assert [choice.path for choice in found] == ["rewards.sum.terms.1.verifier.code", "tools.answeredBy.code"]
    assert {choice.isolation for choice in found} == {Isolation.NAMESPACES}


def test_the_terminal_shows_the_isolation_of_each_sandbox() -> None:
    status = StatusReport(run="sums", phase=Phase.WAITING, isolations={"rewards.code": "Landlock"})
    console = Console(width=100)
    with console.capture() as captured:
        console.print(live_area("sums", {}, status))
    assert "rewards.code Landlock" in captured.get()
