"""The equivalence test of benchmarks/learning.py: its errors, its power, and its faulty sampler."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import numpy as np
import pytest
from benchmarks import learning
from benchmarks.demo_runs import Failed

DEVIATION = 0.027  # what the benchmark's docstring takes a difference to vary by
TRIALS = 4000


def share_of_passes(true_difference: float) -> float:
    """Return the share of simulated benchmarks of one comparison that pass."""
    drawn = np.random.default_rng(7).normal(true_difference, DEVIATION, (TRIALS, learning.SEEDS))
    arm = learning.Arm(learning.EAGLE3, 0)
    return sum(learning.compare_arms(arm, row.tolist()).is_equivalent for row in drawn) / TRIALS


@pytest.mark.parametrize("sign", [1, -1])
def test_a_difference_as_large_as_the_margin_passes_at_most_as_often_as_stated(sign: int) -> None:
    assert share_of_passes(sign * learning.MARGIN) < learning.LEVEL + 0.01


def test_equal_samplers_pass_as_often_as_the_docstring_says() -> None:
    assert learning.compute_power(DEVIATION, learning.SEEDS) == pytest.approx(0.99, abs=0.005)
    # The formula takes the sample's deviation for the true one, which is a little too good.
    assert share_of_passes(0.0) > 0.93
    assert learning.count_seeds(DEVIATION) <= learning.SEEDS


def test_a_drop_of_twice_the_margin_never_passes() -> None:
    assert share_of_passes(-2 * learning.MARGIN) == 0


def test_runs_without_spread_are_compared_by_their_mean() -> None:
    found = learning.compare_arms(learning.Arm("n-gram", 1), [0.01, 0.01, 0.01])
    assert (found.low, found.high) == pytest.approx((0.01, 0.01))
    assert found.is_equivalent
    assert learning.compute_power(found.deviation, found.seeds) == 1


def test_finished_runs_are_kept_and_those_of_another_policy_are_refused(tmp_path: Path) -> None:
    """A policy counted by the name of its folder alone."""
    file = tmp_path / "learning.json"
    policy = tmp_path / "policy"
    drafter = tmp_path / "drafter"
    for folder in (policy, drafter):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"first")
    results = learning.Results(file, policy, drafter)
    arms = [learning.Arm(learning.NONE, 1), learning.Arm("n-gram", 1)]
    for seed in (1, 2):
        for place, arm in enumerate(arms):
            results.add_run(arm, seed, [0.5, 0.6 + 0.01 * seed * place])

    again = learning.Results(file, policy, drafter)
    assert again.find_accuracy(arms[0], 2) == pytest.approx(0.55)
    assert again.find_accuracy(arms[0], 3) is None
    found = again.compare_with_none(arms[1])
    assert found is not None
    assert (found.seeds, found.difference) == (2, pytest.approx(0.0075))
    (policy / "model.safetensors").write_bytes(b"trained again")
    with pytest.raises(Failed, match="must have results of these settings, models and data, got others"):
        learning.Results(file, policy, drafter)


def test_the_fault_fits_the_present_sources_and_leaves_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "mine")
    with learning.use_fault(tmp_path):
        first, *rest = os.environ["PYTHONPATH"].split(os.pathsep)
        assert rest == ["mine"]
        tree = ast.parse((Path(first) / learning.CHECK).read_text(encoding="utf-8"))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {"check_model_runner", "_check_model_runner"} <= functions
    assert os.environ["PYTHONPATH"] == "mine"
