"""`specrl report`: one page without any request, of any run that trained a step; words for everything else."""

from __future__ import annotations

import fcntl
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.unit.report.runs import a_folder, a_step
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.coordinator.report import Phase, Status, StepReport, ValidationReport
from specrl.report import comparison, render, sections
from specrl.report.reading import read

KEY_ERROR = "KeyError at my_rewards.py:12"


def report(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """What a page holds: elements that must be closed, addresses that it would fetch."""

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
        "| rollouts sampled again after their replica was lost | 3 |",
        "| processor | Z80 |",
    ):
        assert row in text, text
        assert all(cell.strip() in a_page(directory.path) for cell in row.strip("| ").split("|"))
    assert "refused by their checks" not in text, "what never happened is not listed"


def test_what_completions_had_no_answer_or_broke_the_verifier_is_in_both_pages(tmp_path: Path) -> None:
    steps = [
        a_step(1, verdicts=10, no_answer=1, ungraded=10, verifier_errors={"KeyError at rewards.py:12": 3}),
        a_step(2, verdicts=10, no_answer=4, verifier_errors={"KeyError at rewards.py:12": 1, "timeout": 2}),
    ]
    directory = a_folder(tmp_path / "runs", steps)
    report(directory.path)
    text = (directory.path / "report.md").read_text()
    for row in (
        "| no answer was found | 5 | 25 % | 40 % |",
        "| the verifier raised, or was ended | 6 | 30 % | 30 % |",
        "| no verdict; sampled again | 10 | 33 % | 50 % |",
        "| KeyError at rewards.py:12 | 4 |",
        "| timeout | 2 |",
    ):
        assert row in text, text
        assert all(cell.strip() in a_page(directory.path) for cell in row.strip("| ").split("|"))


def test_the_page_fetches_nothing_and_is_readable_without_seeing_it(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs")
    report(directory.path)
    page = Page(a_page(directory.path))
    assert page.opened == []
    assert page.addresses == []
    assert not {"script", "link", "img", "iframe"} & set(page.seen)
    assert re.findall(r"url\(|@import|https?://", a_page(directory.path)) == []
    assert page.seen.count("svg") == page.seen.count("title") - 1 >= 5, "each chart has its words"
    assert page.seen.count("table") == page.seen.count("caption") >= 5


def test_names_and_errors_of_others_are_text_in_the_page(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", phase=None, prompts={
        "source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 80, "template": "<script>{question}|",
    })  # fmt: skip
    failed = Status(run="tiny", phase=Phase.FAILED, error="</p><script>alert(1)</script> | *")
    directory.status_file.write_text(failed.model_dump_json(by_alias=True))
    assert report(directory.path).exit_code == 0
    assert "script" not in Page(a_page(directory.path)).seen
    assert r"\</p\>\<script\>alert(1)\</script\> \| \*" in (directory.path / "report.md").read_text()


