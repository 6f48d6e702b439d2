"""Planted bugs of relays: their slots, the versions that come in, what they report.

Reads   nothing
Gives   RELAY_BUGS: functions that put one bug into the running program, through a Planter
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from laminar.actors.relay_slots import RelaySlots
from laminar.weights.arena.slots import SlotTable
from laminar.weights.chain.upstream import Upstream
from laminar.weights.version.copy import VersionCopy
from laminar.weights.version.table import VersionTable
from tools.rows.planted import Planter


def lease_is_not_returned(plant: Planter) -> None:
    """The reader is told that all is well, and the slot stays its own."""
    plant.replace(SlotTable, "release", lambda self, lease_id: True)


def damaged_chunk_is_accepted(plant: Planter) -> None:
    """Whatever came counts as what was published, chunk by chunk and as a whole."""
    accept = VersionCopy.accept
    step = VersionCopy.digest_step

    def planted(self: VersionCopy, index: int, checksum: int | None = None) -> bool:
        accept(self, index, checksum)
        self.num_have += not self.have[index]
        self.have[index] = 1
        return True

    def digest(self: VersionCopy) -> str | None:
        return self.digest if self.num_have == self.num_chunks else None

    plant.replace(VersionCopy, "accept", planted)
    plant.replace(VersionCopy, "digest_step", lambda self: step(self) and False)
    plant.replace(VersionCopy, "computed_digest", digest)


def slot_is_committed_before_its_digest(plant: Planter) -> None:
    """The version can be leased while nobody knows yet what it is."""
    digest = RelaySlots.digest

    async def planted(self: RelaySlots, boot_id: str, request: Any) -> Any:
        assert self._table is not None
        self._table.commit(request.slot, boot_id, request.version)
        return await digest(self, boot_id, request)

    plant.replace(RelaySlots, "digest", planted)


def leases_of_the_lost_are_kept(plant: Planter) -> None:
    plant.replace(RelaySlots, "reader_lost", lambda self, boot_id: [])


def predecessor_of_before_is_obeyed(plant: Planter) -> None:
    """Whatever the number of its order."""
    greet = Upstream._greet

    def planted(self: Upstream, connection: Any, hello: Any) -> None:
        self._chain = 0
        greet(self, connection, hello)

    plant.replace(Upstream, "_greet", planted)


def version_that_is_being_sent_is_evicted(plant: Planter) -> None:
    def planted(self: VersionTable, version: int) -> bool:
        self._copies.pop(version, None)
        return True

    plant.replace(VersionTable, "forget", planted)


RELAY_BUGS: tuple[Callable[[Planter], None], ...] = (
    lease_is_not_returned,
    damaged_chunk_is_accepted,
    slot_is_committed_before_its_digest,
    leases_of_the_lost_are_kept,
    predecessor_of_before_is_obeyed,
    version_that_is_being_sent_is_evicted,
)
