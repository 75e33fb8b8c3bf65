"""Everything that can be known to go wrong before anything is written or started.

Each check raises one SpecrlError whose message says what to do; the command line shows it and exits 2. The order is
that of a user's reading: the run file (checked when it is loaded), engines, mechanism, traces, model, drafter,
parallelism, prompts and verifier, tool, store, mirror, sinks, ports, memory.
Processes check again what is theirs; these checks only make sure that a user learns of it in seconds.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from specrl.coordinator.checked_prompts import CheckedPrompts, Decision, Progress, load_checked_prompts
from specrl.coordinator.sinks import check_sinks
from specrl.coordinator.store import check_server
from specrl.drafting.policy_config import ARCHITECTURES, read_policy_config, read_reference_config
from specrl.errors import CheckpointInvalid, DatasetInvalid, Problem, SpecInvalid, SpecrlError, VerifierFailed
from specrl.generation.vllm_backend import checkpoint
from specrl.generation.vllm_backend.mechanisms import check_mechanism, drafting_model, surroundings
from specrl.installation import require_engines
from specrl.launcher.environment import visible_gpus
from specrl.launcher.memory import check_memory, estimate_memory
from specrl.launcher.model_folder import ModelSummary, read_model_folder
from specrl.launcher.ports import choose_ports
from specrl.machine import available_memory_bytes
from specrl.rewards import check_verifier
from specrl.spec import RunSpec
from specrl.spec.trainer import Routing
from specrl.telemetry import traces
from specrl.trainer import mirror
from specrl.trainer.layout import layout_problems


@dataclass(frozen=True)
class Readiness:
    """What the checks chose on the way: the coordinator's ports, and which references the run does without; and what
    the user should know before the start.

    replica_bytes: memory that one replica takes on a CPU; 0 with GPUs.
    """

    grpc_port: int
    http_port: int
    decision: Decision
    notices: tuple[str, ...] = ()
    replica_bytes: int = 0


def ignore_progress(_done: int, _total: int) -> None:
    """For those who do not show it."""


def check(
    spec: RunSpec,
    directory: Path | None = None,
    progress: Progress = ignore_progress,
    available_bytes: Callable[[], int] = available_memory_bytes,
) -> Readiness:
    """Raise the first SpecrlError that would end this run on this machine; else the ports to use.

    directory: of a run that is resumed.
    """
    require_engines("torch", "megatron", "vllm")
    check_mechanism(spec, surroundings())
    check_trainable(spec)
    traces.check(spec)
    policy = check_policy(spec)
    check_reference(spec, policy)
    check_drafter(spec, policy)
    draft_model = check_draft_model(spec)
    check_parallelism(spec, policy)
    data = check_data(spec, directory, progress)
    check_tools(spec)
    check_server(spec)
    mirror.of_run(spec)
    check_sinks(spec)
    grpc_port, http_port = choose_ports(spec)
    replica_bytes = 0
    if not visible_gpus():  # with GPUs the bulk is in their memory, which the engines check
        need = estimate_memory(spec, policy, draft_model)
        check_memory(need, available_bytes())
        replica_bytes = need.replica_bytes
    return Readiness(grpc_port, http_port, data.decision, tuple(data_notices(data)), replica_bytes)


def check_policy(spec: RunSpec) -> ModelSummary:
    """The model folder is whole, of a family that can be trained, and long enough. Raises CheckpointInvalid."""
    policy = read_model_folder(Path(spec.model.path), "model.path")
    longest = read_policy_config(policy.path).max_length
    size, vocabulary = policy.tokenizer_size, policy.number("vocab_size") or 0
    if size is None:
        raise CheckpointInvalid(
            f"model.path must have a tokenizer, got {policy.path} without tokenizer.json; "
            "copy the model's tokenizer there"
        )
    if size > vocabulary:
        raise CheckpointInvalid(
            f"the tokenizer's token ids must be < the model's vocabulary, got {size} tokens for "
            f"vocab_size={vocabulary} in {policy.path}; use the tokenizer that the model was trained with"
        )
    if spec.model.max_length > longest:
        raise CheckpointInvalid(
            f"model.maxLength must be <= {longest}, the model's max_position_embeddings, got "
            f"maxLength={spec.model.max_length}; shorten prompts.maxTokens or generation.sampling.maxTokens, use "
            "another model, or stretch this one's positions by YaRN (docs/models.md)"
        )
    return policy


def check_trainable(spec: RunSpec) -> None:
    """The trainer can train what the mechanism needs of the policy. Raises SpecInvalid."""
    if spec.generation.speculation.mtp is not None:
        raise SpecInvalid(
            (
                Problem(
                    "generation.speculation.mtp",
                    f"must not be used in a run: the trainer of this version trains {', '.join(ARCHITECTURES)}, which "
                    "have no heads for multi-token prediction, got mtp",
                    "use eagle3, whose head the run trains, or draftModel",
                ),
            )
        )


def check_draft_model(spec: RunSpec) -> int:
    """Parameters of `draftModel`, 0 without it. Raises CheckpointInvalid or SpecInvalid unless it fits the policy."""
    if spec.generation.speculation.draft_model is None:
        return 0
    model = drafting_model(spec, checkpoint.read_policy(Path(spec.model.path), spec.model.max_length))
    return sum(math.prod(shape) for shape in model.shapes.values()) if model is not None else 0


def check_reference(spec: RunSpec, policy: ModelSummary) -> None:
    """A reference that is given is a model of the policy's vocabulary. Raises CheckpointInvalid."""
    kl = spec.trainer.loss.reference_kl
    if kl is None or kl.path is None:
        return
    reference = read_model_folder(Path(kl.path), "trainer.loss.referenceKl.path")
    read_reference_config(reference.path, read_policy_config(policy.path))


