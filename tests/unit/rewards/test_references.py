"""References that hang or crash their process are found before the run, without loss of other results."""

from __future__ import annotations

import re
import tomllib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from specrl.rewards.checks import reference_cache, references
from specrl.rewards.checks.reference_cache import ReferenceCache
from specrl.rewards.checks.references import CheckedReference, ReferenceFinding, ReferencePool
from specrl.rewards.verifier import Verifier
from specrl.spec.data import CodeVerifier, ExactVerifier, MathVerifier, RewardPool, Rewards

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ReferencePool]:
    monkeypatch.syspath_prepend(Path(__file__).parent)  # workers import `hostile` by name
    from hostile import Hostile  # type: ignore[import-not-found]

    async with ReferencePool(Hostile(), RewardPool(workers=2, timeout_s=2)) as pool:
        yield pool


def hostile_of(pool: ReferencePool) -> Verifier:
    return pool.verifiers.terms[0].verifier


async def test_a_worker_that_returns_a_part_of_a_chunk_gets_the_rest(
    pool: ReferencePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "CHUNK_TURN_S", 0.0)
    expected = [CheckedReference(str(number), None) for number in range(20)]
    told = list[CheckedReference]()
    await pool.check_all(expected, hostile_of(pool), lambda some: told.extend(reference for reference, _ in some))
    assert sorted(told) == sorted(expected)


async def test_every_reference_is_checked_despite_those_that_hang_or_crash(pool: ReferencePool) -> None:
    """References used to be unchecked: one on which SymPy hangs left all of its answers ungraded."""
    sound = [CheckedReference(str(number), None) for number in range(1000)]
    bad = ["blame the reference", "hang", "die", "raise", "fill memory", "judge away"]
    everything = [*sound[:500], *(CheckedReference(what, None) for what in bad), *sound[500:]]
    findings: dict[CheckedReference, ReferenceFinding] = {}

    def found(some: Sequence[tuple[CheckedReference, ReferenceFinding]]) -> None:
        assert not findings.keys() & {reference for reference, _ in some}, "each reference must be reported once"
        findings.update(some)

    await pool.check_all(everything, hostile_of(pool), found)
    assert findings.keys() == set(everything)
    assert {findings[reference] for reference in sound} == {ReferenceFinding("")}
    blamed, hung, died, raised, filled, away = (findings[CheckedReference(what, None)] for what in bad)
    assert blamed == ReferenceFinding("the reference must be better")
    assert "took longer than timeoutS=2" in hung.refusal
    assert "exit status -9" in died.refusal
    assert "needed more than memoryMib=4096" in filled.refusal
    assert raised.refusal.startswith("the reference must be one that the verifier can read, got KeyError")
    assert away == ReferenceFinding("", is_certain=False), "the reference is not at fault"
    assert [it.is_certain for it in (blamed, raised, hung, died, filled)] == [True, True, False, False, False]


@pytest.mark.parametrize("solution", ["blame the reference", "raise"])
async def test_a_reference_is_refused_for_its_solution(pool: ReferencePool, solution: str) -> None:
    """A program's reference is checked by running the data set's own solution, which needs a call of its own.

    The refusal was cached: a solution that was too slow once was refused in all later runs, too."""
    found = await pool.check_one(CheckedReference("1", solution), hostile_of(pool))
    assert "the reference must be" in found.refusal
    assert not found.is_certain


REWARDS = Rewards(exact=ExactVerifier())
LIMITS = RewardPool()


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_cached_results_are_used_only_by_the_same_verifier(cache_folder: Path) -> None:
    ReferenceCache(REWARDS, LIMITS).add_refusals({"a": "", "b": "must be better"})
    ReferenceCache(REWARDS, LIMITS).add_refusals({"c": ""})
    assert ReferenceCache(REWARDS, LIMITS).refusals == {"a": "", "b": "must be better", "c": ""}
    others = [
        (Rewards(exact=ExactVerifier(answer_after="=")), LIMITS),
        (Rewards(math=MathVerifier()), LIMITS),
        (REWARDS, RewardPool(timeout_s=60)),
    ]
    assert all(not ReferenceCache(*other).refusals for other in others)


def test_cached_results_are_not_used_after_a_change_of_the_packages(cache_folder: Path) -> None:
    """Tests that use NumPy were refused in every later run, too, after NumPy had been installed."""
    packages = cache_folder / "packages"
    packages.mkdir()
    rewards = Rewards(code=CodeVerifier(packages=str(packages)))
    (packages / "numpy").mkdir()
    ReferenceCache(rewards, LIMITS).add_refusals({"a": ""})
    assert ReferenceCache(rewards, LIMITS).refusals == {"a": ""}
    (packages / "numpy/core.py").write_text("")
    assert not ReferenceCache(rewards, LIMITS).refusals


def test_the_digest_of_a_verifier_needs_no_package_that_an_installation_may_lack() -> None:
    """It asked for the version of a developers' package, so in an image every run that checks references ended."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}  # type: ignore[index]
    assert set(reference_cache._LIBRARIES) <= required


def test_a_damaged_or_unwritable_cache_is_ignored(cache_folder: Path) -> None:
    ReferenceCache(REWARDS, LIMITS).add_refusals({"a": ""})
    (file,) = (cache_folder / "references").iterdir()
    file.write_bytes(b'\xff\n7\n["b"]\n' + file.read_bytes() + b'["c", "cut o')
    assert ReferenceCache(REWARDS, LIMITS).refusals == {"a": ""}
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("no folder")
    cache = ReferenceCache(REWARDS, LIMITS)
    cache.add_refusals({"a": ""})
    assert cache.refusals == {"a": ""}, "of this process"


def test_the_same_reference_with_another_solution_has_another_key() -> None:
    assert (
        len(
            {
                CheckedReference(*it).cache_key
                for it in [("a", None), ("a", ""), ("a", "b"), ("a\0b", None), ("ab", None)]
            }
        )
        == 5
    )
