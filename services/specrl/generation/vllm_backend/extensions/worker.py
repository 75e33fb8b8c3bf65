"""Worker methods that receive and load weights. vLLM mixes them into its workers (`worker_extension_cls`).

The engine calls them on every rank through `collective_rpc`.

    EMPTY --receive--> ARRIVING --received--> STAGED --gather--> WHOLE --load--> EMPTY (the model is the new version)
    STAGED, WHOLE --discard / receive--> EMPTY

ARRIVING is a thread of its own, so that the worker goes on computing tokens. The deadlines of the group's collectives
bound it. STAGED is this rank's share of the weights; the other ranks of its node have the rest (weights/staging.py).

Only `load` changes the model. The engine calls it after it has compared every rank's checksums, so a corrupt or broken
transfer never reaches the model. Policy and drafter are loaded in one call, while the scheduler is paused.

Errors are returned as data (`return_answer`), since vLLM turns any exception into a bare `Exception`.

Loading uses vLLM's layerwise reload (0.32: `vllm.model_executor.model_loader.reload`), as vLLM's own weight transfer
does. vLLM packs parameters after loading, and `model.load_weights` alone fails on packed ones.

Packed weights. On CPUs vLLM packs weights with oneDNN for the current number of OpenMP threads. It also caches compiled
matrix products by batch size, which expect that packing. If the number of threads changes after the start, new weights
give wrong products at every batch size used before, without an error. This happened with numba's OpenMP layer, which
n-gram look-up loads and which sets the number for the whole process. So `load` fails in this case, and
`arguments.build_environment` prevents it. On GPUs nothing depends on the number.

Tied embeddings. An output layer that shares the embedding's tensor has a packed copy of its own. The reload packs only
layers that a tensor was loaded into. So `_repack_output_layers` packs it again. Without it a tied policy keeps
sampling with its first output layer. This was found by the mismatch between sampler and trainer.

Experts. vLLM packs the experts of a mixture when it builds their kernel, at the first load only. On CPUs later experts
would be stored unpacked where the kernel expects packed ones. So `_forget_expert_kernels` makes the reload build the
kernels again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from specrl.errors import ERRORS_BY_NAME, CollectiveFailed, EngineFailed, SpecrlError
from specrl.generation.vllm_backend.extensions import draft_rest, routed_experts, sampling_check, sampling_sets
from specrl.records import WeightGroup, WeightManifest, WeightOwner
from specrl.weights import files
from specrl.weights.arrival import notify_listener
from specrl.weights.group import BroadcastGroup
from specrl.weights.staging import Address, BucketShare, NamedTensors, StagingArea
from specrl.weights.stream import receive_version

MANIFEST_CODEC = TypeAdapter(WeightManifest)
"""Encodes a manifest for `specrl_expect`, since vLLM's message encoding supports no dataclasses."""

Answer = dict[str, Any]


def return_answer(method: Callable[..., Any]) -> Callable[..., Answer]:
    """Decorate a method of `WorkerExtension`: its value, or the SpecrlError that it raises, is returned as data."""

    @wraps(method)
    def answer_call(*args: Any) -> Answer:
        try:
            return {"value": method(*args)}
        except SpecrlError as error:
            return {"error": type(error).__name__, "message": str(error)}

    return answer_call


def unwrap_answer(answer: Answer) -> Any:
    """Return the value of a worker's answer, or raise the worker's SpecrlError."""
    if "error" in answer:
        raise ERRORS_BY_NAME.get(answer["error"], EngineFailed)(answer["message"])
    return answer["value"]


