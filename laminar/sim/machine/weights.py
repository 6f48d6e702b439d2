"""The bytes of versions that a replica can reach: its machine's arena, checkpoints of the disk.

Reads   arenas, directories of models; whether a fault strikes
Gives   ReachableWeights, the port of actors/weight_loader.py
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from laminar.actors.weight_loader import NotReadable
from laminar.engines.protocol import WeightSource
from laminar.run.directory import VERSION_FILE
from laminar.sim.machine.memory import MappedArena
from laminar.sim.machine.versions import manifest_for
from laminar.sim.runtime.process import SimProcess
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, WeightsCorrupt, verify


class CheckpointCopy:
    """A version that was read from the disk."""

    path = "checkpoint"

    def __init__(self, manifest: mf.Manifest, view: Bytes) -> None:
        self.manifest, self.view = manifest, view

    def close(self) -> None: ...


class ReachableWeights:
    """The bytes of versions that this replica can reach (actors/weight_loader.py)."""

    def __init__(self, process: SimProcess, chance: random.Random) -> None:
        self._process, self._world, self._chance = process, process.world, chance
        self._mapped: dict[str, MappedArena] = {}
        self._copy: CheckpointCopy | None = None

    def attach(self, arena: str) -> MappedArena:
        if arena not in self._world.arenas:
            raise NotReadable(f"there is no {arena}")
        mapped = self._mapped[arena] = MappedArena(self._world, arena)
        return mapped

    async def read_checkpoint(self, directory: Path, version: int) -> CheckpointCopy:
        """The copy of a checkpoint; it may have been removed, and bytes may have changed there."""
        world = self._world
        duration_s = world.scenario.load_s * self._chance.uniform(1, 3)
        await asyncio.sleep(duration_s * self._process.slow)
        found = world.models.get(str(directory))
        if found is None or world.faults.corrupts_weights():
            raise NotReadable("it is not there" if found is None else "wrong digest")
        manifest = mf.decode(found.extra[VERSION_FILE])
        if manifest.version != version:
            raise NotReadable(f"it is version {manifest.version}")
        self._copy = CheckpointCopy(manifest, found.weights)
        return self._copy

    def digest_of(self, source: WeightSource) -> str:
        """The digest of what an engine loads now."""
        if self._copy is not None and source.path == self._copy.path:
            return self._copy.manifest.digest
        return manifest_for(self._mapped[source.path].slot(source.offset), 0, 0).digest

    async def verify(self, view: Bytes, manifest: mf.Manifest) -> None:
        copied = self._copy is not None and view is self._copy.view
        if not copied and self._world.faults.corrupts_weights():
            raise WeightsCorrupt("wrong digest")
        verify(view, manifest)
