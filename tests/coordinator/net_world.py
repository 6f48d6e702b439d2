"""The test world behind a Tick: every actor speaks through a ClientLink over a wire that may break,
and the coordinator may be killed in any turn and started again from its disk.

Reads   frames and orders
Gives   frames; checks what a coordinator may let out: nothing that its disk does not hold
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec

from laminar.actors.protocol import CommandFilter
from laminar.coordinator.tick import AT_ONCE, Frame, Tick
from laminar.core import invariants
from laminar.core.machine import LOGIC_VERSION
from laminar.core.state import ENDED, State, digest
from laminar.eventlog.crashes import crashes, given_up
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import (
    FRAME,
    DecisionRecord,
    EventRecord,
    Header,
    Record,
    StateHashRecord,
    frame_end,
    segment_numbers,
)
from laminar.eventlog.restore import restore, take_over
from laminar.events import events as ev
from laminar.events.base import Command, Event, Settings, Stamped
from laminar.events.codec import decode_order, encode
from laminar.net.frames import Ack, Data, Welcome, decode_server
from laminar.net.session import MS, ClientLink, Limits, LinkState
from laminar.ports import AtOnce, Background, DiskError
from tests.core.world import World
from tests.core.world_parts import Faults, Process
from tests.eventlog.memory_disk import MemoryDisk

LEASE_MS = 3_000
NODE_LEASE_MS = 12_000
HEARTBEAT_NS = 500 * MS
SAFETY_NS = 250 * MS  #: a loop looks at its sockets at least so often
LIMITS = Limits()
is_segment = re.compile(r"events-\d+\.log").fullmatch
decode_record = msgspec.msgpack.Decoder(
    Header | EventRecord | DecisionRecord | StateHashRecord
).decode


def begin_tick(
    disk: MemoryDisk,
    now_ns: int,
    observer: object = None,
    background: Background = AT_ONCE,
    **sizes: int,
) -> tuple[Tick, State | None]:
    """What the coordinator does at its start: restore, take over. Also the replayed state."""
    restored = restore(disk)
    found = restored.replay
    assert found.difference is None, str(found.difference)
    writer = take_over(
        disk, restored, logic=LOGIC_VERSION, run="r", seed=0, config_hash="", **sizes
    )
    tick = Tick(
        found.machine,
        writer,
        boot=f"c{restored.incarnation}",
        lease_ms=LEASE_MS,
        node_lease_ms=NODE_LEASE_MS,
        clock_ns=now_ns,
        observer=observer or (lambda *_: None),  # type: ignore[arg-type]
        limits=LIMITS,
        given_up=given_up(crashes(disk)),
        background=background,
    )
    return tick, found.machine.state if found.machine.started else None


@dataclass
class Peer:
    """One process as the network sees it."""

    process: Process
    link: ClientLink
    filter: CommandFilter = field(default_factory=CommandFilter)
    sent: list[bytes] = field(default_factory=list)  #: numbered bodies
    route: bytes = b""


@dataclass
class WireFaults:
    lose_frame: float = 0.0
    kill_turn: float = 0.0  #: the coordinator dies in this share of its turns
    kills_max: int = 10


class NetWorld(World):
    """The same actors and the same machine, with everything real in between but the sockets."""

    ordered = False
    background: ClassVar[Callable[[], Background]] = AtOnce  #: one for each coordinator
    sizes: ClassVar[dict[str, int]] = {}  #: of the log: segment_bytes, snapshot_every, keep_bytes

    def __init__(
        self,
        config: Settings,
        *,
        replicas: int = 2,
        nodes: int = 1,
        capacity: int = 8,
        num_train: int = 40,
        num_eval: int = 0,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            config,
            replicas=replicas,
            nodes=nodes,
            capacity=capacity,
            num_train=num_train,
            num_eval=num_eval,
            faults=faults,
            seed=seed,
        )
        self.chance = random.Random(f"wire {seed}")
        self.wire = WireFaults()
        self.disk = MemoryDisk()
        self.digests: dict[int, str] = {}  #: of the state after each event
        self.own: list[Event] = []
        self.peers: dict[str, Peer] = {}  #: by boot id
        self.boots: dict[tuple[str, int], str] = {}  #: by name and incarnation
        self.acted: dict[int, int] = {}  #: how often each command id was obeyed
        self.offsets: dict[str, int] = {}  #: how far each file of the log has been looked at
        self.decided: set[tuple[int, int]] = set()  #: durable: (cause, index)
        self.logged: dict[str, int] = {}  #: durable: last number by boot id
        self.kills = 0
        self.connections = 0
        self.tick, _ = begin_tick(
            self.disk, 0, self._observe, type(self).background(), **self.sizes
        )

    @property
    def state(self) -> State:
        return self.tick.machine.state

    # --- what the actors' world calls ---------------------------------------------------------

    def say_own(self, event: Event) -> None:
        self.own.append(event)

    def say(self, process: Process, event: Event) -> None:
        peer = self.peers[process.boot_id]
        peer.link.send(encode(event))
        peer.sent.append(encode(event))

    def gauge(self, process: Process, event: Event) -> None:
        self.peers[process.boot_id].link.gauge(encode(event))

    def join(self, process: Process) -> None:
        link = ClientLink(
            process.name,
            process.role,
            process.boot_id,
            heartbeat_ns=HEARTBEAT_NS,
            now_ns=self.now,
            info={"node": process.node, "pid": "7"},
        )
        self.peers[process.boot_id] = Peer(process, link)
        self._connect(self.peers[process.boot_id])

    def _connect(self, peer: Peer) -> None:
        self.connections += 1
        peer.route = b"%d" % self.connections
        peer.link.reintroduce()

    # --- time ---------------------------------------------------------------------------------

    def run(self, max_turns: int = 50_000) -> NetWorld:
        self.begin()
        self._pump()
        turns = 0
        while self.state.phase != ENDED:
            turns += 1
            assert turns < max_turns, "the run does not end"
            self.step()
        return self

    def step(self) -> None:
        """Until the next thing is due; then everybody speaks and listens."""
        due = [self.now + SAFETY_NS, *(peer.link.next_due_ns() for peer in self._live())]
        timer = self.tick.next_timer_ns() if self.tick.machine.started else None
        due += [timer] if timer is not None else []
        due += [self.queue[0][0]] if self.queue else []
        self.now = max(self.now + 1, min(due))
        while self.queue and self.queue[0][0] <= self.now:
            now = self.now
            self.happen_next()
            self.now = now
        self._pump()

    def _live(self) -> list[Peer]:
        """Processes that run: the last boot of each name, unless it is dead."""
        return [
            peer
            for peer in self.peers.values()
            if peer.process.alive and peer.process.boot_id == peer.link.boot_id
        ]

    # --- frames -------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Everybody speaks until nobody has anything to say."""
        while True:
            up: list[Frame] = []
            for peer in self._live():
                frames = peer.link.poll(self.now)
                up += [(peer.route, frame) for frame in frames if not self._lost()]
            if not self._turn(up) and not up and not self.own:
                return

    def _lost(self) -> bool:
        return self.chance.random() < self.wire.lose_frame

    def _turn(self, up: list[Frame]) -> bool:
        """One turn; True when something came of it."""
        own, self.own = self.own, []
        if self.kills < self.wire.kills_max and self.chance.random() < self.wire.kill_turn:
            self._turn_and_kill(up, own)
            return True
        down = self.tick.turn(up, own, self.now, True)
        invariants.check(self.state)
        self.check_durable(down)
        self._carry(down)
        for command_id, command in self.tick.local:
            self._obey_once(command_id, command)
        self.tick.local.clear()
        return bool(down)

    def _carry(self, down: list[Frame]) -> None:
        by_route = {peer.route: peer for peer in self._live()}
        for route, frame in down:
            peer = by_route.get(route)
            if peer is None or self._lost():
                continue
            before = peer.link.incarnation
            for body in peer.link.receive(frame, self.now):
                self._ordered(peer, body)
            if before == 0 and peer.link.incarnation:
                peer.process.incarnation = peer.link.incarnation
                self.ready(peer.process)
            if peer.link.state is LinkState.REFUSED:
                self._kill(peer.process)  # it exits, and its node starts it again

    def _ordered(self, peer: Peer, body: bytes) -> None:
        order, command = decode_order(body)
        assert order.cause == order.command_id >> 20
        assert command.to == peer.process.name
        if peer.filter.take(order.command_id):
            self._obey_once(order.command_id, command)

    def _obey_once(self, command_id: int, command: Command) -> None:
        self.acted[command_id] = self.acted.get(command_id, 0) + 1
        self.obey(command, command_id)

    # --- the coordinator's death --------------------------------------------------------------

    def _turn_and_kill(self, up: list[Frame], own: list[Event]) -> None:
        """It dies while it writes, while it syncs, or before a frame of this turn has left."""
        self.kills += 1
        self.disk.fail_at = self.disk.calls + self.chance.randint(1, 3)
        try:
            self.tick.turn(up, own, self.now, True)
        except DiskError:
            pass
        self.own = [event for event in own if isinstance(event, ev.DrainRequested)]
        self.restart(keep_unsynced=self.chance.random() < 0.5)

    def restart(self, *, keep_unsynced: bool) -> None:
        """A new coordinator on what the disk has kept; every connection is a new one."""
        self.disk = self.disk.crash(keep_unsynced)
        self.tick, state = begin_tick(
            self.disk, self.now, self._observe, type(self).background(), **self.sizes
        )
        if state is not None:
            assert digest(state) == self.digests[state.seq], "another state than before"
        self.own.append(self.started(segment_numbers(self.disk.names())[-1]))
        for peer in self._live():
            self._connect(peer)

    def _observe(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        self.digests[stamped.seq] = digest(state)
        actor = state.actors.get(stamped.peer)
        if actor is not None:
            self.boots[actor.name, actor.incarnation] = actor.boot_id

    # --- checks -------------------------------------------------------------------------------

    def check_durable(self, down: list[Frame]) -> None:
        """Whatever leaves is on the disk: the command and its event, and what is acknowledged."""
        names = {peer.route: peer.link.boot_id for peer in self.peers.values()}
        found = [(names[route], decode_server(f, 1 << 20)) for route, f in down if route in names]
        orders = [decode_order(m.body)[0] for _, m in found if isinstance(m, Data)]
        if not found:
            return
        self._read_disk()
        for order in orders:
            assert (order.cause, order.command_id & 0xFFFFF) in self.decided, order
        for boot_id, message in found:
            if isinstance(message, Data | Ack | Welcome):
                ack = message.last_seq if isinstance(message, Welcome) else message.ack
                assert ack <= self.logged.get(boot_id, 0), (boot_id, message)

    def _read_disk(self) -> None:
        """What has become durable since the last look: decisions, and each boot's last number."""
        for name in filter(is_segment, self.disk.names()):
            data = self.disk.read(name, 0, self.disk.durable[name])
            offset = self.offsets.get(name, 0)
            while offset + FRAME.size <= len(data):
                start = offset + FRAME.size
                end = frame_end(data, offset)
                if end > len(data):
                    break
                self._note(decode_record(data[start:end]))
                offset = end
            self.offsets[name] = offset

    def _note(self, record: Record) -> None:
        if isinstance(record, DecisionRecord):
            self.decided.add((record.cause, record.index))
        elif isinstance(record, EventRecord) and record.peer_seq:
            self.logged[self.boots[record.peer, record.incarnation]] = record.peer_seq

    def check_exactly_once(self) -> None:
        """Every command was acted on at most once; every acknowledged event is in the log once."""
        assert set(self.acted.values()) <= {1}
        logged: dict[tuple[str, int], list[tuple[int, bytes]]] = {}
        for _, record in read_log(self.disk):
            if isinstance(record, EventRecord) and record.peer_seq:
                key = (record.peer, record.incarnation)
                logged.setdefault(key, []).append((record.peer_seq, bytes(record.event)))
        for peer in self.peers.values():
            events = logged.get((peer.process.name, peer.link.incarnation), [])
            numbers = [number for number, _ in events]
            assert numbers == list(range(1, len(numbers) + 1)), peer.process.name
            assert [body for _, body in events] == peer.sent[: len(events)]
            assert len(events) >= peer.link.outbox.first - 1, "acknowledged and not in the log"
