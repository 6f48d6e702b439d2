"""A trainer's side of an arena: its weights go into slots, in threads.

Reads   a relay's arena, by its path; the trainer's weights
Writes  slots of that arena
Gives   SlotWriter: what actors/weight_publisher.py asks for
Raises  ArenaError
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from laminar.weights.arena.arena import Arena
from laminar.weights.version.hashes import Bytes
from laminar.weights.version.manifest import TensorSpec

Fill = Callable[[Bytes, tuple[TensorSpec, ...]], None]


class SlotWriter:
    """One arena that this process has mapped."""

    def __init__(self, fill: Fill, path: str):
        """`fill` puts the present weights into the bytes of a slot. ArenaError if the file is no
        arena."""
        self.path = path
        self._fill = fill
        self._arena = Arena.attach(Path(path))

    async def prepare(self, slot: int) -> None:
        await asyncio.to_thread(self._arena.prepare, slot)

    async def write(self, slot: int, specs: tuple[TensorSpec, ...]) -> None:
        view = self._arena.slot(slot)
        await asyncio.to_thread(self._fill, view, specs)

    def close(self) -> None:
        self._arena.close()
