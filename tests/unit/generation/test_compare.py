"""A comparison of mechanisms refuses wrong input before it starts an engine, and asks for what the run would."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.run_files import a_run, a_run_file

from specrl.generation import compare
from specrl.spec import parse_spec


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--batches", "1,64"], "a batch must be 1 to generation.maxLiveRollouts, 32, got 64"),
        (["--batches", "0"], "a batch must be 1 to generation.maxLiveRollouts, 32, got 0"),
        (["--mechanism", "ngram:3", "--mechanism", "none"], "mechanisms must differ, got none, ngram:3, none"),
        (["--mechanism", "guess"], "a mechanism must be none, ngram"),
    ],
    ids=["too-large", "empty", "twice", "unknown"],
)
def test_a_comparison_that_cannot_be_measured_is_refused_before_an_engine_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: str,
) -> None:
    """Once larger batches waited inside vLLM and were reported as live, and a repeated mechanism leaked an engine.

    There is no policy here, so that a start would end with another message.
    """
    generation = {"sampling": {"maxTokens": 16}, "maxLiveRollouts": 32}
    file = a_run_file(tmp_path, generation=generation)
    monkeypatch.setattr(sys, "argv", ["compare", "--spec", str(file), "--mechanism", "none", *options])
    with pytest.raises(SystemExit) as ended:
        compare.main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_requests_of_a_comparison_end_at_the_runs_stop_strings() -> None:
    """Once they did not, so that a comparison measured longer rollouts than the run's."""
    spec = parse_spec(a_run(Path("run"), generation={"sampling": {"maxTokens": 16, "stop": ["</answer>"]}}))
    assert compare.build_request(spec, (3,), "r", 1).sampling.stop == ("</answer>",)
