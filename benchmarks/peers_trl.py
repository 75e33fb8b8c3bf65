"""TRL's part of peers.py: GRPOTrainer with the settings of the demo's run file. peers.py runs it as a child process.

All that decides the work and the learning comes from the run file: prompts in stream order, verifier, group size,
sampling, loss, optimizer and learning rate. Prompts are plain strings, and their token ids must equal those of
specrl's stream.

Three things differ from plain TRL 1.16 with colocated vLLM. TRL's weight sync fails on vLLM's CPU build, which packs
parameters after loading, so `sync_weights` uses vLLM's layerwise reload, as specrl does. vLLM gets the run file's
dtype, because it would compute in bfloat16 otherwise. And it gets the run's seed, because TRL seeds it by rank alone,
so that all runs would sample alike.

Writes a `StepLine` to --steps-file after each step.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specrl.prompts import load_prompts
from specrl.rewards.choice import verifier_for
from specrl.spec import RunSpec, load_spec
from specrl.spec.yaml_input import quote_yaml
from specrl.trainer.learning_rate import compute_learning_rate

TRANSFORMERS = "transformers"
VLLM = "vllm"


@dataclass(frozen=True)
class StepLine:
    """One step, as the first rank saw it. Its seconds leave out the wait for other ranks.

    tokens: sampled by all ranks. generation_s: without sync_s, the seconds of weight sync.
    """

    step: int
    reward: float
    tokens: float
    generation_s: float
    sync_s: float


class StepTimer:
    """Adds up the seconds of a step's activities."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.seconds[activity] = self.seconds.get(activity, 0.0) + time.monotonic() - began


def list_prompts(spec: RunSpec, steps: int) -> list[dict[str, Any]]:
    """Return the prompts of the first steps in the order of specrl's stream, as rows for TRL with their token ids."""
    stream = load_prompts(spec)
    prompts = [stream.prompt(position) for position in range(steps * spec.schedule.prompts_per_step)]
    return [{"prompt": it.text, "answer": it.answer, "token_ids": list(it.token_ids)} for it in prompts]


def check_token_ids(tokenize: Callable[[list[str]], list[list[int]]], rows: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError if TRL would train on other token ids than specrl."""
    found = tokenize([row["prompt"] for row in rows])
    for row, token_ids in zip(rows, found, strict=True):
        if list(token_ids) != row["token_ids"]:
            raise ValueError(
                f"token ids of {row['prompt']!r} must be {row['token_ids']}, got {list(token_ids)}; use a policy whose "
                "tokenizer adds no tokens of its own"
            )


def make_config(spec: RunSpec, given: argparse.Namespace, ranks: int) -> Any:
    """Translate the run file into a GRPOConfig."""
    from trl import GRPOConfig

    rollouts = spec.schedule.prompts_per_step * spec.schedule.group_size
    loss = spec.trainer.loss
    vllm = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": spec.model.max_length,
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_importance_sampling_correction": not given.without_correction,
        "vllm_importance_sampling_mode": "token_truncate",
        "vllm_importance_sampling_clip_max": float(loss.correction.high),
    }
    return GRPOConfig(
        output_dir=str(given.steps_file.parent / "trl"),
        max_steps=given.steps,
        seed=given.seed,
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": spec.model.dtype.value},
        per_device_train_batch_size=given.micro_batch,
        gradient_accumulation_steps=rollouts // (given.micro_batch * ranks),
        gradient_checkpointing=given.gradient_checkpointing,
        num_generations=spec.schedule.group_size,
        max_completion_length=spec.generation.sampling.max_tokens,
        temperature=float(spec.generation.sampling.temperature),
        shuffle_dataset=False,
        loss_type="dapo",  # the batch's tokens are the divisor
        scale_rewards="none",  # the advantage is the reward minus the group's mean
        beta=0.0,
        epsilon=float(loss.clip_low),
        epsilon_high=float(loss.clip_high),
        max_grad_norm=float(spec.trainer.optimizer.clip_norm),
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **(vllm if given.generation == VLLM else {}),
    )


def mend_vllm(dtype: str, seed: int) -> None:
    """Give vLLM the dtype and the run's seed, and replace TRL's weight sync. Read from TRL 1.16 and vLLM 0.32."""
    import torch
    import trl.generation.vllm_generation as backend
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    def sync_weights(self: Any) -> None:
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        model = runner.get_model()
        with set_current_vllm_config(runner.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
            # Copies, because vLLM packs in place.
            model.load_weights((name, weight.clone()) for name, weight in self._iter_named_params())
            finalize_layerwise_reload(model, runner.vllm_config.model_config)
            for module in model.modules():
                if isinstance(module, ParallelLMHead):  # a tied output layer is not packed again by the reload
                    module.quant_method.process_weights_after_loading(module)
        self.llm.reset_prefix_cache()

    make_llm = backend.LLM
    backend.LLM = lambda **settings: make_llm(
        **settings | {"dtype": dtype, "seed": 1000 * seed + settings["seed"]}  # TRL's own is the rank
    )
    backend.VLLMGeneration.sync_weights = sync_weights


def time_generation(trainer: Any, timer: StepTimer) -> None:
    """Let the trainer's generation and weight sync be measured. Generation contains the sync."""

    def timed(activity: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*values: Any, **fields: Any) -> Any:
            with timer.measure(activity):
                return inner(*values, **fields)

        return call

    trainer._generate_single_turn = timed("generation", trainer._generate_single_turn)
    if trainer.use_vllm:
        trainer.vllm_generation.sync_weights = timed("sync", trainer.vllm_generation.sync_weights)


def make_step_writer(spec: RunSpec, file: Path, timer: StepTimer) -> Any:
    """Make the callback that writes a line for each step, in the first rank."""
    from transformers import TrainerCallback

    rollouts = spec.schedule.prompts_per_step * spec.schedule.group_size

    class StepWriter(TrainerCallback):
        def on_log(self, _given: Any, state: Any, _control: Any, logs: Any = None, **_: Any) -> None:
            seconds = timer.seconds
            timer.seconds = {}
            if not state.is_world_process_zero or "reward" not in (logs or {}):
                return
            sync_s = seconds.get("sync", 0.0)
            line = StepLine(
                step=state.global_step,
                reward=logs["reward"],
                tokens=logs["completions/mean_length"] * rollouts,
                generation_s=seconds["generation"] - sync_s,
                sync_s=sync_s,
            )
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(line)) + "\n")

    return StepWriter()


