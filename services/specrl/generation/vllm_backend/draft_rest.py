"""Lets a drafter rest: for the length `OFF` nothing is drafted and no drafter runs.

vLLM 0.32 runs a learned drafter once a step even for length 0, to keep its KV cache whole, and prepares every step for
drafts that it may not have; for a drafter that does not pay that would be wasted for ever. So a step that has no drafts
to verify and is to make none runs as in an engine without speculation: its model runner has no speculative config for
so long. One that has drafts of the step before it runs as always, but for the drafter. What a policy computes for a
drafter beside its answer, EAGLE-3's hidden states of some layers, is left out, too, where no compiled graph has it in.

With drafting on, a step may still come without any (vLLM's dynamic speculation asked for none, a look-up found none);
it is sampled without the rejection sampler and its preparation, which takes a tenth less time.

Look-up mechanisms draft only what they find, so a calibration, which needs the cost of full drafts, asks for them with
`FORCED` added to the length. Both are lengths that vLLM itself never uses, and are taken out in front of the proposer's
own `propose`. Installed by `worker`, in each of vLLM's workers, which tells the engine what it can be asked for: a
length that nobody takes out would be drafted as it stands.

vLLM has two model runners, which are told apart by the name of their class; one that is not named here is an error. All
of this wraps the first one (`FIRST_RUNNERS`), which runs on CPUs. On GPUs vLLM chooses the second one
(`SECOND_RUNNERS`) for every mechanism but suffix decoding. That one has no `drafter`, `_sample` or
`propose_draft_token_ids`, so that it is left as it is, and can do neither; the engine then says so in its log. It needs
no `FORCED`: its look-up drafts for every request, found or not. In the first one, whatever is missing is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from specrl.errors import EngineFailed
from specrl.generation.draft_length import OFF

FORCED = 1000
"""Added to a length: every request gets a draft of it, of a token that means nothing, whatever was found."""


# Classes of vLLM 0.32 and 0.33, by module and name.
FIRST_RUNNERS = (
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
)
SECOND_RUNNERS = (
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    "vllm.v1.worker.cpu.model_runner.CPUModelRunner",
)


class Abilities(NamedTuple):
    """Which lengths beyond vLLM's own a worker takes out again."""

    can_rest: bool
    """`OFF`: the drafter is left out."""
    can_force: bool
    """Lengths with `FORCED` added."""


