"""The relay actor: keeps the last weight versions of its machine and forwards them along the chain.

Reads   slots that a trainer has written; PinVersion and ForwardWeights commands; reports of the
        bulk plane
Writes  relay-N.json (its address)
Emits   RelayReady, WeightsPublished, WeightsReceived, RelayLinked, TransferProblem
Gives   Relay; RelayPlatform and TransferPlane, the ports to its environment

A trainer writes a slot and continues; checksums and digest are computed here in a thread, after the
copy. Replicas lease a version while they load it. Within a machine weights never pass through a
socket; between machines the bulk plane moves them, in a separate thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from laminar.actors.disk_full_retry import DiskFullRetry
from laminar.actors.host import Host
from laminar.actors.relay_slots import CHAIN, FETCH, Fetches, RelaySlots, SlotMemory
from laminar.config import Config, ConfigError
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.events.reasons import TransferForm
from laminar.names import exit_codes
from laminar.net.calls import Batch, RpcError
from laminar.weights import messages as m
from laminar.weights.arena.region import ArenaError, ArenaTooLargeError
from laminar.weights.arena.slots import SlotError
from laminar.weights.chain.core import PlaneError, PlaneOptions
from laminar.weights.chain.reports import (
    NeighbourDown,
    NeighbourUp,
    NotFetched,
    PeerRejected,
    PlaneFailed,
    Received,
    Report,
    Side,
    SlotReturned,
    SlotWanted,
    TransferPace,
    Trouble,
)
from laminar.weights.chain.upstream import RelayIdentity
from laminar.weights.version import manifest as mf
from laminar.weights.version.table import VersionTable

SLOT_POLL_S = 0.02
DELTA_SHARE = 4  #: deltas kept for the next relay may take this fraction of the arena's limit
DETAIL_CHARS_MAX = 500
_UNKNOWN = TransferPace(0, 0.0, 0)
_REFUSALS = (m.RelayWireError, SlotError, ArenaError, mf.ManifestError)


class TransferPlane(Protocol):
    """Transfers of versions from the previous relay to the next one; calls return at once."""

    def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """Listen, and return the address for the predecessor's order. PlaneError."""

    def set_successor(self, chain: int, successor: tuple[str, str, int] | None) -> None:
        """Feed relay (name, host, port), or none, by the order with this number."""

    def publish_version(self, manifest: mf.Manifest, slot: int) -> None:
        """Forward a complete version that was written on this machine."""

    def grant_slot(self, slot: int) -> None:
        """Answer SlotWanted with a slot."""

    def deny_slot(self, reason: str) -> None:
        """Answer SlotWanted with a refusal: there will never be a slot for the version."""

    def fetch(self, version: int, holder: tuple[str, str, int]) -> None:
        """Fetch this version from relay (name, host, port), outside the chain."""

    def fetch_into(self, slot: int) -> None:
        """Answer SlotWanted of a fetch with a slot; below 0: there will be none."""


class RelayPlatform(Protocol):
    """The environment of a relay."""

    memory_bytes: int
    versions: VersionTable  #: versions held in this process

    @property
    def slots(self) -> SlotMemory:
        """The slots of this process."""
        ...

    async def sweep_stale_arenas(self) -> list[tuple[str, int]]:
        """Remove shared memory that killed relays left; return (path, bytes) of each."""
        ...

    def make_plane(
        self, identity: RelayIdentity, notify: Callable[[Report], None], options: PlaneOptions
    ) -> TransferPlane:
        """Create a plane that is not started; `notify` is called in the event loop."""

    async def close(self) -> None:
        """Close the plane and remove the slots; processes that have mapped them keep them."""


