"""Counts the bytes of live tensors, for tests and benchmarks of memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that are alive, made while it is active, and the most of them.

    What an operation makes and frees within itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.most = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def ignore(self, *tensors: torch.Tensor) -> None:
        """Leave out the storages of tensors that were made before, and which operations return views of."""
        self._seen.update(tensor.untyped_storage() for tensor in tensors)

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen:
            return
        self._seen.add(storage)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, size)

    def _forget(self, size: int) -> None:
        self.now -= size
