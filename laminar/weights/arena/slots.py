"""The relay's slot table: the writer, version and read leases of each slot of the arena.

Reads   requests of writers (grant, commit, abandon), readers (lease, release, revoke) and pins
Gives   SlotTable, SlotGrant, ReadLease, VersionNotHeld; slots_within; SlotError for wrong use

The table is pure and owned by one process, so slots change owner in a single place. With three
slots a publish seldom waits: the first holds the latest version, the second the pinned or previous
one, and the third is free. Before a version is evicted, the code that sends versions to other
machines must agree, since it may be sending that one. The table trusts its caller that an abandoned
writer and a revoked reader have stopped. It refuses late requests of either, because a slot is
named together with its writer and a lease id is never reused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

MIN_SLOTS = 3


class SlotError(RuntimeError):
    """A violation of the table's rules; the message ends with the table's state."""


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """An unused slot."""


@dataclass(frozen=True, slots=True)
class WritingSlot:
    """A slot granted to a writer that has not committed yet."""

    writer: str


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """A slot with a complete version."""

    version: int


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """A writer's hold of `slot`, until it commits or is abandoned."""

    slot: int
    evicted: int | None  #: version that the slot held until now


@dataclass(frozen=True, slots=True)
class ReadLease:
    """A guarantee that `slot` holds `version` until the lease is released or revoked."""

    lease_id: int
    reader: str
    slot: int
    version: int


@dataclass(frozen=True, slots=True)
class VersionNotHeld:
    """A refusal: the requested version was evicted or has not arrived."""

    wanted: int
    held: tuple[int, ...]  #: ascending


