"""Patches vLLM's model runners so that a step can skip the drafter completely (the draft length `OFF`).

Why. Even for length 0, vLLM 0.32 runs a learned drafter once per step to keep its KV cache complete, and prepares every
step for drafts. If drafts do not pay, all of this is wasted.

Model runners. vLLM has two, distinguished here by class name; any other is an error.

First runner. CPUs use it (`FIRST_RUNNERS`), and suffix decoding on GPUs. A step that neither verifies nor makes drafts
runs as in an engine without speculation: the model runner's speculative config is removed for its duration. A step that
verifies drafts of the step before runs as usual, except that the drafter is skipped. The hidden states that the policy
computes for EAGLE-3 are left out as well, unless a compiled graph contains them.

With drafting on, a step can still have no drafts: none were requested, or look-up found none. It is then sampled
without the rejection sampler and its preparation, which saves a tenth of the step.

Second runner. GPUs use it (`SECOND_RUNNERS`) for all other mechanisms. There `sample_tokens` makes all drafts, by
`speculator.propose`, and even length 0 runs a learned drafter once. In a step of length `OFF` the patch returns "no
drafts" in its place, and the runner reads the length as 0. This was read in vLLM 0.32 and 0.33
(v1/worker/gpu/model_runner.py and spec_decode/) and has not run on a GPU: later steps need nothing of `propose` but the
drafter's KV cache, the plain sampler is used where there are no drafts to verify, and the policy's CUDA graph of length
0 serves `OFF`, too. This graph computes hidden states for the drafter in any case. The part `draftLengths` of
benchmarks/gpu checks all this on a GPU.

Called by `worker` in each of vLLM's workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from specrl.errors import EngineFailed
from specrl.generation.draft_lengths.decoding_step import OFF

# Classes of vLLM 0.32 and 0.33.
FIRST_RUNNERS = (
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "vllm.v1.worker.cpu_model_runner.CPUModelRunner",
)
SECOND_RUNNERS = (
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
    "vllm.v1.worker.cpu.model_runner.CPUModelRunner",
)


def patch_model_runner(model_runner: Any) -> None:
    """Patch a model runner with speculation.

    Raises EngineFailed for an unknown runner, and for one that lacks an attribute that the patch needs.
    """
    is_second = _is_second_runner(model_runner)
    if model_runner.vllm_config.speculative_config is None:
        return
    if is_second:
        _patch_second_runner(model_runner)
    else:
        _patch_first_runner(model_runner)


def _patch_second_runner(model_runner: Any) -> None:
    _require_attributes(model_runner, "execute_model", "speculator", "req_states")
    speculator = model_runner.speculator
    _require_attributes(speculator, "propose")
    # The original methods, which the replacements below call.
    execute_model = model_runner.execute_model
    propose = speculator.propose
    rests = False

    def execute_or_rest(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        # vLLM calls this once before each `propose`, also for its dummy steps.
        nonlocal rests
        rests = scheduler_output.num_spec_tokens_to_schedule == OFF
        if rests:  # a copy, since the scheduler may be in this process and still reads its own
            scheduler_output = replace(scheduler_output, num_spec_tokens_to_schedule=0)
        return execute_model(scheduler_output, *args, **kwargs)

    def propose_or_rest(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not rests:
            return propose(input_batch, *args, **kwargs)
        # [requests, longest draft], each -1: no draft. The runner stores it for the next step.
        return torch.full_like(model_runner.req_states.draft_tokens[: input_batch.num_reqs], -1)

    model_runner.execute_model = execute_or_rest
    speculator.propose = propose_or_rest


def _patch_first_runner(model_runner: Any) -> None:
    _require_attributes(model_runner, *_FIRST_RUNNER_ATTRIBUTES)
    drafter = model_runner.drafter
    _require_attributes(drafter, "propose")
    is_lookup = not hasattr(drafter, "model")
    # The original methods, which the replacements below call.
    propose = drafter.propose
    sample = model_runner._sample
    prepare_and_propose = model_runner.propose_draft_token_ids
    execute_model = model_runner.execute_model
    sample_tokens = model_runner.sample_tokens
    observed = _find_observed_module(model_runner)
    layers = () if observed is None else observed.aux_hidden_state_layers

    @contextmanager
    def without_speculation() -> Iterator[None]:
        # The runner reads these attributes in every step; vLLM's worker runs one step at a time.
        config = model_runner.speculative_config
        model_runner.speculative_config = None
        if observed is not None:
            observed.aux_hidden_state_layers = ()
            model_runner.use_aux_hidden_state_outputs = False
        try:
            yield
        finally:
            model_runner.speculative_config = config
            if observed is not None:
                observed.aux_hidden_state_layers = layers
                model_runner.use_aux_hidden_state_outputs = True

    def execute_or_rest(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with without_speculation() if is_draft_free(scheduler_output) else nullcontext():
            return execute_model(scheduler_output, *args, **kwargs)

    def sample_tokens_or_rest(*args: Any, **kwargs: Any) -> Any:
        state = model_runner.execute_model_state
        with without_speculation() if state is not None and is_draft_free(state.scheduler_output) else nullcontext():
            return sample_tokens(*args, **kwargs)

    def sample_as_drafted(logits: Any, metadata: Any) -> Any:
        return sample(logits, metadata if _has_drafts(metadata) else None)

    def prepare_and_propose_as_drafted(scheduler_output: Any, *args: Any) -> Any:
        *before, metadata, attention, slots = args
        if _has_drafts(metadata):  # the preparation also records how many were accepted, for the next step
            return prepare_and_propose(scheduler_output, *args)
        return prepare_and_propose(scheduler_output, *before, None, attention, slots)

    def propose_or_rest(*args: Any, **kwargs: Any) -> Any:
        # Learned drafters get the length by name, look-up proposers as the first argument.
        by_name = "num_speculative_tokens" in kwargs
        length = kwargs["num_speculative_tokens"] if by_name else args[0]
        if length == OFF:
            drafter._last_draft_probs = None  # probabilities of older drafts must not be used
            count = model_runner.input_batch.num_reqs
            if is_lookup:
                return [[] for _ in range(count)]
            return torch.empty(count, 0, dtype=torch.int64, device=model_runner.device)
        return propose(*args, **kwargs)

    drafter.propose = propose_or_rest
    model_runner._sample = sample_as_drafted
    model_runner.propose_draft_token_ids = prepare_and_propose_as_drafted
    model_runner.execute_model = execute_or_rest
    model_runner.sample_tokens = sample_tokens_or_rest


_FIRST_RUNNER_ATTRIBUTES = (
    "drafter",
    "speculative_config",
    "execute_model",
    "sample_tokens",
    "_sample",
    "propose_draft_token_ids",
    "execute_model_state",
    "use_aux_hidden_state_outputs",
)


def _is_second_runner(model_runner: Any) -> bool:
    """Whether this is vLLM's second model runner. Raises EngineFailed for an unknown one."""
    name = f"{type(model_runner).__module__}.{type(model_runner).__qualname__}"
    if name not in FIRST_RUNNERS + SECOND_RUNNERS:
        raise EngineFailed(
            f"vLLM's model runner must be one of {', '.join(FIRST_RUNNERS + SECOND_RUNNERS)}, got {name}; install a "
            "version that specrl supports"
        )
    return name in SECOND_RUNNERS


def _require_attributes(owner: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise EngineFailed(
            f"vLLM's {type(owner).__module__}.{type(owner).__qualname__} must have {', '.join(names)}, got no "
            f"{', no '.join(missing)}; install a version that specrl supports"
        )


def is_draft_free(scheduler_output: Any) -> bool:
    """Whether a step neither verifies drafts nor makes any."""
    return scheduler_output.num_spec_tokens_to_schedule == OFF and not scheduler_output.scheduled_spec_decode_tokens


def _find_observed_module(model_runner: Any) -> Any:
    """Find the policy's module that computes hidden states for the drafter; None if it cannot be switched off.

    A compiled model or a captured graph computes them whatever the module's attribute says.
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
            "drafter reads hidden states, got none; install a version that specrl supports"
        )
    return found


def _has_drafts(metadata: Any) -> bool:
    """Whether a step verifies drafts. metadata: vLLM's SpecDecodeMetadata, or None."""
    return metadata is not None and metadata.max_spec_len > 0
