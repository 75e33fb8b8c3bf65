"""When a run counts as collapsed, or as without a signal."""

from __future__ import annotations

import pytest
from tests.unit.launcher.test_view import a_step

from specrl.formats.collapse import CollapseWatch, SignalWatch

NOTHING = {"reward": 0.0, "gradNorm": 0.0, "groups": 2, "groupsWithoutSignal": 2}


def test_three_steps_without_reward_signal_and_gradient_are_a_collapse_and_a_better_one_ends_it() -> None:
    watch = CollapseWatch()
    assert not watch.add_step(a_step(step=1))
    assert [watch.add_step(a_step(step=step, **NOTHING)) for step in (2, 3, 4, 5)] == [False, False, True, False]
    assert watch.collapsed_since == 2
    watch.add_step(a_step(step=6))
    assert watch.collapsed_since is None
    assert watch.describe_collapse() == ""


@pytest.mark.parametrize(
    "change",
    [{"reward": 0.1}, {"reward": None}, {"gradNorm": 0.1}, {"groupsWithoutSignal": 1}, {"isSkipped": True}],
)
def test_a_step_that_lacks_one_of_the_signs_is_none_of_them(change: dict[str, float | None]) -> None:
    watch = CollapseWatch()
    for step in range(1, 9):
        watch.add_step(a_step(step=step, **NOTHING | change))
    assert watch.collapsed_since is None


@pytest.mark.parametrize(("reward", "remedy"), [(0.0, "easier"), (1.0, "harder")])
def test_three_steps_whose_groups_all_lack_a_signal_are_reported_once_with_what_to_try(
    reward: float, remedy: str
) -> None:
    """A verifier that gave every completion the same reward above 0 was not mentioned: only the collapse was."""
    silent = {"reward": reward, "groups": 2, "groupsWithoutSignal": 2, "gradNorm": 0.1}
    watch = SignalWatch()
    assert not watch.add_step(a_step(step=1, groups=2, groupsWithoutSignal=1))
    assert [watch.add_step(a_step(step=step, **silent)) for step in (2, 3, 4, 5)] == [False, False, True, False]
    assert watch.advice.startswith(f"since step 2 the rewards within each group are equal (mean {reward:.3f})")
    assert f"try {remedy} prompts" in watch.advice
    assert not watch.add_step(a_step(step=6, groups=2, groupsWithoutSignal=1))
    assert watch.advice == ""