def slots_within(version_bytes: int, slots: int, max_bytes: int) -> int:
    """Return how many slots of `version_bytes` fit into `max_bytes`, at most `slots`.

    Raises SlotError if fewer than MIN_SLOTS fit: a publish needs room next to the kept versions.
    """
    fitting = min(slots, max_bytes // version_bytes)
    if fitting < MIN_SLOTS:
        raise SlotError(
            f"{MIN_SLOTS} slots of {version_bytes} bytes are over the limit of {max_bytes} bytes; "
            "raise weights.max_bytes"
        )
    return fitting


class SlotTable:
    """States of `num_slots` slots, the leases on them, and at most one pinned version.

    `forget(version)` is called before a version is evicted: False vetoes the eviction, True
    promises that the version is not sent to other relays from now on.
    """

    def __init__(
        self,
        num_slots: int,
        forget: Callable[[int], bool],
        writers: Mapping[int, str] | None = None,
    ) -> None:
        """Start with free slots, except those that have writers already."""
        if num_slots < MIN_SLOTS:
            raise SlotError(f"{num_slots} slots, at least {MIN_SLOTS} are needed")
        self._slots: list[FreeSlot | WritingSlot | HeldSlot] = [FreeSlot()] * num_slots
        for slot, writer in (writers or {}).items():
            self._slots[slot] = WritingSlot(writer)
        self._leases: dict[int, ReadLease] = {}
        self._next_lease = 0
        self._pinned: int | None = None
        self._last: frozenset[int] = frozenset()  #: versions to evict only if no other can be
        self._forget = forget

    def __repr__(self) -> str:
        leases = ", ".join(
            f"{lease.lease_id}: {lease.reader} reads {lease.version}"
            for lease in self._leases.values()
        )
        return f"SlotTable({self._slots}, pinned={self._pinned}, leases={{{leases}}})"

    @property
    def versions_held(self) -> tuple[int, ...]:
        """The versions that can be leased, ascending."""
        return tuple(sorted(state.version for state in self._slots if isinstance(state, HeldSlot)))

    @property
    def latest(self) -> int | None:
        """The highest version held; None before the first commit."""
        return max(self.versions_held, default=None)

    def get_state(self, slot: int) -> FreeSlot | WritingSlot | HeldSlot:
        """Return the state of a slot; raise SlotError if there is no such slot."""
        if not 0 <= slot < len(self._slots):
            raise self._make_error(f"there is no slot {slot}")
        return self._slots[slot]

    # --- writers ------------------------------------------------------------------------------

    def grant_slot(self, writer: str) -> SlotGrant | None:
        """Grant a free slot, else evict the oldest version that is not needed, else return None.

        Versions named by `set_evict_last` are evicted last. Raises SlotError if the writer has a
        slot already, since two would leave too few for the versions.
        """
        if WritingSlot(writer) in self._slots:
            raise self._make_error(f"{writer} has a slot already")
        free = [index for index, state in enumerate(self._slots) if state == FreeSlot()]
        if free:
            self._slots[free[0]] = WritingSlot(writer)
            return SlotGrant(slot=free[0], evicted=None)
        return self._evict_slot(writer)

    def commit(self, slot: int, writer: str, version: int, *, older: bool = False) -> None:
        """Record that the writer has filled the slot with `version`.

        The version must be above the latest or, with `older`, one that is not held. Raises
        SlotError otherwise, or if the slot is not this writer's.
        """
        if self.get_state(slot) != WritingSlot(writer):
            raise self._make_error(f"slot {slot} is not being written by {writer}")
        if older and version in self.versions_held:
            raise self._make_error(f"version {version} is held already")
        if not older and self.latest is not None and version <= self.latest:
            raise self._make_error(f"version {version} is not above the latest, {self.latest}")
        self._slots[slot] = HeldSlot(version)

    def abandon_slot(self, writer: str) -> int | None:
        """Free and return the slot of a writer known to have stopped; None if it had none."""
        if WritingSlot(writer) not in self._slots:
            return None
        slot = self._slots.index(WritingSlot(writer))
        self._slots[slot] = FreeSlot()
        return slot

    # --- readers ------------------------------------------------------------------------------

    def lease_version(
        self, version: int, reader: str, *, exact: bool
    ) -> ReadLease | VersionNotHeld:
        """Lease `version` itself if `exact`, else the latest if it is at least `version`."""
        held = self.versions_held
        chosen = version if exact else max(held, default=-1)
        if chosen not in held or chosen < version:
            return VersionNotHeld(wanted=version, held=held)
        slot = self._slots.index(HeldSlot(chosen))
        lease = ReadLease(lease_id=self._next_lease, reader=reader, slot=slot, version=chosen)
        self._leases[lease.lease_id] = lease
        self._next_lease += 1
        return lease

    def release(self, lease_id: int) -> bool:
        """End a lease; return False if it was revoked before: discard what was read since.

        Raises SlotError if there never was such a lease.
        """
        if not 0 <= lease_id < self._next_lease:
            raise self._make_error(f"unknown lease {lease_id}")
        return self._leases.pop(lease_id, None) is not None

    def revoke_leases(self, reader: str) -> tuple[ReadLease, ...]:
        """End and return all leases of a reader that is known to have stopped."""
        ended = tuple(lease for lease in self._leases.values() if lease.reader == reader)
        for lease in ended:
            del self._leases[lease.lease_id]
        return ended

    # --- pins ---------------------------------------------------------------------------------

    def pin(self, version: int) -> VersionNotHeld | None:
        """Pin this version in place of the one pinned before; return None on success.

        A second pin would take the slot that the next publish needs. If the version is not held,
        the pin stays as it was.
        """
        if version not in self.versions_held:
            return VersionNotHeld(wanted=version, held=self.versions_held)
        self._pinned = version
        return None

    def unpin(self) -> None:
        """Remove the pin, if there is one."""
        self._pinned = None

    def set_evict_last(self, versions: Collection[int]) -> None:
        """Replace the set of versions that are evicted only if no other version can be."""
        self._last = frozenset(versions)

    def _evict_slot(self, writer: str) -> SlotGrant | None:
        kept = {self.latest, self._pinned, *(lease.version for lease in self._leases.values())}
        idle = [version for version in self.versions_held if version not in kept]
        order = sorted(idle, key=lambda version: (version in self._last, version))
        evicted = next((version for version in order if self._forget(version)), None)
        if evicted is None:
            return None
        slot = self._slots.index(HeldSlot(evicted))
        self._slots[slot] = WritingSlot(writer)
        return SlotGrant(slot=slot, evicted=evicted)

    def _make_error(self, what: str) -> SlotError:
        return SlotError(f"{what}: {self!r}")
