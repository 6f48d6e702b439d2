"""The relay actor: the last weight versions of this machine, from the relay before, to the next.

Reads   slots that a trainer has written; PinVersion and ForwardWeights commands; reports of the
        bulk plane
Writes  the arena file in shared memory, relay-N.json (its address)
Emits   RelayReady, WeightsPublished, WeightsReceived, RelayLinked, TransferTrouble

A trainer writes a slot and goes on; checksums and digest are worked out here, in a thread, after
the copy. Replicas lease a version while they load it. Weights never pass through a socket on one
machine; between machines the bulk plane moves them, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import functools
import time

import psutil

from laminar import ids
from laminar.actors.disk_wait import DiskWait
from laminar.actors.host import Host
from laminar.actors.relay_slots import CHAIN, RelaySlots
from laminar.config import Config, ConfigError
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.net.client import write_address
from laminar.net.rpc import Batch, RpcError, RpcServer
from laminar.weights import manifest as mf
from laminar.weights import messages as m
from laminar.weights.arena import ArenaError, arena_path, sweep_arenas
from laminar.weights.entrance import Identity
from laminar.weights.plane import Plane, PlaneError, PlaneOptions
from laminar.weights.reports import (
    NeighbourDown,
    NeighbourUp,
    PlaneFailed,
    Received,
    Report,
    Side,
    SlotReturned,
    SlotWanted,
    Trouble,
)
from laminar.weights.slots import SlotError

SLOT_POLL_S = 0.02
DELTA_SHARE = 4
"""Deltas that are kept for the next relay may take this fraction of the arena's limit."""
DETAIL_CHARS_MAX = 500
_REFUSALS = (m.RelayWireError, SlotError, ArenaError, mf.ManifestError)


