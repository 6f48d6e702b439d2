"""Arenas and checkpoints of this machine, read without blocking the event loop.

Reads   the memory of relays; directories of models, through `read`
Gives   ReplicaFiles, the WeightFiles of actors/weight_loader.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from laminar.actors.weight_loader import NotReadable
from laminar.weights.arena.arena import Arena
from laminar.weights.arena.region import ArenaError
from laminar.weights.version.hashes import Bytes, verify_weights
from laminar.weights.version.manifest import Manifest
from laminar.weights.version.restored import RestoredVersion, VersionRestoreError


class ReplicaFiles:
    """The weight files that one replica can reach."""

    def __init__(self, read: Callable[[Path, int], RestoredVersion]) -> None:
        """Use `read(directory, version)` to read a checkpoint's version; CheckpointError."""
        self._read = read

    def attach_arena(self, arena: str) -> Arena:
        try:
            return Arena.attach(Path(arena))
        except ArenaError as error:
            raise NotReadable(str(error)) from error

    async def read_checkpoint(self, directory: Path, version: int) -> RestoredVersion:
        try:
            return await asyncio.to_thread(self._read, directory, version)
        except VersionRestoreError as error:
            raise NotReadable(str(error)) from error

    async def verify_weights(self, view: Bytes, manifest: Manifest) -> None:
        await asyncio.to_thread(verify_weights, view, manifest)
