"""Which files belong to a split, by the card or by the files' names."""

from __future__ import annotations

from typing import Any

import pytest

from specrl.errors import FetchFailed
from specrl.hub.client import Repository, RepositoryKind
from specrl.hub.data_sets import DataSetWish, find_files, group_by_split

REPOSITORY = Repository(RepositoryKind.DATA_SET, "team/data", None, "prompts.source.dataset.name")


def find(names: list[str], configs: dict[str, Any] | None = None, **wish: Any) -> list[str]:
    return find_files(DataSetWish(REPOSITORY, **wish), names, configs or {})


def refuse(names: list[str], configs: dict[str, Any] | None = None, **wish: Any) -> str:
    with pytest.raises(FetchFailed) as caught:
        find(names, configs, **wish)
    return str(caught.value)


@pytest.mark.parametrize(
    ("split", "files"),
    [
        ("train", ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]),
        ("train", ["train.jsonl"]),
        ("train", ["my_train_file.csv"]),
        ("train", ["train/a.parquet", "train/b.parquet"]),
        ("train", ["main/train/0000.parquet"]),  # of the hub's own Parquet copies
        ("test", ["data/eval_1.json"]),
        ("validation", ["dev.jsonl.gz"]),
        ("extra", ["data/extra-00000-of-00001.parquet"]),
    ],
)
def test_names_tell_the_split(split: str, files: list[str]) -> None:
    others = ["README.md", "dataset_infos.json", ".gitattributes", "load.py", "latest/other.txt"]
    assert find([*files, *others, "data/unsupervised.parquet"], split=split) == files


def test_names_without_a_split_are_of_train() -> None:
    assert find(["a.jsonl", "b/c.jsonl"]) == ["a.jsonl", "b/c.jsonl"]
    assert refuse(["a.jsonl"], split="test").endswith("got test; use one of these: train")


def test_a_word_counts_apart_from_other_letters_and_the_nearest_one_counts() -> None:
    assert group_by_split(["trained.jsonl", "train/test_0.parquet"], "train") == {"test": ["train/test_0.parquet"]}


def test_a_configuration_is_a_folder_without_a_card() -> None:
    names = ["main/train.jsonl", "other/train.jsonl"]
    assert find(names, config="other") == ["other/train.jsonl"]
    assert refuse(names, config="none").startswith("prompts.source.dataset.config must be a configuration of team/data")
    assert find(names, config=None, split=None) == names


@pytest.mark.parametrize(
    ("given", "files"),
    [
        ("*.jsonl", ["a.jsonl", "b.jsonl"]),
        (["b.jsonl", "a.jsonl"], ["b.jsonl", "a.jsonl"]),
        ([{"split": "train", "path": ["sub/**", "b.jsonl"]}], ["sub/deep/d.jsonl", "sub/e.jsonl", "b.jsonl"]),
        ([{"split": "train", "path": "**/d.jsonl"}, {"split": "test", "path": "a.jsonl"}], ["sub/deep/d.jsonl"]),
        ({"train": "sub/"}, ["sub/deep/d.jsonl", "sub/e.jsonl"]),
        ("[ab].jsonl", ["a.jsonl", "b.jsonl"]),
        ("./?.jsonl", ["a.jsonl", "b.jsonl"]),
    ],
)
def test_a_card_names_files_by_patterns(given: Any, files: list[str]) -> None:
    names = ["a.jsonl", "b.jsonl", "sub/deep/d.jsonl", "sub/e.jsonl"]
    assert find(names, {"default": {"data_files": given}}) == files


def test_a_card_has_one_default_configuration() -> None:
    configs = {"one": {"data_files": "a.jsonl"}, "two": {"data_files": "b.jsonl", "default": True}}
    assert find(["a.jsonl", "b.jsonl"], configs) == ["b.jsonl"]
    assert find(["a.jsonl", "b.jsonl"], configs, config="one") == ["a.jsonl"]
    del configs["two"]["default"]
    message = refuse(["a.jsonl", "b.jsonl"], configs)
    assert message == (
        "prompts.source.dataset.config must be given for team/data, got none; use one of these: one, two"
    )


def test_a_data_dir_of_a_card_holds_the_files() -> None:
    names = ["one/train.jsonl", "two/train.jsonl"]
    assert find(names, {"x": {"data_dir": "two"}}) == ["two/train.jsonl"]


def test_files_elsewhere_are_refused() -> None:
    configs = {"x": {"data_files": "https://example.org/a.jsonl"}}
    assert "with files elsewhere; try its Parquet copy" in refuse(["a.jsonl"], configs)


def test_files_that_are_named_win_over_the_card() -> None:
    names = ["a.jsonl", "data/b.jsonl", "load.py"]
    assert find(names, files=("data/*",)) == ["data/b.jsonl"]
    assert "prompts.source.dataset.files must match a file of team/data, got *.py" in refuse(names, files=("*.py",))


def test_a_repository_without_data_is_refused() -> None:
    message = refuse(["data.zip", "../train.csv"])  # the latter would be read from elsewhere
    assert "must be a data set of Parquet, JSON Lines, JSON or CSV files" in message
