"""The file of the runs of the paper's table: what a run is known by, and which runs are compared."""

from __future__ import annotations

from pathlib import Path

from benchmarks.demo_runs import RUN_FILE, identify_run
from benchmarks.paper_rows import CONFIGURATIONS, LONG, Steps, rows_of
from benchmarks.paper_runs import BOOT_FILE, KeptRuns, Task, describe_start

from specrl.formats.reports import PhaseSeconds, StepReport

NONE = Task(1, LONG, CONFIGURATIONS[0])
EAGLE3 = Task(1, LONG, CONFIGURATIONS[1])
HERE = {"processor": "EPYC", "cores": "2", "boot": "1"}
ELSEWHERE = HERE | {"boot": "2"}


def steps_of(kept: KeptRuns, seconds: float) -> Steps:
    """Make three steps that generate for so many seconds each."""
    numbers = dict.fromkeys(name for name, field in StepReport.model_fields.items() if field.is_required())
    phases = PhaseSeconds(generation=seconds, train=1.0)
    fields = dict.fromkeys(numbers, 0) | {"acceptance_length": None, "phases": phases, "exposed_generation": seconds}
    return {
        (kept.start, 1, step): StepReport.model_validate(fields | {"step": step, "rollouts": 4, "tokens": 40})
        for step in (2, 3, 4)
    }


def write_models(folder: Path, drafter: bytes = b"drafter", data: bytes = b"{}\n") -> dict[str, str]:
    """Write a policy, a drafter and data. Returns the fields of the run file that name them."""
    for name, weights in (("policy", b"policy"), ("drafter", drafter)):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(weights)
        (folder / name / "acceptance.json").write_text(f'"initialised in {folder}"', encoding="utf-8")
    (folder / "train.jsonl").write_bytes(data)
    return {
        "model.path": str(folder / "policy"),
        "generation.speculation": f"{{eagle3: {{numDraftTokens: 3, path: {folder / 'drafter'}}}}}",
        "prompts.source": f"{{jsonl: {{path: {folder / 'train.jsonl'}}}}}",
    }


def test_a_run_is_known_by_the_content_of_its_models_and_data_wherever_they_are(tmp_path: Path) -> None:
    """Runs with --gsm8k were found only below the same path; runs with other drafters were taken for the same."""
    settings = identify_run(write_models(tmp_path / "one"))
    assert identify_run(write_models(tmp_path / "two")) == settings
    assert identify_run(write_models(tmp_path / "three", drafter=b"another")) != settings
    assert identify_run(write_models(tmp_path / "four", data=b"[]\n")) != settings


def test_a_run_is_known_by_its_whole_run_file(tmp_path: Path) -> None:
    """Only the fields that differ from it counted, so runs of an edited example were taken for the same."""
    edited = tmp_path / "run.yaml"
    edited.write_text(RUN_FILE.read_text(encoding="utf-8").replace("maxTokens: 112", "maxTokens: 96"), encoding="utf-8")
    fields = write_models(tmp_path / "models")
    assert identify_run(fields, edited) != identify_run(fields)


def test_a_model_that_is_written_again_is_another(tmp_path: Path) -> None:
    fields = write_models(tmp_path)
    settings = identify_run(fields)
    (tmp_path / "policy" / "model.safetensors").write_bytes(b"trained further")
    assert identify_run(fields) != settings


def test_kept_runs_are_found_by_another_start_with_what_they_were_made_with(tmp_path: Path) -> None:
    kept = KeptRuns(tmp_path / "kept.jsonl", HERE)
    key = NONE.make_key("settings")
    kept.keep_steps(key, steps_of(kept, 2))
    later = KeptRuns(tmp_path / "kept.jsonl", ELSEWHERE)
    assert later.find_pair(key, key) == (steps_of(kept, 2), steps_of(kept, 2))
    assert not later.has_run(key)
    assert later.find_pair(NONE.make_key("others"), NONE.make_key("others")) is None
    assert '"processor": "EPYC"' in (tmp_path / "kept.jsonl").read_text(encoding="utf-8")


def test_a_row_is_compared_only_with_a_reference_of_the_same_start(tmp_path: Path) -> None:
    """Steps of two machines were paired."""
    file = tmp_path / "kept.jsonl"
    reference, own = EAGLE3.reference.make_key("plain"), EAGLE3.make_key("drafts")
    assert EAGLE3.reference == NONE
    slow = KeptRuns(file, HERE)
    slow.keep_steps(reference, steps_of(slow, 30))
    fast = KeptRuns(file, ELSEWHERE)
    fast.keep_steps(own, steps_of(fast, 1))
    assert fast.find_pair(own, reference) is None
    assert rows_of(LONG, {"none": steps_of(slow, 30), "eagle3:1": steps_of(fast, 1)})[1:] == []
    fast.keep_steps(reference, steps_of(fast, 3))
    for kept in (fast, KeptRuns(file, HERE)):
        assert kept.find_pair(own, reference) == (steps_of(fast, 1), steps_of(fast, 3))


def test_a_start_is_one_boot_with_one_commit() -> None:
    found = describe_start()
    assert found["boot"] == BOOT_FILE.read_text(encoding="utf-8").strip()
    assert found.keys() >= {"processor", "cores", "specrl"}
    assert "modified" not in found["specrl"]


def test_a_line_that_a_kill_cut_off_is_dropped_and_its_run_made_again(tmp_path: Path) -> None:
    """It raised JSONDecodeError at every further start."""
    file = tmp_path / "kept.jsonl"
    kept = KeptRuns(file, HERE)
    first, second = NONE.make_key("settings"), EAGLE3.make_key("settings")
    for key in (first, second):
        kept.keep_steps(key, steps_of(kept, 3))
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    kept = KeptRuns(file, HERE)
    assert kept.has_run(first)
    assert not kept.has_run(second)
    kept.keep_steps(second, steps_of(kept, 3))
    assert file.read_bytes() == whole
