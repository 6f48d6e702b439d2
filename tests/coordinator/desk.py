"""A coordinator's tick driven by hand, with real sessions over a disk in memory.

Reads   frames and events that a test gives
Gives   Desk; begin_tick, what a coordinator does at its start
"""

from __future__ import annotations

from collections.abc import Sequence

from laminar.coordinator.tick import Frame, Tick
from laminar.core.rules import LOGIC_VERSION
from laminar.core.state.state import hash_state
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord
from laminar.eventlog.restore import restore_log, take_over_log
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.events.codec import decode_envelope
from laminar.net.session import MS, ClientLink, Limits
from tools.kit.memory_disk import MemoryDisk
from tools.kit.world_parts import coordinator_started, settings

LEASE_MS = 3_000
NODE_LEASE_MS = 12_000
STALL_MS = 300_000
STARTED = coordinator_started(settings())
READY = ev.TrainerReady(num_parameters=1, weights_bytes=4)


def begin_tick(disk: MemoryDisk, now_ns: int) -> Tick:
    """What the coordinator does at its start: restore, take over."""
    restored = restore_log(disk)
    found = restored.replay
    assert found.difference is None, str(found.difference)
    return Tick(
        found.machine,
        take_over_log(disk, restored, logic=LOGIC_VERSION, run="r", seed=0, config_hash=""),
        boot=f"c{restored.incarnation}",
        lease_ms=LEASE_MS,
        node_lease_ms=NODE_LEASE_MS,
        stall_ms=STALL_MS,
        clock_ns=now_ns,
        observer=lambda *_: None,
        limits=Limits(),
    )


class Desk:
    """One coordinator and a few links, on a wire that loses nothing."""

    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.now = 0
        self.tick = begin_tick(self.disk, 0)
        self.links: dict[bytes, ClientLink] = {}
        self.orders: dict[bytes, list[cmd.Command]] = {}
        self.turn(own=[STARTED])

    def turn(
        self, frames: Sequence[Frame] = (), own: Sequence[Event] = (), *, empty: bool = True
    ) -> list[Frame]:
        return self.tick.run_turn(frames, own, self.now, empty)

    def client(self, name: str, boot: str = "") -> ClientLink:
        link = ClientLink(
            name,
            name.rpartition("-")[0],
            boot or f"{name}/a",
            heartbeat_ns=500 * MS,
            now_ns=self.now,
            info={"node": "node-0", "pid": "7"},
        )
        self.links[link.boot_id.encode()] = link
        self.orders[link.boot_id.encode()] = []
        return link

    def talk(self, paused: str = "") -> None:
        """Frames go to and fro until there are none left; one process may stand still."""
        while True:
            speaking = [(r, link) for r, link in self.links.items() if link.name != paused]
            up = [(route, f) for route, link in speaking for f in link.poll(self.now)]
            down = self.turn(up)
            for route, frame in down:
                for body in self.links[route].receive(frame, self.now):
                    self.orders[route].append(decode_envelope(body)[1])
            if not up and not down:
                return

    def restart(self, *, keep_unsynced: bool = False) -> None:
        self.disk = self.disk.crash(keep_unsynced)
        self.tick = begin_tick(self.disk, self.now)
        self.turn(own=[STARTED])
        for link in self.links.values():
            link.request_hello()

    def events(self) -> list[str]:
        """Names of the logged events, without the coordinator's starts."""
        kinds = [
            (record.peer, bytes(record.event))
            for _, record in read_log(self.disk)
            if isinstance(record, EventRecord)
        ]
        return [peer for peer, _ in kinds if peer != "coordinator"]

    @property
    def tick_state(self) -> str:
        return hash_state(self.tick.machine.state)
