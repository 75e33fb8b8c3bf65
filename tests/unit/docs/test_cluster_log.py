"""docs/cluster-log.md is of this tree: its hash of deploy/, operators/ and the locks is the tree's, or is waived."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.cluster.story.freshness import HASH_LINE, LOG, find_problem, hash_sources

PAGE = f"# A run\n\n{HASH_LINE.format(hash='0123456789ab')}\n\n- waived: `aaaaaaaaaaaa`: only a comment changed\n"


def test_the_log_is_of_this_tree_or_says_why_another_run_would_tell_the_same() -> None:
    assert find_problem(LOG.read_text(encoding="utf-8"), hash_sources()) == ""


@pytest.mark.parametrize("current", ["0123456789ab", "aaaaaaaaaaaa"])
def test_the_hash_of_the_run_and_a_waived_one_are_accepted(current: str) -> None:
    assert find_problem(PAGE, current) == ""


def test_an_old_hash_is_refused_with_what_to_do() -> None:
    assert "whose hash is bbbbbbbbbbbb, got 0123456789ab; run `make test-cluster FULL=1`" in find_problem(
        PAGE, "bbbbbbbbbbbb"
    )


def test_a_waiver_without_a_reason_waives_nothing() -> None:
    assert find_problem(PAGE.replace("only a comment changed", ""), "aaaaaaaaaaaa")


def test_a_log_without_a_hash_is_refused() -> None:
    assert "got none" in find_problem("# A run\n", "0123456789ab")


def test_a_changed_line_of_the_operator_changes_the_hash_and_a_digest_in_the_values_does_not(tmp_path: Path) -> None:
    """Digests of images are written into the chart's values by each build."""
    values = tmp_path / "deploy" / "values.yaml"
    operator = tmp_path / "operators" / "main.py"
    for file in (values, operator):
        file.parent.mkdir()
        file.write_text('control: {digest: ""}\n')
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    subprocess.run(["git", "-C", tmp_path, "add", "."], check=True)
    before = hash_sources(tmp_path)
    values.write_text(f'control: {{digest: "sha256:{64 * "0"}"}}\n')
    assert hash_sources(tmp_path) == before
    operator.write_text("changed\n")
    assert hash_sources(tmp_path) != before
