"""benchmarks/paper_table.py: which models and runs are made, and in which order. A script stands in for `specrl`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from benchmarks import demo_runs
from benchmarks.demo_runs import RUN_FILE, Failed, initialise_drafter
from benchmarks.paper_policies import Fields, RealPolicy, Say
from benchmarks.paper_rows import BASE, CHAT, CONFIGURATIONS, IN_DOMAIN, WEAK, Workload, rows_of
from benchmarks.paper_runs import KeptRuns
from benchmarks.paper_table import Runs, list_tasks, measure
from rich.console import Console

from specrl.formats.reports import PhaseSeconds, StepReport

# `specrl run` writes the steps of a finished run at once. `specrl drafter init` writes a drafter, but fails for a weak
# one. Every call adds a line to CALLS.
PROGRAM = """#!{python}
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
out = Path(words[words.index("--out") + 1]) if "--out" in words else None
runs = Path(words[words.index("--runs") + 1]) if "--runs" in words else Path(words[words.index("--resume") + 1]).parent
with open({calls!r}, "a") as file:
    file.write(json.dumps(["resume" if "--resume" in words else words[0], (out or runs).name]) + "\\n")
run = runs / "demo-1"
run.mkdir(parents=True, exist_ok=True)
(run / "run.yaml").touch()
if out is None:
    cache = Path(os.environ["SPECRL_CACHE_DIR"])
    assert not (cache / "draft-costs").exists() and (cache / "gguf" / "model").exists()
    (cache / "draft-costs").mkdir()
    (run / "metrics.jsonl").write_text({steps!r})
    (run / "status.json").write_text('{{"phase": "finished"}}')
elif {weak!r} in out.name:
    sys.exit(1)
else:
    out.mkdir()
    (out / "model.safetensors").touch()
"""


class StandIn:
    """A policy whose drafters are made by `specrl`."""

    workloads: Sequence[Workload] = (BASE,)

    def __init__(self, out: Path) -> None:
        self._out = out

    def find_run_file(self, workload: Workload) -> Path:
        return RUN_FILE

    def list_fields(self, workload: Workload) -> Fields:
        return {"model.path": str(self._out / "policy")}

    def find_drafters(self, workload: Workload) -> Mapping[str, Path]:
        return {kind: self._out / kind for kind in (IN_DOMAIN, WEAK)}

    def make_policy(self, workload: Workload, say: Say) -> None:
        (self._out / "policy").mkdir(parents=True, exist_ok=True)

    def make_drafter(self, workload: Workload, kind: str, say: Say) -> None:
        initialise_drafter(self.list_fields(workload), self.find_drafters(workload)[kind])


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Options of the command, with a program that stands in for `specrl`."""
    numbers = dict.fromkeys((name for name, field in StepReport.model_fields.items() if field.is_required()), 0)
    phases = PhaseSeconds(generation=2.0, train=1.0)
    fields = numbers | {"acceptance_length": None, "phases": phases, "rollouts": 4, "tokens": 40}
    reports = [StepReport.model_validate(fields | {"step": step}) for step in (1, 2, 3)]
    program = tmp_path / "specrl"
    steps = "".join(report.model_dump_json(by_alias=True) + "\n" for report in reports)
    text = PROGRAM.format(python=sys.executable, calls=str(tmp_path / "calls"), steps=steps, weak=WEAK)
    program.write_text(text, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(demo_runs, "SPECRL", program)
    for name in ("draft-costs", "gguf"):
        (tmp_path / "cache" / name / "model").mkdir(parents=True)
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(tmp_path / "cache"))
    out = tmp_path / "out"
    configs = ("none", "eagle3:3", "weak", "ngram")
    return argparse.Namespace(out=out, kept=out / "kept.jsonl", only=["base"], configs=configs, rounds=1, steps=3)


def list_calls(given: argparse.Namespace) -> list[tuple[str, str]]:
    """List the calls of the program: the command, and its run's or drafter's name without what is of the start."""
    lines = (given.out.parent / "calls").read_text(encoding="utf-8").splitlines()
    return [
        (command, name.rpartition("-")[0] if command == "run" else name) for command, name in map(json.loads, lines)
    ]


