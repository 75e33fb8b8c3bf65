"""A YAML file of a stranger is read in bounded time, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from specrl.errors import SpecInvalid
from specrl.spec.yaml_input import YAML_ERRORS, parse_card, parse_override, parse_yaml, quote_yaml, read_documents


def tenfold(last: str) -> str:
    """Lines of which each stands for ten times the one before."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {last.format(','.join([f'*a{n - 1}'] * 10), n)}" for n in range(1, 11)]
    return "\n".join(lines)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (tenfold("[{0}]"), "aliases that stand for more than 100000 values"),
        (tenfold("{{<<: [{0}], y{1}: 1}}"), "aliases that stand for more than 100000 values"),
        ("a: &a [*a]", "an alias of what it lies in"),
        ("[" + "1," * 150_000 + "1]", "more than 100000 values"),
        ("a: " + ":".join(["1"] * 100_000), "a number of 199999 letters in line 1"),
        ("a: 0x" + "f" * 100_000, "a number of 100002 letters"),
        ("a: !!bool x", "'x' as bool in line 1"),
        ("a: !!int ''", "'' as int in line 1"),
        ("a: !!timestamp x", "'x' as timestamp in line 1"),
        ('a: "\\ud800"', "a NUL or half of a surrogate pair in line 1"),
        ('a: "b\\0c"', "a NUL or half of a surrogate pair in line 1"),
        ("[" * 100_000, "recursion"),
        ("a: 2020-13-45", "month must be in 1..12"),
    ],
)
def test_file_that_would_not_end_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    """Eleven lines of aliases had no end in 40 s, and a number to the base 60 took minutes. Others were tracebacks."""
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(SpecInvalid, match=f"run.yaml: must be YAML, got .*{reason}") as caught:
        read_documents(tmp_path / "run.yaml")
    assert len(str(caught.value).splitlines()) == 1
    with pytest.raises(YAML_ERRORS):
        parse_yaml(text)


def test_override_is_bounded_alike() -> None:
    with pytest.raises(SpecInvalid, match="must be YAML"):
        parse_override(f"a={':'.join(['1'] * 1000)}", "a=1")


def test_card_may_have_more_values() -> None:
    text = "[" + "1," * 150_000 + "1]"
    assert len(parse_card(text)) == 150_001
    with pytest.raises(yaml.YAMLError):
        parse_card(tenfold("[{0}]"))


def test_aliases_that_people_write_are_read() -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a, x: 2}"
    both = {"x": 1, "y": [1, 2]}
    assert parse_yaml(text) == {"a": both, "b": both, "c": {"x": 2, "y": [1, 2]}}


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
NUMBERS = st.integers(-(10**50), 10**50) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.none() | st.booleans() | NUMBERS | TEXTS
KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)  # YAML's have up to 1024 characters


@given(st.recursive(VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)))
@example([1e-5, 1e22, -5e-324, "1e5"])
@example("models/\U0001f600 \x7f\x85\u2028 \\ud83d\\ude00")
def test_a_value_that_is_quoted_is_read_as_it_was(value: object) -> None:
    """JSON's escapes of a character above U+FFFF were read as two characters, and refused as halves of one."""
    text = quote_yaml({"a": value})
    assert text.isascii()
    assert len(text.splitlines()) == 1
    assert parse_yaml(text) == {"a": value}


def test_a_path_is_quoted_as_text() -> None:
    assert parse_yaml(quote_yaml(Path("/a b: c"))) == "/a b: c"
