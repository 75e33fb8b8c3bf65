"""References that hang, or end their process, are found before the run and cost the others nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from specrl.rewards import references
from specrl.rewards.reference_cache import ReferenceCache
from specrl.rewards.references import Finding, Reference, ReferencePool
from specrl.spec.data import ExactVerifier, MathVerifier, RewardPool, Rewards


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReferencePool]:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # workers import `hostile` by name
    from hostile import Hostile  # type: ignore[import-not-found]

    async with ReferencePool(Hostile(), RewardPool(workers=2, timeout_s=2)) as pool:
        yield pool


async def test_a_worker_that_hands_back_a_part_is_given_the_rest(
    pool: ReferencePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "TURN_S", 0.0)
    expected, told = [Reference(str(number), None) for number in range(20)], list[Reference]()
    await pool.check(expected, lambda some: told.extend(reference for reference, _ in some))
    assert sorted(told) == sorted(expected)


async def test_every_reference_is_found_out_whatever_others_do(pool: ReferencePool) -> None:
    """References were not tried at all: one that SymPy hangs at made every answer to it ungraded."""
    sound = [Reference(str(number), None) for number in range(1000)]
    bad = ["blame the reference", "hang", "die", "raise", "fill memory", "judge away"]
    everything = [*sound[:500], *(Reference(what, None) for what in bad), *sound[500:]]
    findings: dict[Reference, Finding] = {}

    def found(some: Sequence[tuple[Reference, Finding]]) -> None:
        assert not findings.keys() & {reference for reference, _ in some}, "each is told once"
        findings.update(some)

    await pool.check(everything, found)
    assert findings.keys() == set(everything)
    assert {findings[reference] for reference in sound} == {Finding("")}
    blamed, hung, died, raised, filled, away = (findings[Reference(what, None)] for what in bad)
    assert blamed == Finding("the reference must be better")
    assert "took longer than timeoutS=2" in hung.refusal
    assert "exit status -9" in died.refusal
    assert "needed more than memoryMib=4096" in filled.refusal
    assert raised.refusal.startswith("the reference must be one that the verifier can read, got KeyError")
    assert away == Finding("", is_certain=False), "the reference is not at fault"
    assert [it.is_certain for it in (blamed, raised, hung, died, filled)] == [True, True, False, False, False]


REWARDS, LIMITS = Rewards(exact=ExactVerifier()), RewardPool()


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_what_is_cached_is_known_to_the_same_verifier_alone(cache_folder: Path) -> None:
    ReferenceCache(REWARDS, LIMITS).add({"a": "", "b": "must be better"})
    ReferenceCache(REWARDS, LIMITS).add({"c": ""})
    assert ReferenceCache(REWARDS, LIMITS).refusals == {"a": "", "b": "must be better", "c": ""}
    others = [
        (Rewards(exact=ExactVerifier(answer_after="=")), LIMITS),
        (Rewards(math=MathVerifier()), LIMITS),
        (REWARDS, RewardPool(timeout_s=60)),
    ]
    assert all(not ReferenceCache(*other).refusals for other in others)


def test_a_cache_that_is_damaged_or_cannot_be_written_is_passed_over(cache_folder: Path) -> None:
    ReferenceCache(REWARDS, LIMITS).add({"a": ""})
    (file,) = (cache_folder / "references").iterdir()
    file.write_bytes(b'\xff\n7\n["b"]\n' + file.read_bytes() + b'["c", "cut o')
    assert ReferenceCache(REWARDS, LIMITS).refusals == {"a": ""}
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder")
    cache = ReferenceCache(REWARDS, LIMITS)
    cache.add({"a": ""})
    assert cache.refusals == {"a": ""}, "of this process"


def test_references_with_other_solutions_are_others() -> None:
    assert len({Reference(*it).key for it in [("a", None), ("a", ""), ("a", "b"), ("a\0b", None), ("ab", None)]}) == 5
