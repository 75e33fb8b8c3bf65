"""vLLM's second model runner, which GPUs use: it can leave out its drafter, and every length has CUDA graphs.

vLLM's scheduler, engine core and `execute_model` are stand-ins here. Of the second runner, `sample_tokens`, the stored
drafts and the choice of CUDA graphs are vLLM's own code.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.vllm_cases import a_spec

from specrl.errors import EngineFailed
from specrl.generation.draft_lengths.decoding_step import OFF
from specrl.generation.vllm_backend import arguments
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.generation.vllm_backend.extensions import draft_rest

LIVE = 4  # generation.maxLiveRollouts
LONGEST = 3  # drafts of a step in the second runner


# -- the worker ------------------------------------------------------------------------------------------------------


def an_instance_of(name: str, **attributes: Any) -> Any:
    """An object whose class has the dotted name of one of vLLM's."""
    module, _, last = name.rpartition(".")
    found = type(last, (), {"__module__": module})()
    vars(found).update(attributes)
    return found


def a_first_runner(drafter: Any, name: str = draft_rest.FIRST_RUNNERS[0]) -> Any:
    """The attributes of vLLM's first model runner that the patch replaces."""
    from vllm.config import CompilationMode, CUDAGraphMode

    eager = SimpleNamespace(mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.NONE)
    return an_instance_of(
        name,
        drafter=drafter,
        speculative_config=object(),
        propose_draft_token_ids=lambda *_: None,
        _sample=lambda *_: None,
        execute_model=lambda *_: None,
        sample_tokens=lambda *_: None,
        execute_model_state=None,
        vllm_config=SimpleNamespace(compilation_config=eager, speculative_config=object()),
        use_aux_hidden_state_outputs=False,
    )


def test_the_first_runners_lookup_drafts_nothing_at_off() -> None:
    asked: list[int] = []

    def propose(length: int) -> list[list[int]]:
        asked.append(length)
        return [[7], []]

    runner = a_first_runner(SimpleNamespace(propose=propose))
    runner.input_batch = SimpleNamespace(num_reqs=2)
    draft_rest.patch_model_runner(runner)
    assert runner.drafter.propose(3) == [[7], []]
    assert runner.drafter.propose(OFF) == [[], []]
    assert asked == [3]


@pytest.mark.parametrize("name", draft_rest.FIRST_RUNNERS + draft_rest.SECOND_RUNNERS)
def test_a_runner_without_speculation_is_not_patched(name: str) -> None:
    runner = an_instance_of(name, vllm_config=SimpleNamespace(speculative_config=None))
    before = dict(vars(runner))
    draft_rest.patch_model_runner(runner)
    assert vars(runner) == before


class Speculator:
    """A drafter of the second runner. asked: the lengths that it was asked for."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    def propose(self, input_batch: Any, *_: Any, num_speculative_tokens: int | None = None, **__: Any) -> torch.Tensor:
        self.asked.append(num_speculative_tokens)
        return torch.full((input_batch.num_reqs, LONGEST), 7)


class DraftsHandler:
    """Keeps the drafts that the runner would send to the scheduler: [requests, length]."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def set_draft_tokens(self, _batch: Any, draft_tokens: torch.Tensor) -> None:
        self.sent = draft_tokens.tolist()


