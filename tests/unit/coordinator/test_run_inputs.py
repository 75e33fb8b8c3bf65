"""A run goes on only with the run file and the data that it began with. A changed reward function is said."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder, a_run

from specrl.coordinator.ledger import SqliteStore, make_claim
from specrl.coordinator.ledger.ledger import DurableFacts
from specrl.coordinator.ledger.run_inputs import RunInputs, collect_inputs, continue_with
from specrl.errors import RunInvalid, SpecInvalid
from specrl.launcher import preflight
from specrl.prompts import load_prompts, load_validation, open_sources
from specrl.spec import RunSpec, parse_spec

GRADE = "from helper import score\n\ndef grade(reference, completion):\n    return score(reference, completion)\n"


def write_data(folder: Path, name: str, count: int, first: int = 0) -> dict[str, Any]:
    lines = [
        json.dumps({"question": f"{name} {i}?", "answer": str(i), "level": 1}) for i in range(first, first + count)
    ]
    (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return {"jsonl": {"path": str(folder / f"{name}.jsonl")}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A policy, three data sets and a reward function that imports a module beside it."""
    a_model_folder(tmp_path / "model")
    for name, count in (("math", 300), ("code", 4), ("test", 3)):
        write_data(tmp_path, name, count)
    (tmp_path / "my_rewards.py").write_text(GRADE)
    (tmp_path / "helper.py").write_text("import math\n\ndef score(reference, completion):\n    return 1.0\n")
    (tmp_path / "unrelated.py").write_text("")
    return tmp_path


def a_spec(folder: Path, **changes: Any) -> RunSpec:
    sources = [
        {"name": name, "weight": weight, "source": {"jsonl": {"path": str(folder / f"{name}.jsonl")}}}
        for name, weight in (("math", 3), ("code", 1))
    ]
    run: dict[str, Any] = {
        "prompts": {"sources": sources, "maxTokens": 80},
        "validation": {"source": {"jsonl": {"path": str(folder / "test.jsonl")}}},
        "rewards": {"python": {"function": "my_rewards:grade", "folder": str(folder)}},
    }
    return parse_spec(a_run(folder, **(run | changes)))


def collect(spec: RunSpec) -> RunInputs:
    return collect_inputs(
        spec, load_prompts(spec).identify_sources(), load_validation(spec, open_sources(spec).validation)
    )


def test_the_same_inputs_are_accepted_after_they_were_stored(folder: Path) -> None:
    before = collect(a_spec(folder))
    stored = RunInputs.model_validate(json.loads(json.dumps(before.model_dump(by_alias=True))))
    assert continue_with(stored, collect(a_spec(folder)), 4) == before
    assert continue_with(None, before, 1) == before


@pytest.mark.parametrize(
    ("name", "count", "first", "said"),
    [
        ("math", 200, 0, "prompts source math: 200 problems (digest .*was 300 problems"),
        ("code", 4, 1, "prompts source code: 4 problems (digest .*was 4 problems"),
        ("test", 2, 0, "validation source main: 2 problems (digest .*was 3 problems"),
    ],
)
def test_other_problems_behind_the_same_path_are_refused(
    folder: Path, name: str, count: int, first: int, said: str
) -> None:
    """A resumed run was once accepted with 40 of its 64 problems, and went on to its last step without a word."""
    before = collect(a_spec(folder))
    write_data(folder, name, count, first)
    with pytest.raises(RunInvalid, match=f"the data must be as they were.*\n  {said.replace('(', '[(]')}"):
        continue_with(before, collect(a_spec(folder)), 4)


def test_a_problem_beyond_the_first_256_and_a_column_of_a_verifier_are_compared(folder: Path) -> None:
    """The identity of a stream had the first 256 problems alone, and nothing of the columns that a function reads."""
    before = collect(a_spec(folder))
    lines = (folder / "math.jsonl").read_text().splitlines()
    for old, new in (('"answer": "299"', '"answer": "300"'), ('"level": 1', '"level": 2')):
        (folder / "math.jsonl").write_text("\n".join([*lines[:-1], lines[-1].replace(old, new)]))
        with pytest.raises(RunInvalid, match="prompts source math"):
            continue_with(before, collect(a_spec(folder)), 4)


def test_an_edited_run_file_is_refused_and_every_edit_is_named(folder: Path) -> None:
    """A learning rate that was edited in the run's folder was used from the next step on, without a word."""
    before = collect(a_spec(folder))
    edited = a_spec(folder, trainer={"optimizer": {"learningRate": "1e-4"}, "microBatchTokens": 2048})
    with pytest.raises(RunInvalid) as caught:
        continue_with(before, collect(edited), 4)
    assert "run.yaml must be as it was when the run began" in str(caught.value)
    assert '\n  trainer.optimizer.learningRate: "0.0001", was "0.001"' in str(caught.value)
    assert "\n  trainer.microBatchTokens: 2048, was 1024" in str(caught.value)
    assert "--checkpoint" in str(caught.value)


def test_the_number_of_replicas_may_change_and_a_new_field_counts_as_its_default(folder: Path) -> None:
    before = collect(a_spec(folder))
    del before.run_file["canary"]  # as if this version of specrl had introduced the section
    more = a_spec(folder, generation={"replicas": 3, "sampling": {"maxTokens": 16}})
    assert continue_with(before, collect(more), 4).functions == before.functions