def test_an_interrupted_run_says_so_and_one_under_way_too(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", phase=Phase.TRAINING)
    assert read(directory).standing == "interrupted"
    assert "was interrupted" in sections.notices(read(directory))[0]
    with directory.lock_file.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "under way" in sections.notices(read(directory))[0]


def test_lines_that_cannot_be_read_are_passed_over_and_counted(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", [a_step(1), a_step(2), a_step(4)])
    with directory.metrics_file.open("a") as file:
        file.write('nonsense\n{"step": 5}\n{"step": 6, "cut')
    found = read(directory)
    assert [step.step for step in found.steps] == [1, 2, 4]
    said = sections.notices(found)
    assert any("2 lines of its files could not be read" in notice for notice in said)
    assert any("1 steps before the last one have no line" in notice for notice in said)


def test_a_step_that_was_written_twice_counts_once(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", [a_step(1), a_step(2, reward=0.1), a_step(2, reward=0.7)])
    assert [step.reward for step in read(directory).steps] == [0.5, 0.7]


@pytest.mark.parametrize(
    ("lines", "said"), [("", "none in metrics.jsonl"), ("{}\n", "and 1 lines that cannot be read")]
)
def test_a_run_without_steps_is_refused_in_words(tmp_path: Path, lines: str, said: str) -> None:
    directory = a_folder(tmp_path / "runs", [], phase=None)
    directory.metrics_file.write_text(lines)
    result = report(directory.path)
    assert result.exit_code == 2
    assert "a run must have trained a step to be reported" in result.stderr
    assert said in result.stderr
    assert not (directory.path / "report.html").exists()


@pytest.mark.parametrize("validations", [(), (0, 2)])
def test_a_run_without_any_reward_is_reported_in_words(tmp_path: Path, validations: tuple[int, ...]) -> None:
    """It ended in a traceback of the chart of rewards: when every rollout stays ungraded, one wants the report."""
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
    assert "> No rollout was graded: nothing was learnt." in text
    assert "Mean reward of each step" not in text, "an empty chart would say nothing"
    assert "reward**" not in text.split("##")[0], "there is no change of reward to head the page"
    assert ("| 0 of 4 graded, 4 failed: KeyError at my\\_rewards.py:12 (4) |" in text) == bool(validations)
    other = a_folder(tmp_path / "runs", steps)
    assert report(directory.path, other.path).exit_code == 0, "and compared"


def test_a_run_that_failed_before_its_first_step_is_reported_with_the_reason(tmp_path: Path) -> None:
    """A reward that always fails ends the run at step 1: the report that one then wants was refused."""
    directory = a_folder(tmp_path / "runs", [], phase=None)
    status = Status(
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


def test_a_run_whose_groups_all_teach_nothing_says_so_first(tmp_path: Path) -> None:
    """The report of a constant reward had no word of it."""
    silent = [a_step(step, groups=4, groups_without_signal=4) for step in (1, 2)]
    found = sections.document(read(a_folder(tmp_path / "runs", silent)))
    assert "8 of 8 groups teach nothing: all rewards are equal within each." in found.notices
    some = [a_step(1, groups=4, groups_without_signal=4), a_step(2, groups=4, groups_without_signal=3)]
    found = sections.document(read(a_folder(tmp_path / "runs", some)))
    assert not any("teach nothing" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (1, "Mean reward of each step: 0.10; one step is too few to compare."),
        (2, "Mean reward of each step: 0.10 → 0.20, from the first step to the last."),
        (3, "Mean reward of each step: 0.10 → 0.30, from the first step to the last."),
        (9, "Mean reward of each step: 0.25 → 0.75, means of the first and of the last 4 steps."),
        (12, "Mean reward of each step: 0.30 → 1.00, means of the first and of the last 5 steps."),
    ],
)
def test_no_step_is_among_the_first_and_the_last(tmp_path: Path, steps: int, said: str) -> None:
    """Up to 9 steps the windows of five overlapped: "reward 0.485 -> 0.485 (+0.000)" of 0.650 ... 0.300."""
    directory = a_folder(tmp_path / "runs", [a_step(step, reward=step / 10) for step in range(1, steps + 1)])
    (learnt,) = [it for it in sections.document(read(directory)).sections if it.title == "What was learnt"]
    assert learnt.charts[0].alternative == said


def test_bad_input_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs")
    taken = tmp_path / "taken"
    taken.write_text("")
    for arguments, said in (
        ((tmp_path / "nowhere",), "a run must be a run directory"),
        ((directory.path, tmp_path / "nowhere"), "a run must be a run directory"),
        ((directory.path, "--out", taken), "--out must be a folder, or a file that ends in .html or .md"),
        ((directory.path, "--out", taken / "below" / "x.html"), "--out must be writable"),
    ):
        result = report(*arguments)
        assert result.exit_code == 2, arguments
        assert said in result.stderr
        assert result.stderr.count("specrl: ") == 1


def test_both_pages_lie_where_out_says(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs")
    for out, names in ((tmp_path / "a", "report"), (tmp_path / "b" / "mine.md", "mine"), (tmp_path / "c.html", "c")):
        assert report(directory.path, "--out", out).exit_code == 0
        folder = out.parent if out.suffix else out
        assert {path.stem for path in folder.iterdir() if path.suffix in render.PAGES} == {names}


def test_ten_thousand_steps_make_a_page_of_ordinary_size(tmp_path: Path) -> None:
    directory = a_folder(tmp_path / "runs", [a_step(step) for step in range(1, 10_001)])
    assert report(directory.path).exit_code == 0
    assert len(a_page(directory.path)) < 400_000


# -- two runs ---------------------------------------------------------------------------------------------------------


def faster(step: int) -> StepReport:
    found = a_step(step)
    return found.model_copy(update={"stages": found.stages.model_copy(update={"generation": 1.0})})


def test_two_runs_of_one_task_have_speed_ups_by_stage(tmp_path: Path) -> None:
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
def test_runs_of_other_tasks_are_not_compared_and_the_fields_are_named(
    tmp_path: Path, section: dict[str, object], path: str
) -> None:
    first, second = a_folder(tmp_path / "runs"), a_folder(tmp_path / "runs", **section)
    document = comparison.document(read(first), read(second))
    assert document.headline == ()
    assert any(notice.startswith("Not comparable") and path in notice for notice in document.notices)
    assert "speed-up" not in document.sections[0].tables[0].head


def test_other_machines_are_said_but_compared(tmp_path: Path) -> None:
    first = a_folder(tmp_path / "runs")
    second = a_folder(tmp_path / "runs", generation={"sampling": {"maxTokens": 16}, "replicas": 2})
    document = comparison.document(read(first), read(second))
    assert any("Not of like machines: generation.replicas differ" in notice for notice in document.notices)
    assert document.headline
