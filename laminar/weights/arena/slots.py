"""Who may touch which slot of the arena: the relay's table of writers, versions and read leases.

Reads   requests of writers (grant, commit, abandon), readers (lease, release, revoke) and pins
Gives   Grant, Lease, VersionGone; slots_within; SlotError for wrong use

Pure and owned by one process, so that there is one place where a slot changes hands. With three
slots a publish seldom waits: one holds the latest version, one the pinned or the previous, one is
free. Who sends versions to other machines is asked before one is evicted, since it may be in the
middle of it. The table trusts its caller in one thing: that an abandoned writer and a revoked
reader are known to have stopped. A late request of either is refused, because a slot is named
together with its writer and a lease id is never used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

MIN_SLOTS = 3


class SlotError(RuntimeError):
    """The caller broke a rule of the table; the message ends with the table's state."""


@dataclass(frozen=True, slots=True)
class FreeSlot:
    """Held by none."""


@dataclass(frozen=True, slots=True)
class WritingSlot:
    """Granted to a writer that has not said that it is done."""

    writer: str


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """Holds a complete version."""

    version: int


@dataclass(frozen=True, slots=True)
class SlotGrant:
    """`slot` is the writer's until it commits or is abandoned."""

    slot: int
    evicted: int | None  #: the version that the slot held until now


@dataclass(frozen=True, slots=True)
class ReadLease:
    """`slot` holds `version` at least until the lease is released or revoked."""

    lease_id: int
    reader: str
    slot: int
    version: int


@dataclass(frozen=True, slots=True)
class VersionNotHeld:
    """The version asked for is not held: evicted, or not here yet."""

    wanted: int
    held: tuple[int, ...]  #: ascending


def slots_within(version_bytes: int, slots: int, max_bytes: int) -> int:
    """How many slots of `version_bytes` there is room for, at most `slots`.

    SlotError if `max_bytes` is too little for a publish beside the versions that must be kept.
    """
    fitting = min(slots, max_bytes // version_bytes)
    if fitting < MIN_SLOTS:
        raise SlotError(
            f"{MIN_SLOTS} slots of {version_bytes} bytes are over the limit of {max_bytes} bytes; "
            "raise weights.max_bytes"
        )
    return fitting


def _allow_always(version: int) -> bool:
    return True


class SlotTable:
    """States of `num_slots` slots, the leases on them, and at most one pinned version.

    `forget(version)` is asked before a version is evicted: False keeps it, True says that no relay
    will send it from now on.
    """

    def __init__(self, num_slots: int, forget: Callable[[int], bool] = _allow_always) -> None:
        if num_slots < MIN_SLOTS:
            raise SlotError(f"{num_slots} slots, at least {MIN_SLOTS} are needed")
        self._slots: list[FreeSlot | WritingSlot | HeldSlot] = [FreeSlot()] * num_slots
        self._leases: dict[int, ReadLease] = {}
        self._next_lease = 0
        self._pinned: int | None = None
        self._last: frozenset[int] = frozenset()  #: evicted when nothing else can be
        self._forget = forget

    def __repr__(self) -> str:
        leases = ", ".join(
            f"{lease.lease_id}: {lease.reader} reads {lease.version}"
            for lease in self._leases.values()
        )
        return f"SlotTable({self._slots}, pinned={self._pinned}, leases={{{leases}}})"

    @property
    def versions_held(self) -> tuple[int, ...]:
        """Versions that can be leased, ascending."""
        return tuple(sorted(state.version for state in self._slots if isinstance(state, HeldSlot)))

    @property
    def latest(self) -> int | None:
        """The highest version held; None before the first commit."""
        return max(self.versions_held, default=None)

    @property
    def pinned(self) -> int | None:
        return self._pinned

    def get_state(self, slot: int) -> FreeSlot | WritingSlot | HeldSlot:
        """SlotError if there is no such slot."""
        if not 0 <= slot < len(self._slots):
            raise self._make_error(f"there is no slot {slot}")
        return self._slots[slot]

    # --- writers ------------------------------------------------------------------------------

    def grant_slot(self, writer: str) -> SlotGrant | None:
        """A free slot, else that of the oldest version which is not needed, those with unfinished
        work last, else None.

        SlotError if the writer has a slot already: two would leave too few for the versions.
        """
        if WritingSlot(writer) in self._slots:
            raise self._make_error(f"{writer} has a slot already")
        free = [index for index, state in enumerate(self._slots) if state == FreeSlot()]
        if free:
            self._slots[free[0]] = WritingSlot(writer)
            return SlotGrant(slot=free[0], evicted=None)
        return self._evict_slot(writer)

    def commit(self, slot: int, writer: str, version: int, *, older: bool = False) -> None:
        """The writer is done: the slot holds `version`, which is now the latest, or (`older`) one
        that is not held.

        SlotError if the slot is not this writer's, or if the version is not above the latest, or is
        held.
        """
        if self.get_state(slot) != WritingSlot(writer):
            raise self._make_error(f"slot {slot} is not being written by {writer}")
        if older and version in self.versions_held:
            raise self._make_error(f"version {version} is held already")
        if not older and self.latest is not None and version <= self.latest:
            raise self._make_error(f"version {version} is not above the latest, {self.latest}")
        self._slots[slot] = HeldSlot(version)

    def abandon_slot(self, writer: str) -> int | None:
        """Free the slot of a writer that is known to have stopped; None if it had none."""
        if WritingSlot(writer) not in self._slots:
            return None
        slot = self._slots.index(WritingSlot(writer))
        self._slots[slot] = FreeSlot()
        return slot

    # --- readers ------------------------------------------------------------------------------

    def lease_version(
        self, version: int, reader: str, *, exact: bool
    ) -> ReadLease | VersionNotHeld:
        """Read `version` itself (exact), or the latest, if that is at least `version`."""
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
        """End a lease; False if it had ended before, so that what was read since is not to be used.

        SlotError if there never was such a lease.
        """
        if not 0 <= lease_id < self._next_lease:
            raise self._make_error(f"there never was a lease {lease_id}")
        return self._leases.pop(lease_id, None) is not None

    def revoke_leases(self, reader: str) -> tuple[ReadLease, ...]:
        """End all leases of a reader that is known to have stopped; which they were."""
        ended = tuple(lease for lease in self._leases.values() if lease.reader == reader)
        for lease in ended:
            del self._leases[lease.lease_id]
        return ended

    # --- pins ---------------------------------------------------------------------------------

    def pin(self, version: int) -> VersionNotHeld | None:
        """Keep this version, in place of the one pinned before; None if that was possible.

        One pin at a time: a second would take the slot that the next publish needs. A version that
        is not held leaves the pin as it was.
        """
        if version not in self.versions_held:
            return VersionNotHeld(wanted=version, held=self.versions_held)
        self._pinned = version
        return None

    def unpin(self) -> None:
        """Keep no version for its own sake; harmless when none is pinned."""
        self._pinned = None

    def set_evict_last(self, versions: Collection[int]) -> None:
        """Evict these versions last, and no longer those named before; a publish still gets a slot
        of theirs if need be."""
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
