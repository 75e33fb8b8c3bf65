"""Runs vLLM in one process, configured by specrl, with a rejection sampler that can be broken on purpose.

    main(EXCHANGE)      reads jobs from a JSON file and writes what was sampled into it

In one process an engine starts in seconds, and its sampler can be replaced. Tests of distributions need many samples
from many engines, and must show that they detect a wrong sampler. The product's own engine, with two processes, is
tested beside it.
"""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from specrl.errors import EngineFailed
from specrl.generation.draft_lengths.decoding_step import OFF
from specrl.generation.vllm_backend import arguments, draft_length_client
from specrl.generation.vllm_backend.extensions import sampling_check
from specrl.spec import parse_spec

LIVE_LENGTHS = (2, 2, OFF, 1, 2, 0, OFF, 2, 1)
"""Live draft lengths of consecutive steps, repeated. Lengths that a mechanism does not have are left out."""

ONE_PROCESS = {
    "OMP_NUM_THREADS": "1",  # read when torch is imported: more threads spin while they wait for each other
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}


@dataclass(frozen=True)
class SamplingTurn:
    """Requests that are sampled alike: one completion for each seed, of `prompts` in turn.

    blocks: number of KV cache blocks that the turn may use; None: all.
    """

    prompts: list[list[int]]
    seeds: list[int]
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    fault: str | None = None
    blocks: int | None = None


@dataclass(frozen=True)
class Job:
    """An engine and its turns. raw: content of a run file. drafter: a folder."""

    raw: dict[str, Any]
    turns: list[SamplingTurn]
    drafter: str | None = None


