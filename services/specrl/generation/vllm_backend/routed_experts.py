"""Has vLLM return, with a request's tokens, the experts of a mixture that each token was sent to, on CPUs too.

vLLM 0.32 has all of it: routers on every platform tell what they chose, the worker's connector keeps it beside the KV
cache - so that of a prompt found in the cache it is known as well - and the scheduler hands it to the front end. But
its second model runner alone calls the connector, which needs Triton, and a check refuses the first one, which CPUs
have. So the check is passed over (`permit`, in each process), and the first one calls the connector, too (`install`, in
each worker).

Steps must not overlap (`arguments.engine_arguments`): what was sampled is known when a step's experts are handed on.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def permit() -> None:
    """Let vLLM's configs ask for experts on CPUs. What else the check asks for holds: `arguments.engine_arguments`."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    check = VllmConfig._verify_aux_output_compatibility

    def verify(self: Any) -> None:
        if not current_platform.is_cpu():
            check(self)

    VllmConfig._verify_aux_output_compatibility = verify  # type: ignore[method-assign]  # that is the point


def install(model_runner: Any) -> None:
    """Wrap a first model runner's steps, where a VllmConfig asks for experts."""
    config = model_runner.vllm_config
    if not config.aux_output_config.enabled or config.use_v2_model_runner:
        return
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    connector = get_aux_output_connector(model_runner.get_model(), config, model_runner.kv_cache_config)
    execute_model, sample_tokens = model_runner.execute_model, model_runner.sample_tokens

    def execute_and_follow(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(scheduler_output, *args, **kwargs)

    def sample_and_hand_on(*args: Any, **kwargs: Any) -> Any:
        state = model_runner.execute_model_state
        pending = None if state is None else connector.prepare_output(_batch(model_runner, state.scheduler_output))
        output = sample_tokens(*args, **kwargs)
        if pending is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            drafts = state.scheduler_output.scheduled_spec_decode_tokens
            verified = np.array([len(drafts.get(name, ())) + 1 for name in pending.request_ids])
            pending.enqueue_cpu_copy(sampled, np.where(sampled > 0, verified - sampled, 0))
            output.aux_output_connector_output = pending.process_output()
        return output

    model_runner.execute_model, model_runner.sample_tokens = execute_and_follow, sample_and_hand_on


def _batch(model_runner: Any, scheduler_output: Any) -> Any:
    """The step as the second model runner describes it: requests, and which rows are theirs."""
    batch = model_runner.input_batch
    names = list(batch.req_ids)
    counts = [scheduler_output.num_scheduled_tokens[name] for name in names]
    return SimpleNamespace(
        req_ids=names,
        query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(names)].copy(),
    )
