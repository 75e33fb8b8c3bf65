"""The examples of docs/data.md are valid sections of a run file, and the shapes in its table are read as it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from tests.run_files import a_run

from specrl.prompts.columns import parse_json_record
from specrl.spec import parse_spec
from specrl.spec.data import FieldMapping

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_example_is_a_valid_section(tmp_path: Path) -> None:
    examples = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.+?)```", PAGE, re.DOTALL)]
    assert len(examples) == 4
    for example in examples:
        context = {"model": {"path": str(tmp_path), "maxLength": 4096}, "trainer": a_run(tmp_path)["trainer"]}
        context["trainer"]["microBatchTokens"] = 4096
        parse_spec(a_run(tmp_path, **context) | example)


def test_every_record_of_the_table_is_read_with_its_fields() -> None:
    rows = re.findall(r"^\| `(\{.+?\})` \| (?:none|`(\{.+?\})` \|$)", PAGE, re.MULTILINE)
    assert len(rows) == 5
    for line, fields in rows:
        mapping = FieldMapping.model_validate(yaml.safe_load(fields) if fields else {})
        record = parse_json_record(line, mapping.answer)
        assert not isinstance(record, str)
        assert list(record.find_faults(mapping)) == []
        assert json.loads(line) == record.values
