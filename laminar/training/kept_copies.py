"""Copies of tensors in memory that is kept for them.

Reads   tensors by name, on any device
Writes  memory of the host, which is asked for once
Gives   KeptCopies

Memory that is asked for again each time costs more than the copy: the system clears every page of
it at the first touch. The trainer stands still for a copy, so it is made into pages that are there.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class KeptCopies:
    """One copy of each tensor, which the next copy of that name replaces."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """They are as they were given until the next call."""
        return {name: self._memory(name, tensor).copy_(tensor) for name, tensor in tensors}

    def _memory(self, name: str, tensor: Tensor) -> Tensor:
        kept = self._kept.get(name)
        if kept is None:
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._kept[name] = kept
        return kept