def a_second_runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's second runner with two live requests of LIVE, and only what its `sample_tokens` reads.

    Its `execute_model` keeps the state of a step as vLLM's does, and computes nothing.
    """
    import vllm.v1.worker.gpu.model_runner as second

    batch = SimpleNamespace(num_reqs=2, req_ids=["a", "b"], idx_mapping=torch.tensor([2, 0]), query_start_loc=None)
    monkeypatch.setattr(second, "AsyncOutput", lambda **_: "output")
    runner: Any = second.GPUModelRunner.__new__(second.GPUModelRunner)
    vars(runner).update(
        vllm_config=SimpleNamespace(speculative_config=object()),
        speculator=Speculator(),
        num_speculative_steps=LONGEST,
        req_states=SimpleNamespace(
            draft_tokens=torch.zeros(LIVE, LONGEST, dtype=torch.int64),
            all_token_ids=SimpleNamespace(gpu=None),
            num_computed_tokens=SimpleNamespace(gpu=None),
            prompt_len=SimpleNamespace(np=None),
            last_sampled_tokens=None,
            next_prefill_tokens=None,
        ),
        draft_tokens_handler=DraftsHandler(),
        execute_model_state=None,
        is_last_pp_rank=True,
        pcp_manager=None,
        pp_handler=None,
        aux_output_connector=None,
        adaptive_verification=None,
        eplb=SimpleNamespace(step=lambda *_, **__: None),
        _draft_workspace_lane=0,
        model=SimpleNamespace(compute_logits=None),
        main_stream=None,
        output_copy_stream=None,
        check_ep_fault=None,
        sample=lambda *_: (SimpleNamespace(sampled_token_ids=None), torch.ones(2), torch.zeros(2)),
        sampler=SimpleNamespace(
            sampling_states=SimpleNamespace(temperature=SimpleNamespace(gpu=None), seeds=SimpleNamespace(gpu=None))
        ),
        prompt_logprobs_worker=SimpleNamespace(
            compute_prompt_logprobs=lambda *_: {}, compute_prompt_token_id_logprobs=lambda *_: {}
        ),
        kv_connector=SimpleNamespace(post_forward=lambda *_, **__: None, finalize_step=lambda: None),
        model_state=SimpleNamespace(supports_mm_inputs=False),
        postprocess_sampled=lambda *_: None,
    )

    def execute_model(scheduler_output: Any, *_: Any, **__: Any) -> None:
        fields = dict.fromkeys(second.ExecuteModelState._fields)
        length = scheduler_output.num_spec_tokens_to_schedule
        runner.execute_model_state = second.ExecuteModelState(
            **fields | {"input_batch": batch, "hidden_states": torch.zeros(2, 1), "num_spec_tokens_to_schedule": length}
        )

    runner.speculator.supports_mm_inputs = False
    runner.execute_model = execute_model
    return runner


def run_step(runner: Any, length: int) -> Any:
    """Run one step as vLLM's worker does; returns the scheduler's output of it."""
    from vllm.v1.core.sched.output import SchedulerOutput

    scheduled = SchedulerOutput.make_empty()
    scheduled.num_spec_tokens_to_schedule = length
    runner.execute_model(scheduled, None)
    assert runner.sample_tokens(None) == "output"
    return scheduled


def test_the_second_runner_leaves_out_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once n-gram look-up could not be switched off there, and any other drafter cost one pass per step."""
    runner = a_second_runner(monkeypatch)
    draft_rest.patch_model_runner(runner)
    for length, sent in ((2, [[7, 7]] * 2), (OFF, [[], []]), (0, [[], []]), (OFF, [[], []]), (3, [[7, 7, 7]] * 2)):
        scheduled = run_step(runner, length)
        assert runner.draft_tokens_handler.sent == sent
        stored = runner.req_states.draft_tokens[[2, 0]].tolist()
        assert stored == [[7] * max(length, 0) + [-1] * (LONGEST - max(length, 0))] * 2
        assert scheduled.num_spec_tokens_to_schedule == length, "the scheduler still reads its own output"
    assert runner.speculator.asked == [2, 0, 3]