class WorkerExtension:
    """Mixed into vLLM's Worker, so `self` has its attributes: rank, model_runner, vllm_config.

    The engine unwraps what the decorated methods return (`unwrap_answer`). All names have the prefix `specrl_`, because
    vLLM rejects a mixin that redefines a worker's attribute.
    """

    specrl_manifest: WeightManifest | None = None
    specrl_group: BroadcastGroup | None = None
    specrl_staged: StagingArea | None = None
    specrl_whole: NamedTensors | None = None
    specrl_arriving: Future[StagingArea] | None = None
    specrl_threads: int | None = None
    rank: int
    model_runner: Any
    vllm_config: Any

    @return_answer
    def specrl_inspect(self) -> dict[str, Any]:
        """Check this rank's samplers, and patch its model runner.

        Returns whether the drafter shares the policy's embedding and output layer. Raises EngineFailed if sampling is
        wrong or cannot be checked.
        """
        self.specrl_threads = _count_packing_threads()
        sampling_check.check_model_runner(self.model_runner)
        model = self.model_runner.get_model()
        drafter = self.model_runner.get_draft_model()
        found: dict[str, Any] = {"shares_embedding": None, "shares_lm_head": None}
        draft_rest.patch_model_runner(self.model_runner)
        routed_experts.install_connector(self.model_runner)
        sampling_sets.install_recorder(self.model_runner)
        if drafter is not None and self.vllm_config.speculative_config.method == "eagle3":
            found["shares_embedding"] = drafter.model.embed_tokens is model.model.embed_tokens
            found["shares_lm_head"] = drafter.lm_head is model.lm_head
        return found

    @return_answer
    def specrl_expect(self, manifest: bytes) -> None:
        """Set the manifest of all later versions. manifest: of `MANIFEST_CODEC`."""
        self.specrl_manifest = MANIFEST_CODEC.validate_json(manifest)

    @return_answer
    def specrl_receive(self, fields: dict[str, Any], ranks_of_node: int, listener: bytes) -> None:
        """Start to receive one version in a thread, by broadcast or from files. Joins the group if needed.

        fields: of the WeightGroup. ranks_of_node: workers on each node. listener: address of the engine's
        `ArrivalListener`, which the thread notifies when it ends.
        """
        group = WeightGroup(**fields)
        share = BucketShare(self.rank % ranks_of_node, ranks_of_node)
        before = self.specrl_arriving
        manifest = self.specrl_manifest
        assert manifest is not None, "the engine calls specrl_expect first"
        if before is not None and not before.done():
            raise CollectiveFailed("the previous transfer of a worker is still running; it ends by its deadline")
        self.specrl_staged = self.specrl_whole = None
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        def receive_share() -> StagingArea:
            if device is not None:
                torch.cuda.set_device(device)  # the current device is a setting of each thread
            if group.folder:
                return files.read_version(Path(group.folder), manifest, share)
            return receive_version(self._specrl_join(group), manifest, share)

        thread = ThreadPoolExecutor(1, thread_name_prefix="specrl-receive")
        self.specrl_arriving = thread.submit(receive_share)
        self.specrl_arriving.add_done_callback(lambda _: notify_listener(listener))
        thread.shutdown(wait=False)  # the thread ends after this one task

    @return_answer
    def specrl_received(self) -> dict[str, Any] | None:
        """Return checksums and address of this rank's share, or None while the transfer runs.

        May be called again afterwards, since the engine asks until the slowest rank is done.
        """
        if self.specrl_staged is None:
            self.specrl_staged = self._specrl_arrived()
        staged = self.specrl_staged
        return None if staged is None else {"checksums": list(staged.checksums), "address": staged.address}

    @return_answer
    def specrl_gather(self, addresses: Sequence[Address | None]) -> None:
        """Combine the shares of this node's ranks. addresses: of all ranks of the replica, in order."""
        staged = self.specrl_staged
        assert staged is not None, "gathering without a staged version; the engine checks this first"
        first = self.rank - staged.share.index
        self.specrl_whole = staged.gather_tensors(addresses[first : first + staged.share.count])

    def _specrl_arrived(self) -> StagingArea | None:
        """Take the finished transfer's result, once; None while the transfer runs."""
        arriving = self.specrl_arriving
        if arriving is None:
            raise CollectiveFailed("no transfer is running at this worker; the transfer is repeated")
        if not arriving.done():
            return None
        if arriving.exception() is not None:
            self._specrl_leave()  # a group is unusable after a failed collective
        self.specrl_arriving = None
        return arriving.result()

    def _specrl_join(self, group: WeightGroup) -> BroadcastGroup:
        """Join the group, or return the membership in it. The rank is the replica's first rank plus the worker's."""
        if self.specrl_group is None or self.specrl_group.group.group_id != group.group_id:
            self._specrl_leave()
            mine = WeightGroup(**{**vars(group), "rank": group.rank + self.rank})
            self.specrl_group = BroadcastGroup(mine)
        return self.specrl_group

    def _specrl_leave(self) -> None:
        group = self.specrl_group
        self.specrl_group = None
        if group is not None:
            group.close()

    @return_answer
    def specrl_discard(self) -> None:
        """Drop the staging area."""
        self.specrl_staged = self.specrl_whole = None

    @return_answer
    def specrl_load(self) -> None:
        """Load policy and drafter from the combined shares. An error leaves the model undefined."""
        tensors = self.specrl_whole
        assert tensors is not None, "load without a whole version; the engine checks this first"
        self.specrl_staged = self.specrl_whole = None
        if self.specrl_threads not in (None, torch.get_num_threads()):
            raise EngineFailed(
                f"a library changed the number of OpenMP threads from {self.specrl_threads} to "
                f"{torch.get_num_threads()}, with which new weights would give wrong products; the replica is restarted"
            )
        config = self.vllm_config
        policy_tensors = _select_owned(tensors, WeightOwner.POLICY)
        self._specrl_load_into(self.model_runner.get_model(), config.model_config, policy_tensors)
        drafter_tensors = _select_owned(tensors, WeightOwner.DRAFTER)
        if config.speculative_config is not None and config.speculative_config.method == "mtp":
            drafter_tensors = policy_tensors  # its loader selects the heads' tensors
        if drafter_tensors:
            draft_config = config.speculative_config.draft_model_config
            self._specrl_load_into(self.model_runner.get_draft_model(), draft_config, drafter_tensors)

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
        except Exception as error:  # loaders of different models raise many types
            raise EngineFailed(
                f"failed to load new weights into {type(model).__name__}: {type(error).__name__}: {error}; the replica "
                "is restarted"
            ) from error


def _count_packing_threads() -> int | None:
    """Return the number of OpenMP threads that weights are packed for; None on GPUs. See "Packed weights" above."""
    from vllm.platforms import current_platform

    return torch.get_num_threads() if current_platform.is_cpu() else None


def _select_owned(tensors: NamedTensors, owner: WeightOwner) -> list[tuple[str, torch.Tensor]]:
    return [(meta.name, tensor) for meta, tensor in tensors if meta.owner is owner]


def _repack_output_layers(model: torch.nn.Module) -> None:
    """Pack the current weights of all output layers again, on CPUs. See "Tied embeddings" above."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Make the reload build expert kernels again, on CPUs. See "Experts" above."""
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
                    "packed, got none; install a version that specrl supports"
                )
            method.moe_kernel = None
