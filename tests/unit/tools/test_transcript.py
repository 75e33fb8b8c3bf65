"""A rollout of several turns is the tokens that were sampled, as they were sampled, and outputs between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny_models import EOS, make_tokenizer

from specrl.errors import SpecInvalid
from specrl.records import FinishReason, OutputSpan, Rollout, RolloutRequest, Sampling, VersionSpan
from specrl.spec.tools import AnsweredBy, CodeTool, Tools
from specrl.tools import Delimiters, Ending, Episode

VOCAB = 264


def tools(**changes: Any) -> Tools:
    return Tools(answered_by=AnsweredBy(code=CodeTool()), **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture(scope="module")
def delimiters(model: Path) -> Delimiters:
    return Delimiters(tools(max_output_tokens=6), str(model))


def an_episode(delimiters: Delimiters, max_tokens: int = 100, max_turns: int = 3) -> Episode:
    return Episode(RolloutRequest("r", "g", 1, (5, 6), Sampling(max_tokens, seed=7)), delimiters, max_turns)


def a_turn(episode: Episode, token_ids: Sequence[int], text: str, stop: str = "", version: int = 2) -> Rollout:
    """What a replica sends back for the episode's next turn."""
    count = len(token_ids)
    return Rollout(
        rollout_id=episode.request.rollout_id,
        group_id="g",
        sample_index=1,
        token_ids_T=np.array(token_ids, np.int32),
        sampler_logprobs_T=np.linspace(-2, -1, count, dtype=np.float32),
        versions=(VersionSpan(version, 0, count),),
        finish_reason=FinishReason.STOP,
        replica_id="gen-0",
        text=text,
        seconds=1.5,
        stop=stop,
    )


def test_turns_extend_the_tokens_that_were_sampled_and_no_text_is_tokenized_again(delimiters: Delimiters) -> None:
    episode = an_episode(delimiters)
    first = episode.request
    assert (first.rollout_id, first.prompt_token_ids, first.sampling.stop) == ("r", (5, 6), ("</tool>",))
    # tokens that no tokenizer gives for this text
    assert episode.sampled(a_turn(episode, [200, 201, 202], "<tool>1+2", "</tool>")) is Ending.GOES_ON
    assert episode.call == "1+2"
    assert episode.completion == "<tool>1+2</tool>"
    assert episode.answered("3") is Ending.GOES_ON
    output = delimiters.output("3")
    assert delimiters.text(output) == "<output>3</output>"
    second = episode.request
    assert second.prompt_token_ids == (5, 6, 200, 201, 202, *output)
    assert second.sampling.max_tokens == 100 - 3 - len(output)
    assert second.sampling.stop == ("</tool>",)
    assert second.rollout_id != first.rollout_id
    assert second.sampling.seed not in (None, first.sampling.seed)
    assert episode.sampled(a_turn(episode, [210, 211], "#### 3", version=4)) is Ending.ENDED
    rollout = episode.rollout()
    rollout.check(100, range(2, 5))
    assert rollout.token_ids_T.tolist() == [200, 201, 202, *output, 210, 211]
    assert rollout.outputs == (OutputSpan(3, 3 + len(output)),)
    assert rollout.versions == (VersionSpan(2, 0, 3), VersionSpan(4, 3 + len(output), 5 + len(output)))
    assert rollout.oldest_version == 2
    assert rollout.sampler_logprobs_T[rollout.sampled_N].tolist() == [-2, -1.5, -1, -2, -1]
    assert (rollout.rollout_id, rollout.seconds, rollout.finish_reason) == ("r", 3.0, FinishReason.STOP)
    assert rollout.text == "<tool>1+2</tool>#### 3", "an output is no part of what is judged"
    assert episode.completion == "<tool>1+2</tool><output>3</output>#### 3"


def test_experts_of_a_token_are_those_of_the_first_turn_that_had_it(delimiters: Delimiters) -> None:
    episode = an_episode(delimiters)
    tokens, turns = 0, []
    for number, (ids, stop) in enumerate((([200, 201, 202], "</tool>"), ([210, 211], ""))):
        tokens = len(episode.request.prompt_token_ids) + len(ids) - 1
        of_turn = np.full((tokens, 2, 1), number, np.uint8)
        turns.append(replace(a_turn(episode, ids, "<tool>1" if stop else "#### 1", stop), experts_SLK=of_turn))
        if episode.sampled(turns[-1]) is Ending.GOES_ON:
            episode.answered("1")
    experts = episode.rollout().experts_SLK
    assert experts is not None
    assert experts[:, 1, 0].tolist() == [0] * 4 + [1] * (tokens - 4)


