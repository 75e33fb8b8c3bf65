"""Methods that vLLM mixes into its workers (`worker_extension_cls`), called by the engine through `collective_rpc`.

    EMPTY --receive--> ARRIVING --received--> STAGED --gather--> WHOLE --load--> EMPTY (the model is the new version)
    STAGED, WHOLE --discard / receive--> EMPTY

ARRIVING is a thread: the worker's own goes on computing tokens. It ends by the deadlines of the group's collectives.
STAGED is this rank's share alone, and the other ranks of its node have the rest (weights/staging.py).

The model changes in `load` only, which nobody calls before every rank's checksums have been compared, so a corrupt or
broken transfer never reaches it. Policy and drafter are loaded in one call, while the scheduler is paused.
Errors travel as data (`{"error": class, "message": text}`): vLLM would turn any exception into a bare `Exception`.

Loading goes through vLLM's layerwise reload (0.32: `vllm.model_executor.model_loader.reload`), as its own weight
transfer does: parameters are packed after loading, and `model.load_weights` alone fails on packed ones.

Packed weights: on CPUs vLLM packs with oneDNN for the present number of OpenMP threads, and keeps compiled products by
batch size, which expect that packing. If the number has changed since the start, new weights give wrong products at
every batch size that was used before, without an error (seen with numba's OpenMP layer, which n-gram look-up loads and
which sets the number for the whole process). So `load` refuses then; `arguments.environment` keeps it from happening.

Tied embeddings: an output layer that shares the embedding's tensor has a packed copy of its own, and the reload packs
only layers that a tensor was loaded into. So `_repack_output_layers` packs it again; without it a tied policy would go
on sampling with the output layer of the start (found by the sampler's mismatch with the trainer).

Experts: vLLM packs those of a mixture when it makes their kernel, at the first load alone; on CPUs, later ones would be
put unpacked where packed ones are expected. So `_forget_expert_kernels` has the reload make the kernels anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from specrl.errors import BY_NAME, CollectiveFailed, EngineFailed, SpecrlError
from specrl.generation.vllm_backend import draft_rest, routed_experts, sampling_check
from specrl.records import TensorMeta, WeightGroup, WeightManifest, WeightOwner
from specrl.weights import files
from specrl.weights.group import BroadcastGroup
from specrl.weights.staging import Address, Share, StagingArea, Tensors
from specrl.weights.stream import receive

Answer = dict[str, Any]


def unwrap(answer: Answer) -> Any:
    """The value of a worker's answer. Raises the SpecrlError that the worker met."""
    if "error" in answer:
        raise BY_NAME.get(answer["error"], EngineFailed)(answer["message"])
    return answer["value"]


