"""Several sources in one stream: exact shares, own epochs, and a place that needs no state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.prompts.test_stream import a_file

from specrl.prompts import load_prompts, load_validation, open_sources
from specrl.prompts.mixing import SourceMix
from specrl.spec import RunSpec

Build = Callable[..., RunSpec]
weights = st.lists(st.integers(1, 30), min_size=1, max_size=5)


@given(weights=weights, seed=st.integers(-(2**70), 2**70))
def test_each_block_has_exact_shares_and_each_source_is_walked_without_gaps(weights: list[int], seed: int) -> None:
    mix = SourceMix(weights, seed)
    found = [mix.locate_position(position) for position in range(3 * sum(weights))]
    for source, weight in enumerate(weights):
        places = [place for it, place in found if it == source]
        assert places == list(range(3 * weight))
    block = [source for source, _ in found[: sum(weights)]]
    assert Counter(block) == dict(enumerate(weights))


@given(weights=weights, position=st.integers(0, 10**6))
def test_a_position_is_found_without_walking_to_it(weights: list[int], position: int) -> None:
    walked = SourceMix(weights, 3)
    walked.locate_position(0)
    assert walked.locate_position(position) == SourceMix(weights, 3).locate_position(position)


def test_an_order_never_changes() -> None:
    """Pins the order across versions: a resumed run must find the prompts that it left."""
    mix = SourceMix([3, 1], 0)
    assert [mix.locate_position(position) for position in range(8)] == PINNED


PINNED = [(0, 0), (0, 1), (0, 2), (1, 0), (0, 3), (0, 4), (1, 1), (0, 5)]


def two_sources(tmp_path: Path, **math: object) -> dict[str, object]:
    math_source = {"name": "math", "weight": 2, "source": a_file(tmp_path, 4, "math.jsonl")} | math
    return {"sources": [math_source, {"name": "code", "source": a_file(tmp_path, 3, "code.jsonl")}]}


def test_each_source_has_its_own_epochs_and_its_name_in_every_prompt(a_spec: Build, tmp_path: Path) -> None:
    stream = load_prompts(a_spec(two_sources(tmp_path)))
    prompts = [stream.prompt(position) for position in range(18)]
    assert [prompt.position for prompt in prompts] == list(range(18))
    for name, count, asked in (("math", 4, 12), ("code", 3, 6)):
        own = [prompt for prompt in prompts if prompt.source == name]
        assert len(own) == asked
        epochs = [own[first : first + count] for first in range(0, asked, count)]
        assert all(len({prompt.text for prompt in epoch}) == count for epoch in epochs)
        assert all(prompt.text.startswith(name) and prompt.prompt_id.startswith(f"{name}-p") for prompt in own)
    assert len({prompt.prompt_id for prompt in prompts}) == len(stream) == 7
    again = load_prompts(a_spec(two_sources(tmp_path)))
    assert [again.prompt(position) for position in reversed(range(18))] == prompts[::-1]


def test_the_identity_covers_weights_and_every_source_but_no_names(a_spec: Build, tmp_path: Path) -> None:
    def identify(**math: object) -> str:
        return load_prompts(a_spec(two_sources(tmp_path, **math))).identity()

    same = identify()
    assert same == identify(name="arithmetic") == identify(template="Q: {question}")
    assert same != identify(weight=3)
    assert same != identify(source=a_file(tmp_path, 4, "other.jsonl"))


def test_texts_of_a_source_replace_those_of_the_run_for_its_validation_too(a_spec: Build, tmp_path: Path) -> None:
    prompts = two_sources(tmp_path, system="Calculate.", template="Sum: {question}")
    held_out = [{"name": name, "source": a_file(tmp_path, 5, f"{name}-test.jsonl")} for name in ("math", "other")]
    spec = a_spec(
        prompts | {"format": "Chat", "system": "Be brief."}, {"sources": [{**held_out[0], "limit": 2}, held_out[1]]}
    )
    first = next(prompt for prompt in map(load_prompts(spec).prompt, range(9)) if prompt.source == "code")
    assert first.text.startswith("<s>[system]Be brief.[user]code")
    found = load_validation(spec, open_sources(spec).validation)
    assert [prompt.source for prompt in found] == ["math"] * 2 + ["other"] * 5
    assert [prompt.position for prompt in found] == list(range(7))
    assert found[0].text == "<s>[system]Calculate.[user]Sum: math-test.jsonl 0?[assistant]"
    assert found[2].text == "<s>[system]Be brief.[user]other-test.jsonl 0?[assistant]"
