"""vLLM's second model runner, that of GPUs, is asked for nothing that it cannot do, and prepared for all that it is.

vLLM's model runners, scheduler and engine core are stand-ins here; its choice of CUDA graphs is vLLM's own.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
from tests.vllm_cases import a_spec

from specrl.errors import EngineFailed
from specrl.generation.draft_length import OFF
from specrl.generation.vllm_backend import arguments, draft_rest, drafting
from specrl.generation.vllm_backend.draft_rest import FORCED, Abilities
from specrl.generation.vllm_backend.engine import VllmEngine

LIVE = 4  # as many as generation.maxLiveRollouts
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"


# -- the worker ------------------------------------------------------------------------------------------------------


def an_instance_of(name: str, **attributes: Any) -> Any:
    """An object whose class has the dotted name of one of vLLM's."""
    module, _, last = name.rpartition(".")
    found = type(last, (), {"__module__": module})()
    vars(found).update(attributes)
    return found


def a_first_runner(drafter: Any, name: str = draft_rest.FIRST_RUNNERS[0]) -> Any:
    """vLLM's first model runner, as much of it as is wrapped."""
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


def test_first_runner_lets_its_drafter_rest_and_takes_forced_lengths_out() -> None:
    asked: list[int] = []

    def propose(length: int) -> list[list[int]]:
        asked.append(length)
        return [[7], []]

    runner = a_first_runner(SimpleNamespace(propose=propose))
    assert draft_rest.install(runner) == Abilities(can_rest=True, can_force=True)
    assert runner.drafter.propose(FORCED + 3) == [[7, 1, 1], [1, 1, 1]]
    assert asked == [3]


def test_learned_drafters_are_never_forced() -> None:
    drafter = SimpleNamespace(propose=lambda *_, **__: None, model=object())
    assert draft_rest.install(a_first_runner(drafter)) == Abilities(can_rest=True, can_force=False)


@pytest.mark.parametrize("name", draft_rest.SECOND_RUNNERS)
def test_second_runner_is_left_as_it_is_and_can_do_neither(name: str) -> None:
    runner = an_instance_of(name, speculator=SimpleNamespace(propose=print), execute_model=print, sample_tokens=print)
    before = dict(vars(runner))
    assert draft_rest.install(runner) == Abilities(can_rest=False, can_force=False)
    assert vars(runner) == before


@pytest.mark.parametrize("name", draft_rest.FIRST_RUNNERS)
def test_first_runner_that_does_not_speculate_is_left_as_it_is(name: str) -> None:
    runner = an_instance_of(name, vllm_config=SimpleNamespace(speculative_config=None))
    before = dict(vars(runner))
    assert draft_rest.install(runner) == Abilities(can_rest=False, can_force=False)
    assert vars(runner) == before


@pytest.mark.parametrize(
    "seam", ["drafter", "_sample", "propose_draft_token_ids", "execute_model_state", "use_aux_hidden_state_outputs"]
)
def test_first_runner_that_lacks_a_seam_is_an_error(seam: str) -> None:
    """It was left as it was, without a word: a drafter that did not pay went on costing a pass a step."""
    runner = a_first_runner(SimpleNamespace(propose=print))
    delattr(runner, seam)
    with pytest.raises(EngineFailed, match=rf"gpu_model_runner\.GPUModelRunner must have .*got no {seam};"):
        draft_rest.install(runner)


def test_drafter_that_cannot_propose_is_an_error() -> None:
    with pytest.raises(EngineFailed, match="must have propose, got no propose"):
        draft_rest.install(a_first_runner(SimpleNamespace()))


def test_policy_that_gives_hidden_states_from_nowhere_is_an_error() -> None:
    runner = a_first_runner(SimpleNamespace(propose=print))
    runner.use_aux_hidden_state_outputs = True
    runner.model = SimpleNamespace(modules=lambda: [SimpleNamespace()])
    with pytest.raises(EngineFailed, match="must have aux_hidden_state_layers"):
        draft_rest.install(runner)


def test_third_runner_is_an_error() -> None:
    with pytest.raises(EngineFailed, match=r"must be one of .*, got vllm\.v2\.Runner; install a version"):
        draft_rest.install(an_instance_of("vllm.v2.Runner", drafter=SimpleNamespace(propose=print)))


# -- the scheduler -----------------------------------------------------------------------------------------------------


