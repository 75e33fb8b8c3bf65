"""Two operators, one leader: over any sequence of turns and failures, never two that believe they may act."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stand_ins.api_server import FakeApiServer

from specrl_operator.api import LEASE, Object
from specrl_operator.cluster import ClusterError
from specrl_operator.leader import LEASE_S, RENEW_DEADLINE_S, Election

START = datetime(2026, 1, 1, tzinfo=UTC)


class Pair:
    """Two candidates with one clock, each with an API server that may be out of its reach."""

    def __init__(self) -> None:
        self.server, self.seconds, self.cut_off = FakeApiServer(), 0.0, {"a": False, "b": False}
        self.elections = {name: self._election(name) for name in self.cut_off}

    def _election(self, name: str) -> Election:
        pair = self

        class Reached(FakeApiServer):
            def __init__(self) -> None: ...

            def __getattribute__(self, attribute: str) -> object:
                if pair.cut_off[name]:
                    raise ClusterError(0, "no route to host")
                return getattr(pair.server, attribute)

        return Election(
            Reached(), ("ns", "lease"), name, lambda: self.seconds, lambda: START + timedelta(seconds=self.seconds)
        )

    def leaders(self) -> list[str]:
        return [name for name, it in self.elections.items() if it.is_leader]


def test_one_leads_the_other_waits_and_takes_over_when_it_is_silent() -> None:
    pair = Pair()
    assert pair.elections["a"].turn()
    for _ in range(20):
        pair.seconds += 2
        assert not pair.elections["b"].turn()
        assert pair.elections["a"].turn()
    silent_since = pair.seconds
    while not pair.elections["b"].turn():
        pair.seconds += 1
    assert LEASE_S - 1 <= pair.seconds - silent_since <= LEASE_S + 1
    assert not pair.elections["a"].turn()
    assert pair.leaders() == ["b"]


def test_a_leader_that_cannot_renew_gives_up_before_another_may_take_over() -> None:
    pair = Pair()
    assert pair.elections["a"].turn()
    pair.cut_off["a"] = True
    while pair.elections["a"].turn():
        pair.seconds += 1
    assert pair.seconds <= RENEW_DEADLINE_S < LEASE_S


def test_a_lease_that_is_released_is_taken_at_once() -> None:
    pair = Pair()
    assert pair.elections["a"].turn()
    assert not pair.elections["b"].turn()
    pair.elections["a"].release()
    assert pair.elections["b"].turn()
    assert pair.leaders() == ["b"]


def test_a_lease_that_somebody_took_away_ends_the_leader() -> None:
    pair = Pair()
    assert pair.elections["a"].turn()
    lease = pair.server.of(LEASE)["lease"]
    lease["spec"]["holderIdentity"] = "stranger"
    pair.server.put(lease)
    pair.seconds += 2
    assert not pair.elections["a"].turn()


def test_of_two_that_write_at_once_one_wins() -> None:
    pair = Pair()
    raced: list[Object] = []

    def refuse(verb: str, body: Object) -> ClusterError | None:
        if verb == "create" and not raced:
            raced.append(body)
            pair.server.put({**body, "spec": {**body["spec"], "holderIdentity": "b"}})
        return None

    pair.server.refuse = refuse
    assert not pair.elections["a"].turn()
    assert pair.server.of(LEASE)["lease"]["spec"]["holderIdentity"] == "b"


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["turn", "cut", "join", "release"]), st.integers(0, 6))
    )
)
def test_there_are_never_two_leaders(steps: list[tuple[str, str, int]]) -> None:
    """Each process takes its turn every two seconds at the latest, as `main.py` has it."""
    pair = Pair()
    for who, what, seconds in steps:
        for _ in range(seconds):
            pair.seconds += 1
            for election in pair.elections.values():
                election.turn()
                assert len(pair.leaders()) <= 1
        if what == "turn":
            pair.elections[who].turn()
        elif what == "release":
            if not pair.cut_off[who]:
                pair.elections[who].release()
        else:
            pair.cut_off[who] = what == "cut"
        assert len(pair.leaders()) <= 1
