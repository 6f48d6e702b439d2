"""A relay's machine in virtual time: memory, and a transfer plane without a thread.

Reads   the scheduler, through the process
Gives   SimMachine (actors/relay.py: RelayPlatform); Relay, the real actor over it

The plane's core, the version table and all hashes are the real ones; versions are small.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext

from laminar.actors import relay
from laminar.actors.host import ActorRole, Host
from laminar.weights.chain.core import PlaneCore, PlaneOptions, PlaneRuntime
from laminar.weights.chain.reports import Report
from laminar.weights.chain.upstream import RelayIdentity
from laminar.weights.version.table import VersionTable
from tools.simulator.machine.bulk import BulkNetwork, End, Listening, Owner, View
from tools.simulator.machine.memory import DIGEST_S, Arenas, SimMemory
from tools.simulator.runtime.process import Idle, SimProcess
from tools.simulator.scenario import seconds

MEMORY_BYTES = 1 << 40


class SimPlane:
    """A plane's core without its thread (weights/chain/transfer_thread.py), run in turns."""

    def __init__(
        self,
        machine: SimMachine,
        identity: RelayIdentity,
        notify: Callable[[Report], object],
        options: PlaneOptions,
    ) -> None:
        self._process = machine.process
        scheduler, boot_id = self._process.world.scheduler, self._process.boot_id
        self._boot_id = boot_id
        self._inbox: deque[Callable[[], None]] = deque()
        self._turn_due = self._turning = self._closed = False
        self._alarm_ns = 0
        owner = Owner(
            identity.name, boot_id, machine.versions, lambda: self._process.slow, self._wake
        )
        world = PlaneRuntime(
            View(machine.bulk, owner),
            lambda: scheduler.now / 1e9,
            machine.bulk.nonce,
            self._post,
            _at_once,
        )
        self._core = PlaneCore(
            identity, machine.versions, machine.slots.get_region, notify, options, world
        )
        self.set_successor, self.publish_version = (
            self._core.set_successor,
            self._core.publish_version,
        )
        self.grant_slot, self.deny_slot = self._core.grant_slot, self._core.deny_slot
        self.fetch, self.fetch_into = self._core.fetch, self._core.fetch_into

    def start(self, host: str, port: int = 0) -> tuple[str, int]:
        return self._core.listen(host, port)

    def close(self) -> None:
        """Stop all work, as when the thread has ended."""
        self._closed = True
        self._core.close()

    def _post(self, order: Callable[[], None]) -> None:
        self._inbox.append(order)
        self._wake()

    def _wake(self) -> None:
        """Take a turn soon, unless the process has ended, whose data may still be on its way."""
        ended = self._closed or self._process.boot_id != self._boot_id
        if not self._turn_due and not self._turning and not ended:
            self._turn_due = True
            self._process.call_later(0, self._turn)

    def _turn(self) -> None:
        """Take turns until there is nothing to do at this instant."""
        self._turn_due = False
        if self._closed:
            return
        self._turning = busy = True
        while busy or self._inbox:
            busy = self._act()
            wait_s = self._core.run_turn()
        self._turning = False
        if wait_s is not None:
            self._set_alarm(wait_s or DIGEST_S * self._process.slow)

    def _act(self) -> bool:
        """Act on ready endpoints and queued orders; return whether there were any."""
        acted = bool(self._inbox)
        for endpoint, interest, action in list(self._core.iter_poll_entries()):
            assert isinstance(endpoint, End | Listening)
            ready = endpoint.ready() & interest
            if ready:
                acted = True
                action(ready)
        while self._inbox:
            self._inbox.popleft()()
        return acted

    def _set_alarm(self, delay_s: float) -> None:
        """Wake up after `delay_s`; an earlier alarm suffices."""
        now, delay_ns = self._process.world.scheduler.now, max(1, seconds(delay_s))
        if not now < self._alarm_ns <= now + delay_ns:
            self._alarm_ns = now + delay_ns
            self._process.call_later(delay_ns, self._ring, self._alarm_ns)

    def _ring(self, when_ns: int) -> None:
        if when_ns == self._alarm_ns:
            self._alarm_ns = 0
            self._wake()


class SimMachine:
    """The machine of one boot of a relay."""

    memory_bytes = MEMORY_BYTES

    def __init__(self, process: SimProcess, bulk: BulkNetwork, arenas: Arenas) -> None:
        self.process, self.bulk, self._arenas = process, bulk, arenas
        self.slots = SimMemory(process, arenas)
        self.versions = VersionTable(nullcontext())
        self._plane: SimPlane | None = None
        self._chance = process.world.chance_of(process)

    async def sweep_stale_arenas(self) -> list[tuple[str, int]]:
        """Take over the arena of an earlier boot."""
        await asyncio.sleep(self._chance.uniform(0, self.process.world.scenario.world.start_s))
        arenas, name = self._arenas, f"arena-{self.process.name}/"
        former = [path for path in arenas if path.startswith(name) and path != self.slots.path]
        for path in former:
            self.slots.former = arenas.pop(path)
        return []

    def make_plane(
        self, identity: RelayIdentity, notify: Callable[[Report], None], options: PlaneOptions
    ) -> SimPlane:
        loop = asyncio.get_running_loop()
        in_loop = lambda report: loop.call_soon(notify, report)  # noqa: E731
        self._plane = SimPlane(self, identity, in_loop, options)
        return self._plane

    async def close(self) -> None:
        if self._plane is not None:
            self._plane.close()
        self._arenas.pop(self.slots.path, None)


def _at_once(work: Callable[[], None]) -> None:
    work()


class Relay(Idle):
    """The model of one boot of a relay."""

    def __init__(self, process: SimProcess, bulk: BulkNetwork, arenas: Arenas) -> None:
        super().__init__(process)
        self.machine = SimMachine(process, bulk, arenas)

    def make_actor(self, host: Host) -> ActorRole:
        return relay.Relay(host, self.machine)