def test_models_are_made_first_and_one_that_fails_costs_its_own_rows_alone(given: argparse.Namespace) -> None:
    """They were made between the runs, and a drafter that failed ended the benchmark."""
    found, failures = measure(StandIn(given.out), given, Console(quiet=True))
    assert failures == 1
    assert [row.name for row in rows_of(BASE, found["base"])] == ["none", "eagle3:3", "ngram"]
    drafters = [("drafter", IN_DOMAIN), ("drafter", WEAK)]
    rows = [("run", f"{name}-round1") for name in ("none", "eagle3-3", "ngram")]
    assert list_calls(given) == drafters + rows


def test_finished_runs_and_drafters_are_not_made_again(given: argparse.Namespace) -> None:
    given.configs = ("none", "eagle3:3")
    for _ in range(2):
        _, failures = measure(StandIn(given.out), given, Console(quiet=True))
        assert failures == 0
    assert [command for command, _ in list_calls(given)] == ["drafter", "run", "run"]


def test_no_run_has_the_step_costs_of_an_earlier_one(given: argparse.Namespace) -> None:
    """A chosen draft length began with those in the user's cache, so a row depended on the runs before it."""
    found, failures = measure(StandIn(given.out), given, Console(quiet=True))
    assert found["base"]["ngram"], "the stand-in fails where it finds step costs, and leaves some"
    assert [path.name for path in (given.out.parent / "cache" / "draft-costs").iterdir()] == ["model"]
    assert failures == 1, "of the weak drafter"


def test_another_start_makes_the_reference_of_a_row_first(given: argparse.Namespace) -> None:
    given.configs = ("none", "ngram")
    policy = StandIn(given.out)
    policy.make_policy(BASE, print)
    none, ngram = list_tasks(policy, given)
    Runs(policy, given, KeptRuns(given.kept, {"boot": "1"})).find_pair(none, print)
    later = Runs(policy, given, KeptRuns(given.kept, {"boot": "2"}))
    later.find_pair(none, print)
    assert len(list_calls(given)) == 1, "the row itself is kept"
    own, reference = later.find_pair(ngram, print)
    assert own.keys() == reference.keys()
    assert list_calls(given)[1:] == [("run", "none-round1"), ("run", "ngram-round1")]


def test_an_interrupted_initialisation_goes_on_only_with_the_same_settings(given: argparse.Namespace) -> None:
    """Any was continued, so a drafter could be one of the run file before an edit."""
    weak = given.out / WEAK
    fields = StandIn(given.out).list_fields(BASE)
    given.out.mkdir()
    for changes in ({}, {}, {"schedule.seed": "7"}):
        with pytest.raises(Failed, match="exit code 1"):
            initialise_drafter(fields | changes, weak)
    assert [command for command, _ in list_calls(given)] == ["drafter", "resume", "drafter"]


def test_a_drafter_of_other_settings_is_refused(given: argparse.Namespace) -> None:
    """The drafter of another policy in the same --out was taken for that of the present one."""
    drafter = given.out / IN_DOMAIN
    given.out.mkdir()
    fields = StandIn(given.out).list_fields(BASE)
    initialise_drafter(fields, drafter)
    initialise_drafter(fields, drafter)
    with pytest.raises(Failed, match="must be a drafter of these settings, got one of others"):
        initialise_drafter(fields | {"schedule.seed": "7"}, drafter)


def test_workloads_of_the_real_model_agree_on_the_drafters_that_they_share(given: argparse.Namespace) -> None:
    """Otherwise the second of them would refuse what the first has made."""
    for name in ("policy", "first-layers"):
        (given.out / name).mkdir(parents=True)
        (given.out / name / "model.safetensors").touch()
    for name in ("train", "chat", "gsm8k"):
        (given.out / f"{name}.jsonl").touch()
    policy = RealPolicy(given.out, given.out / "gsm8k.jsonl")
    for workload in policy.workloads:
        kinds = {it.drafter for it in CONFIGURATIONS if it.name in workload.rows and it.drafter is not None}
        for kind in sorted(kinds):
            policy.make_drafter(workload, kind, lambda _: None)
    made = [name for _, name in list_calls(given)]
    assert sorted(made) == sorted(["drafter-json", "drafter-gsm8k", CHAT, "draft-model-json", "draft-model-gsm8k"])
