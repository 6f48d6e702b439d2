"""A trainer's side of an arena: it writes the weights to slots in threads.

Reads   a relay's arena, by its path; the trainer's weights
Writes  slots of that arena
Gives   SlotWriter, SharedSlotWriter (used by actors/weight_publisher.py), WriteTarget
Raises  ArenaError
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from laminar.weights.arena.arena import Arena
from laminar.weights.version.hashes import Bytes
from laminar.weights.version.manifest import TensorSpec

Fill = Callable[[Bytes, tuple[TensorSpec, ...]], None]


class WriteTarget(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place to write a version to."""

    path: str  #: path of the file that all processes map
    offset: int  #: offset of the version in the file, a multiple of the page size
    nbytes: int
    specs: tuple[TensorSpec, ...]
    kept: bool  #: the same path will be written again, so keep it mapped


encode = msgspec.msgpack.encode


class _MappedArena:
    """An arena that this process has mapped."""

    def __init__(self, path: str):
        """Map the arena; raise ArenaError for any other file."""
        self.path = path
        self._arena = Arena.attach(Path(path))

    async def populate_slot(self, slot: int) -> None:
        await asyncio.to_thread(self._arena.populate_slot, slot)

    def close(self) -> None:
        self._arena.close()


class SlotWriter(_MappedArena):
    """The slot writer of a trainer with one process."""

    def __init__(self, fill: Fill, path: str):
        """Map the arena; `fill` writes the current weights to the bytes of a slot."""
        super().__init__(path)
        self._fill = fill

    async def write(self, slot: int, specs: tuple[TensorSpec, ...]) -> None:
        view = self._arena.get_slot(slot)
        await asyncio.to_thread(self._fill, view, specs)


class SharedSlotWriter(_MappedArena):
    """The slot writer of a trainer whose processes each have rows of the weights."""

    def __init__(self, fill: Callable[[bytes], Awaitable[None]], path: str):
        """Map the arena; `fill` has every process write its rows to the encoded WriteTarget."""
        super().__init__(path)
        self._fill = fill

    async def write(self, slot: int, specs: tuple[TensorSpec, ...]) -> None:
        offset, nbytes = self._arena.get_slot_offset(slot), self._arena.slot_bytes
        target = WriteTarget(path=self.path, offset=offset, nbytes=nbytes, specs=specs, kept=True)
        await self._fill(encode(target))
