"""What a run asks is decided once: by what can be judged, the same for launcher and coordinator and at every start."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder, a_run

from specrl.coordinator.checked_prompts import CheckedPrompts, Decision, load_checked_prompts
from specrl.errors import CheckpointInvalid, DatasetInvalid
from specrl.rewards.references import ReferencePool
from specrl.spec import RunSpec, parse_spec

GOOD, BAD = "[a-z]+", "(?=a)"


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def checked_before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache after all references of this module were checked, which starts a process."""
    folder = tmp_path_factory.mktemp("checked")
    a_model_folder(folder / "model")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SPECRL_CACHE_DIR", str(folder / "cache"))
        load(a_spec(folder, [GOOD, BAD, "(", "x", "y", "z"]))
    return folder / "cache"


@pytest.fixture
def warm_cache(checked_before: Path, cache_folder: Path) -> None:
    """For tests of what is decided by the checks, not of the checks."""
    shutil.copytree(checked_before, cache_folder)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    a_model_folder(tmp_path / "model")
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def a_file(path: Path, references: list[str], on_bad_line: str) -> dict[str, Any]:
    lines = [json.dumps({"question": f"{path.name} {i}", "answer": answer}) for i, answer in enumerate(references)]
    path.write_text("\n".join(lines))
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
    return [checked.stream.source.place(i).rpartition(":")[2] for i in range(len(checked.stream))]


def test_a_missing_policy_is_reported_together_with_missing_data(tmp_path: Path, run_folder: Path) -> None:
    """The data were read first, so a job without either was told of the data alone, and failed again when they came."""
    spec = a_spec(tmp_path, [GOOD])
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointInvalid) as refused:
        load(spec)
    assert f"{tmp_path}/model: must hold the policy's tokenizer.json" in str(refused.value)
    assert f"{tmp_path}/train.jsonl" in str(refused.value)


def test_references_that_cannot_be_used_are_left_out_and_counted_where_they_may_be(
    tmp_path: Path, run_folder: Path
) -> None:
    spec = a_spec(tmp_path, [GOOD, BAD, GOOD, "(", "x"])
    said: list[tuple[int, int]] = []
    checked = load(spec, said=said)
    assert asked(checked) == ["1", "3", "5"]
    first, second = checked.stream.source.left_out.skipped
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


def test_a_run_keeps_its_decision_as_long_as_its_data_stay(
    tmp_path: Path, run_folder: Path, cache_folder: Path
) -> None:
    """A reference that took too long on a busy machine would be asked after a restart, and shift all others."""
    spec = a_spec(tmp_path, [GOOD, "x", "y"])
    digest = load(spec).decision.digest
    slow = next(key for key in known(cache_folder) if load_one(spec, key) == "2")
    Decision(digest, {slow: "took longer than timeoutS"}).write(run_folder)
    kept = load(spec, run_folder)
    assert asked(kept) == ["1", "3"]
    assert kept.decision == Decision(digest, {slow: "took longer than timeoutS"})
    assert asked(load(spec)) == ["1", "2", "3"], "of another run"
    assert asked(load(a_spec(tmp_path, [GOOD, "x", "z"]), run_folder)) == ["1", "2", "3"], "with other data"


def known(cache_folder: Path) -> list[str]:
    (file,) = (cache_folder / "references").iterdir()
    return [json.loads(line)[0] for line in file.read_text().splitlines()]


def load_one(spec: RunSpec, key: str) -> str:
    """The line of the reference with this key."""
    from specrl.prompts import open_sources
    from specrl.rewards.references import Reference

    source = open_sources(spec).training
    (line,) = [i + 1 for i in range(len(source)) if Reference(source.problem(i).answer, None).key == key]
    return str(line)


@pytest.mark.usefixtures("warm_cache")
def test_a_decision_that_cannot_be_read_is_made_again(tmp_path: Path, run_folder: Path) -> None:
    for content in (b"", b"{}", b'{"digest": "a", "refused": []}', b"\xff"):
        (run_folder / "references.json").write_bytes(content)
        assert asked(load(a_spec(tmp_path, [GOOD, BAD]), run_folder)) == ["1"]


@pytest.mark.usefixtures("warm_cache")
def test_a_validation_problem_that_takes_another_s_place_is_checked_too(tmp_path: Path, run_folder: Path) -> None:
    checked = load(a_spec(tmp_path, [GOOD], [GOOD, BAD, "(", "x", "y"]))
    assert [prompt.answer for prompt in checked.validation] == [GOOD, "x"]


@pytest.mark.usefixtures("warm_cache")
def test_all_faults_of_both_sources_are_reported_at_once(tmp_path: Path, run_folder: Path) -> None:
    """Each start named one more: the first reference, then the next, then a prompt's length."""
    spec = a_spec(tmp_path, [GOOD, BAD, *["("] * 11], [BAD], on="Fail")
    with pytest.raises(DatasetInvalid, match="got 12 that break this") as caught:
        load(spec)
    lines = str(caught.value).splitlines()
    assert sum(f"{tmp_path}/train.jsonl:" in line for line in lines[1:]) == 10
    assert any(line.endswith("and 2 more") for line in lines)
    assert any(f"{tmp_path}/test.jsonl:1: a regular expression" in line for line in lines)