@dataclass
class TurnOutcome:
    """Result of a turn: a completion with log-probabilities per seed, and vLLM's counters."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    counts: dict[str, float] = field(default_factory=dict)
    refusal: str | None = None
    """Error of the check that each worker makes at its start (`sampling_check`), run on the sampler of this turn."""


def write_jobs(exchange: Path, jobs: Sequence[Job]) -> None:
    """Write jobs for `main`."""
    exchange.write_text(json.dumps([asdict(job) for job in jobs]), encoding="utf-8")


def read_outcomes(exchange: Path) -> list[list[TurnOutcome]]:
    """Read the results: per job, per turn."""
    return [[TurnOutcome(**turn) for turn in job] for job in json.loads(exchange.read_text(encoding="utf-8"))]


# -- broken samplers ------------------------------------------------------------------------------------------------


def accept_too_often(sampler: Any) -> dict[str, Callable[..., Any]]:
    """Accept a draft with probability min(1, 1.5 p/q) instead of min(1, p/q)."""
    original = sampler.generate_uniform_probs
    return {"generate_uniform_probs": lambda *args, **kwargs: original(*args, **kwargs) / 1.5}


def keep_rejected_draft(sampler: Any) -> dict[str, Callable[..., Any]]:
    """Keep the drafter's token where it was rejected."""

    def keep(_length: int, _counts: Any, _ends: Any, draft_token_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return draft_token_ids.clone()

    return {"sample_recovered_tokens": keep}


def redraw_from_policy(sampler: Any) -> dict[str, Callable[..., Any]]:
    """After a rejection, draw from the policy's own distribution instead of the residual one."""
    original = sampler.sample_recovered_tokens

    def redraw(*args: Any, **kwargs: Any) -> torch.Tensor:
        given = list(args)
        target_probs = given[5]
        given[4] = torch.zeros_like(target_probs)  # draft_probs
        drawn: torch.Tensor = original(*given, **kwargs)
        return drawn

    return {"sample_recovered_tokens": redraw}


def repeat_draft_as_bonus(sampler: Any) -> dict[str, Callable[..., Any]]:
    """If every draft was accepted, emit the last one again instead of the bonus token."""
    return {"rejection_sample": _with_bonus(sampler, lambda row, length: row[length - 1])}


def drop_bonus(sampler: Any) -> dict[str, Callable[..., Any]]:
    """If every draft was accepted, emit no bonus token."""
    return {"rejection_sample": _with_bonus(sampler, lambda row, length: sampler.PLACEHOLDER_TOKEN_ID)}


def _with_bonus(sampler: Any, bonus: Callable[[torch.Tensor, int], Any]) -> Callable[..., Any]:
    original = sampler.rejection_sample

    def sample(draft_token_ids: torch.Tensor, num_draft_tokens: list[int], *args: Any, **kwargs: Any) -> torch.Tensor:
        output_RT: torch.Tensor = original(draft_token_ids, num_draft_tokens, *args, **kwargs)
        for row, length in zip(output_RT, num_draft_tokens, strict=True):
            if length and row[length] != sampler.PLACEHOLDER_TOKEN_ID:
                row[length] = bonus(row, length)
        return output_RT

    return sample


FAULTS = {
    fault.__name__: fault
    for fault in (accept_too_often, keep_rejected_draft, redraw_from_policy, repeat_draft_as_bonus, drop_bonus)
}


@contextmanager
def broken_sampler(fault: str | None) -> Iterator[None]:
    """Replace vLLM's rejection sampler by one of FAULTS."""
    from vllm.v1.sample import rejection_sampler

    changes = FAULTS[fault](rejection_sampler) if fault is not None else {}
    before = {name: getattr(rejection_sampler, name) for name in changes}
    try:
        for name, function in changes.items():
            setattr(rejection_sampler, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(rejection_sampler, name, function)


@contextmanager
def scarce_blocks(llm: Any, count: int | None) -> Iterator[None]:
    """Leave so many free KV cache blocks to an idle engine. With None, all."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - count) if count is not None else []
    try:
        yield
    finally:
        pool.free_blocks(taken)


# -- one engine -----------------------------------------------------------------------------------------------------


def run_job(job: Job) -> list[TurnOutcome]:
    """Start the job's engine in this process, run its turns, and stop it."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    spec = parse_spec(job.raw)
    keywords = arguments.build_engine_arguments(spec, Path(job.drafter) if job.drafter else None, is_cpu=True)
    keywords["distributed_executor_backend"] = "uni"
    lengths = arguments.list_adaptive_lengths(spec)
    if lengths:
        keywords |= live_length_arguments(keywords, lengths)
    llm = LLM(**keywords, disable_log_stats=False)
    try:
        if lengths:
            change_lengths(llm, [length for length in LIVE_LENGTHS if length in lengths])
        return [sample_turn(llm, turn) for turn in job.turns]
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()
        gc.freeze()  # vLLM has thawed the imported modules' objects, and looks at all of them at the next start


def live_length_arguments(keywords: dict[str, Any], lengths: Sequence[int]) -> dict[str, Any]:
    """Make arguments of LLM with the effect of `configure_scheduler`, because LLM makes its engine's config itself."""
    from vllm import EngineArgs

    config = EngineArgs(**keywords).create_engine_config()
    draft_length_client.configure_scheduler(config, lengths)
    scheduler = config.scheduler_config
    return {
        "scheduler_cls": scheduler.scheduler_cls,
        "async_scheduling": scheduler.async_scheduling,
        "additional_config": {"specrl": config.additional_config["specrl"]},
    }


def change_lengths(llm: Any, lengths: Sequence[int]) -> None:
    """Make every step draft another number of tokens."""
    llm.collective_rpc("specrl_inspect")  # also allows the drafter to rest
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    wanted = itertools.cycle(lengths)

    def schedule_another(*args: Any, **kwargs: Any) -> Any:
        scheduler.drafting_fix(next(wanted))
        return schedule(*args, **kwargs)

    scheduler.schedule = schedule_another


def bind_kernels_once() -> None:
    """Work around vLLM 0.32: it binds its CPU kernels at the start of each worker, and fails at the second one in a
    process.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    bind = platform.register_triton_kernel_overrides

    def bind_once(_: Any) -> None:
        bind()
        platform.register_triton_kernel_overrides = classmethod(lambda _: None)

    platform.register_triton_kernel_overrides = classmethod(bind_once)


def sample_turn(llm: Any, turn: SamplingTurn) -> TurnOutcome:
    """Sample the completions of one turn."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": turn.prompts[number % len(turn.prompts)]} for number in range(len(turn.seeds))]
    params = [
        SamplingParams(
            temperature=turn.temperature,
            top_p=turn.top_p,
            top_k=turn.top_k,
            max_tokens=turn.max_tokens,
            seed=seed,
            logprobs=0,
            detokenize=False,
        )
        for seed in turn.seeds
    ]
    before = read_counters(llm)
    with broken_sampler(turn.fault), scarce_blocks(llm, turn.blocks):
        done = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        (refusal,) = llm.collective_rpc(run_sampling_check)
    return TurnOutcome(
        tokens=[list(output.token_ids) for output in done],
        logprobs=[
            [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs, strict=True)]
            for output in done
        ],
        counts={name: value - before[name] for name, value in read_counters(llm).items()},
        refusal=refusal,
    )


def run_sampling_check(bound: Any) -> str | None:
    """Run the start-up check of vLLM's worker `bound`. Returns its error, or None if the samplers pass."""
    try:
        sampling_check.check_model_runner(bound.model_runner)
    except EngineFailed as error:
        return str(error)
    return None


def read_counters(llm: Any) -> dict[str, float]:
    """Read vLLM's counters, by name without `vllm:`.

    Of counters by position, the last position's is `accepted_last`.
    """
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:").removeprefix("spec_decode_")
        if name == "num_accepted_tokens_per_pos":
            found["accepted_last"] = metric.values[-1]
        elif hasattr(metric, "value") and name.startswith("num_"):
            found[name] = metric.value
    return found


def build_environment(job: Job) -> dict[str, str]:
    """Variables to set before vLLM is imported: the product's, and those of ONE_PROCESS."""
    return arguments.build_environment(parse_spec(job.raw)) | ONE_PROCESS


def main(exchange: Path) -> None:
    """Run the jobs of a file. The process must be new, with `environment`."""
    jobs = [
        Job(job["raw"], [SamplingTurn(**turn) for turn in job["turns"]], job["drafter"])
        for job in json.loads(exchange.read_text(encoding="utf-8"))
    ]
    bind_kernels_once()
    outcomes = [run_job(job) for job in jobs]
    exchange.write_text(json.dumps([[asdict(turn) for turn in job] for job in outcomes]), encoding="utf-8")
