"""A trainer's side of an arena: its weights go into slots, in threads.

Reads   a relay's arena, by its path; the trainer's weights
Writes  slots of that arena
Gives   SlotWriter, SharedSlotWriter: what actors/weight_publisher.py asks for; Target
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
    """Where a version is to be written."""

    path: str  #: of the file that all map
    offset: int  #: of the version in it, a multiple of the page size
    nbytes: int
    specs: tuple[TensorSpec, ...]
    kept: bool  #: the file is written again, under the same path


encode = msgspec.msgpack.encode


class _MappedArena:
    """One arena that this process has mapped."""

    def __init__(self, path: str):
        """ArenaError if the file is no arena."""
        self.path = path
        self._arena = Arena.attach(Path(path))

    async def populate_slot(self, slot: int) -> None:
        await asyncio.to_thread(self._arena.populate_slot, slot)

    def close(self) -> None:
        self._arena.close()


class SlotWriter(_MappedArena):
    """For a trainer of one process."""

    def __init__(self, fill: Fill, path: str):
        """`fill` puts the present weights into the bytes of a slot."""
        super().__init__(path)
        self._fill = fill

    async def write(self, slot: int, specs: tuple[TensorSpec, ...]) -> None:
        view = self._arena.get_slot(slot)
        await asyncio.to_thread(self._fill, view, specs)


class SharedSlotWriter(_MappedArena):
    """For one of several processes, each of which has rows of the weights."""

    def __init__(self, fill: Callable[[bytes], Awaitable[None]], path: str):
        """`fill` has every process put its rows into the Target in these bytes."""
        super().__init__(path)
        self._fill = fill

    async def write(self, slot: int, specs: tuple[TensorSpec, ...]) -> None:
        offset, nbytes = self._arena.get_slot_offset(slot), self._arena.slot_bytes
        target = WriteTarget(path=self.path, offset=offset, nbytes=nbytes, specs=specs, kept=True)
        await self._fill(encode(target))