@pytest.fixture
def scheduler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`DraftLengthScheduler` on a stand-in of vLLM's: always LIVE requests that decode.

    Parameter: the settings that `drafting.configure` gives it, and `skips`, whether vLLM skips all drafts.
    """
    from vllm.v1.core.sched.scheduler import Scheduler

    from specrl.generation.vllm_backend.scheduler import DraftLengthScheduler

    settings = dict(request.param)
    skips = settings.pop("skips", None)
    lacks_lookup = settings.pop("lacks_lookup", False)

    def init(self: Any) -> None:
        self.vllm_config = SimpleNamespace(additional_config={"specrl": settings})
        self.scheduler_config = SimpleNamespace(max_num_seqs=LIVE)
        self.running, self.waiting = [None] * LIVE, []
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


def calibrated(scheduler: Any) -> set[int]:
    """Calibrate as far as a few hundred steps go; returns the lengths that vLLM was asked for."""
    scheduler.drafting_calibrate(LIVE)
    return {scheduler.schedule().num_spec_tokens_to_schedule for _ in range(400)}


NGRAM = {"lengths": [OFF, 1, 2, 3], "is_lookup": True}
LEARNED = {"lengths": [OFF, 0, 1, 2], "is_lookup": False}


@pytest.mark.parametrize("scheduler", [NGRAM], indirect=True)
def test_lengths_are_forced_after_the_workers_said_that_they_can(scheduler: Any) -> None:
    scheduler.drafting_set_abilities({"can_rest": True, "can_force": True})
    assert calibrated(scheduler) == {OFF, FORCED + 1, FORCED + 2, FORCED + 3}
    assert scheduler.drafting_is_calibrated()


@pytest.mark.parametrize("scheduler", [NGRAM], indirect=True)
def test_no_length_is_forced_on_workers_that_said_nothing(scheduler: Any) -> None:
    assert calibrated(scheduler) == {OFF, 1, 2, 3}


@pytest.mark.parametrize("scheduler", [NGRAM], indirect=True)
def test_no_length_is_forced_on_workers_that_cannot_take_it_out(scheduler: Any) -> None:
    """An n-gram calibration asked the second model runner for 1003 drafts, which has room for three."""
    scheduler.drafting_set_abilities({"can_rest": False, "can_force": False})
    assert calibrated(scheduler) == {1, 2, 3}
    assert scheduler.drafting_is_calibrated()


@pytest.mark.parametrize("scheduler", [LEARNED], indirect=True)
def test_a_drafter_that_cannot_rest_is_asked_for_lengths_from_0(scheduler: Any) -> None:
    scheduler.drafting_set_abilities({"can_rest": False, "can_force": False})
    assert calibrated(scheduler) == {0, 1, 2}


@pytest.mark.parametrize("scheduler", [LEARNED, LEARNED | {"skips": False}], indirect=True)
def test_steps_that_draft_are_measured(scheduler: Any) -> None:
    calibrated(scheduler)
    assert scheduler.drafting_is_calibrated()


@pytest.mark.parametrize("scheduler", [LEARNED | {"skips": True}], indirect=True)
def test_a_step_whose_drafts_vllm_skipped_is_not_measured_as_one_that_drafts(scheduler: Any) -> None:
    """vLLM 0.33 names the length of such a step all the same, and it was taken for that length's cost."""
    assert calibrated(scheduler) == {OFF, 0, 1}, "gets as far as 1, and waits for steps of it"
    assert not scheduler.drafting_is_calibrated()


