"""A relay's access to its machine: shared memory, leftovers of dead relays, the bulk plane.

Reads   the size of the machine's memory, /dev/shm
Writes  the arena file
Gives   RelayMachine, ArenaMemory
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from laminar.run.memory_limit import memory_limit
from laminar.weights import messages as m
from laminar.weights.arena.arena import Arena, arena_path, claim_arena, sweep_arenas
from laminar.weights.arena.region import NO_FILE, ArenaError, Region
from laminar.weights.chain.core import PlaneOptions
from laminar.weights.chain.reports import Report
from laminar.weights.chain.transfer_thread import Plane
from laminar.weights.chain.upstream import RelayIdentity
from laminar.weights.version.hashes import build_manifest
from laminar.weights.version.manifest import Manifest
from laminar.weights.version.table import VersionTable


class ArenaMemory:
    """The slots of one relay process (actors/relay_slots.py: SlotMemory)."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.slot_bytes = 0
        self.kept = False
        self._former = NO_FILE
        self._arena: Arena | None = None
        self._filler: threading.Thread | None = None
        self._closed = False

    def claim_former(self) -> None:
        """Take over the arena of this node's former relay, if it left one."""
        self._former = claim_arena(Path(self.path))

    def create_slots(self, slots: int, slot_bytes: int) -> int:
        former, self._former = self._former, NO_FILE
        self._arena = Arena.create(Path(self.path), slots, slot_bytes, former)
        self.slot_bytes = slot_bytes
        return self._arena.trainer_slot

    def note_trainer_slot(self, slot: int) -> None:
        self._made.trainer_slot = slot

    def get_region(self, slot: int) -> Region:
        return self._made.get_region(slot)

    async def populate_slots(self) -> None:
        """Allocate the slots' pages in a daemon thread, which does not delay process exit."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[None] = loop.create_future()

        def end(error: ArenaError | None) -> None:
            loop.call_soon_threadsafe(_settle_future, ended, error)

        work = partial(self._run_filler, end)
        self._filler = threading.Thread(target=work, name="arena-filler", daemon=True)
        self._filler.start()
        await ended

    def _run_filler(self, end: Callable[[ArenaError | None], None]) -> None:
        error = None
        try:
            self._made.populate_all()
        except ArenaError as shortage:
            error = shortage
        if not self._closed:
            end(error)

    async def build_manifest(self, commit: m.CommitSlot) -> Manifest:
        return await asyncio.to_thread(
            build_manifest,
            self._made.get_slot(commit.slot),
            version=commit.version,
            step=commit.step,
            tensors=commit.tensors,
            probe=commit.probe,
        )

    def close(self) -> None:
        """Remove the file unless it is kept; processes that have it mapped keep the memory."""
        self._closed = True
        if self._arena is not None:
            self._arena.close()
        if self._filler is not None:
            self._filler.join()
        if not self.kept:
            Path(self.path).unlink(missing_ok=True)

    @property
    def _made(self) -> Arena:
        assert self._arena is not None
        return self._arena


class RelayMachine:
    """The real machine of a relay process (actors/relay.py: Machine)."""

    def __init__(self, run: str, run_id: str, node: str, boot_id: str) -> None:
        self.memory_bytes = memory_limit()
        self.slots = ArenaMemory(arena_path(run, run_id, node, boot_id))
        self.versions = VersionTable(threading.Lock())
        self._plane: Plane | None = None

    async def sweep_stale_arenas(self) -> list[tuple[str, int]]:
        self.slots.claim_former()
        found = await asyncio.to_thread(sweep_arenas)
        return [(str(swept.path), swept.num_bytes) for swept in found]

    def make_plane(
        self, identity: RelayIdentity, notify: Callable[[Report], None], options: PlaneOptions
    ) -> Plane:
        loop = asyncio.get_running_loop()

        def in_loop(report: Report) -> None:
            loop.call_soon_threadsafe(notify, report)

        self._plane = Plane(identity, self.slots.get_region, in_loop, options, self.versions)
        return self._plane

    async def close(self) -> None:
        if self._plane is not None:
            await asyncio.to_thread(self._plane.close)
        self.slots.close()


def _settle_future(ended: asyncio.Future[None], error: ArenaError | None) -> None:
    """Complete the future unless its task has been cancelled meanwhile."""
    if ended.done():
        return
    if error is None:
        ended.set_result(None)
    else:
        ended.set_exception(error)