def test_a_run_of_a_newer_version_goes_on_in_this_one_unless_it_needs_a_field_that_this_one_lacks(folder: Path) -> None:
    """`helm rollback`, and a suspension: the older coordinator took the newer version's default for an edit, and the
    job was RunRefused."""
    before = collect(a_spec(folder))
    before.run_file["schedule"]["newField"] = 1
    before.run_file["newSection"] = {"mode": "Off"}
    assert continue_with(before, collect(a_spec(folder)), 4).functions == before.functions
    before.given["schedule"]["newField"] = 1
    with pytest.raises(RunInvalid, match=r"schedule\.newField: not given, was 1"):
        continue_with(before, collect(a_spec(folder)), 4)


def test_a_changed_reward_function_is_recorded_with_the_step(folder: Path) -> None:
    """It was taken silently: the mean reward of a run rose from 0.3 to 0.9 at the step of a restart."""
    before = collect(a_spec(folder))
    assert sorted(Path(path).name for path in before.functions) == ["helper.py", "my_rewards.py"]
    (folder / "unrelated.py").write_text("changed = True\n")
    (folder / "helper.py").write_text("def score(reference, completion):\n    return 0.0\n")
    now = continue_with(before, collect(a_spec(folder)), 15)
    helper = str(folder / "helper.py")
    assert [(change.step, change.files) for change in now.function_changes] == [(15, [helper])]
    assert continue_with(now, collect(a_spec(folder)), 20).function_changes == now.function_changes


@pytest.mark.parametrize("function", ["my_rewards:grade", "lib.helpers:score"])
def test_a_folder_without_init_is_searched_like_a_package(folder: Path, function: str) -> None:
    """The coordinator ended with an AttributeError at every start of a run whose function imported from one."""
    (folder / "lib/deep").mkdir(parents=True)
    (folder / "lib/helpers.py").write_text(
        "from .deep import inner\nfrom lib.deep.other import x\nscore = inner.score\n"
    )
    (folder / "lib/deep/inner.py").write_text("def score(reference, completion):\n    return 1.0\n")
    (folder / "lib/deep/other.py").write_text("x = 1\n")
    (folder / "my_rewards.py").write_text("import lib.helpers as helpers\ngrade = helpers.score\n")
    found = collect(a_spec(folder, rewards={"python": {"function": function, "folder": str(folder)}})).functions
    imported = ["lib/deep/inner.py", "lib/deep/other.py", "lib/helpers.py"]
    expected = [*imported, "my_rewards.py"] if function == "my_rewards:grade" else imported
    assert [str(Path(path).relative_to(folder)) for path in found] == expected


def test_a_folder_with_the_name_of_an_installed_package_does_not_matter(folder: Path) -> None:
    """`import wandb` beside the `wandb` folder that an earlier run had written ended the coordinator, too."""
    (folder / "wandb/run-1").mkdir(parents=True)
    (folder / "my_rewards.py").write_text(f"import wandb\nfrom wandb import init\n{GRADE}")
    found = collect(a_spec(folder)).functions
    assert [Path(path).name for path in found] == ["helper.py", "my_rewards.py"]


@pytest.mark.parametrize("code", [b"x = " + b"-" * 20000 + b"1", b"x = " + b"-" * 5000 + b"1", b"\0", b"def"])
def test_a_module_that_cannot_be_parsed_hides_no_other(folder: Path, code: bytes) -> None:
    """Python raises a MemoryError for source that is too complex, which ended the coordinator."""
    (folder / "broken.py").write_bytes(code)
    (folder / "my_rewards.py").write_text(f"try:\n    import broken\nexcept Exception:\n    pass\n{GRADE}")
    found = collect(a_spec(folder)).functions
    assert [Path(path).name for path in found] == ["helper.py", "my_rewards.py"]
    collect(a_spec(folder, rewards={"python": {"function": "broken:grade", "folder": str(folder)}}))


def test_an_installed_function_is_found_without_importing_it(folder: Path) -> None:
    found = collect(a_spec(folder, rewards={"python": {"function": "tests.run_files:a_run"}})).functions
    assert [Path(path).name for path in found] == ["run_files.py"]


def test_resume_is_refused_before_any_process_starts(folder: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    spec = a_spec(folder)
    stored = DurableFacts(inputs=collect(spec)).model_dump(by_alias=True, include={"inputs"})
    with closing(SqliteStore(directory / "store.db", make_claim(directory))) as store:
        store.set_fact("inputs", stored["inputs"])
    checked = preflight.check_data(spec, directory, preflight.ignore_progress, tries_verifier=False)
    assert list(preflight.list_function_notices(spec, directory, checked)) == []
    (folder / "my_rewards.py").write_text(GRADE + "# repaired\n")
    (notice,) = preflight.list_function_notices(spec, directory, checked)
    assert notice.startswith(f"{folder / 'my_rewards.py'} changed since the run was last started")
    write_data(folder, "code", 5)
    with pytest.raises(SpecInvalid, match="prompts source code: 5 problems"):
        preflight.check_run(spec, directory, available_bytes=lambda: 1 << 40)
