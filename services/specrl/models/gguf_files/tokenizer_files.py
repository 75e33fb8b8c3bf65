"""Makes tokenizer.json, tokenizer_config.json and generation_config.json of a GGUF file's metadata.

A GGUF file has the tokens and their merges or scores, but how text is cut before only by a name, in
`tokenizer.ggml.pre`. The rules that a name stands for are those of llama.cpp's llama-vocab.cpp and of the tokenizers
that the names stand for. A name that is not known here is refused: any other rule would give other tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from specrl.models.gguf_files.header import DOWNLOAD_AGAIN, GgufInvalid

USE_ORIGINAL = "use the tokenizer of the original model in the format of Hugging Face, with its weights"

MOST_TOKENS = 1 << 20
LONGEST_PIECE = 256
"""Most letters of a token of SentencePiece: its merges are rebuilt by trying every cut. In use are at most 48."""

# tokenizer.ggml.token_type
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _Cut:
    """How text is cut into words before byte-pair encoding.

    pattern: a regular expression of words; empty for GPT-2's own. splits_digits: every digit is a word. is_normalized:
    text is brought into Unicode's form NFC first. ignores_merges: a word that is a token is not built by merges.
    """

    pattern: str = ""
    splits_digits: bool = False
    is_normalized: bool = False
    ignores_merges: bool = False


_LLAMA3 = _Cut(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}", ignores_merges=True)
_QWEN2 = _Cut(rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHERS}", is_normalized=True)
CUTS = {
    "gpt-2": _Cut(),
    "smollm": _Cut(splits_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
"""Rules by `tokenizer.ggml.pre`."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Content of the files. numbers: bos_token_id, eos_token_id and pad_token_id of config.json, where known."""

    tokenizer: str
    tokenizer_config: dict[str, Any]
    generation_config: dict[str, Any]
    numbers: dict[str, int]


@dataclass(frozen=True)
class _Vocabulary:
    """tokens: by number. kinds: `tokenizer.ggml.token_type` of each."""

    tokens: list[str]
    kinds: list[int]

    @property
    def numbers(self) -> dict[str, int]:
        """Numbers by token, without those that only fill the embedding up."""
        return {
            token: number
            for number, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind != _UNUSED
        }


def build_tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> TokenizerFiles:
    """Build the files. vocab_size: rows of the embedding. Raises GgufInvalid."""
    vocabulary = _read_vocabulary(metadata, vocab_size)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _build_byte_level(metadata, vocabulary)
    elif kind == "llama":
        tokenizer = _build_sentencepiece(metadata, vocabulary)
    else:
        raise GgufInvalid(f"tokenizer.ggml.model must be gpt2 or llama, got {str(kind)[:40]!r}", USE_ORIGINAL)
    named = {name: _read_number(metadata, f"{key}_token_id", vocabulary) for name, key in _SPECIAL.items()}
    _add_special_tokens(tokenizer, vocabulary, set(named.values()))
    _add_ends(tokenizer, metadata, vocabulary, named)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
        **{f"{name}_token": vocabulary.tokens[number] for name, number in named.items() if number is not None},
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    numbers = {f"{name}_token_id": number for name, number in named.items() if number is not None and name != "unk"}
    others = [_read_number(metadata, f"{key}_token_id", vocabulary) for key in ("eot", "eom")]
    ends = [number for number in dict.fromkeys([named["eos"], *others]) if number is not None]
    generation = {**numbers, "eos_token_id": ends} if len(ends) > 1 else dict(numbers)
    return TokenizerFiles(tokenizer.to_str(), config, generation, numbers)


# Names in tokenizer_config.json, and in the metadata.
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def _read_vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not 0 < len(tokens) <= min(MOST_TOKENS, vocab_size):
        count = len(tokens) if isinstance(tokens, list) else "no"
        raise GgufInvalid(
            f"tokenizer.ggml.tokens must have at most {vocab_size} tokens, as many as the embedding has rows, got "
            f"{count} tokens",
            USE_ORIGINAL,
        )
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens) or not all(isinstance(token, str) for token in tokens):
        raise GgufInvalid("tokenizer.ggml.token_type must have a number for each token", DOWNLOAD_AGAIN)
    vocabulary = _Vocabulary(tokens, kinds)
    if len(vocabulary.numbers) != len(tokens) - kinds.count(_UNUSED):
        raise GgufInvalid("tokenizer.ggml.tokens has a token twice", USE_ORIGINAL)
    return vocabulary


