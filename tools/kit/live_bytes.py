"""Byte counts of live tensors, and of tensors kept for a backward pass.

Reads   results of torch's operations while a part of a test runs
Gives   LiveBytes, saved_bytes

A CPU has no counter such as CUDA's max_memory_allocated, and the memory of the process varies with
much else. Memory that kernels use inside an operation is not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Current and peak bytes of the live tensors that operations made."""

    def __init__(self, own: Iterable[Tensor] = ()) -> None:
        """Count from zero; `own` are existing tensors, which are not counted."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now: int = 0
        self.peak: int = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._take(leaf.untyped_storage())
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def saved_bytes(parameters: Iterable[Tensor], forward: Callable[[], Any]) -> int:
    """Return the bytes that a forward pass keeps for its backward pass, without parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())
