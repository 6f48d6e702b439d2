"""Publishing of weights: from the trainer into a slot of the relay on its machine.

Reads   replies of the relay on this machine
Writes  slots of its arena, through SlotWriter
Emits   PublishSkipped

Publishing costs the trainer one copy into a slot that was granted in advance; the relay computes
digests. The relay may die at any moment and return with its arena under another name. Training
never waits for it: a background task finds the new arena and the next slot. A version without a
slot, or in the old arena, is skipped, and the coordinator requests it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from laminar.actors.service_clients import RelayClient
from laminar.events import events as ev
from laminar.net.calls import RpcError
from laminar.weights import messages as m
from laminar.weights.arena.region import ArenaError
from laminar.weights.version import manifest as mf

if TYPE_CHECKING:
    from laminar.actors.host import Host

SLOT_POLL_S = 0.02
RELAY_CHECK_S = 1.0
"""Interval at which a waiting slot is confirmed; the answer reveals a new relay."""
SLOT_WAIT_S = 1830.0
"""Time limit for the slot of an owed publish or an export.

Longer than the coordinator's deadline for an export, and than most transfers that hold the slots.
For a publish the coordinator's deadline decides, which is extended while bytes arrive.
"""


class WeightArena(Protocol):
    """An arena, mapped by this process, whose slots receive the weights."""

    path: str

    async def populate_slot(self, slot: int) -> None:
        """Populate a slot's memory; ArenaError, also if it is closed meanwhile."""

    async def write(self, slot: int, specs: tuple[mf.TensorSpec, ...]) -> None:
        """Write the present weights to a slot; they must not change meanwhile."""

    def close(self) -> None:
        """Close the arena and abandon slots that are being prepared."""


Attach = Callable[[str], WeightArena]
"""Maps the arena of this path; ArenaError if it cannot be mapped."""


