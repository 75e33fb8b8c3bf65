"""Leader election: over any sequence of turns and failures, two operators never lead at the same time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.stand_ins.api_server import FakeApiServer

from specrl_operator.api import Object
from specrl_operator.cluster.interface import ClusterError
from specrl_operator.cluster.leader import LEASE_S, RENEW_DEADLINE_S, LeaderElection
from specrl_operator.kinds import LEASE

START = datetime(2026, 1, 1, tzinfo=UTC)


class Pair:
    """Two candidates with one clock. The API server may be unreachable for each."""

    def __init__(self) -> None:
        self.server = FakeApiServer()
        self.seconds = 0.0
        self.cut_off = {"a": False, "b": False}
        self.elections = {name: self._election(name) for name in self.cut_off}

    def _election(self, name: str) -> LeaderElection:
        pair = self

        class Reached(FakeApiServer):
            def __init__(self) -> None: ...

            def __getattribute__(self, attribute: str) -> object:
                if pair.cut_off[name]:
                    raise ClusterError(0, "no route to host")
                return getattr(pair.server, attribute)

        return LeaderElection(
            Reached(), ("ns", "lease"), name, lambda: self.seconds, lambda: START + timedelta(seconds=self.seconds)
        )

    def leaders(self) -> list[str]:
        return [name for name, it in self.elections.items() if it.is_leader]


def test_a_waiting_operator_takes_over_when_the_leader_stops_renewing() -> None:
    pair = Pair()
    assert pair.elections["a"].acquire_or_renew()
    for _ in range(20):
        pair.seconds += 2
        assert not pair.elections["b"].acquire_or_renew()
        assert pair.elections["a"].acquire_or_renew()
    silent_since = pair.seconds
    while not pair.elections["b"].acquire_or_renew():
        pair.seconds += 1
    assert LEASE_S - 1 <= pair.seconds - silent_since <= LEASE_S + 1
    assert not pair.elections["a"].acquire_or_renew()
    assert pair.leaders() == ["b"]


def test_a_leader_that_cannot_renew_stops_before_another_may_take_over() -> None:
    pair = Pair()
    assert pair.elections["a"].acquire_or_renew()
    pair.cut_off["a"] = True
    while pair.elections["a"].acquire_or_renew():
        pair.seconds += 1
    assert pair.seconds <= RENEW_DEADLINE_S < LEASE_S


def test_a_released_lease_is_acquired_at_once() -> None:
    pair = Pair()
    assert pair.elections["a"].acquire_or_renew()
    assert not pair.elections["b"].acquire_or_renew()
    pair.elections["a"].release_lease()
    assert pair.elections["b"].acquire_or_renew()
    assert pair.leaders() == ["b"]


def test_a_leader_whose_lease_was_taken_stops() -> None:
    pair = Pair()
    assert pair.elections["a"].acquire_or_renew()
    lease = pair.server.objects_by_name(LEASE)["lease"]
    lease["spec"]["holderIdentity"] = "stranger"
    pair.server.put_object(lease)
    pair.seconds += 2
    assert not pair.elections["a"].acquire_or_renew()


def test_one_of_two_simultaneous_candidates_wins() -> None:
    pair = Pair()
    raced: list[Object] = []

    def refuse(verb: str, body: Object) -> ClusterError | None:
        if verb == "create" and not raced:
            raced.append(body)
            pair.server.put_object({**body, "spec": {**body["spec"], "holderIdentity": "b"}})
        return None

    pair.server.refuse = refuse
    assert not pair.elections["a"].acquire_or_renew()
    assert pair.server.objects_by_name(LEASE)["lease"]["spec"]["holderIdentity"] == "b"


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["turn", "cut", "join", "release"]), st.integers(0, 6))
    )
)
def test_there_are_never_two_leaders(steps: list[tuple[str, str, int]]) -> None:
    """Each process takes its turn at least every two seconds, as in `main.py`."""
    pair = Pair()
    for who, what, seconds in steps:
        for _ in range(seconds):
            pair.seconds += 1
            for election in pair.elections.values():
                election.acquire_or_renew()
                assert len(pair.leaders()) <= 1
        if what == "turn":
            pair.elections[who].acquire_or_renew()
        elif what == "release":
            if not pair.cut_off[who]:
                pair.elections[who].release_lease()
        else:
            pair.cut_off[who] = what == "cut"
        assert len(pair.leaders()) <= 1
