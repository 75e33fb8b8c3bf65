"""Makes vLLM return the routed experts of each token on CPUs, for routing replay in the trainer.

vLLM 0.32 has nearly everything for this. Routers on every platform report their choice. The worker's connector stores
it beside the KV cache, so it is also known for cached prompts. The scheduler passes it to the front end.

But only the second model runner calls the connector. It needs Triton, so CPUs use the first one, which a check of
vLLM's config rejects. So this module skips the check (`allow_on_cpus`, in each process) and makes the first model
runner call the connector (`install_connector`, in each worker).

Steps must not overlap (`arguments.build_engine_arguments`): the sampled tokens of a step must be known when its experts
are handed on.

Called by `plugin.register` and by `worker`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


def allow_on_cpus() -> None:
    """Skip vLLM's check on CPUs. Its other conditions hold there: see `arguments.build_engine_arguments`."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    check = VllmConfig._verify_aux_output_compatibility

    def verify_unless_cpu(self: Any) -> None:
        if not current_platform.is_cpu():
            check(self)

    VllmConfig._verify_aux_output_compatibility = verify_unless_cpu  # type: ignore[method-assign]  # replaces a method


def install_connector(model_runner: Any) -> None:
    """Patch the steps of a first model runner, if the config requests routed experts."""
    config = model_runner.vllm_config
    if not config.aux_output_config.enabled or config.use_v2_model_runner:
        return
    from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

    connector = get_aux_output_connector(model_runner.get_model(), config, model_runner.kv_cache_config)
    execute_model = model_runner.execute_model
    sample_tokens = model_runner.sample_tokens

    def execute_and_follow(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        connector.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute_model(scheduler_output, *args, **kwargs)

    def sample_and_hand_on(*args: Any, **kwargs: Any) -> Any:
        state = model_runner.execute_model_state
        pending = (
            None if state is None else connector.prepare_output(_describe_batch(model_runner, state.scheduler_output))
        )
        output = sample_tokens(*args, **kwargs)
        if pending is not None:
            # The connector takes the numbers of sampled tokens and of rejected drafts, by request.
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            drafts = state.scheduler_output.scheduled_spec_decode_tokens
            verified = np.array([len(drafts.get(name, ())) + 1 for name in pending.request_ids])
            pending.enqueue_cpu_copy(sampled, np.where(sampled > 0, verified - sampled, 0))
            output.aux_output_connector_output = pending.process_output()
        return output

    model_runner.execute_model = execute_and_follow
    model_runner.sample_tokens = sample_and_hand_on


def _describe_batch(model_runner: Any, scheduler_output: Any) -> Any:
    """Describe the step as the second model runner does: the requests and their rows."""
    batch = model_runner.input_batch
    names = list(batch.req_ids)
    counts = [scheduler_output.num_scheduled_tokens[name] for name in names]
    return SimpleNamespace(
        req_ids=names,
        query_start_loc_np=np.concatenate([[0], np.cumsum(counts)]),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(names)].copy(),
    )