def _read_number(metadata: Mapping[str, Any], key: str, vocabulary: _Vocabulary) -> int | None:
    """Return the number of a special token; None if there is none."""
    number = metadata.get(f"tokenizer.ggml.{key}")
    if number is None:
        return None
    if type(number) is not int or not 0 <= number < len(vocabulary.tokens) or vocabulary.kinds[number] == _UNUSED:
        raise GgufInvalid(f"tokenizer.ggml.{key} must be the number of a token, got {str(number)[:40]}", USE_ORIGINAL)
    return number


def _build_byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    """Build byte-pair encoding of bytes, as GPT-2 has it."""
    name = metadata.get("tokenizer.ggml.pre")
    cut = CUTS.get(str(name))
    if cut is None:
        raise GgufInvalid(f"tokenizer.ggml.pre must be one of {', '.join(CUTS)}, got {str(name)[:40]!r}", USE_ORIGINAL)
    merges = metadata.get("tokenizer.ggml.merges")
    pairs = [str(merge).split(" ") for merge in merges] if isinstance(merges, list) else []
    if not isinstance(merges, list) or any(len(pair) != 2 for pair in pairs):
        raise GgufInvalid("tokenizer.ggml.merges must be pairs of tokens", USE_ORIGINAL)
    tokenizer = Tokenizer(_make_bpe(vocabulary, pairs, ignore_merges=cut.ignores_merges))
    steps: list[Any] = []
    if cut.splits_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if cut.pattern:
        steps.append(pre_tokenizers.Split(Regex(cut.pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if cut.is_normalized:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _build_sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    """Build SentencePiece's byte-pair encoding, as Llama 2 has it. Its merges follow from the scores of the tokens."""
    from transformers.convert_slow_tokenizer import generate_merges

    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise GgufInvalid("tokenizer.ggml.scores must have a number for each token", DOWNLOAD_AGAIN)
    numbers = vocabulary.numbers
    special = {token for token, number in numbers.items() if vocabulary.kinds[number] != 1}
    pieces = {token: scores[number] for token, number in numbers.items() if token not in special}
    if any(len(token) > LONGEST_PIECE for token in pieces):
        raise GgufInvalid(f"tokenizer.ggml.tokens must have at most {LONGEST_PIECE} letters each", USE_ORIGINAL)
    merges = generate_merges(numbers, pieces, special)
    unknown = next((token for token, number in numbers.items() if vocabulary.kinds[number] == _UNKNOWN), None)
    tokenizer = Tokenizer(_make_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces] if has_prefix else [spaces])
    steps: list[Any] = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if has_prefix:
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _make_bpe(vocabulary: _Vocabulary, merges: list[Any], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary.numbers, [(left, right) for left, right in merges], **options)
    except Exception as error:
        raise GgufInvalid(f"its tokenizer is malformed ({str(error)[:80]})", USE_ORIGINAL) from error


def _add_special_tokens(tokenizer: Tokenizer, vocabulary: _Vocabulary, named: set[int | None]) -> None:
    """Tell the tokenizer which tokens are found in text before it is cut, and which are left out of decoded text."""
    for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True)):
        is_special = kind in {_UNKNOWN, _CONTROL} or number in named
        if token and (is_special or kind == _USER_DEFINED):
            added = AddedToken(token, normalized=False, special=is_special)
            tokenizer.add_special_tokens([added]) if is_special else tokenizer.add_tokens([added])


def _add_ends(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], vocabulary: _Vocabulary, named: Mapping[str, int | None]
) -> None:
    """Put the first and the last token around a text, if the file says so, or if its kind of tokenizer does."""
    has_own_start = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in {
        "llama-bpe",
        "llama3",
        "llama-v3",
    }
    is_asked = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", has_own_start),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ends = {
        name: vocabulary.tokens[number]
        for name in is_asked
        if is_asked[name] is True and (number := named[name]) is not None
    }
    if not ends:
        return
    template = [ends.get("bos"), "$A", ends.get("eos")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[item for item in template if item],
        special_tokens=[(token, vocabulary.numbers[token]) for token in dict.fromkeys(ends.values())],
    )
