"""The run file's settings reach vLLM, and requests, memory and CUDA graphs are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.run_files import a_model_folder
from tests.vllm_cases import a_spec
from tools.seam_table import SEAMS

from specrl.errors import MemoryTooSmall, RecordInvalid, RunInvalid
from specrl.generation.draft_lengths.decoding_step import OFF
from specrl.generation.gpu_memory import check_kv_cache, estimate_replica_bytes
from specrl.generation.nodes import ReplicaNodes
from specrl.generation.vllm_backend import arguments
from specrl.generation.vllm_backend.launch import ReplicaFolders, check_memory
from specrl.models import ModelFolder, read_model_folder
from specrl.records import RolloutRequest, Sampling

POLICY = Path("/models/policy")


def test_the_run_files_settings_become_engine_arguments() -> None:
    spec = a_spec(POLICY, generation={"maxLiveRollouts": 7, "kvCacheMib": 3}, schedule={
        "steps": 1, "promptsPerStep": 1, "groupSize": 2, "seed": 5,
    })  # fmt: skip
    found = arguments.build_engine_arguments(spec, None, is_cpu=True)
    expected = {"model": "/models/policy", "dtype": "float32", "max_model_len": 512, "max_num_seqs": 7, "seed": 5}
    assert expected.items() <= found.items()
    assert found["kv_cache_memory_bytes"] == 3 << 20
    assert found["logprobs_mode"] == "processed_logprobs"
    assert found["speculative_config"] is None


def test_every_engine_argument_is_in_the_table_of_seams() -> None:
    (seam,) = (seam for seam in SEAMS if seam.name == "vllm.AsyncEngineArgs")
    trainer = {"optimizer": {"learningRate": "1e-4"}, "routing": "Replay"}
    sampling = {"maxTokens": 64, "topP": "0.9"}
    chosen = {"kvCacheDtype": "Fp8", "attentionBackend": "FLASH_ATTN"}
    spec = a_spec(POLICY, {"eagle3": {}}, trainer=trainer, generation={"sampling": sampling} | chosen)
    nodes = ReplicaNodes(2, 0, "leader", 29500, "leader")
    passed = [arguments.build_engine_arguments(spec, None, is_cpu, nodes, 0.5).keys() for is_cpu in (True, False)]
    assert set(seam.only) == set().union(*passed)


@pytest.mark.parametrize(("sampling", "is_returned"), [
    ({}, False), ({"temperature": "0.7"}, False), ({"topP": "0.9"}, True), ({"topK": 20}, True),
])  # fmt: skip
def test_sampling_sets_are_returned_only_if_top_p_or_top_k_leave_tokens_out(
    sampling: dict[str, Any], is_returned: bool
) -> None:
    """Steps may overlap on GPUs only, where vLLM's second model runner returns the sets: not for suffix decoding."""
    for kind, is_cpu in (("eagle3", True), ("eagle3", False), ("suffix", False)):
        spec = a_spec(POLICY, {kind: {}}, generation={"sampling": {"maxTokens": 64} | sampling})
        found = arguments.build_engine_arguments(spec, None, is_cpu)
        assert ("return_sampling_mask" in found) is is_returned
        assert ("async_scheduling" in found) is (is_returned and (kind, is_cpu) != ("eagle3", False))


@pytest.mark.parametrize(("eager", "is_cpu", "expected"), [
    (None, True, True), (None, False, False), (True, False, True), (False, True, False),
])  # fmt: skip
def test_eager_is_the_default_on_cpus_only(eager: bool | None, is_cpu: bool, expected: bool) -> None:
    spec = a_spec(POLICY, generation={"eager": eager})
    assert arguments.build_engine_arguments(spec, None, is_cpu)["enforce_eager"] is expected
    disabled = arguments.build_compile_environment(spec, is_cpu).get("TORCH_COMPILE_DISABLE")
    assert disabled == (None if not is_cpu else "1" if expected else "0")


def test_vllm_chooses_the_kv_cache_size_on_gpus() -> None:
    spec = a_spec(POLICY, generation={"kvCacheMib": None})
    assert arguments.kv_cache_bytes(spec, is_cpu=False) is None
    assert arguments.kv_cache_bytes(spec, is_cpu=True) == arguments.CPU_KV_CACHE_MIB << 20


