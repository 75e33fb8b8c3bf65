"""One rollout turn by turn, as tokens: what was sampled stays as it was sampled, an output is added once, as tokens.

    SAMPLING --end token, stop string of the run, maxTokens--> ENDED
             --callEnd--> CALLED --output, and room after it--> SAMPLING
                                 --no room, or no turn left--> ENDED

Invariant: the prompt of a turn is the prompt of the first, every token that was sampled, and every output's tokens, in
order. No text is ever tokenized again: a policy's tokens need not be those that its text would be given, and a ratio
over others would be about a rollout that was never sampled. Pure: nothing here waits or asks anybody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from specrl.errors import Problem, SpecInvalid
from specrl.prompts.templates import load_tokenizer
from specrl.records import ExpertArray, FinishReason, OutputSpan, Rollout, RolloutRequest, VersionSpan
from specrl.spec.tools import Tools


class Delimiters:
    """The run's texts around calls and outputs, in the policy's own tokens."""

    def __init__(self, tools: Tools, model_path: str) -> None:
        """Raises CheckpointInvalid for the tokenizer, SpecInvalid with every text that it cannot say."""
        self._tools = tools
        tokenizer = load_tokenizer(Path(model_path)).backend_tokenizer
        self._start, self._end = (_tokens(tokenizer, text) for text in (tools.output_start, tools.output_end))
        self._check(tokenizer)
        tokenizer.encode_special_tokens = True  # from here on: an output that spells an end token does not end a turn
        self._tokenizer = tokenizer

    @property
    def start(self) -> str:
        """What a call begins with."""
        return self._tools.call_start

    @property
    def stop(self) -> str:
        """The stop string of a turn that calls."""
        return self._tools.call_end

    def call(self, turn: str) -> str | None:
        """What a turn's text, which callEnd ended, asks of the tool; None when it never began a call."""
        _, began, call = turn.rpartition(self._tools.call_start)
        return call if began else None

    def output(self, text: str) -> tuple[int, ...]:
        """An output's tokens, the texts around it included; at most maxOutputTokens of them are its own."""
        own, most = _tokens(self._tokenizer, text), self._tools.max_output_tokens
        if len(own) > most:  # an exception is said at the end
            own = own[: most - most // 2] + own[len(own) - most // 2 :]
        return (*self._start, *own, *self._end)

    def text(self, output: Sequence[int]) -> str:
        """What an output's tokens say."""
        said: str = self._tokenizer.decode(list(output), skip_special_tokens=False)
        return said

    def _check(self, tokenizer: Any) -> None:
        """The engine finds callEnd in text without special tokens, and the policy must be able to write all four."""
        problems = []
        for name, text, is_sampled in (
            ("callStart", self._tools.call_start, True),
            ("callEnd", self._tools.call_end, True),
            ("outputStart", self._tools.output_start, False),
            ("outputEnd", self._tools.output_end, False),
        ):
            said = tokenizer.decode(_tokens(tokenizer, text), skip_special_tokens=is_sampled)
            if said != text:
                remedy = "use characters that it knows"
                if is_sampled:
                    remedy += ", and none of its special tokens, which are no part of a completion's text"
                rule = f"must be text that the policy's tokenizer can say, got {text!r}, which it says as {said!r}"
                problems.append(Problem(f"tools.{name}", rule, remedy))
        if problems:
            raise SpecInvalid(tuple(problems))


def _tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    readable = text.encode(errors="replace").decode()  # a lone surrogate is no text
    return tuple(tokenizer.encode(readable, add_special_tokens=False).ids)


class Ending(StrEnum):
    """Whether a rollout goes on: after a turn with a tool, after an output with a turn."""

    GOES_ON = "goes on"
    ENDED = "ended"


@dataclass
class Episode:
    """A rollout on its way. Turns and outputs alternate."""

    first: RolloutRequest
    delimiters: Delimiters
    max_turns: int

    def __post_init__(self) -> None:
        self._turns: list[Rollout] = []
        self._outputs: list[tuple[int, ...]] = []
        self._finish = FinishReason.STOP
        self.completion = ""
        """All text since the prompt, outputs included."""

    @property
    def request(self) -> RolloutRequest:
        """The next turn's: all tokens so far as its prompt, what is left of maxTokens, draws of its own."""
        number, sampling = len(self._turns), self.first.sampling
        stop = (*sampling.stop, self.delimiters.stop)
        if number == 0:
            return replace(self.first, sampling=replace(sampling, stop=stop))
        seed = sampling.seed
        if seed is not None:  # the same seed would repeat the first turn's draws
            seed = int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> 1)
        return replace(
            self.first,
            rollout_id=f"{self.first.rollout_id}/turn-{number + 1}",
            prompt_token_ids=(*self.first.prompt_token_ids, *self._token_ids()),
            sampling=replace(sampling, stop=stop, seed=seed, max_tokens=self._room),
        )

    def sampled(self, turn: Rollout) -> Ending:
        """Take a turn that has come back."""
        self._turns.append(turn)
        self.completion += turn.text
        self._finish = turn.finish_reason
        if turn.finish_reason is not FinishReason.STOP or turn.stop != self.delimiters.stop:
            return Ending.ENDED
        self.completion += self.delimiters.stop
        if len(self._turns) == self.max_turns:
            self._finish = FinishReason.TURNS
            return Ending.ENDED
        return Ending.GOES_ON

    @property
    def call(self) -> str | None:
        """What the last turn asks of the tool; None when it never began a call."""
        return self.delimiters.call(self._turns[-1].text)

    def answered(self, text: str) -> Ending:
        """Append a tool's output, if it and one more token fit; what nothing is sampled after would teach nothing."""
        output = self.delimiters.output(text)
        if len(output) >= self._room:
            self._finish = FinishReason.LENGTH
            return Ending.ENDED
        self._outputs.append(output)
        self.completion += self.delimiters.text(output)
        return Ending.GOES_ON

    def rollout(self) -> Rollout:
        """All turns as one rollout, under the first request's name.

        Its text is what the policy wrote: an output that looks like an answer is none.
        """
        last = self._turns[-1]
        token_ids, logprobs, versions, outputs = [], [], [], []
        text, end = "", 0
        for turn, output in zip(self._turns, [*self._outputs, ()], strict=False):
            token_ids += [turn.token_ids_T, np.asarray(output, dtype=np.int32)]
            logprobs += [turn.sampler_logprobs_T, np.zeros(len(output), dtype=np.float32)]
            versions += [VersionSpan(span.policy_version, end + span.first, end + span.end) for span in turn.versions]
            end += turn.length
            if output:
                outputs.append(OutputSpan(end, end + len(output)))
                end += len(output)
            text += turn.text + (turn.stop if turn.stop == self.delimiters.stop else "")
        return replace(
            last,
            rollout_id=self.first.rollout_id,
            token_ids_T=np.concatenate(token_ids),
            sampler_logprobs_T=np.concatenate(logprobs),
            versions=_joined(versions),
            outputs=tuple(outputs),
            finish_reason=self._finish,
            text=text,
            experts_SLK=_experts(self._turns),
            seconds=sum(turn.seconds for turn in self._turns),
        )

    def _token_ids(self) -> list[int]:
        pairs = zip(self._turns, self._outputs, strict=True)
        return [token for turn, output in pairs for token in (*turn.token_ids_T.tolist(), *output)]

    @property
    def _room(self) -> int:
        used = sum(turn.length for turn in self._turns) + sum(map(len, self._outputs))
        return self.first.sampling.max_tokens - used


def _experts(turns: Sequence[Rollout]) -> ExpertArray | None:
    """Of each token those of the first turn that it was in: a later one may have computed it under another version."""
    found: list[ExpertArray] = []
    for turn in turns:
        if turn.experts_SLK is None:
            return None
        found.append(turn.experts_SLK[sum(map(len, found)) :])
    return np.concatenate(found)


def _joined(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Neighbours of one version as one span."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and found[-1].policy_version == span.policy_version and found[-1].end == span.first:
            found[-1] = replace(found[-1], end=span.end)
        else:
            found.append(span)
    return tuple(found)
