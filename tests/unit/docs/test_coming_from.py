"""docs/coming-from.md names fields that a run file has, with values that they accept; its examples are valid."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from specrl.spec import RunSpec, parse_spec
from specrl.spec.base import Section, find_field, find_section
from specrl.spec.yaml_input import ELSEWHERE

PAGE = (Path(__file__).parents[3] / "docs" / "coming-from.md").read_text(encoding="utf-8")
FRAMEWORKS = ("TRL", "verl", "prime-rl", "NeMo-RL")
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.+?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
CODE = re.compile(r"`([^`]+)`")
FIELD = re.compile(r"([a-z][A-Za-z0-9]*(?:\.[a-z][A-Za-z0-9]*)+)(?:: (.+))?")
"""A field by its path, and sometimes a value of it: `trainer.recompute: Layers`."""


def list_rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the tables in a text, without headings."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def find_fault(code: str) -> str:
    """Say what is wrong with a field in backticks; "" if a run file has it and accepts its value."""
    found = FIELD.fullmatch(code)
    if found is None:
        return f"{code} is not a field's path"
    path, value = found.groups()
    *parents, last = path.split(".")
    if find_field(RunSpec, path.split(".")) is None:
        return f"a run file has no field {path}"
    if value is None:
        return ""
    section: type[Section] = RunSpec
    for name in parents:
        field = find_field(section, [name])
        inner = find_section(field) if field is not None else None
        assert inner is not None
        section = inner
    try:
        section.model_validate({last: yaml.safe_load(value)})
    except ValidationError as error:
        wrong = [problem["msg"] for problem in error.errors() if problem["loc"][:1] == (last,)]
        return f"{path} does not accept {value}: {wrong}" if wrong else ""
    return ""


def list_fields() -> Iterator[tuple[str, str]]:
    """Yield framework and field of every field in the columns of specrl."""
    for name in FRAMEWORKS:
        for row in list_rows(SECTIONS[name]):
            yield from ((name, code) for code in CODE.findall(row[1]))
    for row in list_rows(SECTIONS["The other way round"]):
        yield from (("the other way round", code) for code in CODE.findall(row[0]))


def test_every_field_in_a_column_of_specrl_exists_and_accepts_its_value() -> None:
    fields = list(list_fields())
    assert len(fields) > 200
    assert [f"{name}: {fault}" for name, code in fields if (fault := find_fault(code))] == []


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("model.name", "a run file has no field model.name"),
        ("trainer.loss.clip.low", "a run file has no field trainer.loss.clip.low"),
        ("schedule.group_size", "schedule.group_size is not a field's path"),
        ("trainer.loss.objective: Grpo", "trainer.loss.objective does not accept Grpo"),
    ],
)
def test_a_wrong_field_or_value_is_found(code: str, fault: str) -> None:
    assert find_fault(code).startswith(fault)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_a_message_suggests_for_a_name_is_what_the_page_says(name: str) -> None:
    rows = [row for framework in FRAMEWORKS for row in list_rows(SECTIONS[framework])]
    found = [row for row in rows if name in {code.rpartition(".")[2] for code in CODE.findall(row[0])}]
    assert any(ELSEWHERE[name] in {code.partition(":")[0] for code in CODE.findall(row[1])} for row in found), found


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_table_has_three_columns_and_names_what_has_no_counterpart(name: str) -> None:
    rows = list_rows(SECTIONS[name])
    assert 15 <= len(rows) <= 30
    for row in rows:
        assert len(row) == 3, row
        assert row[1] == "-" or CODE.search(row[1]), row
        assert row[1] != "-" or row[2], f"a row without a counterpart says what to do instead: {row}"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_example_is_a_valid_run_file(name: str) -> None:
    (text,) = re.findall(r"```yaml\n(.+?)```", SECTIONS[name], re.DOTALL)
    example = yaml.safe_load(text)
    parsed = parse_spec(example)
    assert set(parsed.model_dump(by_alias=True, exclude_unset=True)) == set(example)


@pytest.mark.parametrize("row", list_rows(SECTIONS["Losses"]), ids=lambda row: row[0])
def test_every_line_of_a_loss_is_valid(row: list[str]) -> None:
    (text,) = re.findall(r"```yaml\n(.+?)```", SECTIONS["TRL"], re.DOTALL)
    example: dict[str, Any] = yaml.safe_load(text)
    example["trainer"]["loss"] = yaml.safe_load(row[-1].strip("`"))
    parsed = parse_spec(example)
    assert set(parsed.trainer.loss.model_dump(by_alias=True, exclude_unset=True)) == set(example["trainer"]["loss"])


def import_rewards(name: str, folder: Path) -> dict[str, Any]:
    """Return the reward functions of a section: those of TRL and verl, too; verifiers is not installed."""
    (text,) = re.findall(r"```python\n(.+?)```", SECTIONS[name], re.DOTALL)
    module = folder / "my_rewards.py"
    module.write_text(text if name != "prime-rl" else text.partition("# specrl")[2], encoding="utf-8")
    return runpy.run_path(str(module))


def test_a_reward_of_trl_and_its_counterpart_give_the_same(tmp_path: Path) -> None:
    names = import_rewards("TRL", tmp_path)
    completions = [[{"role": "assistant", "content": "It is 18."}], [{"role": "assistant", "content": "It is 19."}]]
    theirs = names["has_answer"](prompts=["", ""], completions=completions, solution=["18", "18"])
    assert theirs == [names["grade"]("18", completion[0]["content"], {}) for completion in completions] == [1.0, 0.0]


def test_a_reward_of_verl_is_called_by_its_counterpart(tmp_path: Path) -> None:
    grade = import_rewards("verl", tmp_path)["grade"]
    assert [grade("18", text, {"data_source": "gsm8k"}) for text in ("It is 18.", "It is 19.")] == [1.0, 0.0]


def test_a_reward_of_verifiers_has_a_counterpart(tmp_path: Path) -> None:
    grade = import_rewards("prime-rl", tmp_path)["grade"]
    assert [grade("18", text) for text in ("18\n", "19")] == [1.0, 0.0]