def test_mechanisms_become_vllms_speculative_config() -> None:
    eagle3 = a_spec(POLICY, {"eagle3": {"numDraftTokens": 2}})
    assert arguments.build_speculative_config(eagle3, Path("/head")) == {
        "method": "eagle3", "model": "/head", "num_speculative_tokens": 2, "draft_sample_method": "greedy",
    }  # fmt: skip
    draft_model = a_spec(POLICY, {"draftModel": {"path": "/small", "draftSampling": "Probabilistic"}})
    assert arguments.build_speculative_config(draft_model, Path("/small")) == {
        "method": "draft_model", "model": "/small", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic",
        "draft_tensor_parallel_size": 1,
    }  # fmt: skip
    assert arguments.build_speculative_config(a_spec(POLICY, {"mtp": {}}), None) == {
        "method": "mtp", "num_speculative_tokens": 1, "draft_sample_method": "greedy",
    }  # fmt: skip
    assert arguments.build_speculative_config(a_spec(POLICY, {"suffix": {"cachedRollouts": 50}}), None) == {
        "method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 50,
    }  # fmt: skip
    ngram = a_spec(POLICY, {"ngram": {"numDraftTokens": 4, "lookupMin": 2, "lookupMax": 5}})
    assert arguments.build_speculative_config(ngram, None) == {
        "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5,
    }  # fmt: skip


def test_the_environment_keeps_vllm_offline_and_its_threads_unbound() -> None:
    found = arguments.build_environment(a_spec(POLICY, generation={"threads": 3}))
    assert found["HF_HUB_OFFLINE"] == found["VLLM_NO_USAGE_STATS"] == found["DO_NOT_TRACK"] == "1"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert found["OMP_NUM_THREADS"] == "3"


def a_request(prompt: int = 4, **sampling: object) -> RolloutRequest:
    return RolloutRequest("r", "g", 0, (5,) * prompt, Sampling(**{"max_tokens": 8, **sampling}))  # type: ignore[arg-type]


def test_the_longest_request_leaves_room_for_drafts() -> None:
    spec = a_spec(POLICY, {"ngram": {"numDraftTokens": 3}})
    arguments.check_request(a_request(500, max_tokens=8), spec, 264)
    with pytest.raises(RecordInvalid, match=r"508 tokens.*got 500 \+ 9"):
        arguments.check_request(a_request(500, max_tokens=9), spec, 264)


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.005}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5},
    {"top_k": -1}, {"seed": -1}, {"seed": 1 << 63}, {"max_tokens": 0},
])  # fmt: skip
def test_sampling_that_vllm_would_change_or_refuse_is_refused(sampling: dict[str, object]) -> None:
    with pytest.raises(RecordInvalid, match="request r"):
        arguments.check_request(a_request(**sampling), a_spec(POLICY), 264)


def test_too_little_memory_is_reported_in_numbers() -> None:
    """Weights of 100 MiB count twice: policy and drafter, 25 M parameters together."""
    spec = a_spec(POLICY, generation={"kvCacheMib": 64})
    policy = ModelFolder(POLICY, "model.path", {}, {"a": (20, 1 << 20)}, None)
    head = ModelFolder(POLICY, "generation.speculation.eagle3", {}, {"b": (5 << 20,)}, None)
    needed_mib = 200 + 64 + 1536
    check_memory(spec, ReplicaFolders(policy, head), needed_mib << 20)
    with pytest.raises(MemoryTooSmall, match=rf"at least {needed_mib} MiB.*got {needed_mib - 1} MiB"):
        check_memory(spec, ReplicaFolders(policy, head), (needed_mib - 1) << 20)


def test_prompts_are_never_chunked_on_cpus_and_the_longest_fits_one_step() -> None:
    """vLLM 0.32 rewinds the generator of a seeded request after a partial prompt, which CPU generators cannot."""
    spec = a_spec(POLICY, {"ngram": {"numDraftTokens": 3}}, model={"path": "/p", "maxLength": 4000})
    found = arguments.build_engine_arguments(spec, None, is_cpu=True)
    assert found["enable_chunked_prefill"] is False
    assert found["max_num_batched_tokens"] >= 4000 + 32 * 4
    assert "enable_chunked_prefill" not in arguments.build_engine_arguments(spec, None, is_cpu=False)


