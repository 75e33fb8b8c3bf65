"""Native heads are found in folders of every family, and a run says what becomes of those that it does not train."""

from __future__ import annotations

from typing import Any

import pytest
from tests.run_files import a_run

from specrl.models import ModelFolder
from specrl.models.native_heads import find_native_heads, list_head_notices, lower_head_counts
from specrl.spec import parse_spec

LAYERS = [f"model.layers.{number}.mlp.up_proj.weight" for number in range(4)]
POLICY = ["model.embed_tokens.weight", *LAYERS, "model.norm.weight", "lm_head.weight"]
FAMILIES = {
    "MiMo": ["model.mtp_layers.0.input_proj.weight", "model.mtp_layers.1.input_proj.weight"],
    "GLM, DeepSeek": ["model.layers.4.eh_proj.weight", "model.layers.5.shared_head.norm.weight"],
    "ERNIE": [
        *("model.mtp_block.0.mlp.up_proj.weight", "model.mtp_block.1.mlp.up_proj.weight"),
        *("model.mtp_emb_norm.0.weight", "model.mtp_linear_proj.1.weight"),
    ],
    "Qwen3-Next": ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight", "mtp.layers.1.mlp.up_proj.weight"],
}


def a_folder(tmp_path: Any, names: list[str], **config: Any) -> ModelFolder:
    return ModelFolder(tmp_path, "model.path", {"num_hidden_layers": 4, **config}, dict.fromkeys(names, (1,)), None)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_are_found_by_their_names_in(family: str) -> None:
    heads = FAMILIES[family]
    found = find_native_heads({"num_hidden_layers": 4, "num_nextn_predict_layers": 2}, [*POLICY, *heads])
    assert set(found.names) == set(heads)
    assert (found.present, found.named, found.missing) == (2, 2, 0)


@pytest.mark.parametrize("field", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules"])
def test_named_heads_without_tensors_are_missing(field: str) -> None:
    assert find_native_heads({"num_hidden_layers": 4, field: 1}, POLICY).missing == 1
    one = [*POLICY, FAMILIES["MiMo"][0]]
    assert find_native_heads({"num_hidden_layers": 4, field: 3}, one).missing == 2
    nested = {"text_config": {"num_hidden_layers": 4, field: 1}}
    assert find_native_heads(nested, POLICY).missing == 1
    assert lower_head_counts(nested, 0) == {"text_config": {"num_hidden_layers": 4, field: 0}}


def test_a_policy_without_heads_has_none() -> None:
    found = find_native_heads({"num_hidden_layers": 4}, POLICY)
    assert (found.names, found.present, found.missing) == ((), 0, 0)


@pytest.mark.parametrize(
    ("speculation", "online", "says"),
    [({"ngram": {}}, True, True), ({"mtp": {}}, True, False), ({"mtp": {}}, False, True)],
)
def test_a_run_says_that_it_does_not_train_heads(tmp_path: Any, speculation: Any, online: bool, says: bool) -> None:
    raw = a_run(tmp_path)
    raw["generation"] = {**raw["generation"], "speculation": speculation}
    raw["trainer"] = {**raw["trainer"], "drafter": {"online": online}}
    folder = a_folder(tmp_path, [*POLICY, *FAMILIES["MiMo"]], num_nextn_predict_layers=2)
    notices = list_head_notices(parse_spec(raw), folder)
    assert [notice.startswith("the policy's heads for multi-token prediction (2:") for notice in notices] == [
        True
    ] * says


def test_a_run_says_that_named_heads_are_not_there(tmp_path: Any) -> None:
    (notice,) = list_head_notices(parse_spec(a_run(tmp_path)), a_folder(tmp_path, POLICY, num_mtp_modules=1))
    assert "(num_mtp_modules=1), and the policy's folder has 0" in notice
    assert not list_head_notices(parse_spec(a_run(tmp_path)), a_folder(tmp_path, POLICY))
