"""Format a problem's question, and tokenize it with the policy's tokenizer.

Called by `stream.PromptStream`, by `agent_tools` and by `specrl sft`. Invariant: prompts are tokenized only here, with
the policy's own tokenizer; every other process uses the token ids as they are. This module runs in the coordinator,
which must not import torch: `AutoTokenizer` would do so, `PreTrainedTokenizerFast` only reads tokenizer.json.
"""

from __future__ import annotations

import datetime
import re
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid, SpecProblem, collect_problems, first_line
from specrl.models import RunModels
from specrl.models.end_tokens import find_stop_tokens
from specrl.prompts.columns import DatasetProblem
from specrl.prompts.limited_process import LimitedProcess, LimitReached
from specrl.spec import RunSpec
from specrl.spec.data import ONLY_SOURCE, FewShotTurn, PromptFormat, Prompts
from specrl.spec.tools import Tools
from specrl.tensor_files import check_folder

_TODAY = datetime.date(2024, 7, 26)
"""The date in prompts whose chat template asks for today's (`strftime_now`). A prompt must not depend on the day: a
resumed run would have others. Llama's own templates write this date if they cannot ask."""

_BATCH = 1024
"""Texts per call of the tokenizer: enough to use all cores, which it does within one call, and small in memory. Also
prompts per request to the worker that renders them."""

_BATCH_LETTERS = 1 << 24
"""Letters per request to that worker, so that both sides hold a few hundred MB of it at most."""

_MOST_LETTERS = 1 << 27
"""Letters of a prompt before its tokens are counted: twice those of the largest record."""

_RENDER_MIB = 2048
"""Memory of that worker: ten times the largest request."""

_RENDER_S = 10
"""Processor seconds for one prompt. Real templates take less than a millisecond for a short conversation."""


@dataclass(frozen=True)
class _SourceTexts:
    """What is put around the problems of one source. system: empty if there is no system message."""

    template: str
    system: str
    few_shot: Sequence[FewShotTurn]