def test_a_step_on_a_gpu_reads_prompts_of_8192_tokens_and_a_full_batch() -> None:
    """Once it had 2,048 tokens, vLLM's default for an engine without a server, and 512 x 5 tokens did not fit."""

    def tokens(**generation: object) -> int:
        spec = a_spec(POLICY, {"ngram": {"numDraftTokens": 4}}, generation=generation)
        found: int = arguments.build_engine_arguments(spec, None, is_cpu=False)["max_num_batched_tokens"]
        return found

    assert tokens() == tokens(maxLiveRollouts=512) == 8192
    assert tokens(maxLiveRollouts=2048) == 2048 * 5
    assert tokens(maxBatchedTokens=4000) == 4000
    on_cpus = a_spec(POLICY, generation={"maxBatchedTokens": 4000})
    assert arguments.build_engine_arguments(on_cpus, None, is_cpu=True)["max_num_batched_tokens"] == 4000


def a_policy(folder: Path) -> ModelFolder:
    return read_model_folder(a_model_folder(folder / "model"), "model.path")


def test_vllm_demands_what_the_replica_needs_of_a_gpu_with_a_given_kv_cache(tmp_path: Path) -> None:
    """vLLM demanded 92 % of the card, so no trainer could share it (0.33, v1/worker/utils.py `request_memory`)."""
    policy = a_policy(tmp_path)
    card = 80 << 30

    def demanded(**generation: object) -> float | None:
        spec = a_spec(POLICY, generation={"kvCacheMib": None} | generation)
        return arguments.choose_utilization(spec, policy, None, card)

    assert demanded() is None
    assert demanded(gpuMemoryUtilization="0.4") == 0.4
    small = demanded(kvCacheMib=1024)
    assert small is not None
    assert 1 / 80 < small < 0.1
    assert demanded(kvCacheMib=11 * 1024) == pytest.approx(small + 10 / 80)
    assert demanded(kvCacheMib=1024, eager=True) == pytest.approx(small - 2 / 80)  # no graphs
    found = arguments.build_engine_arguments(a_spec(POLICY), None, is_cpu=False, utilization=small)
    assert found["gpu_memory_utilization"] == small
    assert "gpu_memory_utilization" not in arguments.build_engine_arguments(a_spec(POLICY), None, is_cpu=False)


def test_a_kv_cache_that_no_gpu_has_room_for_is_refused_with_the_room_there_is(tmp_path: Path) -> None:
    spec = a_spec(POLICY, generation={"kvCacheMib": 100_000})
    policy = a_policy(tmp_path)
    needed = estimate_replica_bytes(spec, policy, 0)
    left = ((80 << 30) - needed) >> 20
    with pytest.raises(
        MemoryTooSmall, match=rf"kvCacheMib must be <= {left}, got 100000: the GPU has 81920 MiB.*eager"
    ):
        arguments.choose_utilization(spec, policy, None, 80 << 30)
    with pytest.raises(MemoryTooSmall, match=rf"must have more than {needed >> 20} MiB .*got 1024 MiB; raise"):
        check_kv_cache(spec, needed, 1 << 30)


def test_tensor_parallel_ranks_share_the_weights_of_a_replica(tmp_path: Path) -> None:
    policy = a_policy(tmp_path)
    whole, half = (
        estimate_replica_bytes(a_spec(POLICY, generation={"tensorParallel": ranks}), policy, 0) for ranks in (1, 2)
    )
    assert whole - half >= 4 * policy.num_parameters // 2


def test_precision_of_the_cache_and_attention_kernels_are_passed_only_if_they_are_chosen() -> None:
    plain = arguments.build_engine_arguments(a_spec(POLICY), None, is_cpu=False)
    assert not {"kv_cache_dtype", "attention_backend"} & plain.keys()
    spec = a_spec(POLICY, generation={"kvCacheDtype": "Fp8", "attentionBackend": "FLASHINFER"})
    found = arguments.build_engine_arguments(spec, None, is_cpu=False)
    assert (found["kv_cache_dtype"], found["attention_backend"]) == ("fp8", "FLASHINFER")


def test_experts_are_dealt_out_whole_if_that_was_chosen() -> None:
    spec = a_spec(POLICY, generation={"tensorParallel": 2, "expertParallel": True})
    assert arguments.build_engine_arguments(spec, None, is_cpu=False)["enable_expert_parallel"]
    assert not arguments.build_engine_arguments(a_spec(POLICY), None, is_cpu=False)["enable_expert_parallel"]


def test_numba_does_not_use_openmp() -> None:
    """vLLM's packed weights depend on OpenMP's thread count, which numba's OpenMP layer sets for the whole process."""
    assert arguments.build_environment(a_spec(POLICY))["NUMBA_THREADING_LAYER"] == "workqueue"


