"""The relay actor: the last weight versions of this machine, in shared memory.

Reads   slots that a trainer has written; PinVersion commands
Writes  the arena file in shared memory, relay-N.json (its address)
Emits   RelayReady, WeightsPublished

A trainer writes a slot and goes on; checksums and digest are worked out here, in a thread, after
the copy. Replicas lease a version while they load it. Weights never pass through a socket on one
machine.
"""

from __future__ import annotations

import asyncio

import psutil

from laminar.actors.host import Host
from laminar.config import Config
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.net.client import write_address
from laminar.net.rpc import Batch, RpcError, RpcServer
from laminar.weights import manifest as mf
from laminar.weights import messages as m
from laminar.weights.arena import Arena, ArenaError, arena_path
from laminar.weights.slots import SlotError, SlotTable, VersionGone
from laminar.weights.transfer import checksums

CHUNK_BYTES = 4 << 20
"""Unit of checksums and of forwarding: 1-4 MiB keeps a core busy without large buffers."""


class Relay:
    """Slots, leases and manifests of one machine."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.config: Config = host.config
        self.slots = SlotTable(self.config.weights.slots)
        self.arena: Arena | None = None
        self.manifests: dict[int, mf.Manifest] = {}
        self._committing: set[int] = set()
        self._granted: dict[str, int] = {}  #: by writer, until committed
        self._path = arena_path(host.run_dir, host.node)
        self.server = RpcServer(
            host.address,
            0,
            self._handle_batch,
            boot_id=host.boot_id,
            lease_ms=self.config.coordinator.lease_ms,
            on_peer_lost=self._peer_lost,
        )

    async def start(self) -> None:
        Arena.unlink(self._path)  # left by a relay that was killed
        await self.server.start()
        write_address(self.host.run_dir / f"{self.host.name}.json", self.server.address)
        self.host.spawn(self.server.wait_closed())
        self.host.emit(ev.RelayReady(address=self.server.address))

    def handle(self, orders: list[tuple[cmd.Order, Command]]) -> None:
        for _, command in orders:
            if isinstance(command, cmd.PinVersion):
                if command.version < 0:
                    self.slots.unpin()
                else:
                    self.slots.pin(command.version)

    async def stop(self) -> None:
        await self.server.close()
        if self.arena is not None:
            self.arena.close()
        Arena.unlink(self._path)

    # --- requests of this machine ---------------------------------------------------------------

    def _handle_batch(self, batch: Batch) -> list[bytes | RpcError]:
        return [self._answer(peer, body) for peer, _, body in batch]

    def _answer(self, peer: str, body: bytes) -> bytes | RpcError:
        try:
            request = m.decode_request(body)
            if isinstance(request, m.OpenArena):
                reply: m.Reply = self._open_arena(request)
            elif isinstance(request, m.GrantSlot):
                reply = self._grant(peer)
            elif isinstance(request, m.CommitSlot):
                reply = self._commit(peer, request)
            elif isinstance(request, m.LeaseVersion):
                reply = self._lease(peer, request)
            else:
                reply = m.Released(valid=self.slots.release(request.lease_id))
            return m.encode(reply)
        except (m.RelayWireError, SlotError, ArenaError, mf.ManifestError) as error:
            return RpcError(str(error))

    def _open_arena(self, request: m.OpenArena) -> m.ArenaOpened:
        limit = self.config.weights.max_bytes or psutil.virtual_memory().total // 2
        wanted = request.version_bytes * self.config.weights.slots
        if wanted > limit:
            raise ArenaError(
                f"{self.config.weights.slots} slots of {request.version_bytes} bytes are over the "
                f"limit of {limit} bytes; raise weights.max_bytes"
            )
        if self.arena is None:
            slots = self.config.weights.slots
            self.arena = Arena.create(self._path, slots, request.version_bytes)
        elif self.arena.slot_bytes < request.version_bytes:
            raise ArenaError(f"the slots have {self.arena.slot_bytes} bytes, fewer than asked for")
        return m.ArenaOpened(path=str(self._path))

    def _grant(self, writer: str) -> m.SlotGranted:
        granted = self._granted.get(writer, -1)
        if granted in self._committing:
            return m.SlotGranted(slot=-1)  # the next one is granted when this one is digested
        if granted >= 0:
            return m.SlotGranted(slot=granted)
        grant = self.slots.grant(writer)
        if grant is None:
            return m.SlotGranted(slot=-1)
        if grant.evicted is not None:
            self.manifests.pop(grant.evicted, None)
        self._granted[writer] = grant.slot
        return m.SlotGranted(slot=grant.slot)

    def _commit(self, writer: str, request: m.CommitSlot) -> m.Committed:
        if request.slot in self._committing or request.version in self.manifests:
            return m.Committed()  # asked again after a reconnect
        if self._granted.get(writer) != request.slot or self.arena is None:
            raise SlotError(f"slot {request.slot} is not granted to {writer}")
        if mf.check_tensors(request.tensors) > self.arena.slot_bytes:
            raise SlotError(f"version {request.version} does not fit into a slot")
        self._committing.add(request.slot)
        self.host.spawn(self._digest(writer, request))
        return m.Committed()

    async def _digest(self, writer: str, request: m.CommitSlot) -> None:
        """Work out checksums off the loop, then announce the version."""
        assert self.arena is not None
        total = mf.check_tensors(request.tensors)
        view = self.arena.slot(request.slot)
        sums, digest = await asyncio.to_thread(checksums, view, total, CHUNK_BYTES)
        version = request.version
        manifest = mf.Manifest(
            version=version,
            step=request.step,
            kind="full",
            dtype=request.dtype,
            total_bytes=total,
            tensors=request.tensors,
            parts=(mf.Part(rank=0, offset=0, nbytes=total),),
            chunk_bytes=CHUNK_BYTES,
            chunk_checksums=tuple(sums),
            digest=digest,
            probe=request.probe,
        )
        self.slots.commit(request.slot, writer, version)
        self.manifests[version] = manifest
        del self._granted[writer]
        self._committing.discard(request.slot)
        published = ev.WeightsPublished(
            version=version,
            step=request.step,
            digest=digest,
            num_bytes=total,
            held=self.slots.versions_held,
        )
        self.host.emit(published, version=version, step=request.step, digest=digest)

    def _lease(self, reader: str, request: m.LeaseVersion) -> m.Leased | m.Gone:
        lease = self.slots.lease(request.version, reader, exact=request.exact)
        if isinstance(lease, VersionGone):
            return m.Gone(held=lease.held)
        return m.Leased(
            lease_id=lease.lease_id,
            slot=lease.slot,
            arena=str(self._path),
            manifest=mf.encode(self.manifests[lease.version]),
        )

    def _peer_lost(self, name: str) -> None:
        """Its leases end; what it was writing is given back, unless it is being digested."""
        self.slots.revoke(name)
        slot = self._granted.get(name)
        if slot is not None and slot not in self._committing:
            self.slots.abandon(name)
            del self._granted[name]
