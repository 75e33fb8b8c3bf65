"""A missing requirement is reported once, with the number of tests, what they prove, and a remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.requirements import BY_NAME, REDIS, SUFFIX, Requirement, summarise_skips

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import pytest
from tests import requirements

ABSENT = requirements.Requirement("a unicorn", "that it gallops", "make unicorn", lambda: "none was seen")
requirements.BY_NAME[ABSENT.name] = ABSENT

@pytest.fixture
def horse():
    raise AssertionError("a fixture must not start where something is missing")

@pytest.mark.needs(ABSENT)
def test_of_a_marker(horse): ...

@pytest.mark.parametrize("kind", ["here", pytest.param("there", marks=pytest.mark.needs(ABSENT))])
def test_of_a_parameter(kind): ...

@pytest.fixture
def one_that_asks():
    ABSENT.require()

def test_of_a_fixture(one_that_asks): ...

@pytest.mark.xfail(reason="known")
def test_that_fails(): raise ValueError

def test_that_does_not_apply(): pytest.skip("not this kind")

if __name__ == "__main__":
    raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", __file__], plugins=[requirements.Skips()]))
"""


def test_a_run_ends_with_one_line_for_each_missing_thing(tmp_path: Path) -> None:
    file = tmp_path / "test_ride.py"
    file.write_text(TESTS)
    done = subprocess.run(
        [sys.executable, file],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'services'}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert "not proved here: that it gallops (3 tests, without a unicorn); remedy: make unicorn" in lines
    assert "skipped: 1 test: not this kind" in lines
    assert lines[-1].startswith("1 passed, 4 skipped, 1 xfailed")


def test_skips_are_counted_by_requirement() -> None:
    found = []
    for why in ("not on the PATH", "no network: none at all"):
        with pytest.raises(pytest.skip.Exception) as caught:
            REDIS.skip(why)
        found.append(str(caught.value))
    with pytest.raises(pytest.skip.Exception) as caught:
        SUFFIX.skip("not installed")
    assert summarise_skips({found[0]: 3, found[1]: 4, str(caught.value): 9, "another kind": 1}) == [
        "not proved here: that suffix decoding is lossless (9 tests, without arctic-inference); remedy: make suffix",
        "not proved here: that the Redis store keeps its promises (7 tests, without redis-server); "
        "remedy: apt install redis-server",
        "skipped: 1 test: another kind",
    ]


@pytest.mark.parametrize("requirement", BY_NAME.values(), ids=BY_NAME.keys())
def test_every_requirement_has_a_purpose_and_a_remedy(requirement: Requirement) -> None:
    assert ": " not in requirement.name, "a reason is taken apart there"
    assert requirement.proves
    assert requirement.remedy
