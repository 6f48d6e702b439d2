"""The relay's model: the real slot table, without the weights.

Reads   requests of trainer and rollouts; PinVersion commands
Emits   RelayReady, WeightsPublished
"""

from __future__ import annotations

from typing import Any, NamedTuple

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.sim.models.idle import Idle
from laminar.weights.slots import SlotTable, VersionGone

SLOTS = 3
DIGEST_S = 0.05


class Grant(NamedTuple):
    """Ask for a slot to write to; the reply is its number, -1: none is free."""


class Commit(NamedTuple):
    """The slot holds these weights; the reply is True."""

    slot: int
    version: int
    step: int
    digest: str


class Lease(NamedTuple):
    """Ask to read a version; the reply is a Leased or a VersionGone."""

    version: int
    exact: bool


class Leased(NamedTuple):
    lease_id: int
    version: int
    step: int
    digest: str


class Release(NamedTuple):
    """The reply is False for a lease that had been revoked."""

    lease_id: int


class Relay(Idle):
    """The versions of one machine."""

    def start(self) -> None:
        self.slots = SlotTable(SLOTS)
        self.versions: dict[int, Commit] = {}
        self._granted: dict[str, int] = {}
        self._committing: set[int] = set()  #: asked for membership only, never walked
        self.process.compute(self.chance.uniform(0, self.scenario.start_s), self._ready)

    def _ready(self) -> None:
        self.process.emit(ev.RelayReady(address=self.process.name))

    def handle(self, order: cmd.Order, command: Command) -> None:
        if not isinstance(command, cmd.PinVersion):
            return
        if command.version < 0:
            self.slots.unpin()
        elif self.slots.pin(command.version) is not None:
            self.world.marks.hit("relay:pin-of-a-version-gone")

    def answer(self, client: str, request: Any) -> Any:
        if isinstance(request, Grant):
            return self._grant(client)
        if isinstance(request, Commit):
            return self._commit(client, request)
        if isinstance(request, Lease):
            return self._lease(client, request)
        if isinstance(request, Release):
            return self.slots.release(request.lease_id)
        return super().answer(client, request)

    def _grant(self, writer: str) -> int:
        granted = self._granted.get(writer, -1)
        if granted in self._committing:
            return -1
        if granted >= 0:
            return granted
        grant = self.slots.grant(writer)
        if grant is None:
            return -1
        self._granted[writer] = grant.slot
        return grant.slot

    def _commit(self, writer: str, request: Commit) -> bool:
        self._committing.add(request.slot)
        self.process.compute(DIGEST_S, self._digested, writer, request)
        return True

    def _digested(self, writer: str, request: Commit) -> None:
        self.slots.commit(request.slot, writer, request.version)
        self.versions[request.version] = request
        del self._granted[writer]
        self._committing.discard(request.slot)
        published = ev.WeightsPublished(
            version=request.version,
            step=request.step,
            digest=request.digest,
            num_bytes=4,
            held=self.slots.versions_held,
        )
        self.process.emit(published)

    def _lease(self, reader: str, request: Lease) -> Leased | VersionGone:
        lease = self.slots.lease(request.version, reader, exact=request.exact)
        if isinstance(lease, VersionGone):
            return lease
        held = self.versions[lease.version]
        return Leased(lease.lease_id, held.version, held.step, held.digest)

    def peer_lost(self, name: str) -> None:
        """A reader or writer of this machine has been silent for its lease."""
        if self.slots.revoke(name):
            self.world.marks.hit("relay:lease-revoked")