class Relay:
    """Slots, leases and the neighbours of one machine."""

    def __init__(self, host: Host) -> None:
        self.host = host
        config: Config = host.config
        self._max_bytes = config.weights.max_bytes or psutil.virtual_memory().total // 2
        self.slots = RelaySlots(
            arena_path(host.run_dir, host.node, host.boot_id),
            config.weights.slots,
            self._max_bytes,
            lambda version: self.plane.forget(version),
            host.fail,
        )
        self._order: tuple[int, cmd.ForwardWeights] | None = None  #: command id, successor
        self._linked = False  #: the order was answered
        self.server = RpcServer(
            host.address,
            0,
            self._handle_batch,
            boot_id=host.boot_id,
            lease_ms=config.coordinator.lease_ms,
            on_peer_lost=self.slots.reader_lost,
        )

    async def start(self) -> None:
        for swept in sweep_arenas():
            self.host.log.info("arena-swept", path=str(swept.path), bytes=swept.num_bytes)
        self.plane = self._make_plane()
        try:
            host, port = self.plane.start(self.host.address)
        except PlaneError as error:
            raise ConfigError(str(error)) from None
        await self.server.start()
        await DiskWait(self.host, "the relay's address").until_room(self._tell_address)
        self.host.spawn(self.server.wait_closed())
        self.host.emit(ev.RelayReady(address=self.server.address, bulk=f"{host}:{port}"))

    async def _tell_address(self) -> None:
        write_address(self.host.run_dir / f"{self.host.name}.json", self.server.address)

    def _make_plane(self) -> Plane:
        config, loop = self.host.config.weights, asyncio.get_running_loop()
        identity = Identity(
            run=f"{self.host.config.run.name}-{ids.hash64(str(self.host.run_dir.resolve())):016x}",
            name=self.host.name,
            incarnation=self.host.incarnation,
        )
        options = PlaneOptions(
            delta_bytes_max=self._max_bytes // DELTA_SHARE if config.delta else 0,
            send_rate=config.rate_mbit * 1_000_000 // 8,
        )
        notify = functools.partial(loop.call_soon_threadsafe, self._on_report)
        return Plane(identity, self.slots.region, notify, options)

    async def stop(self) -> None:
        await self.server.close()
        if hasattr(self, "plane"):
            await asyncio.to_thread(self.plane.close)
        self.slots.close()

    # --- commands -----------------------------------------------------------------------------

    def handle(self, orders: list[tuple[cmd.Order, Command]]) -> None:
        for order, command in orders:
            if isinstance(command, cmd.PinVersion):
                self.slots.pin(command.version)
            elif isinstance(command, cmd.ForwardWeights):
                self._forward(order, command)

    def _forward(self, order: cmd.Order, command: cmd.ForwardWeights) -> None:
        """Feed another successor from now on; an order that came late changes nothing."""
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
        """Once for each order."""
        assert self._order is not None
        self._linked = True
        command_id, command = self._order
        linked = ev.RelayLinked(command_id=command_id, successor=command.successor)
        self.host.emit(linked, successor=command.successor)

    # --- the bulk plane -----------------------------------------------------------------------

    def _on_report(self, report: Report) -> None:
        if isinstance(report, SlotWanted):
            self.host.spawn(self._grant_to_chain(report))
        elif isinstance(report, SlotReturned):
            self.slots.abandon(CHAIN)
        elif isinstance(report, Received):
            self._received(report)
        elif isinstance(report, Trouble):
            self._trouble(report.kind, report.peer, report.version, report.detail)
        elif isinstance(report, NeighbourUp):
            self._neighbour_up(report)
        elif isinstance(report, NeighbourDown):
            self._neighbour_down(report)
        else:
            assert isinstance(report, PlaneFailed)
            self.host.fail(f"the thread that moves weights failed: {report.reason}")

    async def _grant_to_chain(self, wanted: SlotWanted) -> None:
        """Find a slot for a version that is offered; a reader or a sender may take a while."""
        try:
            self.slots.make(wanted.nbytes)
        except (ArenaError, SlotError) as error:
            return self.plane.deny(str(error))
        while (slot := self.slots.grant_to_chain()) < 0:
            await asyncio.sleep(SLOT_POLL_S)
        self.plane.grant(slot)

    def _received(self, report: Received) -> None:
        manifest = report.manifest
        if not self.slots.keep(CHAIN, report.slot, manifest):
            self.plane.forget(manifest.version)
            self.host.log.info("received-too-late", version=manifest.version)
            return
        now, duration_ns = time.monotonic_ns(), int(report.seconds * 1e9)
        self.host.span("receiving", now - duration_ns, now, version=manifest.version)
        received = ev.WeightsReceived(
            version=manifest.version,
            step=manifest.step,
            digest=manifest.digest,
            kind="delta" if report.by_delta else "full",
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
            detail = f"incarnation {report.incarnation} has its address, not {command.incarnation}"
            self._trouble("other-relay", report.name, -1, detail)

    def _neighbour_down(self, report: NeighbourDown) -> None:
        facts = {"name": report.name, "reason": report.reason}
        self.host.log.info("neighbour-down", side=report.side, **facts)
        fed = self._order is not None and self._order[1].successor == report.name
        if report.side is Side.SUCCESSOR and fed:
            self._trouble("connection-lost", report.name, -1, report.reason)

    def _trouble(self, kind: str, relay: str, version: int, detail: str) -> None:
        detail = detail[:DETAIL_CHARS_MAX]
        trouble = ev.TransferTrouble(kind=kind, relay=relay, version=version, detail=detail)
        self.host.emit(trouble, kind=kind, relay=relay, detail=detail)

    # --- requests of this machine ---------------------------------------------------------------

    def _handle_batch(self, batch: Batch) -> list[bytes | RpcError]:
        return [self._answer(boot_id, body) for boot_id, _, body in batch]

    def _answer(self, boot_id: str, body: bytes) -> bytes | RpcError:
        try:
            request = m.decode_request(body)
            if isinstance(request, m.OpenArena):
                reply: m.Reply = self.slots.make(request.version_bytes)
            elif isinstance(request, m.GrantSlot):
                reply = self.slots.grant(boot_id, request)
            elif isinstance(request, m.CommitSlot):
                reply = self._commit(boot_id, request)
            elif isinstance(request, m.LeaseVersion):
                reply = self.slots.lease(boot_id, request)
            else:
                reply = self.slots.release(request)
            return m.encode(reply)
        except _REFUSALS as error:
            return RpcError(str(error))

    def _commit(self, boot_id: str, request: m.CommitSlot) -> m.Committed | m.OtherArena:
        if self.slots.is_other(request.arena):
            return m.OtherArena()
        if self.slots.begin_commit(boot_id, request):
            self.host.spawn(self._digest(boot_id, request))
        elif (manifest := self.slots.manifest(request.version)) is not None:
            self._announce(manifest)  # it is here, and somebody does not know
        return m.Committed()

    async def _digest(self, boot_id: str, request: m.CommitSlot) -> None:
        manifest = await self.slots.digest(boot_id, request)
        if manifest is not None:
            self.plane.publish(manifest, request.slot)
        else:
            manifest = self.slots.manifest(request.version)
        if manifest is not None:
            self._announce(manifest)

    def _announce(self, manifest: mf.Manifest) -> None:
        """The version can be pulled here."""
        facts = {"version": manifest.version, "step": manifest.step, "digest": manifest.digest}
        published = ev.WeightsPublished(
            **facts, num_bytes=manifest.total_bytes, held=self.slots.held
        )
        self.host.emit(published, **facts)
