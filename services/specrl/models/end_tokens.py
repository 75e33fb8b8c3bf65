"""Finds the tokens that end a completion: those of the policy's folder, those of the run file, and stop strings.

Called by preflight, and by a replica for its requests. vLLM itself knows the tokenizer's end token and those of
generation_config.json, or of config.json if there is no such file. Here they are joined, so that none is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from specrl.errors import SpecInvalid, SpecProblem
from specrl.files import read_object
from specrl.models.model_folder import ModelFolder
from specrl.models.sampling_defaults import GENERATION_CONFIG
from specrl.spec import RunSpec

_FIELD = "eos_token_id"


def find_end_tokens(spec: RunSpec, policy: ModelFolder) -> tuple[int, ...]:
    """Return the ids of all end tokens but the tokenizer's own, ascending.

    Raises SpecInvalid for a token of the run file that the policy's tokenizer does not have.
    """
    given = {text: _find_token(policy, text) for text in spec.generation.sampling.end_tokens}
    unknown = [text for text, number in given.items() if number is None]
    if unknown:
        rule = f"must be tokens of the policy's tokenizer, got {', '.join(map(repr, unknown))}"
        remedy = f"name tokens of {policy.path / 'tokenizer.json'}, or use stop for other texts"
        raise SpecInvalid((SpecProblem("generation.sampling.endTokens", rule, remedy),))
    size = policy.config_number("vocab_size") or 0
    own = (number for number in _list_own_tokens(policy) if 0 <= number < size)
    return tuple(sorted({*own, *(number for number in given.values() if number is not None)}))


def find_stop_tokens(stop: Sequence[str], policy: ModelFolder) -> dict[int, str]:
    """Return the stop strings that are added tokens of the policy's tokenizer, by token id.

    The engine must end a completion at these tokens: most are special tokens, which its text leaves out. So a search
    in the text would never find them.
    """
    if not stop:  # of most requests; a vocabulary may have a thousand added tokens
        return {}
    added = policy.vocabulary.added if policy.vocabulary is not None else ()
    return {number: content for number, content in added if content in stop}


def _list_own_tokens(policy: ModelFolder) -> Iterator[int]:
    """Yield the end tokens of config.json and generation_config.json. Each has one id or a list of ids."""
    contents: list[dict[str, Any]] = [policy.config]
    nested = policy.config.get("text_config")
    if isinstance(nested, dict):
        contents.append(nested)
    with suppress(OSError, ValueError):  # no such file, or a broken one, which the engine reports
        contents.append(read_object(policy.path / GENERATION_CONFIG))
    for content in contents:
        found = content.get(_FIELD)
        for number in found if isinstance(found, list) else [found]:
            if type(number) is int:
                yield number


def _find_token(policy: ModelFolder, text: str) -> int | None:
    """Return the id of a token by its text in tokenizer.json; None if there is none."""
    if policy.vocabulary is None:
        return None
    added = {content: number for number, content in policy.vocabulary.added}
    pieces = policy.vocabulary.pieces
    if text in added or not isinstance(pieces, dict):
        return added.get(text)
    number = pieces.get(text)
    return number if type(number) is int else None
