"""Lets Megatron-Core run without CUDA: with Gloo groups and CPU tensors. Does nothing where CUDA is available.

Megatron 0.19.2 hard-codes CUDA in five ways:
- `device="cuda"` in factory calls
- CUDA random states
- streams and events
- `Tensor.type() == "torch.cuda.FloatTensor"` where it clips gradients
- `Tensor.is_cuda` where it converts token counts for an all-to-all

`install_shim` rebinds the global name `torch` in Megatron's modules to a stand-in in which "cuda" means "cpu". It also
patches four methods of torch so that they behave as on CUDA when Megatron's code calls them.

The rest of torch stays unpatched. transformers 5 looks factory functions up by identity while it builds models; with
those replaced, its rotary frequencies silently stay uninitialised.

Written against megatron-core 0.19.2. `specrl.seams` rejects other versions, because a use of CUDA that is missed here
fails far from its cause. Called by `backend.py` and the package's `__init__`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_CPU = torch.device("cpu")
# Functions of torch to which Megatron passes "cuda", or a device that it was given.
_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like")
# Functions of torch.cuda that do nothing on a CPU.
_SILENT = ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")


def install_shim() -> None:
    """Rebind `torch` in every Megatron module that has been imported. Idempotent; call it again after more imports."""
    if torch.cuda.is_available():
        return
    # With sequence parallelism Megatron warns unless this is 1. It only concerns kernels on CUDA.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    stand_in = _build_stand_in()
    for name, module in list(sys.modules.items()):
        if _is_megatron(name) and getattr(module, "__dict__", {}).get("torch") is torch:
            module.__dict__["torch"] = stand_in
    _replace_functions()


def _replace_functions() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    random._set_cuda_rng_state = _set_random_state
    random._get_cuda_rng_state = _get_random_state
    token_dispatcher.maybe_move_tensor_to_cpu = _move_tensor_to_cpu


def _set_random_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _get_random_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _move_tensor_to_cpu(found: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return found.numpy() if as_numpy and isinstance(found, torch.Tensor) else found


@contextlib.contextmanager
def without_compilation() -> Iterator[None]:
    """Make torch.compile a no-op while Megatron is imported inside this context, on CPUs. The shim cannot be compiled.

    TORCHDYNAMO_DISABLE prevents compilation anyway, but decorating alone imports all of inductor. Importing the trainer
    then takes 3590 modules and 5.1 s of CPU, instead of 2880 and 4.0 s.
    """
    if torch.cuda.is_available():
        yield
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torch reads it when dynamo is imported, at the first use
    real = torch.compile

    def leave_uncompiled(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda found: found

    torch.compile = leave_uncompiled  # type: ignore[assignment]  # an overloaded function, replaced for the import
    try:
        yield
    finally:
        torch.compile = real


def _is_megatron(name: str) -> bool:
    return name == "megatron" or name.startswith("megatron.")


class _ModuleProxy(types.ModuleType):
    """A module that forwards to another one, except for the attributes that it replaces."""

    def __init__(self, real: types.ModuleType, replaced: Mapping[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced, _real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _StreamStandIn:
    """Stands in for a CUDA stream, an event, or a function that returns a stream or enters one.

    Every method does nothing and returns the object itself.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _StreamStandIn]:
        return lambda *_, **__: self

    def __enter__(self) -> _StreamStandIn:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@functools.cache
def _build_stand_in() -> types.ModuleType:
    """Build the module that Megatron sees as `torch`, once, and patch the methods of torch's classes."""
    _patch_methods()
    states = {"get_rng_state": _get_random_state, "set_rng_state": _set_random_state}
    streams = ("Stream", "Event", "stream", "current_stream", "default_stream")
    cuda = _ModuleProxy(
        torch.cuda,
        {
            **dict.fromkeys(_SILENT, _do_nothing),
            **dict.fromkeys(streams, _StreamStandIn),
            **states,
            "current_device": lambda: _CPU,
            "manual_seed": torch.manual_seed,
            "random": _ModuleProxy(torch.cuda.random, states),
            "nvtx": _ModuleProxy(torch.cuda.nvtx, dict.fromkeys(("range_push", "range_pop"), _do_nothing)),
        },
    )
    factories = {name: _wrap_factory(getattr(torch, name)) for name in _FACTORIES}
    return _ModuleProxy(torch, {**factories, "cuda": cuda})


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _wrap_factory(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create_on_cpu


def _caller_is_megatron() -> bool:
    """Return whether the patched method that calls this was itself called from Megatron's code."""
    # Frame 0 is this function, 1 the patched method, 2 its caller.
    return _is_megatron(sys._getframe(2).f_globals.get("__name__", ""))


def _patch_methods() -> None:
    real_to = torch.Tensor.to
    real_type = torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _caller_is_megatron():
            if args and _names_cuda(args[0]):
                args = (_CPU, *args[1:])
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
        return real_to(self, *args, **kwargs)

    # Megatron compares type() with "torch.cuda.FloatTensor" where it clips gradients.
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda.") and _caller_is_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def keep_on_cpu(real_cuda: Callable[..., Any]) -> Callable[..., Any]:
        def cuda(self: Any, *args: Any, **kwargs: Any) -> Any:
            return self if _caller_is_megatron() else real_cuda(self, *args, **kwargs)

        return cuda

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]  # that is the point, here and below
    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = keep_on_cpu(torch.Tensor.cuda)  # type: ignore[method-assign]
    torch.nn.Module.cuda = keep_on_cpu(torch.nn.Module.cuda)  # type: ignore[method-assign]