class _ChatRenderer:
    """Renders the policy's chat template in a worker, since a stranger may have written it. Starts it when needed."""

    def __init__(self, template: str, variables: Mapping[str, Any]) -> None:
        self._start = {
            "template": template,
            "variables": dict(variables),
            "today": _TODAY.isoformat(),
            "most_letters": _MOST_LETTERS,
        }
        self._worker: LimitedProcess | None = None
        self._lock = threading.Lock()

    def render_all(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
        """Render conversations. Raises `_RenderFailed` for the first that fails."""
        with self._lock:  # a worker answers one request at a time
            return [text for batch in _make_batches(conversations) for text in self._render(batch)]

    def _render(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> Iterator[str]:
        worker = self._worker
        self._worker = None  # after a failure another one is started
        place = 0
        try:
            if worker is None:
                worker = LimitedProcess("templates", _RENDER_MIB, _RENDER_S)
                for answer in worker.ask(self._start):
                    raise _RenderFailed(0, answer["fault"])
            for place, answer in enumerate(worker.ask(conversations)):
                if "fault" in answer:
                    raise _RenderFailed(place, answer["fault"])
                yield answer["text"]
        except LimitReached as error:
            raise _RenderFailed(place, str(error)) from error
        self._worker = worker


class _RenderFailed(Exception):
    """A conversation was not rendered. place: its index among those of one request."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place = place


def _make_batches(conversations: Sequence[Sequence[Mapping[str, str]]]) -> Iterator[list[Sequence[Mapping[str, str]]]]:
    """Cut a list into requests of at most _BATCH conversations and _BATCH_LETTERS letters, or of one conversation."""
    batch: list[Sequence[Mapping[str, str]]] = []
    letters = 0
    for messages in conversations:
        batch.append(messages)
        letters += sum(len(message["content"]) for message in messages)
        if len(batch) == _BATCH or letters > _BATCH_LETTERS:
            yield batch
            batch = []
            letters = 0
    if batch:
        yield batch


class PromptTemplate:
    """Formats questions by the run's template, and tokenizes them with the policy's tokenizer."""

    def __init__(self, prompts: Prompts, model_path: str) -> None:
        """Load the tokenizer. Raises CheckpointInvalid if it is missing or broken, or `Chat` lacks a chat template."""
        self._texts = _SourceTexts(prompts.template, prompts.system or "", prompts.few_shot)
        self._texts_by_source = {
            source.name: _SourceTexts(
                self._texts.template if source.template is None else source.template,
                self._texts.system if source.system is None else source.system,
                source.few_shot or prompts.few_shot,
            )
            for source in prompts.sources
        }
        self._is_chat = prompts.format == PromptFormat.CHAT
        self._tokenizer = load_tokenizer(Path(model_path))
        self._path = model_path
        if self._is_chat:
            self._renderer = _ChatRenderer(self._find_chat_template(), self._tokenizer.special_tokens_map)

    def _find_chat_template(self) -> str:
        found = ""
        if self._tokenizer.chat_template:
            try:
                found = self._tokenizer.get_chat_template()
            except ValueError as error:  # several, none of them the default
                raise CheckpointInvalid(
                    f"{self._path}: must have a default chat template, got {first_line(error)}; name one `default`"
                ) from error
        if not found or not isinstance(found, str):
            raise CheckpointInvalid(
                f"{self._path}: must have a chat template for prompts.format Chat, got none; "
                "add chat_template.jinja, or use Raw"
            )
        return found

    def find_fault(self, problem: DatasetProblem) -> str:
        """Return why a problem cannot be formatted; empty if it can."""
        if problem.messages and not self._is_chat:
            return "the problem must be one user message for prompts.format Raw, got more messages; use Chat"
        return ""

    def find_stop_problems(self, stop: Sequence[str], stop_tokens: Container[str]) -> Iterator[SpecProblem]:
        """Report stop strings that contain a special token beside other text, in which no completion ends.

        The engine looks for them in text without special tokens. The end token ends a completion by itself.
        stop_tokens: stop strings that are tokens, at which the engine ends a completion.
        """
        special = {
            token.content
            for token in self._tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
            if token.special
        }
        for number, text in enumerate(stop):
            found = sorted(content for content in special if content in text)
            if found and text != self._tokenizer.eos_token and text not in stop_tokens:
                yield SpecProblem(
                    f"generation.sampling.stop[{number}]",
                    f"must be a special token alone or have none, since completions' text leaves them out, "
                    f"got {found[0]!r} in {text!r}",
                    "write the token alone",
                )

    def format_problem(self, problem: DatasetProblem, source: str = ONLY_SOURCE) -> str:
        """Return the prompt's text. In a template only `{question}` is replaced; other braces stay.

        source: name of the problem's source, whose template, system message and examples are used. A problem must have
        no fault. Raises CheckpointInvalid if the chat template fails.
        """
        (text,) = self.format_all([problem], source)
        return text

    def format_all(self, problems: Sequence[DatasetProblem], source: str = ONLY_SOURCE) -> list[str]:
        """Return the prompts' texts of several problems of one source, as `format_problem` does of one."""
        texts = self._texts_by_source.get(source, self._texts)
        if not self._is_chat:
            return [texts.template.replace("{question}", problem.question) for problem in problems]
        conversations = [_build_messages(problem, texts) for problem in problems]
        try:
            return self._renderer.render_all(conversations)
        except _RenderFailed as error:
            roles = ", ".join(message["role"] for message in conversations[error.place][:20])
            raise CheckpointInvalid(
                f"{self._path}: the chat template must render messages of the roles {roles}, got {error}; "
                "correct it, leave prompts.system and prompts.fewShot out, or use prompts.format Raw"
            ) from error

    def tokenize_text(self, text: str) -> tuple[int, ...]:
        """Tokenize one formatted text."""
        (token_ids,) = self.tokenize_all([text])
        return token_ids

    def tokenize_all(self, texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Tokenize formatted texts. `Raw` adds the tokenizer's special tokens; chat templates contain them already."""
        # Without transformers' wrapper, which adds a millisecond per text.
        backend = self._tokenizer.backend_tokenizer
        for first in range(0, len(texts), _BATCH):
            batch = list(texts[first : first + _BATCH])
            encoded = backend.encode_batch_fast(batch, add_special_tokens=not self._is_chat)
            yield from (tuple(encoding.ids) for encoding in encoded)

    def tokenize_completion(
        self, text: str, tools: Tools | None = None
    ) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Tokenize a completion for supervised training.

        Returns its token ids with the end token, and the spans [first, end) of tools' outputs in them. The completion
        is tokenized apart from the prompt, as it is sampled. Raises CheckpointInvalid if there is no end token.
        """
        end = self._tokenizer.eos_token_id
        if end is None:
            raise CheckpointInvalid(
                f"{self._path}: the tokenizer must have an end token, got none; name eos_token in tokenizer_config.json"
            )
        # Split around tools' outputs: with one capturing group, every second piece is an output.
        pieces = [text]
        if tools is not None:
            marks = f"({re.escape(tools.output_start)}.*?{re.escape(tools.output_end)})"
            pieces = re.split(marks, text, flags=re.DOTALL)
        token_ids: list[int] = []
        outputs = []
        for number, piece in enumerate(pieces):
            ids = self._tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False).ids
            if number % 2:
                outputs.append((len(token_ids), len(token_ids) + len(ids)))
            token_ids += ids
        return (*token_ids, end), outputs


def _build_messages(problem: DatasetProblem, texts: _SourceTexts) -> list[dict[str, str]]:
    """Build the conversation: system message, examples, the problem's earlier messages, and its question."""
    given = [dict(message) for message in problem.messages] or [{"role": "user", "content": problem.question}]
    given[-1]["content"] = texts.template.replace("{question}", given[-1]["content"])
    messages: list[dict[str, str]] = []
    if given[0]["role"] == "system":
        messages.append(given.pop(0))
    elif texts.system:
        messages.append({"role": "system", "content": texts.system})
    for turn in texts.few_shot:
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.assistant})
    return messages + given


def check(spec: RunSpec, models: RunModels) -> list[SpecProblem]:
    """List the problems of the policy's tokenizer: it does not load, or lacks the chat template that `Chat` needs."""
    problems: list[SpecProblem] = []
    if models.policy is not None and models.policy.vocabulary is not None:
        with collect_problems(problems):
            template = PromptTemplate(spec.prompts, spec.model.path)
            stop = spec.generation.sampling.stop
            problems += template.find_stop_problems(stop, find_stop_tokens(stop, models.policy).values())
    return problems


def load_tokenizer(folder: Path) -> Any:
    """Load the policy's tokenizer, a `PreTrainedTokenizerFast`. Raises CheckpointInvalid if it is missing or broken."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointInvalid(
            f"{folder}: must hold the policy's tokenizer.json, got no such file; "
            "save the fast tokenizer there with transformers' save_pretrained"
        )
    check_folder(folder, str(folder))
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a malformed file
        raise CheckpointInvalid(
            f"{file}: must be a tokenizer that transformers can load, got {type(error).__name__}: {error}; "
            "save it again with transformers' save_pretrained"
        ) from error
    # tokenizer.json may enable both. Prompts are never cut, and their lengths are checked without padding.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
