"""`specrl run --dry-run` accepts the examples that name models on the hub, and shows the prompts that they mean.

The stand-in hub has each model's config as it is published, and a tokenizer with a chat template. Weights are a file
without tensors of the model. The data sets are a few rows in the published columns.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.integration.hub.test_hub import hub_environment
from tests.run_files import write_safetensors
from tests.stand_ins.hub import StandInHub, serve_hub
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

EXAMPLES = Path(__file__).parents[3] / "examples"

QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "sliding_window": 32768,
    "use_sliding_window": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "is_llama_config": True,
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "vocab_size": 49152,
    },
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN25_05B,
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": QWEN25_05B,
    "Qwen/Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
}
"""Each model's config.json, without the fields that say nothing of its shape."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

GSM8K_ROWS = [
    {"question": f"Ann has {number} apples and buys 2. How many?", "answer": f"{number}+2\n#### {number + 2}"}
    for number in range(80)
]
DAPO_ROWS = [
    {"prompt": f"What is {number} + 2?", "solution": str(number + 2), "ability": "math"} for number in range(40)
]
AIME_ROWS = [{"id": 60 + row, "problem": f"Find {row} + 200.", "answer": str(row + 200)} for row in range(3)]


def as_jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def make_tokenizer_files(texts: list[str]) -> dict[str, bytes]:
    """Make a byte-level tokenizer that knows the words of the texts, and ends turns as the published ones do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHATML,
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings).encode(),
    }


@dataclass(frozen=True)
class Plan:
    """What `--dry-run` must say about an example. gpus: which the machine seems to have."""

    folder: str
    lines: list[str]
    gpus: str = "0,1"


PLANS = [
    Plan(
        "02-json",
        [
            "precision: float32",
            "data: 1024 problems; ",
            "validation: 32 problems every ",
            "    You turn sentences into JSON.<|im_end|>",
            '    {"name": "Ivan", "age": 27, "city": "Prague", "job": "driver"}<|im_end|>',
        ],
        gpus="",
    ),
    Plan(
        "03-gsm8k",
        [
            "note: prompts.source.dataset.name: openai/gsm8k at commit ",
            "precision: bfloat16",
            "data: 80 problems; 50 steps take 400 prompts, 5.0 epochs",
            "validation: 3 problems every 10 steps",
            "    Think step by step. End with a line that has only #### and the number.<|im_end|>",
            "    the reference itself: reward 1",
        ],
    ),
    Plan(
        "04-code",
        [
            "data: 4 problems; 20 steps take 40 prompts, 10.0 epochs",
            "    Answer with one fenced block of Python.<|im_end|>",
            "    the reference itself: reward 0",
        ],
    ),
    Plan(
        "06-8b-one-node",
        [
            "precision: bfloat16",
            "data: 40 problems; ",
            "validation: 3 problems every 20 steps",
            r"    Think step by step, and put the final answer in \boxed{}.<|im_end|>",
            "    the reference itself: reward 1",
        ],
        gpus="0,1,2,3,4,5,6,7",
    ),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInHub]:
    """A hub with the models and data sets that the examples name."""
    weights = tmp_path_factory.mktemp("weights") / "model.safetensors"
    write_safetensors(weights, {"none.weight": (1,)})
    texts = [json.dumps(row) for row in (*GSM8K_ROWS, *DAPO_ROWS)]
    texts += [file.read_text(encoding="utf-8") for file in sorted(EXAMPLES.glob("0*/*.yaml"))]
    texts += [file.read_text(encoding="utf-8") for file in sorted(EXAMPLES.glob("0*/*.jsonl"))]
    files = make_tokenizer_files(texts) | {"model.safetensors": weights.read_bytes()}
    with serve_hub() as served:
        for name, config in CONFIGS.items():
            served.add_model(name, files | {"config.json": json.dumps(config).encode()})
        test = [{"question": f"What is {row} + 1000?", "answer": f"#### {row + 1000}"} for row in range(3)]
        served.add_data_set(
            "openai/gsm8k", {"main/train.jsonl": as_jsonl(GSM8K_ROWS), "main/test.jsonl": as_jsonl(test)}
        )
        served.add_data_set("open-r1/DAPO-Math-17k-Processed", {"en/train.jsonl": as_jsonl(DAPO_ROWS)})
        served.add_data_set("HuggingFaceH4/aime_2024", {"data/train.jsonl": as_jsonl(AIME_ROWS)})
        yield served


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the examples, with the data of the JSON example."""
    copy = tmp_path_factory.mktemp("copy") / "examples"
    shutil.copytree(EXAMPLES, copy)
    subprocess.run([sys.executable, copy / "02-json" / "make_data.py"], check=True, capture_output=True)
    return copy


@pytest.fixture(scope="module")
def program(hub: StandInHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """One process for all examples: its start costs seconds."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.hub.dry_run_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=hub_environment(hub, tmp_path_factory.mktemp("hf")),
        cwd=EXAMPLES.parent,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.folder)
def test_a_dry_run_accepts_an_example_and_shows_its_first_prompt(
    plan: Plan, program: subprocess.Popen[str], examples: Path
) -> None:
    assert program.stdin is not None
    assert program.stdout is not None
    call = {"file": str(examples / plan.folder / "run.yaml"), "gpus": plan.gpus}
    program.stdin.write(json.dumps(call) + "\n")
    program.stdin.flush()
    answer = json.loads(program.stdout.readline())
    assert answer["exitCode"] == 0, answer["output"]
    said = answer["output"].splitlines()
    missing = [line for line in plan.lines if not any(it.startswith(line) for it in said)]
    assert not missing, answer["output"]


def test_every_example_that_names_a_model_is_tried() -> None:
    by_name = {file.parent.name for file in EXAMPLES.glob("0*/run.yaml") if "path: ../" not in file.read_text()}
    assert by_name == {plan.folder for plan in PLANS}
