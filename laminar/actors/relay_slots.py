"""The slots of a relay process: its arena, the writer of each slot, the versions in it.

Reads   requests of trainers and readers (weights/messages.py), by the boot id of the process
Writes  the slots' states; their content is described by the version table
Gives   RelaySlots and its replies; Fetches; SlotMemory, the port to the machine
Raises  SlotError, ArenaError and ManifestError for wrong requests

One process has one arena with a unique name. Its memory may be that of this node's former relay:
late readers find a wrong digest, and the slot that a trainer may still write to is not granted to
relays. A writer is a process, not a name: a restarted trainer gets another slot than the one that
its previous process may have left incomplete.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol

from laminar.weights import messages as m
from laminar.weights.arena.region import ArenaError, Region
from laminar.weights.arena.slots import SlotError, SlotTable, VersionNotHeld, slots_within
from laminar.weights.version import manifest as mf
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.table import VersionTable

CHAIN, FETCH = "chain", "fetch"
"""Writers that are other relays: the previous one of the chain, and any that is fetched from."""
FORMER = "former"
"""A trainer that may still write to the slot that this node's former relay granted."""
CREATE_TRIES = 30  #: failures to create the slots that end the relay; a trainer tries once a second


class SlotMemory(Protocol):
    """The memory of the slots, which other processes of the machine map by its path."""

    path: str  #: unique to every relay process
    slot_bytes: int  #: 0 until `create_slots`
    kept: bool  #: whether `close` leaves the memory to this node's next relay

    def create_slots(self, slots: int, slot_bytes: int) -> int:
        """Create so many equal slots, whose memory is populated later. ArenaError.

        Those of this node's former relay are taken over. Returns the slot that it last granted to
        a trainer, or -1.
        """

    def note_trainer_slot(self, slot: int) -> None:
        """Note for this node's next relay that a trainer may write to this slot."""

    def get_region(self, slot: int) -> Region:
        """Return all bytes of a slot."""

    async def populate_slots(self) -> None:
        """Allocate memory for slot after slot, in the background; ArenaError if there is none."""

    async def build_manifest(self, commit: m.CommitSlot) -> mf.Manifest:
        """Compute the checksums of a slot's content, in the background."""