def install(model_runner: Any) -> Abilities:
    """Wrap a first model runner's drafting. It is able to do nothing without drafting, as is a second one.

    Raises EngineFailed for a runner that is not known, or that lacks a seam.
    """
    if _is_second(model_runner) or model_runner.vllm_config.speculative_config is None:
        return Abilities(can_rest=False, can_force=False)
    _require(model_runner, *_OF_RUNNER)
    drafter = model_runner.drafter
    _require(drafter, "propose")
    is_lookup = not hasattr(drafter, "model")
    propose, sample = drafter.propose, model_runner._sample
    prepare_and_propose = model_runner.propose_draft_token_ids
    execute_model, sample_tokens = model_runner.execute_model, model_runner.sample_tokens
    observed = _observed(model_runner)
    layers = () if observed is None else observed.aux_hidden_state_layers

    @contextmanager
    def resting() -> Iterator[None]:
        config = model_runner.speculative_config
        model_runner.speculative_config = None
        if observed is not None:
            observed.aux_hidden_state_layers, model_runner.use_aux_hidden_state_outputs = (), False
        try:
            yield
        finally:
            model_runner.speculative_config = config
            if observed is not None:
                observed.aux_hidden_state_layers, model_runner.use_aux_hidden_state_outputs = layers, True

    def execute_or_rest(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with resting() if rests(scheduler_output) else nullcontext():
            return execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens_or_rest(*args: Any, **kwargs: Any) -> Any:
        state = model_runner.execute_model_state
        with resting() if state is not None and rests(state.scheduler_output) else nullcontext():
            return sample_tokens(*args, **kwargs)

    def sample_as_drafted(logits: Any, metadata: Any) -> Any:
        return sample(logits, metadata if _has_drafts(metadata) else None)

    def prepare_and_propose_as_drafted(scheduler_output: Any, *args: Any) -> Any:
        *before, metadata, attention, slots = args
        if _has_drafts(metadata):  # the preparation also tells the next step how many of them were accepted
            return prepare_and_propose(scheduler_output, *args)
        return prepare_and_propose(scheduler_output, *before, None, attention, slots)

    def propose_or_rest(*args: Any, **kwargs: Any) -> Any:
        by_name = "num_speculative_tokens" in kwargs
        length = kwargs["num_speculative_tokens"] if by_name else args[0]
        if length == OFF:
            drafter._last_draft_probs = None
            count = model_runner.input_batch.num_reqs
            if is_lookup:
                return [[] for _ in range(count)]
            return torch.empty(count, 0, dtype=torch.int64, device=model_runner.device)
        if length < FORCED:
            return propose(*args, **kwargs)
        wanted = length - FORCED
        found = propose(wanted, *args[1:], **kwargs)
        return [(draft + [1] * wanted)[:wanted] for draft in found]

    drafter.propose, model_runner._sample = propose_or_rest, sample_as_drafted
    model_runner.propose_draft_token_ids = prepare_and_propose_as_drafted
    model_runner.execute_model, model_runner.sample_tokens = execute_or_rest, sample_tokens_or_rest
    return Abilities(can_rest=True, can_force=is_lookup)


_OF_RUNNER = (
    "drafter",
    "speculative_config",
    "execute_model",
    "sample_tokens",
    "_sample",
    "propose_draft_token_ids",
    "execute_model_state",
    "use_aux_hidden_state_outputs",
)


def _is_second(model_runner: Any) -> bool:
    """Which of vLLM's two model runners this is. Raises EngineFailed for a third one."""
    name = f"{type(model_runner).__module__}.{type(model_runner).__qualname__}"
    if name not in FIRST_RUNNERS + SECOND_RUNNERS:
        raise EngineFailed(
            f"vLLM's model runner must be one of {', '.join(FIRST_RUNNERS + SECOND_RUNNERS)}, got {name}; install a "
            "version that specrl was read with"
        )
    return name in SECOND_RUNNERS


def _require(owner: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise EngineFailed(
            f"vLLM's {type(owner).__module__}.{type(owner).__qualname__} must have {', '.join(names)}, got no "
            f"{', no '.join(missing)}; install a version that specrl was read with"
        )


def rests(scheduler_output: Any) -> bool:
    """Whether a step neither verifies drafts nor makes any."""
    return scheduler_output.num_spec_tokens_to_schedule == OFF and not scheduler_output.scheduled_spec_decode_tokens


def _observed(model_runner: Any) -> Any:
    """The policy's module that gives hidden states of some layers to the drafter; None where it must go on giving them.

    In a compiled model or a captured graph they are computed whatever the module says afterwards.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = model_runner.vllm_config.compilation_config
    is_eager = compilation.mode == CompilationMode.NONE and compilation.cudagraph_mode == CUDAGraphMode.NONE
    if not is_eager or not model_runner.use_aux_hidden_state_outputs:
        return None
    modules = model_runner.model.modules()
    found = next((module for module in modules if getattr(module, "aux_hidden_state_layers", ())), None)
    if found is None:
        raise EngineFailed(
            f"a module of vLLM's {type(model_runner.model).__name__} must have aux_hidden_state_layers, since the "
            "drafter reads hidden states, got none; install a version that specrl was read with"
        )
    return found


def _has_drafts(metadata: Any) -> bool:
    """Whether a step verified any drafts (vLLM's SpecDecodeMetadata, or None)."""
    return metadata is not None and metadata.max_spec_len > 0
