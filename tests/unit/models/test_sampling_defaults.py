"""What a policy's generation_config.json proposes is not applied, and each difference is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_run

from specrl.models.sampling_defaults import list_sampling_notices
from specrl.spec import parse_spec


@pytest.mark.parametrize(
    ("proposed", "said"),
    [
        ({"eos_token_id": [1, 2], "do_sample": True}, []),
        ({"temperature": 0.7, "top_p": 1.0, "top_k": 0, "max_new_tokens": 16, "repetition_penalty": 1.0}, []),
        ({"temperature": 0.6, "top_k": 20}, ["temperature 0.6, and the run has 0.7, top_k 20, and the run has 0"]),
        ({"repetition_penalty": 1.5, "min_p": 0.5}, ["min_p 0.5, which runs do not have, repetition_penalty 1.5, "]),
        ({"do_sample": False}, ["greedy decoding, and the run has temperature 0.7"]),
    ],
)
def test_each_difference_is_said_once(tmp_path: Path, proposed: dict[str, Any], said: list[str]) -> None:
    spec = parse_spec(a_run(tmp_path, generation={"sampling": {"maxTokens": 16, "temperature": 0.7}}))
    assert list(list_sampling_notices(spec, tmp_path)) == []
    (tmp_path / "generation_config.json").write_text(json.dumps(proposed))
    found = list(list_sampling_notices(spec, tmp_path))
    assert [words in notice for words, notice in zip(said, found, strict=True)] == [True] * len(said)
