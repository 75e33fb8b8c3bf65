"""The line that a finished run prints to serve its export is the one that docs/serving.md explains."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from tests.run_files import a_run

from specrl.cli.command_exit import build_serving_line
from specrl.formats.reports import RunSummary
from specrl.spec import RunSpec
from specrl.spec.generation import Mtp, Speculation

PAGE = Path(__file__).parents[3] / "docs" / "serving.md"


def a_summary(run: str, *, has_drafter: bool = True) -> RunSummary:
    paths = {"policy_path": f"{run}/export/policy", "drafter_path": f"{run}/export/drafter" if has_drafter else ""}
    return RunSummary.model_construct(**paths)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    speculation = {"eagle3": {"numDraftTokens": 3}}
    model = {"path": str(tmp_path / "model"), "dtype": "bfloat16", "maxLength": 128}
    generation = {"sampling": {"maxTokens": 16}, "speculation": speculation}
    return RunSpec.model_validate(a_run(tmp_path, model=model, generation=generation))


def test_the_page_has_the_line_that_a_run_prints(spec: RunSpec) -> None:
    assert f"    {build_serving_line(a_summary('RUN'), spec)}\n" in PAGE.read_text(encoding="utf-8")


def test_paths_are_quoted_for_a_shell(spec: RunSpec) -> None:
    words = shlex.split(build_serving_line(a_summary("/my runs/it's"), spec))
    assert words[2] == "/my runs/it's/export/policy"
    assert json.loads(words[-1])["model"] == "/my runs/it's/export/drafter"


def test_native_heads_are_served_from_the_policys_folder(spec: RunSpec) -> None:
    speculation = spec.generation.speculation.model_copy(update={"eagle3": None, "mtp": Mtp(num_draft_tokens=1)})
    generation = spec.generation.model_copy(update={"speculation": speculation})
    line = build_serving_line(a_summary("RUN", has_drafter=False), spec.model_copy(update={"generation": generation}))
    words = shlex.split(line)
    assert words[:3] == ["vllm", "serve", "RUN/export/policy"]
    assert json.loads(words[-1]) == {"method": "mtp", "num_speculative_tokens": 1}
    assert line.partition("bfloat16 ")[2] in PAGE.read_text(encoding="utf-8")


def test_a_policy_without_a_drafter_is_served_without_speculation(spec: RunSpec) -> None:
    line = build_serving_line(a_summary("RUN", has_drafter=False), spec)
    assert line == "vllm serve RUN/export/policy --dtype bfloat16"


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_draft_model_is_served_from_the_export_if_it_was_trained(is_trained: bool, spec: RunSpec) -> None:
    draft_model = Speculation.model_validate({"draftModel": {"path": "/small", "numDraftTokens": 2}})
    generation = spec.generation.model_copy(update={"speculation": draft_model})
    summary = a_summary("RUN", has_drafter=is_trained)
    words = shlex.split(build_serving_line(summary, spec.model_copy(update={"generation": generation})))
    model = "RUN/export/drafter" if is_trained else "/small"
    assert json.loads(words[-1]) == {"method": "draft_model", "model": model, "num_speculative_tokens": 2}