class RelaySlots:
    """The state of all slots, independent of sockets and commands."""

    def __init__(
        self,
        memory: SlotMemory,
        slots: int,
        max_bytes: int,
        versions: VersionTable,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        on_shortage: Callable[[str], None],
    ) -> None:
        """Start without slots.

        `max_bytes`: of the whole arena. `versions`: versions held in this process, and how much of
        them is sent. `on_shortage`: called if memory for the slots cannot be allocated.
        """
        self._memory, self._num_slots, self._max_bytes = memory, slots, max_bytes
        self._versions, self._spawn, self._on_shortage = versions, spawn, on_shortage
        self._table: SlotTable | None = None
        self._failures = 0  #: to create the slots
        self._granted: dict[str, int] = {}  #: slots by writing process, until complete
        self._digesting: set[int] = set()
        self._pin = -1  #: a pinned version, which may not be here yet
        self._unfinished: Collection[int] = ()  #: versions that are evicted last

    @property
    def held(self) -> tuple[int, ...]:
        """Versions that can be leased, ascending."""
        return self._table.versions_held if self._table is not None else ()

    # --- the arena ----------------------------------------------------------------------------

    def ensure_slots(self, version_bytes: int) -> m.ArenaOpened:
        """Create slots of this size if there are none, and populate their memory later.

        ArenaError or SlotError if that is impossible, or the existing slots are smaller.
        """
        if self._table is None:
            count = slots_within(version_bytes, self._num_slots, self._max_bytes)
            try:
                former = self._memory.create_slots(count, version_bytes)
            except ArenaError as error:
                self._failures += 1
                if self._failures >= CREATE_TRIES:
                    self._on_shortage(str(error))
                raise
            self._granted = {FORMER: former} if former >= 0 else {}
            writers = {slot: writer for writer, slot in self._granted.items()}
            self._table = SlotTable(count, self._versions.try_forget, writers)
            self._spawn(self._populate_slots())
        if self._memory.slot_bytes < version_bytes:
            raise ArenaError(
                f"the slots have {self._memory.slot_bytes} bytes, the version {version_bytes}"
            )
        return m.ArenaOpened(arena=self._memory.path)

    async def _populate_slots(self) -> None:
        try:
            await self._memory.populate_slots()
        except ArenaError as error:
            self._on_shortage(str(error))

    # --- writers ------------------------------------------------------------------------------

    def grant_trainer_slot(
        self, boot_id: str, request: m.GrantSlot
    ) -> m.SlotGranted | m.ArenaReplaced:
        """Return a slot for a trainer; the next one once its previous version is digested."""
        if self.is_other(request.arena):
            return m.ArenaReplaced()
        self._abandon_former(boot_id)
        slot = self._granted.get(boot_id, -1)
        if slot in self._digesting:
            return m.SlotGranted(slot=-1)
        if slot < 0 and (slot := self._grant_slot(boot_id)) >= 0:
            self._memory.note_trainer_slot(slot)
        return m.SlotGranted(slot=slot)

    def grant_to(self, writer: str) -> int:
        """Return a slot for a version of another relay (CHAIN, FETCH); -1: none is free now."""
        return self._grant_slot(writer)

    def _grant_slot(self, writer: str) -> int:
        assert self._table is not None
        grant = self._table.grant_slot(writer)
        if grant is None:
            return -1
        self._granted[writer] = grant.slot
        return grant.slot

    def _abandon_former(self, boot_id: str) -> None:
        """Free the slots of earlier processes of this name; a node starts one after the other.

        A trainer asks for a slot when it no longer writes to one of the former relay.
        """
        name = _parse_process_name(boot_id)
        former = [
            w
            for w in self._granted
            if w not in (boot_id, CHAIN, FETCH) and (w == FORMER or _parse_process_name(w) == name)
        ]
        for writer in former:
            if self._granted[writer] not in self._digesting:
                self.abandon_slot(writer)

    def abandon_slot(self, writer: str) -> None:
        """Free the slot of a writer that stopped before it was done."""
        assert self._table is not None
        del self._granted[writer]
        self._table.abandon_slot(writer)

    def begin_commit(self, boot_id: str, request: m.CommitSlot) -> bool:
        """Accept a written slot; return whether to compute its digest now (False for a repeat)."""
        if request.slot in self._digesting or request.version in self.held:
            return False
        if self._granted.get(boot_id) != request.slot:
            raise SlotError(f"slot {request.slot} is not granted to {boot_id}")
        if mf.check_tensors(request.tensors) > self._memory.slot_bytes:
            raise SlotError(f"version {request.version} does not fit into a slot")
        if request.version < max(self.held, default=-1):
            raise SlotError(f"version {request.version} is older than {max(self.held)}")
        self._digesting.add(request.slot)
        return True

    async def digest_slot(self, boot_id: str, request: m.CommitSlot) -> mf.Manifest | None:
        """Compute checksums in the background; afterwards the version is held.

        Returns None if a newer version came over the chain in the meantime, which makes this one
        useless.
        """
        manifest = await self._memory.build_manifest(request)
        self._digesting.discard(request.slot)
        return manifest if self.commit_version(boot_id, request.slot, manifest) else None

    def commit_version(self, writer: str, slot: int, manifest: mf.Manifest) -> bool:
        """Hold this complete version; return False if a newer one or the same is held."""
        assert self._table is not None
        older = writer == FETCH
        if manifest.version in self.held or (
            not older and manifest.version < max(self.held, default=-1)
        ):
            self.abandon_slot(writer)
            return False
        self._table.commit(slot, writer, manifest.version, older=older)
        del self._granted[writer]
        self._apply_pin()
        return True

    def get_manifest(self, version: int) -> mf.Manifest | None:
        """Return the manifest of a version that can be leased, else None."""
        return self._load_manifest(version) if version in self.held else None

    def _load_manifest(self, version: int) -> mf.Manifest:
        return self._get_copy(version).get_manifest()

    def _get_copy(self, version: int) -> VersionCopy:
        copy = self._versions.get(version)
        assert copy is not None, version  # it is forgotten when its slot is given away, not before
        return copy

    # --- readers ------------------------------------------------------------------------------

    def lease_version(
        self, boot_id: str, request: m.LeaseVersion
    ) -> m.VersionLeased | m.VersionUnavailable:
        """Lease any held version, or the newest that is new enough."""
        if self._table is None:
            return m.VersionUnavailable(held=())
        lease = self._table.lease_version(request.version, boot_id, exact=request.exact)
        if isinstance(lease, VersionNotHeld):
            return m.VersionUnavailable(held=lease.held)
        return m.VersionLeased(
            lease_id=lease.lease_id,
            slot=lease.slot,
            arena=self._memory.path,
            manifest=mf.encode(self._load_manifest(lease.version)),
            copy=self._get_copy(lease.version).number,
        )

    def stream_version(
        self, boot_id: str, request: m.LeaseVersion
    ) -> m.VersionLeased | m.VersionArriving | m.VersionPending | m.VersionUnavailable:
        """Lease the exact version or its part that is here; unavailable if only newer are."""
        reply, copy = self.lease_version(boot_id, request), self._versions.get(request.version)
        if isinstance(reply, m.VersionLeased):
            return reply
        if copy is None:
            newer = max(self._versions.get_copies(), default=-1) > request.version
            return reply if newer else m.VersionPending()
        return m.VersionArriving(
            slot=copy.slot,
            arena=self._memory.path,
            copy=copy.number,
            num_bytes=copy.front,
            manifest=copy.get_manifest() if copy.number != request.copy else None,
        )

    def release(self, request: m.ReleaseLease) -> m.LeaseReleased | m.ArenaReplaced:
        if self.is_other(request.arena) or self._table is None:
            return m.ArenaReplaced()
        return m.LeaseReleased(valid=self._table.release(request.lease_id))

    def revoke_reader(self, boot_id: str) -> list[int]:
        """End a reader's leases and return their versions.

        A silent writer may still write, so it keeps its slot.
        """
        ended = self._table.revoke_leases(boot_id) if self._table is not None else ()
        return [lease.version for lease in ended]

    def pin_version(self, version: int, unfinished: Collection[int] = ()) -> None:
        """Pin this version, which may come later, and no other (-1: none).

        Versions with unfinished work are evicted last.
        """
        self._pin, self._unfinished = version, unfinished
        if self._table is not None:
            self._table.unpin()
            self._apply_pin()

    def _apply_pin(self) -> None:
        assert self._table is not None
        self._table.set_evict_last(self._unfinished)
        if self._pin in self.held:
            self._table.pin(self._pin)

    def is_other(self, arena: str) -> bool:
        """Return whether a request names another arena than this process's."""
        return self._table is None or arena != self._memory.path


