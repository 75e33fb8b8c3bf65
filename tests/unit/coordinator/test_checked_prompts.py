"""The prompts of a run are decided once: launcher and coordinator agree, and so do all starts of the coordinator."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder, a_run

from specrl.coordinator.rollouts.checked_prompts import (
    CheckedPrompts,
    ReferenceDecision,
    load_checked_prompts,
    load_decided_prompts,
)
from specrl.errors import CheckpointInvalid, DatasetInvalid
from specrl.rewards.checks.references import ReferencePool
from specrl.spec import RunSpec, parse_spec

GOOD = "[a-z]+"
BAD = "(?=a)"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def checked_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which all references of this module are checked. Filling it starts worker processes."""
    folder = tmp_path_factory.mktemp("checked")
    a_model_folder(folder / "model")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPECRL_CACHE_DIR", str(folder / "cache"))
        load(a_spec(folder, [GOOD, BAD, "(", "x", "y", "z"]))
    return folder / "cache"


@pytest.fixture
def warm_cache(checked_before: Path, cache_folder: Path) -> None:
    """Prefills the cache, for tests that do not test the checks themselves."""
    shutil.copytree(checked_before, cache_folder)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    a_model_folder(tmp_path / "model")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def a_file(path: Path, references: list[str], on_bad_line: str) -> dict[str, Any]:
    lines = [json.dumps({"question": f"{path.name} {i}", "answer": answer}) for i, answer in enumerate(references)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return {"jsonl": {"path": str(path), "onBadLine": on_bad_line}}


def a_spec(tmp_path: Path, training: list[str], validation: list[str] | None = None, on: str = "Skip") -> RunSpec:
    changes: dict[str, Any] = {
        "prompts": {"source": a_file(tmp_path / "train.jsonl", training, on), "maxTokens": 80},
        "rewards": {"regex": {}},
    }
    if validation is not None:
        source = a_file(tmp_path / "test.jsonl", validation, on)
        changes["validation"] = {"source": source, "limit": 2, "everySteps": 1}
    return parse_spec(a_run(tmp_path, **changes))


def load(spec: RunSpec, folder: Path | None = None, said: list[tuple[int, int]] | None = None) -> CheckedPrompts:
    progress = (said if said is not None else []).append
    return asyncio.run(
        load_checked_prompts(spec, folder, lambda done, total: progress((done, total)), workers=1, tries_verifier=False)
    )


def asked(checked: CheckedPrompts) -> list[str]:
    return [checked.stream.sources[0].source.locate_problem(i).rpartition(":")[2] for i in range(len(checked.stream))]


def test_a_missing_policy_is_reported_together_with_missing_data(tmp_path: Path, run_folder: Path) -> None:
    """The data were read first, so a job that lacked both learned of the data alone, and failed again later."""
    spec = a_spec(tmp_path, [GOOD])
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointInvalid) as refused:
        load(spec)
    assert f"{tmp_path}/model: must hold the policy's tokenizer.json" in str(refused.value)
    assert f"{tmp_path}/train.jsonl" in str(refused.value)


def test_refused_references_are_left_out_and_counted_if_the_run_file_allows_it(
    tmp_path: Path, run_folder: Path
) -> None:
    spec = a_spec(tmp_path, [GOOD, BAD, GOOD, "(", "x"])
    said: list[tuple[int, int]] = []
    checked = load(spec, said=said)
    assert asked(checked) == ["1", "3", "5"]
    first, second = checked.stream.sources[0].source.skipped
    assert first.startswith(f"{tmp_path}/train.jsonl:2: a regular expression must be one of RE2's, got ")
    assert second.startswith(f"{tmp_path}/train.jsonl:4: ")
    assert said[0] == (0, 4), "different ones"
    assert said[-1] == (4, 4)


