"""The recipes of docs/losses.md are parts of run files: each parses, and breaks no rule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.spec.test_load import a_run

from specrl.spec import parse_spec

PAGE = (Path(__file__).parents[3] / "docs" / "losses.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^\| ([^|]+) \| `([^`]+)` \|$", PAGE.split("## Recipes")[1], re.MULTILINE))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_of_the_page_is_a_valid_run_file(recipe: str) -> None:
    loss: dict[str, Any] = yaml.safe_load(RECIPES[recipe])
    parsed = parse_spec(a_run(generation__sampling__maxTokens=4096, model__maxLength=8192, trainer__loss=loss))
    assert set(parsed.trainer.loss.model_dump(by_alias=True, exclude_unset=True)) == set(loss)


def test_no_named_recipe_is_missing() -> None:
    named = {"GRPO", "Dr. GRPO", "DAPO", "GSPO", "CISPO", "REINFORCE++", "RLOO", "TIS", "IcePop"}
    assert named <= set(RECIPES)
