"""`specrl report` makes a self-contained page of any run that trained a step, and refuses others with a message."""

from __future__ import annotations

import fcntl
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.unit.report.runs import a_folder, a_step
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.formats.reports import Phase, SourceReport, StatusReport, StepReport, ValidationReport
from specrl.report import comparison, render, sections
from specrl.report.reading import load_run

KEY_ERROR = "KeyError at my_rewards.py:12"


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """Parses a page: elements that are not closed, all elements, and all addresses that it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.seen: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.addresses += [value or "" for name, value in attributes if name in {"src", "href", "data", "action"}]
        if tag not in {"meta", "link", "br", "img"}:
            self.opened.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def a_page(directory: Path) -> str:
    return (directory / "report.html").read_text()


def test_a_finished_run_has_all_of_its_figures_in_both_pages(tmp_path: Path) -> None:
    validations = [
        ValidationReport(
            policy_version=v, reward=0.25 * v, reward_low=v * 0.125, reward_high=0.75, problems=40, seconds=1.0
        )
        for v in (0, 2)
    ]
    directory = a_folder(tmp_path / "runs", validations=validations)
    result = report(directory.path)
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(directory.path / "report.html"), str(directory.path / "report.md")]
    text = (directory.path / "report.md").read_text()
    for row in (
        "| generation | 4.00 s | 40 % |",
        "| step | 10.0 s | 100 % |",
        "| accepted at position 2 | 30 % |",
        "| version 2 | 0.500 | 0.250 to 0.750 | 40 | - | - |",
        "| lag 1 | 12 | 75 % |",
        "| rollouts requeued because their replica was lost | 3 |",
        "| processor | Z80 |",
    ):
        assert row in text, text
        assert all(cell.strip() in a_page(directory.path) for cell in row.strip("| ").split("|"))
    assert "failed a record check" not in text, "counters of 0 are not listed"


def test_each_source_of_a_validation_has_a_row_of_its_own(tmp_path: Path) -> None:
    def scores(reward: float, problems: int, **more: Any) -> ValidationReport:
        return ValidationReport(policy_version=2, reward=reward, problems=problems, seconds=1.0, **more)

    whole = scores(0.4, 5, sources={"math": scores(0.25, 4), "code": scores(1.0, 1)})
    directory = a_folder(tmp_path / "runs", validations=[whole])
    assert report(directory.path).exit_code == 0
    text = (directory.path / "report.md").read_text()
    rows = (
        "| version 2 | 0.400 | - | 5 |",
        "| version 2, math | 0.250 | - | 4 |",
        "| version 2, code | 1.000 | - | 1 |",
    )
    assert [row in text for row in rows] == [True] * 3, text


def test_both_pages_count_missing_answers_and_verifier_errors(tmp_path: Path) -> None:
    steps = [
        a_step(1, verdicts=10, no_answer=1, ungraded=10, verifier_errors={"KeyError at rewards.py:12": 3}),
        a_step(2, verdicts=10, no_answer=4, verifier_errors={"KeyError at rewards.py:12": 1, "timeout": 2}),
    ]
    directory = a_folder(tmp_path / "runs", steps)
    report(directory.path)
    text = (directory.path / "report.md").read_text()
    for row in (
        "| no answer found | 5 | 25 % | 40 % |",
        "| verifier raised, crashed or timed out | 6 | 30 % | 30 % |",
        "| ungraded; sampled again | 10 | 33 % | 50 % |",
        "| KeyError at rewards.py:12 | 4 |",
        "| timeout | 2 |",
    ):
        assert row in text, text
        assert all(cell.strip() in a_page(directory.path) for cell in row.strip("| ").split("|"))


def test_the_page_fetches_nothing_and_works_with_a_screen_reader(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs")
    report(directory.path)
    page = Page(a_page(directory.path))
    assert page.opened == []
    assert page.addresses == []
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert re.findall(r"url\(|@import|https?://", a_page(directory.path)) == []
    assert page.seen.count("svg") == page.seen.count("title") - 1 >= 5, "each chart has an alternative text"
    assert page.seen.count("table") == page.seen.count("caption") >= 5


def test_text_of_the_run_is_escaped_in_the_page(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", phase=None, prompts={
        "source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 80, "template": "<script>{question}|",
    })  # fmt: skip
    failed = StatusReport(run="tiny", phase=Phase.FAILED, error="</p><script>alert(1)</script> | *")
    directory.status_file.write_text(failed.model_dump_json(by_alias=True))
    assert report(directory.path).exit_code == 0
    assert "script" not in Page(a_page(directory.path)).seen
    assert r"\</p\>\<script\>alert(1)\</script\> \| \*" in (directory.path / "report.md").read_text()


def test_a_report_names_the_isolation_of_each_sandbox(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", phase=None)
    status = StatusReport(run="tiny", phase=Phase.FINISHED, isolations={"rewards.code": "Landlock"})
    directory.status_file.write_text(status.model_dump_json(by_alias=True))
    report(directory.path)
    assert "| isolation | rewards.code: Landlock |" in (directory.path / "report.md").read_text()


def test_a_report_says_whether_the_run_is_interrupted_or_in_progress(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", phase=Phase.TRAINING)
    assert load_run(directory).run_state == "interrupted"
    assert "was interrupted" in sections.list_notices(load_run(directory))[0]
    with directory.lock_file.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "in progress" in sections.list_notices(load_run(directory))[0]


def test_unreadable_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", [a_step(1), a_step(2), a_step(4)])
    with directory.metrics_file.open("a") as file:
        file.write('nonsense\n{"step": 5}\n{"step": 6, "cut')
    found = load_run(directory)
    assert [step.step for step in found.steps] == [1, 2, 4]
    said = sections.list_notices(found)
    assert any("2 lines of its files could not be read" in notice for notice in said)
    assert any("1 steps before the last one have no line" in notice for notice in said)


def test_a_step_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", [a_step(1), a_step(2, reward=0.1), a_step(2, reward=0.7)])
    assert [step.reward for step in load_run(directory).steps] == [0.5, 0.7]


@pytest.mark.parametrize(("lines", "said"), [("", "none in metrics.jsonl"), ("{}\n", "and 1 unreadable lines")])
def test_a_run_without_steps_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    directory = a_folder(tmp_path / "runs", [], phase=None)
    directory.metrics_file.write_text(lines)
    result = report(directory.path)
    assert result.exit_code == 2
    assert "a run must have trained a step to be reported" in result.stderr
    assert said in result.stderr
    assert not (directory.path / "report.html").exists()


@pytest.mark.parametrize("validations", [(), (0, 2)])
def test_a_run_without_any_reward_has_a_report(tmp_path: Path, validations: tuple[int, ...]) -> None:
    """The reward chart once raised for such a run. A user needs the report most when every rollout is ungraded."""
    steps = [
        a_step(step, reward=None, reward_error=None, rollouts=0, tokens=0, policy_lags=[], acceptance_length=None)
        for step in (1, 2)
    ]
    found = [
        ValidationReport(policy_version=v, reward=0.0, problems=4, answers=4, seconds=1.0, failures={KEY_ERROR: 4})
        for v in validations
    ]
    directory = a_folder(tmp_path / "runs", steps, found)
    result = report(directory.path)
    assert result.exit_code == 0, result.output
    text = (directory.path / "report.md").read_text()
    assert "> No rollout was graded, so nothing was learned." in text
    assert "Mean reward of each step" not in text, "an empty chart is omitted"
    assert "reward**" not in text.split("##")[0], "the headline has no reward"
    assert ("| 0 of 4 graded, 4 failed: KeyError at my\\_rewards.py:12 (4) |" in text) == bool(validations)
    other = a_folder(tmp_path / "runs", steps)
    assert report(directory.path, other.path).exit_code == 0, "it can also be compared"


def test_a_report_shows_each_of_several_rewards(tmp_path: Path) -> None:
    terms = [
        {"name": "answer", "verifier": {"exact": {}}},
        {"name": "tags", "weight": 0.5, "verifier": {"tags": {}}},
    ]
    steps = [a_step(n, rewards={"answer": 0.25 * n, "tags": 0.5}) for n in (1, 2)]
    validation = ValidationReport(policy_version=0, reward=0.5, rewards={"tags": 0.125}, problems=4, seconds=1.0)
    rewards = {"sum": {"terms": terms}}
    directory = a_folder(tmp_path / "runs", steps, [validation], rewards=rewards)
    assert report(directory.path).exit_code == 0
    text = (directory.path / "report.md").read_text()
    assert "| answer | 1 | 0.250 | 0.500 | - | - |" in text
    assert "| tags | 0.5 | 0.500 | 0.500 | - | 0.125 |" in text
    assert "judged by exact (answer, weight 1), tags (tags, weight 0.5)" in text
    assert "Rewards by name, before weighting" in a_page(directory.path)


def test_a_report_shows_the_reward_of_each_training_source(tmp_path: Path) -> None:
    def parts(**rewards: float) -> dict[str, SourceReport]:
        return {name: SourceReport(reward=it, groups=2, groups_without_signal=1) for name, it in rewards.items()}

    steps = [a_step(1, sources=parts(math=0.25, code=0.5)), a_step(2, sources=parts(math=0.75))]
    directory = a_folder(tmp_path / "runs", steps)
    assert report(directory.path).exit_code == 0
    text = (directory.path / "report.md").read_text()
    assert "| math | 0.250 | 0.750 | 2 of 4 | - | - |" in text
    assert "| code | - | 0.500 | 1 of 2 | - | - |" in text
    assert "Reward by source" in a_page(directory.path)
    found = json.loads(report(directory.path, "--json").stdout)
    assert found["sources"] == {"math": {"first": 0.25, "last": 0.75}, "code": {"first": None, "last": 0.5}}


def test_a_report_says_how_many_steps_drafted(tmp_path: Path) -> None:
    """A drafter that was off in most steps had a mean that read as that of all of them."""
    steps = [a_step(n, acceptance_length=2.0 if n == 1 else None, draft_length=3.0) for n in (1, 2, 3)]
    speculation = {"speculation": {"ngram": {}}, "sampling": {"maxTokens": 16}}
    directory = a_folder(tmp_path / "runs", steps, generation=speculation)
    assert report(directory.path).exit_code == 0
    assert "Drafts, over the 1 of 3 steps that drafted" in (directory.path / "report.md").read_text()


def test_a_report_names_the_replicas_that_were_given_up(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", phase=None)
    status = StatusReport(run="tiny", phase=Phase.FAILED, replicas_given_up={"gen-1": "no memory"})
    directory.status_file.write_text(status.model_dump_json(by_alias=True))
    assert report(directory.path).exit_code == 0
    assert "| gen-1 | no memory |" in (directory.path / "report.md").read_text()
    assert json.loads(report(directory.path, "--json").stdout)["replicasGivenUp"] == {"gen-1": "no memory"}


def test_the_report_of_a_run_that_failed_before_its_first_step_has_the_reason(tmp_path: Path) -> None:
    """A verifier that always fails ends the run at step 1. Its report was once refused."""
    directory = a_folder(tmp_path / "runs", [], phase=None)
    status = StatusReport(
        run="tiny", phase=Phase.FAILED, error="step 1 must have a graded rollout", verdict_failures={KEY_ERROR: 60}
    )
    directory.status_file.write_text(status.model_dump_json(by_alias=True))
    assert report(directory.path).exit_code == 0
    text = (directory.path / "report.md").read_text()
    assert "> The run failed: step 1 must have a graded rollout" in text
    assert "failed after 0 of 2 steps" in text
    assert "| KeyError at my\\_rewards.py:12 | 60 |" in text
    whole = a_folder(tmp_path / "runs")
    refused = report(whole.path, directory.path)
    assert refused.exit_code == 2
    assert "must have trained a step to be compared" in refused.stderr


def test_the_report_warns_first_if_no_group_has_a_signal(tmp_path: Path) -> None:
    """The report once did not mention that all rewards were equal."""
    silent = [a_step(step, groups=4, groups_without_signal=4) for step in (1, 2)]
    found = sections.build_run_report(load_run(a_folder(tmp_path / "runs", silent)))
    assert "8 of 8 groups have no training signal: the rewards within each group are equal." in found.notices
    some = [a_step(1, groups=4, groups_without_signal=4), a_step(2, groups=4, groups_without_signal=3)]
    found = sections.build_run_report(load_run(a_folder(tmp_path / "runs", some)))
    assert not any("training signal" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (1, "Mean reward of each step: 0.10 (a single step)."),
        (2, "Mean reward of each step: 0.10 → 0.20 (first and last step)."),
        (3, "Mean reward of each step: 0.10 → 0.30 (first and last step)."),
        (9, "Mean reward of each step: 0.25 → 0.75 (means of the first and of the last 4 steps)."),
        (12, "Mean reward of each step: 0.30 → 1.00 (means of the first and of the last 5 steps)."),
    ],
)
def test_no_step_counts_among_the_first_and_the_last(tmp_path: Path, steps: int, said: str) -> None:
    """With up to 9 steps the windows of five overlapped: "reward 0.485 -> 0.485 (+0.000)" for 0.650 ... 0.300."""
    directory = a_folder(tmp_path / "runs", [a_step(step, reward=step / 10) for step in range(1, steps + 1)])
    (learnt,) = [
        it for it in sections.build_run_report(load_run(directory)).sections if it.title == "Rewards and validations"
    ]
    assert learnt.charts[0].alternative == said


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs")
    taken = tmp_path / "taken"
    taken.write_text("")
    for arguments, said in (
        ((tmp_path / "nowhere",), "RUN must be a run's folder"),
        ((directory.path, tmp_path / "nowhere"), "RUN must be a run's folder"),
        ((directory.path, "--out", taken), "--out must be a folder, or a file that ends in .html or .md"),
        ((directory.path, "--out", taken / "below" / "x.html"), "--out must be writable"),
    ):
        result = report(*arguments)
        assert result.exit_code == 2, arguments
        assert said in result.stderr
        assert result.stderr.count("specrl: ") == 1


def test_out_chooses_where_both_pages_are_written(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs")
    for out, names in ((tmp_path / "a", "report"), (tmp_path / "b" / "mine.md", "mine"), (tmp_path / "c.html", "c")):
        assert report(directory.path, "--out", out).exit_code == 0
        folder = out.parent if out.suffix else out
        assert {path.stem for path in folder.iterdir() if path.suffix in render.PAGES} == {names}


def test_dots_in_the_name_of_a_run_or_page_are_kept(tmp_path: Path) -> None:
    """Comparisons with the runs lr1.0e-6 and lr1.5e-6 were written to one file, and `--out v1.2.html` to v1.html."""
    directory = a_folder(tmp_path / "runs")
    for name in ("lr1.0e-6", "lr1.5e-6"):
        other = a_folder(tmp_path / "runs").path.rename(tmp_path / name)
        assert report(directory.path, other, "--out", tmp_path).exit_code == 0
    assert report(directory.path, "--out", tmp_path / "v1.2.html").exit_code == 0
    names = ("report-with-lr1.0e-6", "report-with-lr1.5e-6", "v1.2")
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        f"{name}{page}" for name in names for page in render.PAGES
    }


def test_ten_thousand_steps_make_a_page_of_ordinary_size(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", [a_step(step) for step in range(1, 10_001)])
    assert report(directory.path).exit_code == 0
    assert len(a_page(directory.path)) < 400_000


# -- for programs -----------------------------------------------------------------------------------------------------


def read_json(*arguments: str | Path) -> dict[str, Any]:
    result = report(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_figures_of_the_page_are_printed_as_json(tmp_path: Path) -> None:
    validations = [ValidationReport(policy_version=v, reward=0.25 * v, problems=40, seconds=1.0) for v in (0, 2)]
    steps = [a_step(1, grad_norm=2.0, reward=0.25), a_step(2, grad_norm=1.0, verifier_errors={KEY_ERROR: 2})]
    directory = a_folder(tmp_path / "runs", steps, validations)
    found = read_json(directory.path)
    assert found["phases"]["generation"] == {"seconds": 4.0, "share": 0.4}
    assert (found["run"], found["state"], found["steps"], found["stepSeconds"]) == ("tiny-1", "finished", 2, 10.0)
    assert (found["firstReward"], found["lastReward"], found["rewardSteps"]) == (0.25, 0.5, 1)
    assert [it["reward"] for it in found["validations"]] == [0.0, 0.5]
    assert found["training"]["gradNorm"] == {"first": 2.0, "last": 1.0}
    assert found["acceptedPerPosition"] == [0.7, 0.3]
    assert found["policyLags"] == [4, 12]
    assert found["verifierErrors"] == {KEY_ERROR: 2}
    assert found["origin"]["processor"] == "Z80"
    assert found["runFile"]["schedule"]["promptsPerStep"] == 2
    assert not (directory.path / "report.html").exists(), "it writes no page"


def test_two_runs_as_json_have_ratios_only_if_their_steps_are_the_same_work(tmp_path: Path) -> None:
    first = a_folder(tmp_path / "runs")
    second = a_folder(tmp_path / "runs", [faster(1), faster(2)], generation={
        "sampling": {"maxTokens": 16}, "replicas": 2,
    })  # fmt: skip
    found = read_json(first.path, second.path)
    assert [run["run"] for run in found["runs"]] == ["tiny-1", "tiny-2"]
    assert found["isComparable"]
    assert found["speedUps"]["generation"] == 4.0
    assert found["speedUps"]["validation"] is None, "neither took any time"
    assert found["differences"]["generation.replicas"] == [1, 2]
    other = a_folder(tmp_path / "runs", schedule={"steps": 2, "promptsPerStep": 4, "groupSize": 2})
    found = read_json(first.path, other.path)
    assert (found["isComparable"], found["speedUps"]) == (False, {})


def test_a_failed_run_without_steps_has_a_report_as_json(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", [], phase=None)
    status = StatusReport(run="tiny", phase=Phase.FAILED, error="step 1 must have a graded rollout")
    directory.status_file.write_text(status.model_dump_json(by_alias=True))
    found = read_json(directory.path)
    assert (found["state"], found["error"]) == ("failed", "step 1 must have a graded rollout")
    assert (found["steps"], found["stepSeconds"], found["phases"]) == (0, None, {})


def test_json_and_a_place_for_pages_exclude_each_other(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs")
    assert report(directory.path, "--json", "--out", tmp_path).exit_code == 2


def test_a_run_that_a_crash_ended_is_reported_as_failed(tmp_path: Path) -> None:
    """Its coordinator was stopped, as by a user, because another program had crashed too often."""
    directory = a_folder(tmp_path / "runs", phase=Phase.STOPPED)
    directory.outcome_file.write_text(json.dumps({"exitCode": 1, "error": "gen-0 crashed 6 times in a row"}))
    assert load_run(directory).run_state == "failed"
    assert "The run failed: gen-0 crashed 6 times in a row" in sections.list_notices(load_run(directory))


# -- two runs ---------------------------------------------------------------------------------------------------------


def faster(step: int) -> StepReport:
    found = a_step(step)
    return found.model_copy(update={"phases": found.phases.model_copy(update={"generation": 1.0})})


@pytest.mark.parametrize("content", ["", "[1]", '[{"mechanism": "eagle3", "batch": Infinity}]', "[" * 100_000])
def test_a_damaged_comparison_is_left_out(content: str, tmp_path: Path) -> None:
    """A number too large for an integer ended the report with a traceback."""
    folder = a_folder(tmp_path / "runs")
    (folder.path / "comparison.json").write_text(content)
    assert load_run(folder).speed_ups == ()


def test_two_runs_of_one_task_have_speed_ups_by_phase(tmp_path: Path) -> None:
    first = a_folder(tmp_path / "runs")
    second = a_folder(tmp_path / "runs", [faster(1), faster(2)], schedule={
        "steps": 2, "promptsPerStep": 2, "groupSize": 2, "maxPolicyLag": 0,
    })  # fmt: skip
    result = report(first.path, second.path)
    assert result.exit_code == 0, result.output
    text = (first.path / "report-with-tiny-2.md").read_text()
    assert "| generation | 4.00 s | 40 % | 1.00 s | 14 % | 4.00x |" in text
    assert "| step | 10.0 s | 100 % | 7.00 s | 100 % | 1.43x |" in text
    assert "| schedule.maxPolicyLag | 1 | 0 |" in text
    assert "Not comparable" not in text


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"schedule": {"steps": 2, "promptsPerStep": 4, "groupSize": 2}}, "schedule.promptsPerStep"),
        ({"generation": {"sampling": {"maxTokens": 32}}}, "generation.sampling.maxTokens"),
        ({"rewards": {"math": {}}}, "rewards.exact"),
    ],
)
def test_runs_with_different_tasks_are_not_compared_and_the_fields_are_named(
    tmp_path: Path, section: dict[str, object], path: str
) -> None:
    first = a_folder(tmp_path / "runs")
    second = a_folder(tmp_path / "runs", **section)
    document = comparison.build_comparison(load_run(first), load_run(second))
    assert document.headline == ()
    assert any(notice.startswith("Not comparable") and path in notice for notice in document.notices)
    assert "speed-up" not in document.sections[0].tables[0].head


def test_runs_on_different_resources_are_compared_with_a_warning(tmp_path: Path) -> None:
    first = a_folder(tmp_path / "runs")
    second = a_folder(tmp_path / "runs", generation={"sampling": {"maxTokens": 16}, "replicas": 2})
    document = comparison.build_comparison(load_run(first), load_run(second))
    assert any("Different resources: the runs differ in generation.replicas" in notice for notice in document.notices)
    assert document.headline
