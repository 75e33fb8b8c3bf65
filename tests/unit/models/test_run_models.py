"""What a run's models must fit is checked before anything starts."""

from __future__ import annotations

from decimal import ROUND_DOWN, Decimal
from pathlib import Path

import pytest
from tests.run_files import a_model_folder, a_run

from specrl.models import read_models
from specrl.models.run_models import check
from specrl.spec import parse_spec


@pytest.mark.parametrize(("above", "refused"), [("0", True), ("1e-6", False)])
def test_a_top_p_that_leaves_one_token_everywhere_is_refused(tmp_path: Path, above: str, refused: bool) -> None:
    a_model_folder(tmp_path / "model")
    policy = read_models(parse_spec(a_run(tmp_path))).policy
    assert policy is not None
    size = policy.config_number("vocab_size")
    assert size is not None
    top_p = Decimal(1) / size + Decimal(above)
    sampling = {"topP": f"{top_p.quantize(Decimal('1e-9'), ROUND_DOWN)}", "maxTokens": 16}
    spec = parse_spec(a_run(tmp_path, generation={"sampling": sampling}))
    paths = [problem.path for problem in check(spec, read_models(spec))]
    assert ("generation.sampling.topP" in paths) == refused
