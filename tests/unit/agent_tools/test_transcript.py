"""A rollout of several turns consists of exactly the sampled tokens, with the outputs between them."""

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

from specrl.agent_tools import CallDelimiters, Episode
from specrl.errors import SpecInvalid
from specrl.records import FinishReason, OutputSpan, Rollout, RolloutRequest, Sampling, SamplingSets, VersionSpan
from specrl.spec.tools import AnsweredBy, CodeTool, Tools

VOCAB = 264


def tools(**changes: Any) -> Tools:
    return Tools(answered_by=AnsweredBy(code=CodeTool()), **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, VOCAB)
    return folder


@pytest.fixture(scope="module")
def delimiters(model: Path) -> CallDelimiters:
    return CallDelimiters(tools(max_output_tokens=6), str(model))


def an_episode(delimiters: CallDelimiters, max_tokens: int = 100, max_turns: int = 3) -> Episode:
    return Episode(RolloutRequest("r", "g", 1, (5, 6), Sampling(max_tokens, seed=7)), delimiters, max_turns)


def a_turn(episode: Episode, token_ids: Sequence[int], text: str, stop: str = "", version: int = 2) -> Rollout:
    """Build the rollout that a replica returns for the episode's next turn."""
    count = len(token_ids)
    return Rollout(
        rollout_id=episode.next_request.rollout_id,
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


def test_turns_extend_the_sampled_tokens_and_no_text_is_tokenized_again(delimiters: CallDelimiters) -> None:
    episode = an_episode(delimiters)
    first = episode.next_request
    assert (first.rollout_id, first.prompt_token_ids, first.sampling.stop) == ("r", (5, 6), ("</tool>",))
    # tokens that no tokenizer gives for this text
    assert episode.add_turn(a_turn(episode, [200, 201, 202], "<tool>1+2", "</tool>"))
    assert episode.requested_call == "1+2"
    assert episode.completion == "<tool>1+2</tool>"
    assert episode.add_output("3")
    output = delimiters.tokenize_output("3")
    assert delimiters.decode_output(output) == "<output>3</output>"
    second = episode.next_request
    assert second.prompt_token_ids == (5, 6, 200, 201, 202, *output)
    assert second.sampling.max_tokens == 100 - 3 - len(output)
    assert second.sampling.stop == ("</tool>",)
    assert second.rollout_id != first.rollout_id
    assert second.sampling.seed not in (None, first.sampling.seed)
    assert not episode.add_turn(a_turn(episode, [210, 211], "#### 3", version=4))
    rollout = episode.build_rollout()
    rollout.check(100, range(2, 5))
    assert rollout.token_ids_T.tolist() == [200, 201, 202, *output, 210, 211]
    assert rollout.outputs == (OutputSpan(3, 3 + len(output)),)
    assert rollout.versions == (VersionSpan(2, 0, 3), VersionSpan(4, 3 + len(output), 5 + len(output)))
    assert rollout.oldest_version == 2
    assert rollout.sampler_logprobs_T[rollout.sampled_N].tolist() == [-2, -1.5, -1, -2, -1]
    assert (rollout.rollout_id, rollout.seconds, rollout.finish_reason) == ("r", 3.0, FinishReason.STOP)
    assert rollout.text == "<tool>1+2</tool>#### 3", "an output is no part of what is judged"
    assert episode.completion == "<tool>1+2</tool><output>3</output>#### 3"


def test_a_tokens_experts_come_from_the_first_turn_that_computed_it(delimiters: CallDelimiters) -> None:
    episode = an_episode(delimiters)
    tokens = 0
    turns = []
    for number, (ids, stop) in enumerate((([200, 201, 202], "</tool>"), ([210, 211], ""))):
        tokens = len(episode.next_request.prompt_token_ids) + len(ids) - 1
        of_turn = np.full((tokens, 2, 1), number, np.uint8)
        turns.append(replace(a_turn(episode, ids, "<tool>1" if stop else "#### 1", stop), experts_SLK=of_turn))
        if episode.add_turn(turns[-1]):
            episode.add_output("1")
    experts = episode.build_rollout().experts_SLK
    assert experts is not None
    assert experts[:, 1, 0].tolist() == [0] * 4 + [1] * (tokens - 4)


def test_turns_with_experts_of_different_shapes_have_none_together(delimiters: CallDelimiters) -> None:
    """Joining them raised ValueError, which ended the run. Without experts the rollout is sampled again."""
    episode = an_episode(delimiters)
    first = replace(a_turn(episode, [200, 201], "<tool>1", "</tool>"), experts_SLK=np.zeros((3, 2, 1), np.uint8))
    assert episode.add_turn(first)
    assert episode.add_output("1")
    tokens = len(episode.next_request.prompt_token_ids)
    episode.add_turn(replace(a_turn(episode, [210], "#### 1"), experts_SLK=np.zeros((tokens, 3, 1), np.uint8)))
    assert episode.build_rollout().experts_SLK is None


def test_sampling_sets_of_all_turns_are_joined_without_the_outputs(delimiters: CallDelimiters) -> None:
    episode = an_episode(delimiters)
    first = replace(a_turn(episode, [200, 201], "<tool>1", "</tool>"), sets=SamplingSets.from_lists([[7, 200], [201]]))
    assert episode.add_turn(first)
    assert episode.add_output("1")
    episode.add_turn(replace(a_turn(episode, [210], "#### 1"), sets=SamplingSets.from_lists([[1, 2, 210]])))
    rollout = episode.build_rollout()
    rollout.check(max_tokens=rollout.total_length)
    assert rollout.outputs
    assert rollout.sets is not None
    assert rollout.sets.sizes_N.tolist() == [2, 1, 3]
    assert rollout.sets.ids_M.tolist() == [7, 200, 201, 1, 2, 210]


def test_a_single_turn_without_a_call_is_the_whole_rollout(delimiters: CallDelimiters) -> None:
    episode = an_episode(delimiters)
    turn = a_turn(episode, [200, 201], "#### 3")
    assert not episode.add_turn(turn)
    rollout = episode.build_rollout()
    assert (rollout.outputs, rollout.versions, rollout.text) == ((), turn.versions, turn.text)
    assert rollout.token_ids_T.tolist() == turn.token_ids_T.tolist()


def test_a_call_in_the_last_turn_ends_the_rollout_with_reason_turns(delimiters: CallDelimiters) -> None:
    episode = an_episode(delimiters, max_turns=2)
    assert episode.add_turn(a_turn(episode, [200], "<tool>1", "</tool>"))
    assert episode.add_output("1")
    assert not episode.add_turn(a_turn(episode, [201], "<tool>2", "</tool>"))
    assert episode.build_rollout().finish_reason is FinishReason.TURNS
    assert episode.build_rollout().text == "<tool>1</tool><tool>2</tool>"


def test_a_rollout_ends_if_an_output_and_one_more_token_do_not_fit(delimiters: CallDelimiters) -> None:
    length = len(delimiters.tokenize_output("3"))
    for spare, has_next in ((1, True), (0, False)):
        episode = an_episode(delimiters, max_tokens=1 + length + spare)
        episode.add_turn(a_turn(episode, [200], "<tool>1+2", "</tool>"))
        assert episode.add_output("3") is has_next
    assert episode.build_rollout().finish_reason is FinishReason.LENGTH
    assert episode.build_rollout().token_ids_T.tolist() == [200], "no output that nothing follows"


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
def test_a_turn_that_ends_for_another_reason_calls_no_tool(delimiters: CallDelimiters, reason: FinishReason) -> None:
    episode = an_episode(delimiters)
    stop = "\n\n" if reason is FinishReason.STOP else ""
    turn = replace(a_turn(episode, [200], "<tool>1+2", stop), finish_reason=reason)
    assert not episode.add_turn(turn)
    assert episode.build_rollout().finish_reason is reason
    assert episode.build_rollout().text == "<tool>1+2"


def test_a_call_begins_at_the_last_call_start(delimiters: CallDelimiters) -> None:
    assert delimiters.extract_call("so <tool>not this <tool>this") == "this"
    assert delimiters.extract_call("no beginning") is None
    assert delimiters.extract_call("<tool>") == ""


def test_a_long_output_loses_its_middle_and_keeps_its_end(delimiters: CallDelimiters) -> None:
    assert delimiters.decode_output(delimiters.tokenize_output("0123456789")) == "<output>012789</output>"
    assert delimiters.decode_output(delimiters.tokenize_output("")) == "<output></output>"


@given(text=st.text(max_size=6))
def test_an_output_never_becomes_a_special_token_and_loses_no_text(delimiters: CallDelimiters, text: str) -> None:
    for said in (text, EOS):
        output = delimiters.tokenize_output(said)
        assert not {0, 1, 2, 3} & set(output)
        if len(said.encode(errors="replace")) <= 6:
            readable = said.encode(errors="replace").decode()
            assert delimiters.decode_output(output) == f"<output>{readable}</output>"


def test_output_delimiters_may_be_special_tokens_of_a_chat_template(model: Path) -> None:
    chat = CallDelimiters(tools(output_start="<|im_end|>\n<|im_start|>user\n", output_end="<|im_end|>\n"), str(model))
    output = chat.tokenize_output("3")
    assert output[0] == output[-2] == 3, "the end of a message is its own token"
    assert chat.decode_output(output) == "<|im_end|>\n<|im_start|>user\n3<|im_end|>\n"


@pytest.mark.parametrize("name", ["call_start", "call_end"])
def test_a_call_delimiter_that_is_a_special_token_is_refused(model: Path, name: str) -> None:
    with pytest.raises(
        SpecInvalid, match=r"tools\.call(Start|End): must be text that the policy's tokenizer can encode"
    ):
        CallDelimiters(tools(**{name: "<|im_end|>"}), str(model))


def test_a_delimiter_that_the_tokenizer_cannot_encode_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "call": 1, "end": 2, "so": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    known = {"call_start": "call", "call_end": "end", "output_start": "so", "output_end": "end"}
    CallDelimiters(tools(**known), str(tmp_path))
    with pytest.raises(SpecInvalid) as caught:
        CallDelimiters(tools(**known | {"call_end": "over", "output_start": "then"}), str(tmp_path))
    assert [problem.path for problem in caught.value.problems] == ["tools.callEnd", "tools.outputStart"]