def test_dummy_steps_of_the_second_runner_run_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM runs a dummy step without a length, and its `propose` by keywords alone. Its ranks must stay in step."""
    runner = a_second_runner(monkeypatch)
    draft_rest.patch_model_runner(runner)
    run_step(runner, OFF)
    runner.execute_model(SimpleNamespace(num_spec_tokens_to_schedule=0), dummy_run=True)
    runner.speculator.propose(input_batch=runner.execute_model_state.input_batch, dummy_run=True)
    assert runner.speculator.asked == [None]


@pytest.mark.parametrize("seam", ["speculator", "req_states", "execute_model"])
def test_a_second_runner_without_a_needed_attribute_is_an_error(seam: str) -> None:
    attributes = dict.fromkeys(("speculator", "req_states", "execute_model"), SimpleNamespace(propose=print))
    del attributes[seam]
    config = SimpleNamespace(speculative_config=object())
    runner = an_instance_of(draft_rest.SECOND_RUNNERS[0], vllm_config=config, **attributes)
    with pytest.raises(EngineFailed, match=rf"GPUModelRunner must have .*got no {seam};"):
        draft_rest.patch_model_runner(runner)


@pytest.mark.parametrize(
    "seam", ["drafter", "_sample", "propose_draft_token_ids", "execute_model_state", "use_aux_hidden_state_outputs"]
)
def test_a_first_runner_without_a_needed_attribute_is_an_error(seam: str) -> None:
    """Once it was silently not patched, and a drafter that did not pay kept costing one pass per step."""
    runner = a_first_runner(SimpleNamespace(propose=print))
    delattr(runner, seam)
    with pytest.raises(EngineFailed, match=rf"gpu_model_runner\.GPUModelRunner must have .*got no {seam};"):
        draft_rest.patch_model_runner(runner)


def test_a_drafter_without_propose_is_an_error() -> None:
    with pytest.raises(EngineFailed, match="must have propose, got no propose"):
        draft_rest.patch_model_runner(a_first_runner(SimpleNamespace()))


def test_a_policy_without_a_module_for_hidden_states_is_an_error() -> None:
    runner = a_first_runner(SimpleNamespace(propose=print))
    runner.use_aux_hidden_state_outputs = True
    runner.model = SimpleNamespace(modules=lambda: [SimpleNamespace()])
    with pytest.raises(EngineFailed, match="must have aux_hidden_state_layers"):
        draft_rest.patch_model_runner(runner)


def test_an_unknown_runner_is_an_error() -> None:
    with pytest.raises(EngineFailed, match=r"must be one of .*, got vllm\.v2\.Runner; install a version"):
        draft_rest.patch_model_runner(an_instance_of("vllm.v2.Runner", drafter=SimpleNamespace(propose=print)))


# -- the scheduler -----------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`DraftLengthScheduler` on a stand-in for vLLM's scheduler, with LIVE requests that always decode.

    Parameter: the scheduler's settings, and `skips`: whether vLLM skips all drafts.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from specrl.generation.vllm_backend.extensions.scheduler import DraftLengthScheduler

    settings = dict(request.param)
    skips = settings.pop("skips", None)
    lacks_lookup = settings.pop("lacks_lookup", False)

    def init(self: Any) -> None:
        self.vllm_config = SimpleNamespace(additional_config={"specrl": settings})
        self.scheduler_config = SimpleNamespace(max_num_seqs=LIVE)
        self.running = [None] * LIVE
        self.waiting = []
        if not lacks_lookup:
            self.dynamic_sd_lookup = None

    def schedule(self: Any) -> Any:
        length = self.dynamic_sd_lookup[LIVE]
        output = SimpleNamespace(
            num_scheduled_tokens=dict.fromkeys("abcd", 1),
            total_num_scheduled_tokens=LIVE,
            scheduled_spec_decode_tokens={},
            num_spec_tokens_to_schedule=length,
            finished_req_ids=set(),
        )
        if skips is not None:  # vLLM 0.32's output has no such field
            output.skip_drafts = skips
        return output

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(Scheduler, "schedule", schedule)
    return DraftLengthScheduler if lacks_lookup else DraftLengthScheduler()


def run_steps(scheduler: Any) -> dict[int, float | None]:
    """Run a few hundred steps; returns the seconds of a step with all requests, by length."""
    for _ in range(400):
        scheduler.schedule()
    seconds: dict[str, list[float | None]] = scheduler.drafting_report()["costs"]["seconds"]
    return {int(length): row[-1] for length, row in seconds.items()}


NGRAM = {"lengths": [OFF, 1, 2, 3], "is_lookup": True}
LEARNED = {"lengths": [OFF, 1, 2], "is_lookup": False}


@pytest.mark.parametrize("scheduler", [NGRAM, LEARNED, LEARNED | {"skips": False}], indirect=True)
def test_step_costs_are_learnt_from_the_first_steps(scheduler: Any) -> None:
    """Once every start waited for a calibration, for seconds or minutes."""
    assert set(run_steps(scheduler)) == set(scheduler._drafting.lengths)
    assert sum(seconds is not None for seconds in run_steps(scheduler).values()) >= 2


@pytest.mark.parametrize("scheduler", [LEARNED | {"skips": True}], indirect=True)
def test_a_step_whose_drafts_vllm_skipped_is_not_a_step_of_the_length_that_it_reports(scheduler: Any) -> None:
    """vLLM 0.33 still reports the lookup's length for such a step, which was once taken for that length's cost."""
    assert set(run_steps(scheduler).values()) == {None}


@pytest.mark.parametrize("scheduler", [LEARNED], indirect=True)
def test_only_vllm_0_32_may_lack_the_field_skip_drafts(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrl.generation.vllm_backend.extensions.scheduler.LACKS_SKIP_DRAFTS", False)
    with pytest.raises(AttributeError, match="skip_drafts"):
        run_steps(scheduler)


@pytest.mark.parametrize("scheduler", [LEARNED | {"lacks_lookup": True}], indirect=True)
def test_a_scheduler_without_dynamic_sd_lookup_is_an_error(scheduler: Any) -> None:
    with pytest.raises(EngineFailed, match="must have dynamic_sd_lookup"):
        scheduler()


# -- the front end ---------------------------------------------------------------------------------------------------


class StandInCore:
    """AsyncLLM whose workers give these answers."""

    def __init__(self) -> None:
        self.answers: list[dict[str, Any]] = []
        """Answers of the workers, by rank."""

    async def collective_rpc(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return self.answers


async def test_an_engine_does_not_start_if_a_worker_samples_from_a_wrong_distribution() -> None:
    engine = VllmEngine(a_spec(Path("/policy")), "gen-0")
    core = StandInCore()
    engine._llm = core
    wrong = {"error": "EngineFailed", "message": "the sampler on cuda:1 must draw from the policy's distribution"}
    core.answers = [{"value": {"shares_embedding": None, "shares_lm_head": None}}, wrong]
    with pytest.raises(EngineFailed, match="cuda:1"):
        await engine._check_workers()


# -- vLLM's CUDA graphs ------------------------------------------------------------------------------------------------


def largest_batches(spec: Any) -> dict[int, int]:
    """Return, by draft length, the largest batch for which vLLM's second model runner captures a full CUDA graph.

    Runs vLLM's own code, which needs no GPU, on a manager with only the attributes that it reads.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    speculation = spec.generation.speculation
    live = spec.generation.max_live_rollouts
    keywords = arguments.build_engine_arguments(spec, Path("/head"), is_cpu=False)
    sizes = keywords["compilation_config"]["cudagraph_capture_sizes"]
    schedule = keywords["speculative_config"]["num_speculative_tokens_per_batch_size"]
    manager: Any = CudaGraphManager.__new__(CudaGraphManager)
    manager.vllm_config = SimpleNamespace(
        num_speculative_tokens=speculation.num_draft_tokens,
        speculative_config=SimpleNamespace(
            uses_dynamic_speculative_decoding=lambda: True, num_speculative_tokens_per_batch_size=schedule
        ),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
    )
    manager.compilation_config = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes))
    manager.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    manager.max_num_reqs = live
    manager.decode_query_len = speculation.num_draft_tokens + 1
    manager.varlen_decode = False
    manager.ubatch_runner = None
    manager.lora_capture_cases = [0]
    manager._candidates = {}
    manager._capture_descs = {}
    manager._init_candidates()
    found: dict[int, int] = {}
    for graph in manager._capture_descs[CUDAGraphMode.FULL]:
        length = graph.uniform_token_count - 1
        found[length] = max(found.get(length, 0), graph.num_reqs)
    return found


@pytest.mark.parametrize(("longest", "live"), [(3, 64), (2, 30), (3, 60), (3, 136), (5, 100), (3, 4)])
def test_vllm_captures_full_batches_for_every_draft_length(longest: int, live: int) -> None:
    spec = a_spec(
        Path("/policy"),
        {"eagle3": {"numDraftTokens": longest}},
        generation={"draftLength": "Adaptive", "maxLiveRollouts": live},
    )
    assert largest_batches(spec) == dict.fromkeys(range(longest + 1), live)
