"""Lets Megatron-Core run without CUDA: Gloo groups, CPU tensors. Does nothing where CUDA is available.

Megatron 0.19.2 names CUDA in five ways: `device="cuda"` in factory calls, CUDA random states, streams and events,
`Tensor.type() == "torch.cuda.FloatTensor"` where it clips gradients, and `Tensor.is_cuda` where it makes of counts of
tokens the array that an all-to-all takes. `install` rebinds the global name `torch` of
Megatron's own modules to a stand-in in which "cuda" means "cpu", and makes four tensor methods answer Megatron, and
nobody else, as on CUDA. torch itself stays as it is: transformers 5 looks factory functions up by identity while it
builds models, and with those replaced its rotary frequencies stay uninitialised, silently.

Read from megatron-core 0.19.2; `specrl.seams` refuses versions that were not read, since what is missed here fails far
away.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specrl.errors import TrainerFailed

_CPU = torch.device("cpu")
_FACTORIES = [
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "as_tensor",
    "linspace",
    "eye",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
]
_SILENT = ("synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")


def install() -> None:
    """Rebind `torch` in every Megatron module that is imported by now. Idempotent; call it after importing more.

    Raises TrainerFailed where Megatron lacks what is replaced.
    """
    if torch.cuda.is_available():
        return
    # Megatron warns where sequence parallelism is on and this is not 1; it is about kernels on CUDA.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    stand_in = _stand_in()
    for name, module in list(sys.modules.items()):
        if _is_megatron(name) and getattr(module, "__dict__", {}).get("torch") is torch:
            module.__dict__["torch"] = stand_in
    _replace_functions()


def _replace_functions() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    for module, name in (
        (random, "_set_cuda_rng_state"),
        (random, "_get_cuda_rng_state"),
        (token_dispatcher, "maybe_move_tensor_to_cpu"),
    ):
        if not hasattr(module, name):
            raise TrainerFailed(
                f"megatron-core must have {module.__name__}.{name}, got none; install a version that specrl was read "
                "with"
            )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    token_dispatcher.maybe_move_tensor_to_cpu = _brought_to_the_host


def _brought_to_the_host(found: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return found.numpy() if as_numpy and isinstance(found, torch.Tensor) else found


@contextlib.contextmanager
def without_compilation() -> Iterator[None]:
    """Import Megatron inside: on CPUs its torch.compile decorators then leave functions as they are.

    They would never be compiled (TORCHDYNAMO_DISABLE), but decorating alone imports the whole of inductor: 3590 modules
    and 5.1 s of CPU until the trainer is imported, instead of 2880 and 4.0 s.
    """
    if torch.cuda.is_available():
        yield
        return
    real = torch.compile

    def leave(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda found: found

    torch.compile = leave  # type: ignore[assignment]  # an overloaded function, replaced for the import
    try:
        yield
    finally:
        torch.compile = real


def _is_megatron(name: str) -> bool:
    return name == "megatron" or name.startswith("megatron.")


class _Proxy(types.ModuleType):
    """A module that answers from another one unless an attribute is set here."""

    def __init__(self, real: types.ModuleType) -> None:
        super().__init__(real.__name__)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class _Stream:
    """A CUDA stream or event: accepts every call, does nothing, and returns itself for the event that is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        return lambda *_, **__: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@functools.cache
def _stand_in() -> types.ModuleType:
    """The module that Megatron sees as `torch`. Built once; building it also patches the tensor methods."""
    _patch_methods()
    cuda = _Proxy(torch.cuda)
    for name in _SILENT:
        setattr(cuda, name, lambda *_, **__: None)
    set_state: Callable[..., None] = lambda state, device=None: torch.set_rng_state(state)  # noqa: E731 - one of a table
    table: dict[str, Any] = {
        "current_device": lambda: _CPU,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": set_state,
        "Stream": _Stream,
        "Event": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda *_, **__: _Stream(),
        "default_stream": lambda *_, **__: _Stream(),
    }
    for name, value in table.items():
        setattr(cuda, name, value)
    for part, names in (("random", ("get_rng_state", "set_rng_state")), ("nvtx", ("range_push", "range_pop"))):
        proxy = _Proxy(getattr(torch.cuda, part))
        for name in names:
            setattr(proxy, name, table.get(name, lambda *_, **__: None))
        setattr(cuda, part, proxy)
    stand_in = _Proxy(torch)
    for name in _FACTORIES:
        setattr(stand_in, name, _on_cpu(getattr(torch, name)))
    stand_in.__dict__["cuda"] = cuda
    return stand_in


def _names_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return made


def _caller_is_megatron() -> bool:
    """Whether the method that asks was called from Megatron's code."""
    return _is_megatron(sys._getframe(2).f_globals.get("__name__", ""))


def _patch_methods() -> None:
    real_to, real_type = torch.Tensor.to, torch.Tensor.type
    real_cuda, real_module_cuda = torch.Tensor.cuda, torch.nn.Module.cuda

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _caller_is_megatron():
            if args and _names_cuda(args[0]):
                args = (_CPU, *args[1:])
            if _names_cuda(kwargs.get("device")):
                kwargs["device"] = _CPU
        return real_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = real_type(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda.") and _caller_is_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    def cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self if _caller_is_megatron() else real_cuda(self, *args, **kwargs)

    def module_cuda(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self if _caller_is_megatron() else real_module_cuda(self, *args, **kwargs)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]  # that is the point, here and below
    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]
    torch.Tensor.cuda = cuda  # type: ignore[method-assign, assignment]
    torch.nn.Module.cuda = module_cuda  # type: ignore[method-assign]
