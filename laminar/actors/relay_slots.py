"""The slots of one relay process: the arena, who writes where, which versions lie in it.

Reads   requests of trainers and readers (weights/messages.py), by the boot id of the process
Writes  the arena file in shared memory
Gives   RelaySlots and its replies; SlotError, ArenaError and ManifestError for wrong requests

One process has one arena with a name of its own. A writer is a process, not a name: a trainer that
was started again gets another slot than the one its former self may have left half written.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from pathlib import Path

from laminar.weights import manifest as mf
from laminar.weights import messages as m
from laminar.weights.arena import Arena, ArenaError
from laminar.weights.hashes import manifest_of
from laminar.weights.region import Region
from laminar.weights.slots import SlotError, SlotTable, VersionGone, slots_within

CHAIN = "chain"
"""As a writer: the relay before this one."""


class RelaySlots:
    """Everything about slots; knows neither sockets nor commands."""

    def __init__(
        self,
        path: Path,
        slots: int,
        max_bytes: int,
        forget: Callable[[int], bool],
        on_shortage: Callable[[str], None],
    ) -> None:
        """`max_bytes`: of the whole arena. `forget`: asked before a version is evicted.
        `on_shortage`: told in the event loop when the memory of the slots cannot be had."""
        self._path, self._num_slots, self._max_bytes = path, slots, max_bytes
        self._forget, self._on_shortage = forget, on_shortage
        self._arena: Arena | None = None
        self._table: SlotTable | None = None
        self._filler: threading.Thread | None = None
        self._closed = False
        self._manifests: dict[int, mf.Manifest] = {}
        self._granted: dict[str, int] = {}  #: by writing process, until its version is complete
        self._digesting: set[int] = set()
        self._pin = -1  #: a version to be kept, also one that is not here yet

    @property
    def held(self) -> tuple[int, ...]:
        """Versions that can be leased, ascending."""
        return self._table.versions_held if self._table is not None else ()

    # --- the arena ----------------------------------------------------------------------------

    def make(self, version_bytes: int) -> m.ArenaOpened:
        """Have slots of this size. Their memory comes in the background, slot after slot.

        ArenaError or SlotError if they cannot be had, or those that there are are smaller.
        """
        if self._arena is None:
            count = slots_within(version_bytes, self._num_slots, self._max_bytes)
            self._arena = Arena.create(self._path, count, version_bytes)
            self._table = SlotTable(count, self._forget)
            loop = asyncio.get_running_loop()
            fill = functools.partial(self._fill, self._arena, loop)
            self._filler = threading.Thread(target=fill, name="arena-filler", daemon=True)
            self._filler.start()
        if self._arena.slot_bytes < version_bytes:
            raise ArenaError(
                f"the slots have {self._arena.slot_bytes} bytes, {version_bytes} were asked for"
            )
        return m.ArenaOpened(arena=str(self._path))

    def _fill(self, arena: Arena, loop: asyncio.AbstractEventLoop) -> None:
        try:
            arena.fill_all()
        except ArenaError as error:
            if not self._closed:
                loop.call_soon_threadsafe(self._on_shortage, str(error))

    def region(self, slot: int) -> Region:
        """All bytes of a slot."""
        assert self._arena is not None
        return self._arena.region(slot)

    def close(self) -> None:
        """Remove the file; those who have it mapped keep it."""
        self._closed = True
        if self._arena is not None and self._filler is not None:
            self._arena.close()
            self._filler.join()
        Arena.unlink(self._path)

    # --- writers ------------------------------------------------------------------------------

    def grant(self, boot_id: str, request: m.GrantSlot) -> m.SlotGranted | m.OtherArena:
        """A slot for a trainer; the next one when the one before it is digested."""
        if self.is_other(request.arena):
            return m.OtherArena()
        self._abandon_former(boot_id)
        slot = self._granted.get(boot_id, -1)
        if slot in self._digesting:
            return m.SlotGranted(slot=-1)
        return m.SlotGranted(slot=slot if slot >= 0 else self._grant(boot_id))

    def grant_to_chain(self) -> int:
        """A slot for a version of the relay before this one; -1: none is free now."""
        return self._grant(CHAIN)

    def _grant(self, writer: str) -> int:
        assert self._table is not None
        grant = self._table.grant(writer)
        if grant is None:
            return -1
        if grant.evicted is not None:
            del self._manifests[grant.evicted]
        self._granted[writer] = grant.slot
        return grant.slot

    def _abandon_former(self, boot_id: str) -> None:
        """Free what an earlier process of this name had: a node starts one when that has ended."""
        name = _name(boot_id)
        former = [w for w in self._granted if w not in (boot_id, CHAIN) and _name(w) == name]
        for writer in former:
            if self._granted[writer] not in self._digesting:
                self.abandon(writer)

    def abandon(self, writer: str) -> None:
        """The writer has stopped before it was done; its slot is free again."""
        assert self._table is not None
        del self._granted[writer]
        self._table.abandon(writer)

    def begin_commit(self, boot_id: str, request: m.CommitSlot) -> bool:
        """The slot is written: whether its digest is to be worked out now (else it is a repeat)."""
        assert self._arena is not None
        if request.slot in self._digesting or request.version in self._manifests:
            return False
        if self._granted.get(boot_id) != request.slot:
            raise SlotError(f"slot {request.slot} is not granted to {boot_id}")
        if mf.check_tensors(request.tensors) > self._arena.slot_bytes:
            raise SlotError(f"version {request.version} does not fit into a slot")
        if request.version < max(self.held, default=-1):
            raise SlotError(f"version {request.version} is older than {max(self.held)}")
        self._digesting.add(request.slot)
        return True

    async def digest(self, boot_id: str, request: m.CommitSlot) -> mf.Manifest | None:
        """Work out checksums off the loop; the version is held then.

        None: a newer version came over the chain in the meantime, this one is of no use.
        """
        assert self._arena is not None
        manifest = await asyncio.to_thread(
            manifest_of,
            self._arena.slot(request.slot),
            version=request.version,
            step=request.step,
            tensors=request.tensors,
            probe=request.probe,
        )
        self._digesting.discard(request.slot)
        return manifest if self.keep(boot_id, request.slot, manifest) else None

    def keep(self, writer: str, slot: int, manifest: mf.Manifest) -> bool:
        """A slot holds this complete version from now on; False if a newer one is here."""
        assert self._table is not None
        if manifest.version <= max(self.held, default=-1):
            self.abandon(writer)
            return False
        self._table.commit(slot, writer, manifest.version)
        del self._granted[writer]
        self._manifests[manifest.version] = manifest
        self._apply_pin()
        return True

    def manifest(self, version: int) -> mf.Manifest | None:
        return self._manifests.get(version)

    # --- readers ------------------------------------------------------------------------------

    def lease(self, boot_id: str, request: m.LeaseVersion) -> m.Leased | m.Gone:
        """Any version that is kept, or the newest that is new enough."""
        if self._table is None:
            return m.Gone(held=())
        lease = self._table.lease(request.version, boot_id, exact=request.exact)
        if isinstance(lease, VersionGone):
            return m.Gone(held=lease.held)
        return m.Leased(
            lease_id=lease.lease_id,
            slot=lease.slot,
            arena=str(self._path),
            manifest=mf.encode(self._manifests[lease.version]),
        )

    def release(self, request: m.ReleaseLease) -> m.Released | m.OtherArena:
        if self.is_other(request.arena) or self._table is None:
            return m.OtherArena()
        return m.Released(valid=self._table.release(request.lease_id))

    def reader_lost(self, boot_id: str) -> None:
        """End its leases. A silent writer may still write: its slot stays its own."""
        if self._table is not None:
            self._table.revoke(boot_id)

    def pin(self, version: int) -> None:
        """Keep this version and no other, also if it comes later; -1: none."""
        self._pin = version
        if self._table is not None:
            self._table.unpin()
            self._apply_pin()

    def _apply_pin(self) -> None:
        assert self._table is not None
        if self._pin in self._manifests:
            self._table.pin(self._pin)

    def is_other(self, arena: str) -> bool:
        """Whether a request names another arena than the one of this process."""
        return self._arena is None or arena != str(self._path)


def _name(boot_id: str) -> str:
    """The process name in a boot id, which is "name-random"."""
    return boot_id.rpartition("-")[0]