def train(spec: RunSpec, given: argparse.Namespace) -> None:
    """Train the steps."""
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOTrainer

    torch.set_num_threads(given.threads)
    if given.generation == VLLM:
        mend_vllm(spec.model.dtype.value, given.seed)
    verifier = verifier_for(spec.rewards)

    def grade(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        pairs = zip(answer, completions, strict=True)
        return [verifier.grade(reference, completion, {}).reward for reference, completion in pairs]

    tokenizer = AutoTokenizer.from_pretrained(spec.model.path)
    rows = list_prompts(spec, given.steps)
    check_token_ids(lambda texts: tokenizer(text=texts)["input_ids"], rows)
    timer = StepTimer()
    trainer = GRPOTrainer(
        model=spec.model.path,
        reward_funcs=grade,
        args=make_config(spec, given, int(os.environ.get("WORLD_SIZE", "1"))),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
        processing_class=tokenizer,
        callbacks=[make_step_writer(spec, given.steps_file, timer)],
    )
    settings = spec.trainer.optimizer
    rate = float(settings.learning_rate)
    trainer.optimizer = torch.optim.AdamW(
        trainer.model.parameters(),
        lr=rate,
        betas=(float(settings.beta1), float(settings.beta2)),
        eps=float(settings.epsilon),
        weight_decay=float(settings.weight_decay),
    )
    # transformers' own warm-up starts with a rate of 0, specrl's with a step's share.
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
        trainer.optimizer, lambda done: compute_learning_rate(settings, done + 1, given.steps) / rate
    )
    time_generation(trainer, timer)
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-file", type=Path, required=True)
    parser.add_argument("--policy", type=Path, required=True, help="model folder of the policy")
    parser.add_argument("--steps-file", type=Path, required=True, help="file that gets a line for each step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--generation", choices=[TRANSFORMERS, VLLM], required=True)
    parser.add_argument("--micro-batch", type=int, required=True, help="rollouts in a forward pass of one rank")
    parser.add_argument("--threads", type=int, required=True, help="CPU threads of one rank")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="TRL's default")
    parser.add_argument("--without-correction", action="store_true", help="no importance-sampling correction for vLLM")
    given = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": str(given.threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two ranks would bind to the same cores
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    train(load_spec(given.run_file, [f"model.path={quote_yaml(given.policy)}"]), given)


if __name__ == "__main__":
    main()