def check_drafter(spec: RunSpec, policy: ModelSummary) -> None:
    """A drafter that is given speaks the policy's vocabulary and has its width. Raises CheckpointInvalid."""
    eagle3 = spec.generation.speculation.eagle3
    if eagle3 is None:
        return
    vocabulary = policy.number("vocab_size") or 0
    if eagle3.draft_vocab_size is not None and eagle3.draft_vocab_size > vocabulary:
        raise SpecInvalid(
            (
                Problem(
                    "generation.speculation.eagle3.draftVocabSize",
                    f"must be <= {vocabulary}, the policy's vocabulary, got {eagle3.draft_vocab_size}",
                    "lower it, or leave it out to draft every token",
                ),
            )
        )
    if eagle3.path is None:
        return
    field = "generation.speculation.eagle3.path"
    drafter = read_model_folder(Path(eagle3.path), field)
    for name in ("vocab_size", "hidden_size"):
        theirs = drafter.number("target_hidden_size") if name == "hidden_size" else None
        theirs = theirs or drafter.number(name)
        if theirs is not None and theirs != policy.number(name):
            raise CheckpointInvalid(
                f"{field} must be a drafter of this policy, got {name}={theirs} in {drafter.path} and "
                f"{policy.number(name)} in {policy.path}; use its own drafter, or leave path out for a fresh one"
            )
    if drafter.tokenizer_size not in (None, policy.tokenizer_size):
        raise CheckpointInvalid(
            f"{field} must have the policy's tokenizer, got {drafter.tokenizer_size} tokens in {drafter.path} and "
            f"{policy.tokenizer_size} in {policy.path}; use the policy's own drafter, or leave path out for a fresh one"
        )


def check_parallelism(spec: RunSpec, policy: ModelSummary) -> None:
    """Ranks share heads, widths, layers and experts evenly. Raises SpecInvalid with every number that does not."""
    ranks = spec.generation.tensor_parallel
    config = read_policy_config(policy.path)
    problems = layout_problems(spec.trainer.parallelism, config)
    if spec.trainer.routing is Routing.REPLAY and config.experts is None:
        problems.append(
            Problem(
                "trainer.routing", "must be Anew, since the model's layers have no experts, got Replay", "leave it out"
            )
        )
    kl = spec.trainer.loss.reference_kl
    if kl is not None and kl.path is not None:
        problems += layout_problems(spec.trainer.parallelism, read_policy_config(Path(kl.path)), "the reference's")
    problems += [
        Problem("generation.tensorParallel", f"must divide the model's {field}={heads}, got {ranks}", "use a divisor")
        for field in ("num_attention_heads", "num_key_value_heads")
        if (heads := policy.number(field)) is not None and heads % ranks
    ]
    if problems:
        raise SpecInvalid(tuple(problems))


def check_data(spec: RunSpec, directory: Path | None = None, progress: Progress = ignore_progress) -> CheckedPrompts:
    """Every problem can be read and fits, the verifier works here and can use every reference. All faults at once.

    directory: the run's, where it has one. progress: told how many references are checked, of how many. Raises
    DatasetInvalid with file and line; SpecInvalid for the verifier. What is found of references is kept for the next
    start; without it a check takes a second or two for each thousand (`math`) or hundred (`code`).
    """
    errors: list[SpecrlError] = []
    try:
        check_rewards(spec)
    except SpecInvalid as error:
        errors.append(error)
    tries_verifier, workers = not errors, max(spec.reward_pool.workers, len(os.sched_getaffinity(0)))
    try:
        checked = asyncio.run(
            load_checked_prompts(spec, directory, progress, workers=workers, tries_verifier=tries_verifier)
        )
    except (DatasetInvalid, SpecInvalid, VerifierFailed) as error:
        errors.append(error)
    if len(errors) > 1:
        raise DatasetInvalid("\n".join(map(str, errors)))
    if errors:
        raise errors[0]
    return checked


def data_notices(data: CheckedPrompts) -> Iterator[str]:
    """What a user should know of data and a verifier that are used nevertheless."""
    found = data.stream.source.left_out
    if found.skipped:
        yield f"{len(found.skipped)} problems are left out (onBadLine: Skip), the first: {found.skipped[0]}"
    if found.repeated:
        yield f"{found.repeated} problems ask what an earlier one asks, and are asked as often as they are there"
    if data.untried:
        yield f"{data.untried} references could not be tried on this machine, and are taken for sound"
    yield from data.failures


def check_rewards(spec: RunSpec) -> None:
    """The verifier can work on this machine. Raises SpecInvalid. Takes a second or two, in a process of its own."""
    if spec.rewards.code is not None or spec.rewards.python is not None:  # the others need nothing of the machine
        check_verifier(spec.rewards)


def check_tools(spec: RunSpec) -> None:
    """The policy can say how it calls, and calls can be answered on this machine. Raises SpecInvalid."""
    from specrl import tools

    if spec.tools is not None:
        tools.Delimiters(spec.tools, spec.model.path)
        tools.check_tools(spec.tools)
