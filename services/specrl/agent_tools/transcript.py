"""The tokens of one rollout with tool calls, turn by turn.

    SAMPLING --end token, stop string of the run, maxTokens--> ENDED
             --callEnd--> CALLED --output, and tokens left--> SAMPLING
                                 --no tokens or turns left--> ENDED

Invariant: the prompt of a turn is the first prompt, then every sampled token and every output's tokens, in order.
Sampled text is never tokenized again, because the tokenizer may split it into other tokens than the policy sampled.
Importance ratios over those would belong to a rollout that was never sampled. Each output is tokenized once.

The coordinator's `replica_session` drives an `Episode`, which is pure: it neither waits nor does I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specrl.errors import SpecProblem, raise_problems
from specrl.prompts.templates import load_tokenizer
from specrl.records import (
    ExpertArray,
    FinishReason,
    OutputSpan,
    Rollout,
    RolloutRequest,
    SamplingSets,
    VersionSpan,
)
from specrl.spec.tools import Tools


class CallDelimiters:
    """The texts around calls and outputs that the run file sets, in the policy's tokens."""

    def __init__(self, tools: Tools, model_path: str) -> None:
        """Load the tokenizer and check the texts.

        Raises CheckpointInvalid if the tokenizer is unusable, and SpecInvalid with every text that it cannot encode.
        """
        self.call_start = tools.call_start
        """The text that begins a call."""
        self.call_end = tools.call_end
        """The text that ends a call. It is a stop string of every turn."""
        self._most_tokens = tools.max_output_tokens
        tokenizer = load_tokenizer(Path(model_path)).backend_tokenizer
        self._start = _tokenize_text(tokenizer, tools.output_start)
        self._end = _tokenize_text(tokenizer, tools.output_end)
        _check_texts(tools, tokenizer)
        # Set only after the delimiters are encoded, since these may be special tokens. An output that spells the end
        # token must become ordinary tokens, so that it does not end the turn.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer

    def extract_call(self, turn: str) -> str | None:
        """Return the call in the text of a turn that ended with callEnd; None if the turn never began a call."""
        _, began, call = turn.rpartition(self.call_start)
        return call if began else None

    def tokenize_output(self, text: str) -> tuple[int, ...]:
        """Tokenize an output with the texts around it. Longer outputs than maxOutputTokens lose their middle."""
        own = _tokenize_text(self._tokenizer, text)
        most = self._most_tokens
        if len(own) > most:  # keep the end, too: it has the exception, if there was one
            own = own[: most - most // 2] + own[len(own) - most // 2 :]
        return (*self._start, *own, *self._end)

    def decode_output(self, output: Sequence[int]) -> str:
        """Decode an output's tokens to the text that the policy reads."""
        said: str = self._tokenizer.decode(list(output), skip_special_tokens=False)
        return said


def _check_texts(tools: Tools, tokenizer: Any) -> None:
    """Raise SpecInvalid for every text that the tokenizer cannot reproduce."""
    # The policy writes the first two. The engine looks for callEnd in text without special tokens, so those two must
    # survive decoding without them.
    problems = []
    for name, text, is_sampled in (
        ("callStart", tools.call_start, True),
        ("callEnd", tools.call_end, True),
        ("outputStart", tools.output_start, False),
        ("outputEnd", tools.output_end, False),
    ):
        said = tokenizer.decode(_tokenize_text(tokenizer, text), skip_special_tokens=is_sampled)
        if said != text:
            remedy = "use characters that it knows"
            if is_sampled:
                remedy += ", and none of its special tokens, which are not part of a completion's text"
            rule = f"must be text that the policy's tokenizer can encode, got {text!r}, which decodes to {said!r}"
            problems.append(SpecProblem(f"tools.{name}", rule, remedy))
    raise_problems(problems)


def _tokenize_text(tokenizer: Any, text: str) -> tuple[int, ...]:
    readable = text.encode(errors="replace").decode()  # the tokenizer takes UTF-8, which has no lone surrogates
    return tuple(tokenizer.encode(readable, add_special_tokens=False).ids)


@dataclass
class Episode:
    """A rollout in progress, in which turns and outputs alternate.

    first: the request of the first turn. max_turns: most turns of the rollout.
    """

    first: RolloutRequest
    delimiters: CallDelimiters
    max_turns: int

    def __post_init__(self) -> None:
        self._turns: list[Rollout] = []
        self._outputs: list[tuple[int, ...]] = []
        self._finish = FinishReason.STOP
        self.completion = ""
        """All text since the prompt, outputs included."""

    @property
    def next_request(self) -> RolloutRequest:
        """The request for the next turn: all tokens so far as its prompt, and the rest of maxTokens."""
        number = len(self._turns)
        sampling = self.first.sampling
        stop = (*sampling.stop, self.delimiters.call_end)
        if number == 0:
            return replace(self.first, sampling=replace(sampling, stop=stop))
        seed = sampling.seed
        if seed is not None:  # the same seed would repeat the first turn's draws
            seed = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
        pairs = zip(self._turns, self._outputs, strict=True)
        so_far = [token for turn, output in pairs for token in (*turn.token_ids_T.tolist(), *output)]
        return replace(
            self.first,
            rollout_id=f"{self.first.rollout_id}/turn-{number + 1}",
            prompt_token_ids=(*self.first.prompt_token_ids, *so_far),
            sampling=replace(sampling, stop=stop, seed=seed, max_tokens=self._tokens_left),
        )

    def add_turn(self, turn: Rollout) -> bool:
        """Append a sampled turn. Returns whether its call must be answered next; if not, the rollout has ended."""
        self._turns.append(turn)
        self.completion += turn.text
        self._finish = turn.finish_reason
        # A stop string of the run ends the rollout; only callEnd asks for the tool.
        if turn.finish_reason is not FinishReason.STOP or turn.stop != self.delimiters.call_end:
            return False
        self.completion += self.delimiters.call_end  # the engine leaves the stop string out of the text
        if len(self._turns) == self.max_turns:
            self._finish = FinishReason.TURNS
            return False
        return True

    @property
    def requested_call(self) -> str | None:
        """The call at the end of the last turn; None if that turn never began a call."""
        return self.delimiters.extract_call(self._turns[-1].text)

    def add_output(self, text: str) -> bool:
        """Append a tool's output. Returns whether another turn follows; if not, the rollout has ended."""
        output = self.delimiters.tokenize_output(text)
        # At least one token must fit after the output: an output that no sampled token follows teaches nothing.
        if len(output) >= self._tokens_left:
            self._finish = FinishReason.LENGTH
            return False
        self._outputs.append(output)
        self.completion += self.delimiters.decode_output(output)
        return True

    def build_rollout(self) -> Rollout:
        """Join all turns and outputs into one rollout with the first request's id.

        Its text has only what the policy wrote, so that the verifier never takes an output for the answer. Outputs have
        log probability 0 and are marked as spans, which are not trained on.
        """
        last = self._turns[-1]
        token_ids = []
        logprobs = []
        versions = []
        outputs = []
        text = ""
        end = 0
        for turn, output in zip(self._turns, [*self._outputs, ()], strict=False):
            token_ids += [turn.token_ids_T, np.asarray(output, dtype=np.int32)]
            logprobs += [turn.sampler_logprobs_T, np.zeros(len(output), dtype=np.float32)]
            versions += [VersionSpan(span.policy_version, end + span.first, end + span.end) for span in turn.versions]
            end += turn.total_length
            if output:
                outputs.append(OutputSpan(end, end + len(output)))
                end += len(output)
            text += turn.text + (turn.stop if turn.stop == self.delimiters.call_end else "")
        return replace(
            last,
            rollout_id=self.first.rollout_id,
            token_ids_T=np.concatenate(token_ids),
            sampler_logprobs_T=np.concatenate(logprobs),
            versions=_merge_spans(versions),
            outputs=tuple(outputs),
            finish_reason=self._finish,
            text=text,
            experts_SLK=_join_experts(self._turns),
            sets=_join_sets(self._turns),
            seconds=sum(turn.seconds for turn in self._turns),
        )

    @property
    def _tokens_left(self) -> int:
        used = sum(turn.total_length for turn in self._turns) + sum(map(len, self._outputs))
        return self.first.sampling.max_tokens - used


def _join_experts(turns: Sequence[Rollout]) -> ExpertArray | None:
    """Join the experts of all turns to one array [S, L, K].

    None if any turn lacks them, or if turns disagree on L and K: a run that replays routing refuses the rollout then.
    """
    # Take each token from the first turn that computed it. A later turn has it in its prompt, and may have computed it
    # under another policy version.
    found: list[ExpertArray] = []
    for turn in turns:
        if turn.experts_SLK is None or (found and turn.experts_SLK.shape[1:] != found[0].shape[1:]):
            return None
        found.append(turn.experts_SLK[sum(map(len, found)) :])
    return np.concatenate(found)


def _join_sets(turns: Sequence[Rollout]) -> SamplingSets | None:
    """Join the sampling sets of all turns; None if any turn lacks them. An output has none: it is not sampled."""
    found = [turn.sets for turn in turns if turn.sets is not None]
    return SamplingSets.join(found) if len(found) == len(turns) else None


def _merge_spans(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Merge adjacent spans of one policy version."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and found[-1].policy_version == span.policy_version and found[-1].end == span.first:
            found[-1] = replace(found[-1], end=span.end)
        else:
            found.append(span)
    return tuple(found)
