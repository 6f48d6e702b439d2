"""Shared memory of the machines in virtual time: arenas by path, and their mappings.

Reads   weights of the trainer; directories of models; whether a fault strikes
Writes  slots, which other processes of the machine find by the arena's path
Gives   SimArena; SimMemory for a relay, SimSlotWriter for the trainer; for replicas
        MappedArena and ReachableWeights, the port of actors/weight_loader.py
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from laminar.actors.weight_loader import NotReadable
from laminar.engines.protocol import WeightSource
from laminar.run.directory import VERSION_FILE
from laminar.weights import messages as m
from laminar.weights.arena.region import ArenaError, Region
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import Bytes, WeightsCorrupt, build_manifest, verify_weights
from tools.simulator.machine.versions import CHUNK_BYTES, ModelDirectory, manifest_for
from tools.simulator.runtime.process import SimProcess

DIGEST_S = 0.05  #: time to digest a whole version, or some received chunks
COPY_S = 0.1  #: time to copy a version into a slot, or to duplicate it


class SimArena:
    """Slots that processes of one machine have mapped; a mapping keeps them alive."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.num_bytes = slots * slot_bytes
        self.trainer_slot = -1
        self._slots = [np.zeros(slot_bytes, np.uint8) for _ in range(slots)]

    def slot(self, index: int) -> Bytes:
        if not 0 <= index < len(self._slots):
            raise ArenaError(f"there is no slot {index}")
        return self._slots[index]


Arenas = dict[str, SimArena]  #: by path


class SimMemory:
    """The slots of one relay process (actors/relay_slots.py: SlotMemory)."""

    def __init__(self, process: SimProcess, arenas: Arenas) -> None:
        self.path, self.slot_bytes = f"arena-{process.boot_id}", 0
        self._process, self._arenas = process, arenas
        self.kept = False
        self.former: SimArena | None = None

    def create_slots(self, slots: int, slot_bytes: int) -> int:
        self._arena = self.former or SimArena(slots, slot_bytes)
        self._arenas[self.path] = self._arena
        self.slot_bytes = slot_bytes
        return self._arena.trainer_slot

    def note_trainer_slot(self, slot: int) -> None:
        self._arena.trainer_slot = slot

    def get_region(self, slot: int) -> Region:
        return Region(self.view(slot).data)

    def view(self, slot: int) -> Bytes:
        """Return the bytes of a slot, uint8 [slot_bytes]."""
        return self._arena.slot(slot)

    async def populate_slots(self) -> None:
        """Do nothing: there is always enough memory."""

    async def build_manifest(self, commit: m.CommitSlot) -> mf.Manifest:
        await asyncio.sleep(DIGEST_S * self._process.slow)
        return build_manifest(
            self._arena.slot(commit.slot),
            version=commit.version,
            step=commit.step,
            tensors=commit.tensors,
            probe=commit.probe,
            chunk_bytes=CHUNK_BYTES,
        )


class SimSlotWriter:
    """An arena that the trainer has mapped; `content` returns the weights to write."""

    def __init__(
        self, process: SimProcess, arenas: Arenas, content: Callable[[], Bytes], path: str
    ) -> None:
        self.path, self._process, self._content = path, process, content
        if path not in arenas:
            raise ArenaError(f"{path} does not exist")
        self._arena = arenas[path]

    async def populate_slot(self, slot: int) -> None:
        """Populate a slot, or, as a fault, wait and raise for lack of memory."""
        world = self._process.world
        if world.faults.publish_fails():
            await asyncio.sleep(2 * world.config.emulation.train_s * self._process.slow)
            raise ArenaError("there is no memory for the slot")

    async def write(self, slot: int, specs: tuple[mf.TensorSpec, ...]) -> None:
        """Write the first half at once, and the rest when the copy is done."""
        content, view = self._content(), self._arena.slot(slot)
        half, end = len(content) // 2, len(content)
        view[:half] = content[:half]
        await asyncio.sleep(COPY_S * self._process.slow)
        view[half:end] = content[half:]

    def close(self) -> None:
        """Do nothing: nothing waits for its memory."""


class MappedArena:
    """The slots of this machine's relay."""

    def __init__(self, arena: SimArena) -> None:
        self._arena = arena

    def get_slot_offset(self, index: int) -> int:
        return index

    def get_slot(self, index: int) -> Bytes:
        try:
            return self._arena.slot(index)
        except ArenaError as error:
            raise NotReadable(str(error)) from error


class CheckpointCopy:
    """A version read from the disk."""

    path = "checkpoint"

    def __init__(self, manifest: mf.Manifest, view: Bytes) -> None:
        self.manifest, self.view = manifest, view

    def close(self) -> None: ...


class ReachableWeights:
    """The weight bytes that this replica can reach (actors/weight_loader.py)."""

    def __init__(
        self,
        process: SimProcess,
        chance: random.Random,
        arenas: Arenas,
        models: Mapping[str, ModelDirectory],
    ) -> None:
        self._process, self._world, self._chance = process, process.world, chance
        self._arenas, self._models = arenas, models
        self._mapped: dict[str, MappedArena] = {}
        self._copy: CheckpointCopy | None = None

    def attach_arena(self, arena: str) -> MappedArena:
        if arena not in self._arenas:
            raise NotReadable(f"there is no {arena}")
        mapped = self._mapped[arena] = MappedArena(self._arenas[arena])
        return mapped

    async def read_checkpoint(self, directory: Path, version: int) -> CheckpointCopy:
        """Return the copy of a checkpoint, which may be missing or, as a fault, corrupt."""
        world = self._world
        duration_s = world.scenario.world.load_s * self._chance.uniform(1, 3)
        await asyncio.sleep(duration_s * self._process.slow)
        found = self._models.get(str(directory))
        if found is None or world.faults.corrupts_weights(self._process):
            raise NotReadable("it is not there" if found is None else "wrong digest")
        manifest = mf.decode(found.extra[VERSION_FILE])
        if manifest.version != version:
            raise NotReadable(f"it is version {manifest.version}")
        self._copy = CheckpointCopy(manifest, found.weights)
        return self._copy

    def digest_of(self, source: WeightSource) -> str:
        """Return the digest of the weights that an engine loads now."""
        if self._copy is not None and source.path == self._copy.path:
            return self._copy.manifest.digest
        return manifest_for(self._mapped[source.path].get_slot(source.offset), 0, 0).digest

    async def verify_weights(self, view: Bytes, manifest: mf.Manifest) -> None:
        copied = self._copy is not None and view is self._copy.view
        if not copied and self._world.faults.corrupts_weights(self._process):
            raise WeightsCorrupt("wrong digest")
        verify_weights(view, manifest)