def test_cuda_graphs_cover_a_full_batch_with_drafts() -> None:
    spec = a_spec(POLICY, {"eagle3": {"numDraftTokens": 3}}, generation={"maxLiveRollouts": 256})
    assert arguments.build_engine_arguments(spec, Path("head"), is_cpu=False)["compilation_config"] == {
        "cudagraph_capture_sizes": [1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16)]
    }
    assert "compilation_config" not in arguments.build_engine_arguments(spec, Path("head"), is_cpu=True)
    arguments.check_graph_coverage(spec, 1024, is_cpu=False)


@pytest.mark.parametrize(
    "mechanism", [{"none": {}}, {"suffix": {"numDraftTokens": 2}}, {"ngram": {"numDraftTokens": 2}}]
)
@pytest.mark.parametrize("length", ["Fixed", "Adaptive"])
def test_cuda_graphs_cover_full_batches_of_any_size(mechanism: dict[str, object], length: str) -> None:
    """Once runs of 30 rollouts with 2 drafts each were refused: for their 90 tokens, vLLM's own grid ends at 88."""
    spec = a_spec(POLICY, mechanism, generation={"maxLiveRollouts": 30, "draftLength": length})
    assert arguments.choose_captured_sizes(spec)[-1] == spec.generation.full_step_tokens
    arguments.check_graph_coverage(spec, arguments.choose_captured_sizes(spec)[-1], is_cpu=False)


@pytest.mark.parametrize("largest", [None, 512, 1023])
def test_too_small_cuda_graphs_are_refused(largest: int | None) -> None:
    spec = a_spec(POLICY, {"eagle3": {"numDraftTokens": 3}}, generation={"maxLiveRollouts": 256})
    with pytest.raises(RunInvalid, match=r"= 1024 tokens, got .*; a larger step would run eagerly"):
        arguments.check_graph_coverage(spec, largest, is_cpu=False)
    arguments.check_graph_coverage(spec, largest, is_cpu=True)
    eager = a_spec(POLICY, {"eagle3": {}}, generation={"maxLiveRollouts": 256, "eager": True})
    arguments.check_graph_coverage(eager, largest, is_cpu=False)


def test_the_adaptive_lengths_depend_on_the_mechanism() -> None:
    def lengths(speculation: dict[str, object], length: str = "Adaptive") -> tuple[int, ...]:
        return arguments.list_adaptive_lengths(a_spec(POLICY, speculation, generation={"draftLength": length}))

    assert lengths({"eagle3": {"numDraftTokens": 2}}) == (OFF, 1, 2)
    assert lengths({"ngram": {"numDraftTokens": 2}}) == (OFF, 1, 2)
    assert lengths({"suffix": {"numDraftTokens": 8}}) == ()
    assert lengths({"none": {}}) == ()
    assert lengths({"eagle3": {"numDraftTokens": 2}}, "Fixed") == ()


def test_vllms_table_has_each_draft_length_once() -> None:
    """Once it had the longest only, and vLLM's second model runner captured graphs for no other length."""

    def named(longest: int, live: int) -> list[tuple[int, int, int]]:
        spec = a_spec(
            POLICY,
            {"ngram": {"numDraftTokens": longest}},
            generation={"draftLength": "Adaptive", "maxLiveRollouts": live},
        )
        found = arguments.build_engine_arguments(spec, None, is_cpu=False)["speculative_config"]
        ranges: list[tuple[int, int, int]] = found["num_speculative_tokens_per_batch_size"]
        return ranges

    assert named(3, 64) == [(1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 64, 3)]
    assert named(3, 4) == [(1, 1, 0), (2, 2, 1), (3, 3, 2), (4, 4, 3)]
    assert named(1, 64) == [(1, 1, 0), (2, 64, 1)]
    # With fewer batch sizes than lengths: the longest, then 0, then some between.
    assert named(3, 1) == [(1, 1, 3)]
    assert named(8, 2) == [(1, 1, 0), (2, 2, 8)]
    assert named(8, 3) == [(1, 1, 0), (2, 2, 4), (3, 3, 8)]


def test_a_fixed_length_has_no_table() -> None:
    spec = a_spec(POLICY, {"ngram": {"numDraftTokens": 3}}, generation={"draftLength": "Fixed"})
    found = arguments.build_engine_arguments(spec, None, is_cpu=False)["speculative_config"]
    assert "num_speculative_tokens_per_batch_size" not in found