def test_a_turn_without_a_call_is_the_rollout_as_it_came(delimiters: Delimiters) -> None:
    episode = an_episode(delimiters)
    turn = a_turn(episode, [200, 201], "#### 3")
    assert episode.sampled(turn) is Ending.ENDED
    rollout = episode.rollout()
    assert (rollout.outputs, rollout.versions, rollout.text) == ((), turn.versions, turn.text)
    assert rollout.token_ids_T.tolist() == turn.token_ids_T.tolist()


def test_a_call_in_the_last_turn_ends_the_rollout_with_that_reason(delimiters: Delimiters) -> None:
    episode = an_episode(delimiters, max_turns=2)
    assert episode.sampled(a_turn(episode, [200], "<tool>1", "</tool>")) is Ending.GOES_ON
    assert episode.answered("1") is Ending.GOES_ON
    assert episode.sampled(a_turn(episode, [201], "<tool>2", "</tool>")) is Ending.ENDED
    assert episode.rollout().finish_reason is FinishReason.TURNS
    assert episode.rollout().text == "<tool>1</tool><tool>2</tool>"


def test_a_rollout_ends_where_an_output_and_one_more_token_do_not_fit(delimiters: Delimiters) -> None:
    length = len(delimiters.output("3"))
    for spare, ending in ((1, Ending.GOES_ON), (0, Ending.ENDED)):
        episode = an_episode(delimiters, max_tokens=1 + length + spare)
        episode.sampled(a_turn(episode, [200], "<tool>1+2", "</tool>"))
        assert episode.answered("3") is ending
    assert episode.rollout().finish_reason is FinishReason.LENGTH
    assert episode.rollout().token_ids_T.tolist() == [200], "no output that nothing follows"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_what_ends_for_another_reason_calls_nothing(delimiters: Delimiters, reason: FinishReason) -> None:
    episode = an_episode(delimiters)
    stop = "\n\n" if reason is FinishReason.STOP else ""
    turn = replace(a_turn(episode, [200], "<tool>1+2", stop), finish_reason=reason)
    assert episode.sampled(turn) is Ending.ENDED
    assert episode.rollout().finish_reason is reason
    assert episode.rollout().text == "<tool>1+2"


def test_the_call_is_what_follows_the_last_beginning(delimiters: Delimiters) -> None:
    assert delimiters.call("so <tool>not this <tool>this") == "this"
    assert delimiters.call("no beginning") is None
    assert delimiters.call("<tool>") == ""


def test_a_long_output_loses_its_middle_and_keeps_what_it_ends_with(delimiters: Delimiters) -> None:
    assert delimiters.text(delimiters.output("0123456789")) == "<output>012789</output>"
    assert delimiters.text(delimiters.output("")) == "<output></output>"


@given(text=st.text(max_size=6))
def test_an_output_spells_no_special_token_and_nothing_of_it_is_lost(delimiters: Delimiters, text: str) -> None:
    for said in (text, EOS):
        output = delimiters.output(said)
        assert not {0, 1, 2, 3} & set(output)
        if len(said.encode(errors="replace")) <= 6:
            readable = said.encode(errors="replace").decode()
            assert delimiters.text(output) == f"<output>{readable}</output>"


def test_a_chat_templates_turns_can_be_written_out(model: Path) -> None:
    chat = Delimiters(tools(output_start="<|im_end|>\n<|im_start|>user\n", output_end="<|im_end|>\n"), str(model))
    output = chat.output("3")
    assert output[0] == output[-2] == 3, "the end of a message is its own token"
    assert chat.text(output) == "<|im_end|>\n<|im_start|>user\n3<|im_end|>\n"


@pytest.mark.parametrize("name", ["call_start", "call_end"])
def test_a_call_that_is_no_text_is_refused(model: Path, name: str) -> None:
    with pytest.raises(SpecInvalid, match=r"tools\.call(Start|End): must be text that the policy's tokenizer can say"):
        Delimiters(tools(**{name: "<|im_end|>"}), str(model))


def test_what_a_tokenizer_does_not_know_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "call": 1, "end": 2, "so": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    known = {"call_start": "call", "call_end": "end", "output_start": "so", "output_end": "end"}
    Delimiters(tools(**known), str(tmp_path))
    with pytest.raises(SpecInvalid) as caught:
        Delimiters(tools(**known | {"call_end": "over", "output_start": "then"}), str(tmp_path))
    assert [problem.path for problem in caught.value.problems] == ["tools.callEnd", "tools.outputStart"]
