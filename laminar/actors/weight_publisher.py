"""Publishing weights: from the trainer into a slot of the relay on its machine.

Reads   the policy's tensors
Writes  slots of the relay's arena
Emits   PublishSkipped

Publishing costs the trainer one copy into a slot that was granted ahead; digests are the relay's
work. The relay may die at any moment and come back with another arena. Training never waits for it:
a background task finds the new arena and the next slot, a version for which there is no slot, or
that was in the old arena, is skipped, and the coordinator asks for it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from laminar.actors.clients import RelayClient
from laminar.actors.host import Host
from laminar.events import events as ev
from laminar.net.rpc import RpcError
from laminar.training.model import named_weights
from laminar.weights import manifest as mf
from laminar.weights import messages as m
from laminar.weights.arena import Arena, ArenaError
from laminar.weights.transfer import write_tensors

SLOT_POLL_S = 0.02
RELAY_CHECK_S = 1.0
"""How often a slot that waits to be written is asked for again: the answer tells a new relay."""
SLOT_WAIT_S = 240.0
"""For an owed publish; shorter than the coordinator's deadline for the same command."""


class WeightPublisher:
    """The way of new versions out of the trainer."""

    def __init__(
        self,
        host: Host,
        relay: RelayClient,
        model: PreTrainedModel,
        dtype: str,
        probe: Callable[[], mf.Probe],
    ) -> None:
        """`dtype`: published type. `probe`: scores of the present weights, asked in a thread."""
        self.host, self.relay = host, relay
        self._model, self._probe = model, probe
        shapes = [(name, tuple(t.shape)) for name, t in named_weights(model)]
        self.specs = mf.layout(shapes, dtype)
        self.version_bytes = mf.check_tensors(self.specs)
        self._arena: Arena | None = None
        self._slot = -1  #: granted and not written
        self._granted = asyncio.Event()  #: there is such a slot
        self._publishing = False  #: between the copy and the relay's answer
        self._published = 0  #: counts copies
        self._idle = asyncio.Event()  #: set when a publish is over

    async def start(self) -> None:
        """Wait for the relay and its arena; RpcError if the slots cannot be had."""
        await self.relay.start()
        await self._open()
        self.host.spawn(self._keep_slot())

    async def close(self) -> None:
        if self._arena is not None:
            self._arena.close()  # a slot that is being filled must not hold up the process
        await self.relay.close()

    # --- publishing ---------------------------------------------------------------------------

    async def publish(self, version: int, step: int, event_seq: int) -> None:
        """Copy the weights if a slot is there; PublishSkipped if not, or if the relay is gone.

        The weights may change when this returns; the hand-over goes on in the background.
        """
        if self._slot < 0:
            now = time.monotonic_ns()
            self.host.span("publishing", now, now, step=step, skipped=True)
            return self._skip(version, step, "no slot was free", event_seq)
        request = await self._copy(version, step)
        self.host.spawn(self._hand_over_or_skip(request, event_seq))

    async def publish_owed(self, version: int, step: int) -> bool:
        """Copy and hand over, again with a relay that was started meanwhile; False: no slot."""
        deadline = time.monotonic() + SLOT_WAIT_S
        while await self._slot_by(deadline):
            request = await self._copy(version, step)
            failure = await self._hand_over(request)
            if not failure:
                return True
            self.host.log.warning("publish-again", version=version, reason=failure)
        return False

    async def _slot_by(self, deadline: float) -> bool:
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._granted.wait()
        except TimeoutError:
            return False
        return True

    async def _copy(self, version: int, step: int) -> m.CommitSlot:
        """Write the slot; the weights must not change meanwhile."""
        assert self._arena is not None
        arena, slot = self._arena, self._slot
        self._slot = -1
        self._granted.clear()
        self._publishing = True
        self._published += 1
        started = time.monotonic_ns()
        weights = named_weights(self._model)
        await asyncio.to_thread(write_tensors, arena.slot(slot), self.specs, weights)
        written = time.monotonic_ns()
        self.host.span("publishing", started, written, step=step, version=version)
        probe = await asyncio.to_thread(self._probe)
        self.host.span("probe", written, time.monotonic_ns(), step=step)
        return m.CommitSlot(
            arena=str(arena.path),
            slot=slot,
            version=version,
            step=step,
            tensors=self.specs,
            probe=probe,
        )

    async def _hand_over(self, request: m.CommitSlot) -> str:
        """Give the slot to the relay; why it did not take it, or nothing."""
        try:
            taken = await self.relay.ask(request, m.Committed, m.OtherArena)
        except (RpcError, TimeoutError) as error:
            return str(error)
        finally:
            self._publishing = False
            self._idle.set()
        return "" if isinstance(taken, m.Committed) else "the relay was started again"

    async def _hand_over_or_skip(self, request: m.CommitSlot, event_seq: int) -> None:
        failure = await self._hand_over(request)
        if failure:
            self._skip(request.version, request.step, failure, event_seq)

    def _skip(self, version: int, step: int, reason: str, event_seq: int) -> None:
        """The coordinator asks for it again."""
        skipped = ev.PublishSkipped(version=version, step=step, reason=reason)
        self.host.emit(skipped, event_seq=event_seq, version=version, reason=reason)

    # --- the next slot ------------------------------------------------------------------------

    async def _open(self) -> None:
        """Find the arena of the relay that is there now."""
        request = m.OpenArena(version_bytes=self.version_bytes)
        opened = await self.relay.ask(request, m.ArenaOpened)
        self._arena = Arena.attach(Path(opened.arena))

    async def _keep_slot(self) -> None:
        """Have a slot ready, and notice a new relay before there is something to publish."""
        while True:
            self._idle.clear()
            try:
                if not self._publishing:
                    await self._ask_for_slot()
                pause_s = RELAY_CHECK_S if self._publishing or self._slot >= 0 else SLOT_POLL_S
            except (RpcError, TimeoutError, ArenaError) as error:
                self.host.log.warning("no-slot", reason=str(error))
                pause_s = RELAY_CHECK_S
            try:
                async with asyncio.timeout(pause_s):
                    await self._idle.wait()
            except TimeoutError:
                pass

    async def _ask_for_slot(self) -> None:
        """One request; an answer that is older than a publish is about a slot that is used up."""
        if self._arena is None:
            await self._open()
        assert self._arena is not None
        published = self._published
        answer: m.SlotGranted | m.OtherArena = await self.relay.ask(
            m.GrantSlot(arena=str(self._arena.path)), m.SlotGranted, m.OtherArena
        )
        if isinstance(answer, m.SlotGranted) and answer.slot >= 0:
            await asyncio.to_thread(self._arena.prepare, answer.slot)
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
