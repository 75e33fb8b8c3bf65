"""The demo as a user runs it. One process of every kind is killed by SIGKILL, and the run still keeps its promises.

Thresholds are the product's own claims. The demo's problems, seeds and schedule are fixed; the machine's speed varies.
Half of the demo's layers and a third of its steps are enough: without learning, at most one run in 100 would
improve as much as the test demands. At the end, vLLM alone serves the export, with the command that the run printed.

The policy is made with the script of the wheel, in an environment that has no checkout. Other tests cover how
`specrl demo` calls it (launcher/test_cli.py) and how it compares speeds at the end (generation/test_compare.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.integration.packages.installation import install
from tests.integration.runs import start
from tests.plain_vllm import run_line

from specrl.prompts.families import held_out_problems
from specrl.rewards.choice import verifier_for
from specrl.spec import load_spec

pytestmark = pytest.mark.slow

START_S = 1200.0  # a busy machine is slow, not wrong
STEPS_S = 1500.0
STEPS = 8
LAYERS = 4


@pytest.mark.timeout(3000)
def test_the_demo_learns_and_survives_the_loss_of_any_process(tmp_path: Path, wheel: Path) -> None:
    make_policy_from_the_wheel(wheel, tmp_path)
    run = start(tmp_path, "demo", "--keep-policy", "--plain", "--no-compare", "--steps", str(STEPS))
    try:
        run.wait_until(lambda: len(run.reports()) >= 1, START_S)
        run.kill_program("specrl-generation", "gen-1")
        run.wait_until(lambda: len(run.reports()) >= 3, STEPS_S)
        run.kill_program("specrl-trainer")
        run.wait_until(lambda: len(run.reports()) >= 5, STEPS_S)
        run.kill_program("specrl-coordinator")
        text = run.finish(STEPS_S)
    finally:
        run.stop()

    reports = run.reports()
    status = json.loads((run.directory / "status.json").read_text())
    summary = status["summary"]
    assert [report["step"] for report in reports] == list(range(1, STEPS + 1)), "every step once, in order"
    assert summary["promptsTrained"] == STEPS * 16
    assert summary["unaccountedRollouts"] == 0
    assert status["counters"]["failedPrompts"] == 0
    assert summary["policyLagMax"] <= 1
    assert max(report["policyLagMax"] for report in reports) == 1, "generation did run ahead"
    interrupted = [report for report in reports if not report["checksum"]]
    assert len(interrupted) <= 1, "only the step that was being trained when the coordinator was killed may lack one"
    published = [report for report in reports if report["checksum"]]
    compared = [report for report in reports if report["mismatchTokens"] > 0]
    assert compared
    assert max(report["mismatchMeanAbs"] for report in compared) < 1e-3
    assert max(report["mismatchMaxAbs"] for report in compared) < 1e-2
    for report in published:
        assert report["canaryTokens"] > 0, f"step {report['step']}: no replica was compared with the trainer"
        assert report["canaryMeanAbs"] < 1e-3
        assert report["canaryMaxAbs"] < 1e-2
    assert status["counters"]["canariesDisagreed"] == 0
    assert summary["lastValidationReward"] - summary["firstValidationReward"] >= 0.15
    assert summary["lastAcceptanceLength"] > 1.8
    assert summary["lastAcceptanceLength"] >= 0.9 * summary["firstAcceptanceLength"], "drafter and policy keep together"
    for path in (summary["policyPath"], summary["drafterPath"], summary["checkpointPath"]):
        assert Path(path).is_dir()
        assert path in text
    assert not (run.directory / "comparison.json").exists()

    questions = [problem.question for problem in held_out_problems("wheels", seed=2026, count=64, exclude=())]
    assert not [question for question in questions if question in text], "the terminal shows no prompt"
    (line,) = [line for line in text.splitlines() if line.startswith("vllm serve ")]
    check_serving(line, run.directory, summary["lastAcceptanceLength"])


def make_policy_from_the_wheel(wheel: Path, folder: Path) -> None:
    """Make the demo's policy in `folder`/runs, outside the checkout: the wheel has the script and its run file."""
    (folder / "installed").mkdir()
    installed = install(wheel, folder / "installed", ())
    script = "from specrl.cli.demo import DEMO; print(DEMO / 'make_policy.py')"
    place = installed.output("python", "-c", script).strip()
    assert Path(place).is_relative_to(installed.environment)
    policy = folder / "runs" / "demo-policy"
    arguments = ["--layers", str(LAYERS), "--out", str(policy), "--plain"]
    installed.output("python", place, *arguments, timeout_s=START_S)


def check_serving(line: str, run: Path, acceptance_length: float) -> None:
    """Check that vLLM alone answers the validation problems, and accepts as many draft tokens as the run did.

    It decodes greedily, and the run sampled at temperature 1. The acceptance lengths are similar, because the policy is
    almost sure of most tokens.
    """
    spec = load_spec(run / "run.yaml")
    problems = held_out_problems("wheels", seed=2026, count=64, exclude=())
    served = run_line(line, [problem.question for problem in problems], spec.generation.sampling.max_tokens, run)
    assert served.imported == [], "specrl is not needed"
    assert served.acceptance_length == pytest.approx(acceptance_length, rel=0.15)
    verifier = verifier_for(spec.rewards)
    rewards = [verifier.compute_reward(*pair) for pair in zip((p.answer for p in problems), served.texts, strict=True)]
    assert sum(rewards) / len(rewards) > 0.5
