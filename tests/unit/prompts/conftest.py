"""A policy folder that holds only a tokenizer: one token per byte, `<s>` first, and a chat template."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specrl.spec import RunSpec, parse_spec

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.bos_token = "<s>"
    fast.eos_token = "</s>"
    fast.chat_template = CHAT_TEMPLATE
    folder = tmp_path_factory.mktemp("policy")
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def a_spec(policy_path: Path) -> Callable[..., RunSpec]:
    """Return a function that builds a run with the given `prompts` section and, optionally, others."""

    def build(
        prompts: dict[str, Any],
        validation: dict[str, Any] | None = None,
        model: Path = policy_path,
        rewards: dict[str, Any] | None = None,
    ) -> RunSpec:
        return parse_spec(
            {
                "name": "test",
                "model": {"path": str(model)},
                "prompts": prompts,
                "rewards": rewards or {"exact": {}},
                "generation": {"sampling": {"maxTokens": 16}},
                "trainer": {"optimizer": {"learningRate": "1e-3"}},
                "schedule": {"steps": 1, "promptsPerStep": 2, "groupSize": 2},
                "validation": validation,
            }
        )

    return build
