"""Bytes of tensors, counted: those that are there at a time, and those kept for a backward pass.

Reads   what torch's operations give while a part of a test runs
Gives   LiveBytes, saved_bytes

A CPU has no counter such as CUDA's max_memory_allocated, and the memory of the process moves with
much else. What kernels take inside of one operation is not seen.
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
    """Bytes of the tensors that operations made and that are still there, and the most of them."""

    def __init__(self, own: Iterable[Tensor] = ()) -> None:
        """`own`: tensors that were there before, which are not counted."""
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
    """Bytes that a forward pass keeps for its backward pass, without parameters."""
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
