"""Checks that completions are detokenized by the tokenizer that encoded the prompts.

Prompts are tokenized by tokenizer.json alone (`prompts/templates.py`). vLLM loads the class that tokenizer_config.json
names, and transformers 5 may then replace the decoder of tokenizer.json. Token ids agree, and so do log-probabilities.
But verifiers would get other text than the policy wrote. Each node of a replica calls this before its engine starts
(`vllm_backend/launch.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid
from specrl.prompts.templates import load_tokenizer

# Spaces at all places, line breaks, digits, code, and letters of several bytes.
SAMPLES = (
    "So 3 + 4 = 7.\n\n#### 7",
    '{"name": "Zo\u00eb", "age": 31}',
    "def f(x):\n    return x ** 2  # squared",
    " leading, trailing ",
    "\u6570\u5b66 \u00bd \u20ac",
)


def check_tokenizers(folder: Path) -> None:
    """Raise CheckpointInvalid if the engine's tokenizer decodes the tokens of the policy's tokenizer differently."""
    from transformers import AutoTokenizer

    ours = load_tokenizer(folder)
    try:
        theirs: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # transformers and tokenizers raise many types
        raise CheckpointInvalid(
            f"{folder}: must have a tokenizer that the engine can load, got {type(error).__name__}: {error}; "
            "save it again with transformers' save_pretrained"
        ) from error
    for text in SAMPLES:
        ids = ours.backend_tokenizer.encode(text, add_special_tokens=False).ids
        expected = ours.backend_tokenizer.decode(ids, skip_special_tokens=True)
        # What vLLM's FastIncrementalDetokenizer reads (v1/engine/detokenizer.py); tokenizers in Python have no backend.
        found = getattr(theirs, "backend_tokenizer", theirs).decode(ids, skip_special_tokens=True)
        if found != expected:
            raise CheckpointInvalid(
                f"{folder}: the engine's tokenizer, {type(theirs).__name__}, must decode as tokenizer.json does, got "
                f"{found!r} for {expected!r}; name PreTrainedTokenizerFast as tokenizer_class in tokenizer_config.json"
            )