def test_a_second_start_checks_nothing_again(tmp_path: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = a_spec(tmp_path, [GOOD, BAD, "x"])
    first = load(spec)

    async def start(_: ReferencePool) -> None:
        raise AssertionError("everything is known")

    monkeypatch.setattr(ReferencePool, "start", start)
    assert asked(load(spec)) == asked(first) == ["1", "3"]
    (tmp_path / "train.jsonl").write_text(
        (tmp_path / "train.jsonl").read_text() + "\n" + json.dumps({"question": "new", "answer": "x"})
    )
    assert asked(load(spec)) == ["1", "3", "4"], "only references that are new are checked"


def test_a_run_keeps_its_decision_as_long_as_its_data_do_not_change(
    tmp_path: Path, run_folder: Path, cache_folder: Path
) -> None:
    """A reference that timed out on a busy machine would be used after a restart, and shift all prompts behind it."""
    spec = a_spec(tmp_path, [GOOD, "x", "y"])
    digest = load(spec).decision.digest
    slow = next(key for key in known(cache_folder) if load_one(spec, key) == "2")
    ReferenceDecision(digest, {slow: "took longer than timeoutS"}).write_file(run_folder)
    kept = load(spec, run_folder)
    assert asked(kept) == ["1", "3"]
    assert kept.decision == ReferenceDecision(digest, {slow: "took longer than timeoutS"})
    assert asked(load(spec)) == ["1", "2", "3"], "of another run"
    assert asked(load(a_spec(tmp_path, [GOOD, "x", "z"]), run_folder)) == ["1", "2", "3"], "with other data"


def known(cache_folder: Path) -> list[str]:
    (file,) = (cache_folder / "references").iterdir()
    return [json.loads(line)[0] for line in file.read_text().splitlines()]


def load_one(spec: RunSpec, key: str) -> str:
    """The line of the data set that has the reference with this key."""
    from specrl.prompts import open_sources
    from specrl.rewards.checks.references import CheckedReference

    source = open_sources(spec).training[0].source
    (line,) = [i + 1 for i in range(len(source)) if CheckedReference(source.problems[i].answer, None).cache_key == key]
    return str(line)


@pytest.mark.usefixtures("warm_cache")
def test_a_decision_that_cannot_be_read_is_made_again(tmp_path: Path, run_folder: Path) -> None:
    for content in (b"", b"{}", b'{"digest": "a", "refused": []}', b"\xff"):
        (run_folder / "references.json").write_bytes(content)
        assert asked(load(a_spec(tmp_path, [GOOD, BAD]), run_folder)) == ["1"]


@pytest.mark.usefixtures("warm_cache")
def test_a_validation_problem_that_replaces_another_is_checked_too(tmp_path: Path, run_folder: Path) -> None:
    checked = load(a_spec(tmp_path, [GOOD], [GOOD, BAD, "(", "x", "y"]))
    assert [prompt.answer for prompt in checked.validation] == [GOOD, "x"]


@pytest.mark.usefixtures("warm_cache")
def test_all_faults_of_both_sources_are_reported_at_once(tmp_path: Path, run_folder: Path) -> None:
    """Each start reported only one more fault: the first reference, then the next, then a prompt that was too long."""
    spec = a_spec(tmp_path, [GOOD, BAD, *["("] * 11], [BAD], on="Fail")
    with pytest.raises(DatasetInvalid, match="got 12 faults") as caught:
        load(spec)
    lines = str(caught.value).splitlines()
    assert any(f"{tmp_path}/train.jsonl:2: " in line for line in lines)
    assert any(f"{tmp_path}/train.jsonl:3 to 13: a regular expression" in line for line in lines)
    assert any(f"{tmp_path}/test.jsonl:1: a regular expression" in line for line in lines)


def test_a_reference_is_checked_for_each_reward_that_its_record_names(tmp_path: Path, run_folder: Path) -> None:
    """`[` is no expression, but text; `(?=a)` is text as well. The record's column says which of both it is."""
    records = [
        ("[", "pattern"),
        ("[", "text"),
        ("{", "text"),
        ("a+", ["text", "pattern"]),
        ("a+", "maths"),
        ("a+", None),
    ]
    lines = [json.dumps({"question": f"q{i}", "answer": it, "task": task}) for i, (it, task) in enumerate(records)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    terms = [
        {"name": "pattern", "column": "task", "verifier": {"regex": {}}},
        {"name": "text", "column": "task", "verifier": {"exact": {}}},
    ]
    source = {"jsonl": {"path": str(tmp_path / "train.jsonl"), "onBadLine": "Skip"}}
    changes = {"prompts": {"source": source, "maxTokens": 80}, "rewards": {"sum": {"terms": terms}}}
    spec = parse_spec(a_run(tmp_path, **changes))
    checked = load(spec, run_folder)
    assert asked(checked) == ["2", "3", "4"]
    first, fifth, sixth = checked.stream.sources[0].source.skipped
    assert ":1: a regular expression must be one of RE2's" in first
    assert ":5: field 'task' must name rewards of rewards.sum.terms, which are pattern, text, got maths" in fifth
    assert ":6: a reward must apply to every problem" in sixth
    checked.decision.write_file(run_folder)
    assert len(load_decided_prompts(spec, run_folder)) == 3, "tools that read the run leave out the same problems"
    assert asked(load(spec, run_folder)) == ["2", "3", "4"]


def test_a_reference_is_checked_for_the_rewards_of_its_source(tmp_path: Path, run_folder: Path) -> None:
    terms = [
        {"name": "pattern", "sources": ["patterns"], "verifier": {"regex": {}}},
        {"name": "text", "sources": ["texts"], "verifier": {"exact": {}}},
        {"name": "form", "weight": 0.5, "verifier": {"tags": {}}},
    ]
    sources = [
        {"name": name, "source": a_file(tmp_path / f"{name}.jsonl", [GOOD, "["], "Skip")}
        for name in ("patterns", "texts")
    ]
    changes = {"prompts": {"sources": sources, "maxTokens": 80}, "rewards": {"sum": {"terms": terms}}}
    checked = load(parse_spec(a_run(tmp_path, **changes)), run_folder)
    assert {named.name: len(named.source) for named in checked.stream.sources} == {"patterns": 1, "texts": 2}
    assert {checked.stream.prompt(position).source for position in range(6)} == {"patterns", "texts"}
