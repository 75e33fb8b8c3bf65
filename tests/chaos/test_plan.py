"""The seed alone decides which faults happen, and every possible fault happens."""

from __future__ import annotations

from itertools import islice

import pytest
from tests.chaos.plan import ANYWHERE, REDIS, VERIFIER, Fault, Kind, Possible, faults

ALL = Possible(is_on_redis=True, is_compared=False)


def dealt(seed: str, count: int, possible: Possible = ALL) -> list[Fault]:
    return list(islice(faults(seed, possible), count))


def test_the_same_seed_gives_the_same_faults_and_another_seed_gives_others() -> None:
    assert dealt("1", 200) == dealt("1", 200)
    assert dealt("1", 200) != dealt("2", 200)


def test_every_fault_happens_once_before_any_happens_twice() -> None:
    possible = [*ANYWHERE, *REDIS, *VERIFIER]
    found = {(fault.kind, fault.target, fault.signal) for fault in dealt("1", len(possible))}
    assert found == {(fault.kind, fault.target, fault.signal) for fault in possible}


def test_compared_runs_lose_no_verifier_and_runs_on_sqlite_lose_no_redis() -> None:
    found = dealt("1", 300, Possible(is_on_redis=False, is_compared=True))
    assert not {fault.target for fault in found} & {"verifier", "redis"}


def test_kills_have_no_duration_and_all_other_faults_have_one() -> None:
    for fault in dealt("1", 200):
        kills = fault.kind is Kind.KILL or (fault.kind is Kind.POINT and fault.signal.name == "SIGKILL")
        assert (fault.for_s == 0) == kills, fault


def test_only_the_chosen_faults_happen_and_impossible_ones_are_refused() -> None:
    asked = Possible(is_on_redis=False, is_compared=True, only=("cut gen-0", "full disk"))
    assert {str(fault).split(" for ")[0] for fault in dealt("1", 10, asked)} == {"cut gen-0", "full disk"}
    with pytest.raises(ValueError, match="got kill redis"):
        dealt("1", 1, Possible(is_on_redis=False, is_compared=True, only=("kill redis",)))
