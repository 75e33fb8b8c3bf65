"""Which rank writes a parameter, and who sends what it lacks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.trainer.megatron_backend.policy.state_parts import Part, plan_parameter


def test_parts_cover_every_shard_once_and_come_from_ranks_that_have_them() -> None:
    @given(st.data())
    def check(data: st.DataObject) -> None:
        size = data.draw(st.integers(1, 40))
        ranks = data.draw(st.integers(1, 4))
        shards = []
        for shard in range(data.draw(st.integers(1, 3))):
            edges = sorted(data.draw(st.lists(st.integers(0, size), min_size=ranks - 1, max_size=ranks - 1)))
            bounds = list(zip([0, *edges], [*edges, size], strict=True))
            shards.append({shard * ranks + i: pair for i, pair in enumerate(bounds) if pair[0] < pair[1]})
        plan = plan_parameter(shards, size, {})
        seen = [(part.shard, place) for part in plan.parts for place in range(part.first, part.end)]
        assert seen == [(shard, place) for shard in range(len(shards)) for place in range(size)]
        for part in plan.parts:
            first, end = shards[part.shard][part.source]
            assert first <= part.first < part.end <= end
        held = {rank: end - first for ranges in shards for rank, (first, end) in ranges.items()}
        assert held[plan.writer] == max(held.values())

    check()


def test_replicas_share_the_writing_and_send_nothing() -> None:
    written = Counter[int]()
    for _ in range(8):
        plan = plan_parameter([dict.fromkeys(range(4), (0, 10))], 10, written)
        assert plan.parts == (Part(0, plan.writer, 0, 10),)
        written[plan.writer] += 10
    assert written == dict.fromkeys(range(4), 20)


def test_the_nearest_rank_sends_the_shard_that_the_writer_lacks() -> None:
    """Tensor parallel ranks 0 and 1 are one replica, 2 and 3 the other."""
    shards = [{0: (0, 10), 2: (0, 10)}, {1: (0, 10), 3: (0, 10)}]
    assert [part.source for part in plan_parameter(shards, 10, {0: 1, 1: 1}).parts] == [2, 3]


def test_an_element_that_no_rank_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        plan_parameter([{0: (0, 4), 1: (5, 10)}], 10, {})
