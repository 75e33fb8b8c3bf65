"""From a problem's question to the token ids that the policy is given.

Stage 1 of the loop; `stream.PromptStream` calls it. Invariant: token ids are made here alone, with the policy's own
tokenizer, and every other process takes them as they are. transformers is loaded without torch: this module runs in
the coordinator (`PreTrainedTokenizerFast` reads tokenizer.json; `AutoTokenizer` would load torch).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid
from specrl.spec.data import PromptFormat, Prompts
from specrl.spec.tools import Tools

_BATCH = 1024
"""Texts per call of the tokenizer, which uses all cores for one call: large enough for that, small in memory."""


class PromptTemplate:
    """The run's template and format, and the policy's tokenizer."""

    def __init__(self, prompts: Prompts, model_path: str) -> None:
        """Load the tokenizer. Raises CheckpointInvalid when it is missing or broken, or lacks what `Chat` needs."""
        self._text = prompts.template
        self._is_chat = prompts.format == PromptFormat.CHAT
        self._tokenizer = load_tokenizer(Path(model_path))
        if self._is_chat and not self._tokenizer.chat_template:
            raise CheckpointInvalid(
                f"{model_path}: must have a chat template for prompts.format Chat, got none; "
                "add chat_template.jinja, or use Raw"
            )
        self._path = model_path

    def format(self, question: str) -> str:
        """The text that the policy reads. Only `{question}` is replaced; other braces stay."""
        text = self._text.replace("{question}", question)
        if not self._is_chat:
            return text
        from jinja2 import TemplateError

        try:
            rendered: str = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise CheckpointInvalid(
                f"{self._path}: the chat template must render one user message, got {error}; "
                "correct it, or use prompts.format Raw"
            ) from error
        return rendered

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of a formatted text."""
        (token_ids,) = self.tokenize_all([text])
        return token_ids

    def tokenize_all(self, texts: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """Token ids of each text. `Raw` adds what the tokenizer adds to any text (as a first token); `Chat` has it."""
        # The tokenizer behind transformers' wrapper, which costs a millisecond a text.
        backend = self._tokenizer.backend_tokenizer
        for first in range(0, len(texts), _BATCH):
            batch = list(texts[first : first + _BATCH])
            encoded = backend.encode_batch_fast(batch, add_special_tokens=not self._is_chat)
            yield from (tuple(encoding.ids) for encoding in encoded)

    def completion(self, text: str, tools: Tools | None = None) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
        """Token ids of what the policy is to answer, its end token included, and [first, end) of tools' outputs in it.

        Tokenized apart from the prompt, as a completion is sampled. Raises CheckpointInvalid without an end token.
        """
        end = self._tokenizer.eos_token_id
        if end is None:
            raise CheckpointInvalid(
                f"{self._path}: the tokenizer must have an end token, got none; name eos_token in tokenizer_config.json"
            )
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


def load_tokenizer(folder: Path) -> Any:
    """The policy's tokenizer, a `PreTrainedTokenizerFast`. Raises CheckpointInvalid when it is missing or broken."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointInvalid(
            f"{folder}: must hold the policy's tokenizer.json, got no such file; "
            "save the fast tokenizer there with transformers' save_pretrained"
        )
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a file that it cannot read
        raise CheckpointInvalid(
            f"{file}: must be a tokenizer that transformers can load, got {type(error).__name__}: {error}; "
            "save it again with transformers' save_pretrained"
        ) from error
    # tokenizer.json may ask for both; a prompt is given whole and alone.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