class WorkerExtension:
    """Mixed into vLLM's Worker: `self` has its attributes (rank, model_runner, vllm_config). Every name is prefixed."""

    specrl_manifest: WeightManifest | None = None
    specrl_group: BroadcastGroup | None = None
    specrl_staged: StagingArea | None = None
    specrl_whole: Tensors | None = None
    specrl_arriving: Future[StagingArea] | None = None
    specrl_threads: int = 0
    rank: int
    model_runner: Any
    vllm_config: Any

    def specrl_inspect(self) -> Answer:
        """Check how this rank samples. Value: what the engine must know before it serves: who owns the drafter's ends,
        and which draft lengths can be asked for. EngineFailed if sampling is wrong, or cannot be checked."""
        return _answer(self._specrl_inspect)

    def specrl_expect(self, tensors: list[list[Any]], bucket_bytes: int) -> Answer:
        """Every version consists of these from now on. Value: None."""
        return _answer(lambda: self._specrl_expect(manifest_from_rows(tensors, bucket_bytes)))

    def specrl_receive(self, group: dict[str, Any], ranks_of_node: int) -> Answer:
        """Begin to join the group, if needed, and to take part in one broadcast, or to read files. Value: None."""
        share = Share(self.rank % ranks_of_node, ranks_of_node)
        return _answer(lambda: self._specrl_receive(WeightGroup(**group), share))

    def specrl_received(self) -> Answer:
        """Has everything arrived? Value: checksums of this rank's share, and its address; None while something is on
        its way. May be asked again, as it is while another rank is slower."""
        return _answer(self._specrl_received)

    def specrl_gather(self, addresses: list[Address | None]) -> Answer:
        """Make the shares of this node's ranks whole. addresses: of all ranks of the replica, in order. Value: None."""
        return _answer(lambda: self._specrl_gather(addresses))

    def specrl_load(self) -> Answer:
        """Load the whole policy and drafter. Value: seconds. After an error the model is in an unknown state."""
        return _answer(self._specrl_load)

    def specrl_discard(self) -> Answer:
        """Drop what is staged. What is still arriving ends by its deadline, and is never asked for. Value: None."""
        self._specrl_drop()
        return _answer(lambda: None)

    def _specrl_inspect(self) -> dict[str, Any]:
        self.specrl_threads = torch.get_num_threads()
        sampling_check.check(self.model_runner)
        model, drafter = self.model_runner.get_model(), self._specrl_drafter()
        found: dict[str, Any] = {
            "shares_embedding": None,
            "shares_lm_head": None,
        }
        found |= draft_rest.install(self.model_runner)._asdict()
        found["model_runner"] = type(self.model_runner).__module__
        routed_experts.install(self.model_runner)
        if drafter is not None and self.vllm_config.speculative_config.method == "eagle3":
            found["shares_embedding"] = drafter.model.embed_tokens is model.model.embed_tokens
            found["shares_lm_head"] = drafter.lm_head is model.lm_head
        return found

    def _specrl_drafter(self) -> Any:
        """The drafter's module, or None. n-gram proposers have no model."""
        return self.model_runner.get_draft_model()

    def _specrl_expect(self, manifest: WeightManifest) -> None:
        self.specrl_manifest = manifest

    def _specrl_drop(self) -> None:
        self.specrl_staged = self.specrl_whole = None

    def _specrl_receive(self, group: WeightGroup, share: Share) -> None:
        before, manifest = self.specrl_arriving, self.specrl_manifest
        assert manifest is not None, "the engine says what to expect before anything arrives"
        if before is not None and not before.done():
            raise CollectiveFailed("a worker must be in one transfer at a time, got another; it ends by its deadline")
        self._specrl_drop()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def arrive() -> StagingArea:
            if device is not None:
                torch.cuda.set_device(device)  # each thread has its own
            if group.folder:
                return files.read(Path(group.folder), manifest, share)
            return receive(self._specrl_join(group), manifest, share)

        thread = ThreadPoolExecutor(1, thread_name_prefix="specrl-receive")
        self.specrl_arriving = thread.submit(arrive)
        thread.shutdown(wait=False)

    def _specrl_received(self) -> dict[str, Any] | None:
        if self.specrl_staged is None:
            self.specrl_staged = self._specrl_arrived()
        staged = self.specrl_staged
        return None if staged is None else {"checksums": list(staged.checksums), "address": staged.address}

    def _specrl_gather(self, addresses: Sequence[Address | None]) -> None:
        staged = self.specrl_staged
        assert staged is not None, "gathering without a staged version; the engine checks this first"
        first = self.rank - staged.share.index
        self.specrl_whole = staged.gathered(addresses[first : first + staged.share.count])

    def _specrl_arrived(self) -> StagingArea | None:
        """What has arrived, taken once. None while something is on its way."""
        arriving = self.specrl_arriving
        if arriving is None:
            raise CollectiveFailed("weights must be on their way to be received, got nothing; the transfer is repeated")
        if not arriving.done():
            return None
        if arriving.exception() is not None:
            self._specrl_leave()  # a collective that broke leaves the group unusable
        self.specrl_arriving = None
        return arriving.result()

    def _specrl_join(self, group: WeightGroup) -> BroadcastGroup:
        """This worker's membership: the replica's first rank plus the worker's own."""
        if self.specrl_group is None or self.specrl_group.group.group_id != group.group_id:
            self._specrl_leave()
            mine = WeightGroup(**{**vars(group), "rank": group.rank + self.rank})
            self.specrl_group = BroadcastGroup(mine)
        return self.specrl_group

    def _specrl_leave(self) -> None:
        group, self.specrl_group = self.specrl_group, None
        if group is not None:
            group.close()

    def _specrl_load(self) -> float:
        began = time.monotonic()
        tensors = self.specrl_whole
        assert tensors is not None, "load without a whole version; the engine checks this first"
        self._specrl_drop()
        if torch.get_num_threads() != self.specrl_threads:
            raise EngineFailed(
                f"weights must be loaded with the {self.specrl_threads} threads of the start, got "
                f"{torch.get_num_threads()}; a library changed OpenMP's setting, and products go wrong; start again"
            )
        config = self.vllm_config
        self._specrl_load_into(self.model_runner.get_model(), config.model_config, _owned(tensors, WeightOwner.POLICY))
        drafter_tensors = _owned(tensors, WeightOwner.DRAFTER)
        if config.speculative_config is not None and config.speculative_config.method == "mtp":
            drafter_tensors = _owned(tensors, WeightOwner.POLICY)  # its own loader picks the heads
        if drafter_tensors:
            draft_config = config.speculative_config.draft_model_config
            self._specrl_load_into(self._specrl_drafter(), draft_config, drafter_tensors)
        return time.monotonic() - began

    def _specrl_load_into(self, model: Any, model_config: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                _forget_expert_kernels(model)
                initialize_layerwise_reload(model)
                model.load_weights(iter(tensors))
                finalize_layerwise_reload(model, model_config)  # type: ignore[no-untyped-call]
                _repack_output_layers(model)
        except Exception as error:  # any loader of any model: the engine is stopped with what it said
            raise EngineFailed(
                f"new weights must load into {type(model).__name__}, got {type(error).__name__}: {error}; "
                "the replica is started again"
            ) from error


def manifest_to_rows(manifest: WeightManifest) -> list[list[Any]]:
    """A manifest's tensors in types that vLLM's message encoding carries."""
    return [[meta.name, meta.owner.value, meta.dtype, list(meta.shape)] for meta in manifest.tensors]


def manifest_from_rows(rows: list[list[Any]], bucket_bytes: int) -> WeightManifest:
    """Inverse of `manifest_to_rows`."""
    tensors = tuple(TensorMeta(name, WeightOwner(owner), dtype, tuple(shape)) for name, owner, dtype, shape in rows)
    return WeightManifest(tensors, bucket_bytes)


def _owned(tensors: Tensors, owner: WeightOwner) -> list[tuple[str, torch.Tensor]]:
    return [(meta.name, tensor) for meta, tensor in tensors if meta.owner is owner]


def _repack_output_layers(model: torch.nn.Module) -> None:
    """Pack every output layer's present weights for the CPU's products. See "Tied embeddings" above."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Have the reload pack the experts' new weights for the CPU's products. See "Experts" above."""
    from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(method, FusedMoEMethodBase):
            if not hasattr(method, "moe_kernel"):
                raise EngineFailed(
                    f"vLLM's {type(method).__name__} must have moe_kernel, without which new experts would not be "
                    "packed, got none; install a version that specrl was read with"
                )
            method.moe_kernel = None


def _answer(call: Callable[[], Any]) -> Answer:
    try:
        return {"value": call()}
    except SpecrlError as error:
        return {"error": type(error).__name__, "message": str(error)}
