"""What decoding steps cost: which of them are compared, and tables of costs."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.generation.draft_lengths.decoding_step import OFF, Step
from specrl.generation.draft_lengths.gains import PromptCost
from specrl.generation.draft_lengths.step_costs import StepCosts, choose_batch_nodes

LENGTHS = (OFF, 1, 2)


@pytest.mark.parametrize(
    ("steps", "is_comparable"),
    [
        ([(4, 1), (4, 1), (4, 1)], True),
        ([(64, 1), (64, 1), (57, 1)], True),
        ([(8, 1), (64, 1), (64, 1)], True),
        ([(64, 1), (64, 1), (50, 1)], False),
        ([(5, 1), (5, 1), (4, 1)], False),
        ([(4, 3), (4, OFF), (4, OFF)], False),
        ([(4, 3), (4, 3), (4, OFF)], False),
        ([(4, 1), (4, 3), (4, 1)], False),
    ],
)
def test_a_step_is_comparable_if_it_verified_drafts_of_its_own_length(
    steps: list[tuple[int, int]], is_comparable: bool
) -> None:
    *before, last = (Step(float(at), batch, length, 0) for at, (batch, length) in enumerate(steps))
    assert last.is_comparable(*before) is is_comparable


@pytest.mark.parametrize(("read", "read_before", "is_comparable"), [(16, 0, True), (8, 9, False), (0, 17, False)])
def test_a_step_may_read_as_many_prompt_tokens_as_it_verifies(read: int, read_before: int, is_comparable: bool) -> None:
    before = Step(0.0, 4, 1, read_before)
    assert Step(0.0, 4, 1, read).is_comparable(before, before) is is_comparable


def test_a_catch_up_is_not_comparable() -> None:
    before = Step(0.0, 4, 1, 0)
    assert not Step(0.0, 4, 1, 4, is_catch_up=True).is_comparable(before, before)


@given(st.integers(1, 3000))
def test_nodes_ascend_from_one_and_every_batch_size_has_a_near_one(largest: int) -> None:
    costs = StepCosts(largest, LENGTHS)
    assert costs.nodes == choose_batch_nodes(largest) == tuple(sorted(set(costs.nodes)))
    assert costs.nodes[0] == 1
    near = costs.nodes[costs.find_node(largest)]
    assert largest / near < 1.5 <= 2 * largest / near
    assert costs.find_node(10 * largest) == len(costs.nodes) - 1


def learn(costs: StepCosts, node: int, seconds: dict[int, float], used: int = 1) -> None:
    """Use one length for some steps, and try the others."""
    for tried, its_seconds in seconds.items():
        for _ in range(8):
            costs.record_step(node, used, math.log(seconds[used]))
        if tried != used:
            costs.record_try(node, used, tried, [math.log(its_seconds)] * 4)


def test_costs_are_those_of_the_tries() -> None:
    costs = StepCosts(4, LENGTHS)
    learn(costs, 1, {OFF: 0.1, 1: 0.15, 2: 0.2})
    assert [costs.seconds_at(1, k) for k in LENGTHS] == [pytest.approx(s) for s in (0.1, 0.15, 0.2)]


def test_a_node_without_costs_borrows_those_of_the_nearest() -> None:
    costs = StepCosts(64, LENGTHS)
    assert costs.list_costs(3) == {}
    learn(costs, 2, {OFF: 0.1, 1: 0.15})
    learn(costs, 6, {OFF: 0.1, 1: 0.3})
    found = [costs.list_costs(node)[1] / costs.list_costs(node)[OFF] for node in (0, 3, 4, 5)]
    assert found == [pytest.approx(1.5), pytest.approx(1.5), pytest.approx(3.0), pytest.approx(3.0)]
    assert costs.seconds_at(3, 1) is None, "the machine's speed there is unknown"


def test_a_longer_draft_never_costs_less() -> None:
    costs = StepCosts(4, LENGTHS)
    learn(costs, 0, {OFF: 0.1, 1: 0.2, 2: 0.16})
    found = costs.list_costs(0)
    assert found[OFF] < found[1] == found[2]


def test_a_disturbed_try_does_not_count() -> None:
    costs = StepCosts(4, LENGTHS)
    learn(costs, 0, {OFF: 0.1, 1: 0.2})
    learn(costs, 0, {OFF: 9.0, 1: 0.2})
    learn(costs, 0, {OFF: 0.1, 1: 0.2})
    assert costs.seconds_at(0, OFF) == pytest.approx(0.1)


def test_a_table_is_a_seed_that_is_forgotten_where_a_try_contradicts_it() -> None:
    known = StepCosts(4, LENGTHS)
    for node in (0, 1):
        learn(known, node, {OFF: 0.1, 1: 0.2, 2: 0.3})
    costs = StepCosts(4, LENGTHS)
    assert costs.load_json(json.loads(json.dumps(known.to_json())))
    assert costs.to_json() == {
        "nodes": [1, 2, 4],
        "seconds": {str(k): [pytest.approx(s)] * 2 + [None] for k, s in ((OFF, 0.1), (1, 0.2), (2, 0.3))},
    }
    learn(costs, 0, {OFF: 0.1, 1: 0.1})  # drafts cost nothing on this machine
    assert set(costs.list_costs(0)) == {OFF, 1}
    assert set(costs.list_costs(1)) == {*LENGTHS}, "no try has contradicted this node"


GOOD: dict[str, Any] = {"nodes": [1, 2, 4], "seconds": {"-1": [0.1, 0.2, 0.3], "1": [0.2, None, 0.4]}}


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {},
        "x",
        {"nodes": [1, 2, 4]},
        {"nodes": [1, 2, 4], "seconds": {}},
        {"nodes": [1, 2, 4], "seconds": {"-1": [None, None, None]}},
        GOOD | {"nodes": [1, 2]},
        GOOD | {"nodes": [1, 2, 8]},
        GOOD | {"nodes": 3},
        GOOD | {"seconds": []},
        *(GOOD | {"seconds": {"-1": row}} for row in ([0.1], [0.1] * 4, "abc", 3, {"a": 1}, None)),
        *(
            GOOD | {"seconds": {"-1": [0.1, value, 0.1]}}
            for value in (0, -1.0, math.inf, math.nan, "1", [], {}, -(10**400))
        ),
        *(GOOD | {"seconds": {length: [0.1, 0.1, 0.1]}} for length in ("7", "x", "-2", "1.0", "9" * 5000)),
    ],
)
def test_a_table_that_is_not_one_of_such_an_engine_changes_nothing(wrong: Any) -> None:
    costs = StepCosts(4, LENGTHS)
    assert not costs.load_json(wrong)
    assert costs.list_costs(0) == {}
    assert costs.load_json(GOOD)


def test_the_cost_of_a_prompt_token_is_learnt_whichever_step_its_time_falls_into() -> None:
    for late in (False, True):
        prompt = PromptCost()
        for tokens in (50, 10, 30) * 10:
            for is_next in (False, True):  # the tokens of a duration are the mean of two steps
                prompt.record_step(tokens / 2, 0.001 * tokens if is_next is late else 0.0, 0.01)
        assert prompt.seconds == pytest.approx(0.001, rel=0.02)


def test_a_stall_does_not_make_prompts_dear_for_long() -> None:
    prompt = PromptCost()
    prompt.record_step(10, 1e9, 0.01)
    assert prompt.seconds <= 0.01