def _parse_process_name(boot_id: str) -> str:
    """Return the process name in a boot id, which is "name-random"."""
    return boot_id.rpartition("-")[0]


class Fetches:
    """Versions that are fetched outside the chain, and the orders that they are for."""

    def __init__(self, slots: RelaySlots, fetch: Callable[[int, str, str], None]) -> None:
        """Fetch by `fetch(version, relay, address)`."""
        self._slots, self._fetch = slots, fetch
        self._coming: set[int] = set()
        self._asked: set[int] = set()  #: ids of orders for which a version was fetched

    def lease_version(
        self, boot_id: str, request: m.LeaseVersion
    ) -> m.VersionLeased | m.VersionArriving | m.VersionPending | m.VersionUnavailable:
        """Lease a held version; else fetch it once for this order, if it names a holder."""
        if request.stream:
            return self._slots.stream_version(boot_id, request)
        reply = self._slots.lease_version(boot_id, request)
        if isinstance(reply, m.VersionUnavailable) and request.holder:
            if request.order not in self._asked and request.version not in self._coming:
                self._fetch(request.version, request.holder, request.address)
                self._coming.add(request.version)
            self._asked.add(request.order)
            if request.version in self._coming:
                return m.VersionPending()
        self._asked.discard(request.order)
        return reply

    def end_fetch(self, version: int) -> None:
        """Note that a fetched version is here, or will not come."""
        self._coming.discard(version)