@pytest.mark.parametrize("scheduler", [LEARNED], indirect=True)
def test_only_vllm_0_32_may_lack_the_field_of_skipped_drafts(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrl.generation.vllm_backend.scheduler.LACKS_SKIP_DRAFTS", False)
    with pytest.raises(AttributeError, match="skip_drafts"):
        calibrated(scheduler)


@pytest.mark.parametrize("scheduler", [LEARNED | {"lacks_lookup": True}], indirect=True)
def test_scheduler_without_a_lookup_of_lengths_is_an_error(scheduler: Any) -> None:
    with pytest.raises(EngineFailed, match="must have dynamic_sd_lookup"):
        scheduler()


# -- the front end ---------------------------------------------------------------------------------------------------


class StandInCore:
    """AsyncLLM with an engine core that only notes its commands."""

    def __init__(self) -> None:
        self.engine_core, self.calls = self, list[tuple[Any, ...]]()
        self.answers: list[dict[str, Any]] = []
        """Of the workers."""

    async def collective_rpc(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return self.answers

    async def call_utility_async(self, method: str, name: str, argument: Any = None) -> None:
        assert method == "specrl_drafting"
        self.calls.append((name, argument))


def a_worker(can_rest: bool, can_force: bool) -> dict[str, Any]:
    return {"can_rest": can_rest, "can_force": can_force, "model_runner": SECOND_RUNNER}


async def test_only_what_every_worker_can_do_is_asked_for() -> None:
    core = StandInCore()
    await drafting.set_abilities(core, (OFF, 1), [a_worker(True, True), a_worker(True, False)], "gen-0")
    await drafting.set_abilities(core, (OFF, 1), [a_worker(False, True), a_worker(True, True)], "gen-0")
    assert core.calls == [
        ("set_abilities", {"can_rest": True, "can_force": False}),
        ("set_abilities", {"can_rest": False, "can_force": True}),
    ]


@pytest.mark.parametrize(
    ("lengths", "smallest", "meaning"),
    [((OFF, 0, 1, 2), 0, "every step pays for one pass"), ((OFF, 1, 2), 1, "cannot be switched off")],
)
async def test_a_drafter_that_cannot_rest_is_named_in_the_log_once(
    lengths: tuple[int, ...], smallest: int, meaning: str
) -> None:
    with structlog.testing.capture_logs() as events:
        await drafting.set_abilities(StandInCore(), lengths, [a_worker(False, False)] * 2, "gen-0")
    (event,) = events
    assert event["event"] == "drafter_rest_not_supported"
    assert event["log_level"] == "warning"
    assert event["smallest_length"] == smallest
    assert meaning in event["meaning"]
    assert event["model_runner"] == SECOND_RUNNER
    assert event["replica"] == "gen-0"


@pytest.mark.parametrize(("length", "expected"), [
    ("Adaptive", [("set_abilities", {"can_rest": True, "can_force": True})]), ("Fixed", []),
])  # fmt: skip
async def test_an_engine_with_a_live_draft_length_passes_on_what_its_workers_said(
    length: str, expected: list[tuple[Any, ...]]
) -> None:
    spec = a_spec(Path("/policy"), {"ngram": {}}, generation={"draftLength": length})
    engine, core = VllmEngine(spec, "gen-0"), StandInCore()
    engine._llm = core
    shared = {"shares_embedding": None, "shares_lm_head": None}
    core.answers = [{"value": shared | a_worker(True, True)}] * 2
    await engine._inspect()
    assert core.calls == expected


async def test_an_engine_does_not_serve_when_one_of_its_workers_samples_wrong() -> None:
    engine, core = VllmEngine(a_spec(Path("/policy")), "gen-0"), StandInCore()
    engine._llm = core
    wrong = {"error": "EngineFailed", "message": "the sampler on cuda:1 must draw from the policy's distribution"}
    core.answers = [{"value": {"shares_embedding": None, "shares_lm_head": None} | a_worker(True, True)}, wrong]
    with pytest.raises(EngineFailed, match="cuda:1"):
        await engine._inspect()


async def test_nothing_is_logged_of_a_drafter_that_can_rest() -> None:
    with structlog.testing.capture_logs() as events:
        await drafting.set_abilities(StandInCore(), (OFF, 0, 1), [a_worker(True, False)], "gen-0")
    assert not events


# -- vLLM's CUDA graphs ------------------------------------------------------------------------------------------------


def largest_batches(spec: Any) -> dict[int, int]:
    """The largest batch of each draft length that vLLM's second model runner would capture a full CUDA graph for.

    Runs vLLM's own choice, which needs no GPU, on a manager that has only what is read there.
    """
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    speculation, live = spec.generation.speculation, spec.generation.max_live_rollouts
    keywords = arguments.engine_arguments(spec, Path("/head"), is_cpu=False)
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
    manager.cudagraph_mode, manager.max_num_reqs = CUDAGraphMode.FULL_AND_PIECEWISE, live
    manager.decode_query_len, manager.varlen_decode = speculation.num_draft_tokens + 1, False
    manager.ubatch_runner, manager.lora_capture_cases = None, [0]
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    found: dict[int, int] = {}
    for graph in manager._capture_descs[CUDAGraphMode.FULL]:
        length = graph.uniform_token_count - 1
        found[length] = max(found.get(length, 0), graph.num_reqs)
    return found


@pytest.mark.parametrize(("longest", "live"), [(3, 64), (2, 30), (3, 60), (3, 136), (5, 100), (3, 4)])
def test_vllm_captures_a_full_batch_of_every_draft_length(longest: int, live: int) -> None:
    spec = a_spec(
        Path("/policy"),
        {"eagle3": {"numDraftTokens": longest}},
        generation={"draftLength": "Adaptive", "maxLiveRollouts": live},
    )
    assert largest_batches(spec) == dict.fromkeys(range(longest + 1), live)
