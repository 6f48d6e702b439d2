"""A trainer's side of an arena: its weights go into slots, in threads.

Reads   a relay's arena, by its path; the trainer's tensors
Writes  slots of that arena
Gives   SlotWriter: what actors/weight_publisher.py asks for
Raises  ArenaError
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from laminar.weights.arena.arena import Arena
from laminar.weights.version.manifest import TensorSpec
from laminar.weights.version.tensors import write_tensors


class SlotWriter:
    """One arena that this process has mapped."""

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]], path: str):
        """`tensors`: the present weights. ArenaError if the file is no arena."""
        self.path = path
        self._tensors = tensors
        self._arena = Arena.attach(Path(path))

    async def prepare(self, slot: int) -> None:
        await asyncio.to_thread(self._arena.prepare, slot)

    async def write(self, slot: int, specs: tuple[TensorSpec, ...]) -> None:
        view = self._arena.slot(slot)
        await asyncio.to_thread(write_tensors, view, specs, self._tensors())

    def close(self) -> None:
        self._arena.close()