class WeightPublisher:
    """The publisher of the trainer's new versions."""

    def __init__(
        self,
        host: Host,
        relay: RelayClient,
        attach: Attach,
        specs: tuple[mf.TensorSpec, ...],
        probe: Callable[[], Awaitable[mf.Probe]],
    ) -> None:
        """Create the publisher. `specs`: the published layout. `probe`: of the present weights."""
        self.host, self.relay = host, relay
        self._attach, self._specs, self._probe = attach, specs, probe
        self._arena: WeightArena | None = None
        self._slot = -1  #: slot that is granted and not written, or -1
        self._granted = asyncio.Event()  #: set while there is such a slot
        self._publishing = False  #: between the copy and the relay's answer
        self._published = 0  #: number of copies
        self._idle = asyncio.Event()  #: set after each publish

    async def start(self) -> None:
        """Wait for the relay and its arena, up to the coordinator's deadline for the start.

        RpcError if the slots cannot be allocated.
        """
        await self.relay.start()
        while self._arena is None:
            try:
                await self._open_arena()
            except (ArenaError, TimeoutError) as error:  # the relay is gone or not ready
                self.host.log.warning("no-arena", reason=str(error))
                await self.host.sleep_for(RELAY_CHECK_S)
        self.host.spawn(self._maintain_slot())

    async def close(self) -> None:
        if self._arena is not None:
            self._arena.close()  # a slot that is being filled must not hold up the process
        await self.relay.close()

    # --- publishing ---------------------------------------------------------------------------

    async def publish_or_skip(self, version: int, step: int, event_seq: int) -> None:
        """Copy the weights if a slot is free; else, or if the relay is gone, emit PublishSkipped.

        The weights may change on return; the commit continues in the background.
        """
        if self._slot < 0:
            now = self.host.now_ns()
            self.host.record_span("publishing", now, now, step=step, skipped=True)
            return self._report_skipped(version, step, "no slot was free", event_seq)
        request = await self._copy_weights(version, step)
        self.host.spawn(self._commit_or_skip(request, event_seq))

    async def publish_owed(self, version: int, step: int) -> bool:
        """Copy and commit, again after a restart of the relay; return False if no slot came."""
        deadline_ns = self.host.now_ns() + int(SLOT_WAIT_S * 1e9)
        while await self._slot_by(deadline_ns):
            request = await self._copy_weights(version, step)
            failure = await self._commit_slot(request)
            if not failure:
                return True
            self.host.log.warning("publish-retried", version=version, reason=failure)
        return False

    async def _slot_by(self, deadline_ns: int) -> bool:
        try:
            async with asyncio.timeout((deadline_ns - self.host.now_ns()) / 1e9):
                await self._granted.wait()
        except TimeoutError:
            return False
        return True

    async def _copy_weights(self, version: int, step: int) -> m.CommitSlot:
        """Write the slot; the weights must not change meanwhile."""
        assert self._arena is not None
        arena, slot = self._arena, self._slot
        self._slot = -1
        self._granted.clear()
        self._publishing = True
        self._published += 1
        started = self.host.now_ns()
        await arena.write(slot, self._specs)
        written = self.host.now_ns()
        self.host.record_span("publishing", started, written, step=step, version=version)
        probe = await self._probe()
        self.host.record_span("probe", written, self.host.now_ns(), step=step)
        return m.CommitSlot(
            arena=arena.path,
            slot=slot,
            version=version,
            step=step,
            tensors=self._specs,
            probe=probe,
        )

    async def _commit_slot(self, request: m.CommitSlot) -> str | None:
        """Give the slot to the relay; return why it refused it, if it did."""
        try:
            taken = await self.relay.send_request(request, m.SlotCommitted, m.ArenaReplaced)
        except (RpcError, TimeoutError) as error:
            return str(error)
        finally:
            self._publishing = False
            self._idle.set()
        return None if isinstance(taken, m.SlotCommitted) else "the relay was restarted"

    async def _commit_or_skip(self, request: m.CommitSlot, event_seq: int) -> None:
        failure = await self._commit_slot(request)
        if failure:
            self._report_skipped(request.version, request.step, failure, event_seq)

    def _report_skipped(self, version: int, step: int, reason: str, event_seq: int) -> None:
        """Report a skipped version, which the coordinator will request again."""
        skipped = ev.PublishSkipped(version=version, step=step, reason=reason)
        self.host.emit(skipped, event_seq=event_seq, version=version, reason=reason)

    # --- the next slot ------------------------------------------------------------------------

    async def _open_arena(self) -> None:
        """Find the arena of the present relay."""
        request = m.OpenArena(version_bytes=mf.check_tensors(self._specs))
        opened = await self.relay.send_request(request, m.ArenaOpened)
        self._arena = self._attach(opened.arena)

    async def _maintain_slot(self) -> None:
        """Keep a slot ready, and detect a new relay before there is something to publish."""
        while True:
            self._idle.clear()
            try:
                if not self._publishing:
                    await self._request_slot()
                pause_s = RELAY_CHECK_S if self._publishing or self._slot >= 0 else SLOT_POLL_S
            except (RpcError, TimeoutError, ArenaError) as error:
                self.host.log.warning("no-slot", reason=str(error))
                pause_s = RELAY_CHECK_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._idle.wait()
            except TimeoutError:
                pass

    async def _request_slot(self) -> None:
        """Request a slot once; ignore an answer older than a publish, whose slot is used up."""
        if self._arena is None:
            await self._open_arena()
        assert self._arena is not None
        published = self._published
        answer: m.SlotGranted | m.ArenaReplaced = await self.relay.send_request(
            m.GrantSlot(arena=self._arena.path), m.SlotGranted, m.ArenaReplaced
        )
        if isinstance(answer, m.SlotGranted) and answer.slot >= 0:
            await self._arena.populate_slot(answer.slot)
        if self._published != published:
            return
        if isinstance(answer, m.SlotGranted):
            self._slot = answer.slot
        else:
            self._arena, self._slot = None, -1
        if self._slot >= 0:
            self._granted.set()
        else:
            self._granted.clear()