class Relay:
    """Slots, leases and neighbours of one machine."""

    def __init__(self, host: Host, machine: RelayPlatform) -> None:
        self.host, self.machine = host, machine
        config: Config = host.config
        self._max_bytes = config.weights.max_bytes or machine.memory_bytes // 2
        self.slots = RelaySlots(
            machine.slots,
            config.weights.slots,
            self._max_bytes,
            machine.versions,
            host.spawn,
            self._fail_relay,
        )
        self._order: tuple[int, cmd.ForwardWeights] | None = None  #: command id, successor
        self._linked = False  #: whether the order was answered
        self._fetches = Fetches(self.slots, self._fetch)
        self.server = host.make_server(self._handle_batch, self._peer_lost)

    async def start(self) -> None:
        for path, num_bytes in await self.machine.sweep_stale_arenas():
            self.host.log.info("arena-swept", path=path, bytes=num_bytes)
        self.plane = self._make_plane()
        try:
            host, port = self.plane.start(self.host.address)
        except PlaneError as error:
            raise ConfigError(str(error)) from None
        await self.server.start()
        await DiskFullRetry(self.host, "the relay's address").until_room(
            partial(self.host.publish_address, self.server.address)
        )
        self.host.spawn(self.server.wait_closed())
        await self.host.hit_failpoint("relay-ready")
        self.host.emit(ev.RelayReady(address=self.server.address, chain_address=f"{host}:{port}"))

    def _make_plane(self) -> TransferPlane:
        config = self.host.config.weights
        identity = RelayIdentity(
            run=f"{self.host.config.run.name}-{self.host.run_id}",
            name=self.host.name,
            incarnation=self.host.incarnation,
            key=self.host.bulk_key,
        )
        options = PlaneOptions(
            delta_bytes_max=self._max_bytes // DELTA_SHARE if config.delta else 0,
            send_rate=config.rate_mbit * 1_000_000 // 8,
        )
        return self.machine.make_plane(identity, self._on_report, options)

    async def stop(self) -> None:
        await self.server.close()
        await self.machine.close()

    # --- commands -----------------------------------------------------------------------------

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        for order, command in orders:
            if isinstance(command, cmd.PinVersion):
                self.slots.pin_version(command.version, command.unfinished)
            elif isinstance(command, cmd.ForwardWeights):
                self._set_successor(order, command)

    def _set_successor(self, order: cmd.Envelope, command: cmd.ForwardWeights) -> None:
        """Feed another successor from now on; ignore an outdated order."""
        if self._order is not None and order.command_id <= self._order[0]:
            return
        self._order, self._linked = (order.command_id, command), False
        facts = {"event_seq": order.cause, "successor": command.successor}
        self.host.log.info("forward", address=command.address, **facts)
        if command.successor:
            host, _, port = command.address.rpartition(":")
            self.plane.set_successor(order.command_id, (command.successor, host, int(port)))
        else:
            self.plane.set_successor(order.command_id, None)
            self._report_linked()

    def _report_linked(self) -> None:
        """Report the link, once for each order."""
        assert self._order is not None
        self._linked = True
        command_id, command = self._order
        linked = ev.RelayLinked(command_id=command_id, successor=command.successor)
        self.host.emit(linked, successor=command.successor)

    def _fetch(self, version: int, holder: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.host.log.info("fetch", version=version, holder=holder, address=address)
        self.plane.fetch(version, (holder, host, int(port)))

    # --- the bulk plane -----------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        if isinstance(report, SlotWanted):
            self.host.spawn(self._grant_slot(report))
        elif isinstance(report, SlotReturned):
            self.slots.abandon_slot(FETCH if report.fetched else CHAIN)
        elif isinstance(report, NotFetched):
            self._fetches.end_fetch(report.version)
            self._report_trouble(Trouble("not-fetched", report.version, report.peer, report.reason))
        elif isinstance(report, Received):
            self._handle_received(report)
        elif isinstance(report, Trouble):
            self._report_trouble(report)
        elif isinstance(report, PeerRejected):
            self.host.log.warning("peer-rejected", what=report.what)
        elif isinstance(report, NeighbourUp):
            self._neighbour_up(report)
        elif isinstance(report, NeighbourDown):
            self._neighbour_down(report)
        else:
            assert isinstance(report, PlaneFailed)
            self._fail_relay(f"the transfer thread failed: {report.reason}")

    def _fail_relay(self, reason: str) -> None:
        """End this process and leave its arena to the next one."""
        self.machine.slots.kept = True
        self.host.fail_process(reason)

    async def _grant_slot(self, wanted: SlotWanted) -> None:
        """Find a slot for an offered version; a reader or a sender may delay it."""
        try:
            self.slots.ensure_slots(wanted.nbytes)
        except (ArenaError, SlotError) as error:
            return self.plane.fetch_into(-1) if wanted.fetched else self.plane.deny_slot(str(error))
        while (slot := self.slots.grant_to(FETCH if wanted.fetched else CHAIN)) < 0:
            await asyncio.sleep(SLOT_POLL_S)
        (self.plane.fetch_into if wanted.fetched else self.plane.grant_slot)(slot)

    def _handle_received(self, report: Received) -> None:
        manifest = report.manifest
        self._fetches.end_fetch(manifest.version)
        if not self.slots.commit_version(FETCH if report.fetched else CHAIN, report.slot, manifest):
            self.machine.versions.try_forget(manifest.version)
            self.host.log.info("received-too-late", version=manifest.version)
            return
        now, duration_ns = self.host.now_ns(), int(report.seconds * 1e9)
        self.host.record_span("receiving", now - duration_ns, now, version=manifest.version)
        received = ev.WeightsReceived(
            version=manifest.version,
            step=manifest.step,
            digest=manifest.digest,
            kind=TransferForm.DELTA if report.by_delta else TransferForm.FULL,
            num_bytes=report.num_bytes,
            duration_ms=duration_ns // 1_000_000,
            held=self.slots.held,
        )
        self.host.emit(received, version=manifest.version, digest=manifest.digest)

    def _neighbour_up(self, report: NeighbourUp) -> None:
        who = {"name": report.name, "incarnation": report.incarnation}
        self.host.log.info("neighbour-up", side=report.side, **who)
        if report.side is Side.PREDECESSOR or self._order is None or self._linked:
            return
        _, command = self._order
        if (report.name, report.incarnation) == (command.successor, command.incarnation):
            self._report_linked()
        elif report.name == command.successor:
            detail = f"incarnation {report.incarnation} is there, not {command.incarnation}"
            self._report_trouble(Trouble("other-relay", -1, report.name, detail))

    def _neighbour_down(self, report: NeighbourDown) -> None:
        facts = {"name": report.name, "reason": report.reason}
        self.host.log.info("neighbour-down", side=report.side, **facts)
        fed = self._order is not None and self._order[1].successor == report.name
        if report.side is Side.SUCCESSOR and fed:
            self._report_trouble(Trouble("connection-lost", -1, report.name, report.reason))

    def _report_trouble(self, report: Trouble) -> None:
        kind, relay, pace = report.kind, report.peer, report.pace or _UNKNOWN
        detail = report.detail[:DETAIL_CHARS_MAX]
        trouble = ev.TransferProblem(
            kind=kind,
            relay=relay,
            version=report.version,
            detail=detail,
            num_bytes=pace.num_bytes,
            duration_ms=int(pace.seconds * 1000),
            left_bytes=pace.left_bytes,
            stalls=report.stalls,
        )
        self.host.emit(trouble, kind=kind, relay=relay, detail=detail)

    # --- requests of this machine ---------------------------------------------------------------

    def _peer_lost(self, boot_id: str) -> None:
        versions = self.slots.revoke_reader(boot_id)
        if versions:
            self.host.log.warning("lease-revoked", reader=boot_id, versions=versions)

    def _handle_batch(self, batch: Batch) -> list[bytes | RpcError | None]:
        return [self._answer_request(boot_id, body) for boot_id, _, body in batch]

    def _answer_request(self, boot_id: str, body: bytes) -> bytes | RpcError:
        try:
            request = m.decode_request(body)
            if isinstance(request, m.OpenArena):
                reply: m.Reply = self.slots.ensure_slots(request.version_bytes)
            elif isinstance(request, m.GrantSlot):
                reply = self.slots.grant_trainer_slot(boot_id, request)
            elif isinstance(request, m.CommitSlot):
                reply = self._commit_slot(boot_id, request)
            elif isinstance(request, m.LeaseVersion):
                reply = self._fetches.lease_version(boot_id, request)
            else:
                reply = self.slots.release(request)
            return m.encode(reply)
        except ArenaTooLargeError as error:  # nothing can be published, however often it is tried
            self.host.fail_process(str(error), exit_codes.USER_ERROR)
            return RpcError(str(error))
        except _REFUSALS as error:
            return RpcError(str(error))

    def _commit_slot(
        self, boot_id: str, request: m.CommitSlot
    ) -> m.SlotCommitted | m.ArenaReplaced:
        if self.slots.is_other(request.arena):
            self.host.log.warning("commit-of-a-dead-relays-slot", arena=request.arena)
            return m.ArenaReplaced()
        if self.slots.begin_commit(boot_id, request):
            self.host.spawn(self._digest_slot(boot_id, request))
        elif (manifest := self.slots.get_manifest(request.version)) is not None:
            self._report_published(manifest)  # a neighbour does not know that it is here
        return m.SlotCommitted()

    async def _digest_slot(self, boot_id: str, request: m.CommitSlot) -> None:
        await self.host.hit_failpoint("relay-digest")
        manifest = await self.slots.digest_slot(boot_id, request)
        await self.host.hit_failpoint("relay-digested")
        if manifest is not None:
            self.plane.publish_version(manifest, request.slot)
        else:
            manifest = self.slots.get_manifest(request.version)
        if manifest is not None:
            self._report_published(manifest)

    def _report_published(self, manifest: mf.Manifest) -> None:
        """Report that the version can be pulled here."""
        published = ev.WeightsPublished(
            version=manifest.version,
            step=manifest.step,
            digest=manifest.digest,
            num_bytes=manifest.total_bytes,
            held=self.slots.held,
        )
        self.host.emit(
            published, version=manifest.version, step=manifest.step, digest=manifest.digest
        )
