"""Tests of generation/compilation.py: whether a replica on CPUs compiles its models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.vllm_cases import a_spec

from specrl.generation import compilation
from specrl.models import ModelFolder
from specrl.spec import RunSpec

LAYERS = 8


@pytest.fixture(autouse=True)
def cpus_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "visible_gpus", tuple)
    monkeypatch.setattr(compilation, "can_compile", lambda: True)


def a_policy(layers: int | None = LAYERS) -> ModelFolder:
    config = {} if layers is None else {"num_hidden_layers": layers}
    return ModelFolder(Path("/policy"), "model.path", config, {}, None)


def a_run(steps: int, speculation: dict[str, Any] | None = None, **generation: Any) -> RunSpec:
    """64 rollouts of up to 200 tokens in each step, all of them live."""
    fields = {"sampling": {"maxTokens": 200}, "maxLiveRollouts": 64} | generation
    schedule = {"steps": steps, "promptsPerStep": 8, "groupSize": 8}
    return a_spec(Path("/policy"), speculation, generation=fields, schedule=schedule)


def is_compiled(spec: RunSpec, policy: ModelFolder | None = None) -> bool:
    chosen = compilation.resolve_eager(spec, policy or a_policy())
    assert chosen.generation.eager is not None
    return not chosen.generation.eager


def test_long_runs_compile_and_short_ones_do_not() -> None:
    assert not is_compiled(a_run(24))
    assert is_compiled(a_run(10_000))


def test_models_with_more_layers_compile_for_shorter_runs() -> None:
    def shortest(layers: int) -> int:
        return next(steps for steps in range(1, 10_000) if is_compiled(a_run(steps), a_policy(layers)))

    assert shortest(64) < shortest(16) < shortest(4)


def test_steps_are_counted_for_one_replica() -> None:
    once = compilation.estimate_gain(a_run(10), LAYERS).steps
    assert once == 10 * 100
    assert compilation.estimate_gain(a_run(10, maxLiveRollouts=16), LAYERS).steps == 4 * once
    assert compilation.estimate_gain(a_run(10, maxLiveRollouts=16, replicas=2), LAYERS).steps == 2 * once
    assert compilation.estimate_gain(a_run(10, maxLiveRollouts=256), LAYERS).steps == once
    assert compilation.estimate_gain(a_run(10, {"ngram": {}}), LAYERS).steps == once / 2


def test_what_the_run_file_says_is_kept() -> None:
    assert not is_compiled(a_run(10_000, eager=True))
    assert is_compiled(a_run(1, eager=False))


def test_gpus_keep_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "visible_gpus", lambda: ("0",))
    assert compilation.resolve_eager(a_run(10_000), a_policy()).generation.eager is None


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "can_compile", lambda: False)
    assert not is_compiled(a_run(10_000))


def test_model_that_names_no_layers_is_not_compiled() -> None:
    assert not is_compiled(a_run(10_000), a_policy(None))


def test_compiling_needs_torchs_compiler_and_pythons_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    compiler = tmp_path / "my-c++"
    compiler.touch(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda _: str(tmp_path))
    assert not compilation.can_compile()
    (tmp_path / "Python.h").touch()
    assert compilation.can_compile()
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    assert not compilation.can_compile()
