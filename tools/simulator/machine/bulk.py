"""Connections between relays in virtual time: ordered frames, or a close that both ends see.

Reads   cuts and weather of the simulated network; what relays send
Gives   BulkNetwork, and each process's view of it: weights/chain/transport.py over the scheduler

As with TCP, lost data arrives later, a cut link is retried and then given up, the kernel closes the
connections of a dead process, and a receiver that does not read blocks its sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import xxhash

from laminar.weights.arena.region import Region
from laminar.weights.chain import wire
from laminar.weights.chain.handshake import NONCE_BYTES
from laminar.weights.chain.transport import READABLE, WRITABLE, FrameHandler
from laminar.weights.chain.wire import FrameHeader, FrameKind
from laminar.weights.version.table import VersionTable
from tools.simulator.context import Context
from tools.simulator.runtime.violation import Violation
from tools.simulator.scenario import stream
from tools.simulator.scheduler import MS, SECOND

RETRY_NS = 200 * MS  #: delay before lost data is resent
GIVEN_UP_NS = 10 * SECOND
"""Time limit for an acknowledgement; USER_TIMEOUT_MS of weights/chain/tcp.py."""
WINDOW = 8  #: maximum number of unread frames before the sender has to wait


class Owner(NamedTuple):
    """The process that owns an end, as far as its connections need it."""

    name: str
    boot_id: str
    versions: VersionTable
    slowness: Callable[[], float]
    wake: Callable[[], None]  #: called when something is ready


class Frame(NamedTuple):
    header: FrameHeader | None  #: None for a message
    body: bytes


class End:
    """An end of a connection (transport.Link)."""

    def __init__(self, bulk: BulkNetwork, owner: Owner, handler: FrameHandler[Any]) -> None:
        self.handler, self.owner = handler, owner
        self.message_bytes_max = wire.HANDSHAKE_BYTES_MAX
        self.moved_at = bulk.now_s()
        self.peer: End | None = None  #: None while connecting
        self.decoder: Any = None  #: decoder of the other end's messages
        self.error: OSError | None = None  #: error that ended the connection
        self.order = 0  #: chain order by which the predecessor at the other end connected
        self.closed = self.stuck = False  #: stuck: nothing more from here arrives
        self.line: deque[Frame | None] = deque()  #: in flight to the other end; None: the close
        self.lands_ns = self.cut_ns = 0  #: arrival of the last one; start of a cut, 0: none
        self._bulk, self._number = bulk, bulk.next_number()
        self._queue: deque[Frame] = deque()
        self._arrived: deque[Frame] = deque()
        self._unread = 0  #: frames sent from here and not read yet
        self._busy = False  #: whether a frame is being sent

    @property
    def idle(self) -> bool:
        return not self._queue and not self._busy

    def fileno(self) -> int:
        return self._number

    def get_interest(self) -> int:
        return READABLE if self.idle else READABLE | WRITABLE

    def ready(self) -> int:
        """Return the operations that are ready."""
        if self.error is not None:
            return READABLE | WRITABLE
        writable = self.peer is not None and not self._busy and self._unread < WINDOW
        return (READABLE if self._arrived else 0) | (WRITABLE if writable else 0)

    def finish_connect(self) -> None:
        if self.error is not None:
            raise self.error

    def send(self, message: wire.FromPredecessor | wire.FromSuccessor) -> None:
        self._bulk.said(self, message)
        self._queue.append(Frame(None, wire.encode(message)))

    def push(self, header: FrameHeader, body: Region) -> None:
        self._bulk.pushed(self.owner, header, body)
        self._queue.append(Frame(header, bytes(body.view)))

    def flush(self) -> None:
        if self.error is not None:
            raise self.error
        while self._queue and not self._busy and self._unread < WINDOW:
            frame = self._queue.popleft()
            self._unread += 1
            self.moved_at = self._bulk.now_s()
            taking_ns = 0
            if frame.header is not None:
                self._busy = True
                assert self.peer is not None
                slowness = max(self.owner.slowness(), self.peer.owner.slowness())
                taking_ns = int(self._bulk.duration_ns(len(frame.body)) * slowness)
                self._bulk.after(taking_ns, self._handed_over)
            self._bulk.carry(self, frame, taking_ns)

    def _handed_over(self) -> None:
        self._busy = False
        self.owner.wake()

    def read(self) -> None:
        while self._arrived and not self.closed:
            self._take(self._arrived.popleft())
        if self.error is not None and not self.closed:
            raise self.error

    def _take(self, frame: Frame) -> None:
        self.moved_at = self._bulk.now_s()
        assert self.peer is not None
        self.peer._was_read()
        if frame.header is None:
            header = wire.unpack_header(frame.body[: wire.HEADER_BYTES], self.message_bytes_max)
            body = bytearray(frame.body[wire.HEADER_BYTES :])
            message = wire.decode(self.decoder, header, body)
            if isinstance(message, wire.ChainHello):
                self.order = message.chain
            return self.handler.handle_message(message)
        self.handler.get_buffer(frame.header)[:] = frame.body
        self.handler.handle_body(frame.header)

    def _was_read(self) -> None:
        self._unread -= 1
        if self._unread == WINDOW - 1 and self._queue:
            self.owner.wake()

    def arrive(self, frame: Frame | None) -> None:
        """Receive a frame from the other end, or None when that end closed the connection."""
        if frame is None:
            self.fail(ConnectionResetError("the other side closed the connection"))
        elif not self.closed and self.error is None:
            self._arrived.append(frame)
            self.owner.wake()

    def fail(self, error: OSError) -> None:
        """End the connection; frames that have arrived can still be read."""
        if not self.closed and self.error is None:
            self.error = error
            self.owner.wake()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._bulk.closed(self)


class Listening:
    """The listener for predecessors (transport.Listener)."""

    def __init__(self, bulk: BulkNetwork, owner: Owner, address: tuple[str, int]) -> None:
        self.address, self.owner = address, owner
        self._bulk, self._number = bulk, bulk.next_number()
        self.waiting: deque[End] = deque()

    def fileno(self) -> int:
        return self._number

    def ready(self) -> int:
        return READABLE if self.waiting else 0

    def accept(self, handler: FrameHandler[wire.FromPredecessor]) -> End | None:
        caller = self.waiting.popleft()
        if caller.closed:
            return None
        accepted = End(self._bulk, self.owner, handler)
        accepted.peer, accepted.decoder = caller, wire.predecessor_decoder
        caller.peer, caller.decoder = accepted, wire.successor_decoder
        self._bulk.opened(accepted)
        caller.owner.wake()
        return accepted

    def close(self) -> None:
        self._bulk.silent(self)


class View(NamedTuple):
    """The network as one process sees it (transport.Network)."""

    bulk: BulkNetwork
    owner: Owner

    def listen(self, host: str, port: int) -> Listening:
        return self.bulk.listen(self.owner, host)

    def connect(
        self, host: str, port: int, source: str, handler: FrameHandler[wire.FromSuccessor]
    ) -> End:
        end = End(self.bulk, self.owner, handler)
        self.bulk.opened(end)
        self.bulk.after(self.bulk.delay_ns, self.bulk.knock, end, (host, port))
        return end


class BulkNetwork:
    """All connections of a world."""

    def __init__(self, world: Context, delay_ms: float, bytes_per_s: float) -> None:
        """Create an empty network: `delay_ms` one way, `bytes_per_s` of a relay at full speed."""
        self.delay_ns = int(delay_ms * MS)
        self._world, self._bytes_per_s = world, bytes_per_s
        self._listening: dict[tuple[str, int], Listening] = {}
        self._ends: dict[str, list[End]] = {}  #: by boot id
        self._orders: dict[str, int] = {}  #: order that each relay followed last, by boot id
        self._numbers = 0
        self._chance = stream(world.scenario.seed, "bulk")

    def process_ended(self, boot_id: str) -> None:
        """Close the connections of an ended process, as its kernel does."""
        for end in self._ends.pop(boot_id, []):
            end.close()
        for listening in list(self._listening.values()):
            if listening.owner.boot_id == boot_id:
                self.silent(listening)

    # --- called by its ends ---------------------------------------------------------------------

    def now_s(self) -> float:
        return self._world.scheduler.now / 1e9

    def after(self, delay_ns: int, action: Callable[..., None], *args: Any) -> None:
        self._world.scheduler.after(delay_ns, action, *args)

    def duration_ns(self, num_bytes: int) -> float:
        return num_bytes / self._bytes_per_s * SECOND

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def nonce(self) -> bytes:
        return self.next_number().to_bytes(NONCE_BYTES, "big")

    def opened(self, end: End) -> None:
        self._ends.setdefault(end.owner.boot_id, []).append(end)

    def closed(self, end: End) -> None:
        mine = self._ends.get(end.owner.boot_id, [])
        if end in mine:
            mine.remove(end)
        if end.peer is not None:
            self._put(end, None, 0)

    def listen(self, owner: Owner, host: str) -> Listening:
        address = (host, 20_000 + self.next_number())
        self._listening[address] = Listening(self, owner, address)
        return self._listening[address]

    def silent(self, listening: Listening) -> None:
        """Stop listening and refuse waiting callers."""
        self._listening.pop(listening.address, None)
        for caller in listening.waiting:
            caller.fail(ConnectionRefusedError("no process listens there"))

    def knock(self, caller: End, address: tuple[str, int]) -> None:
        """Request a connection."""
        listening = self._listening.get(address)
        if caller.closed:
            return
        if listening is None:
            return caller.fail(ConnectionRefusedError("no process listens there"))
        if self._cut(caller.owner, listening.owner):
            return self.after(RETRY_NS, self.knock, caller, address)
        listening.waiting.append(caller)
        listening.owner.wake()

    def carry(self, end: End, frame: Frame, taking_ns: int) -> None:
        """Carry a frame to the other end, after the `taking_ns` that sending it takes."""
        faults = self._world.faults
        if frame.header is not None and frame.header.kind == FrameKind.CHUNK:
            end.stuck = end.stuck or faults.sticks()
            if faults.damages_chunk():
                frame = Frame(frame.header, frame.body[:-1] + bytes([frame.body[-1] ^ 1]))
        if not end.stuck:
            self._put(end, frame, taking_ns)

    def _put(self, end: End, frame: Frame | None, taking_ns: int) -> None:
        loss = self._world.network.weather.loss
        late_ns = RETRY_NS if loss and self._chance.random() < loss else 0
        lands_ns = self._world.scheduler.now + taking_ns + self.delay_ns + late_ns
        end.line.append(frame)
        end.lands_ns = max(end.lands_ns, lands_ns)
        self._world.scheduler.at(end.lands_ns, self._land, end)

    def _land(self, end: End) -> None:
        """Deliver the oldest frame in flight, unless the link is cut."""
        peer = end.peer
        assert peer is not None
        if not self._cut(end.owner, peer.owner):
            end.cut_ns = 0
            return peer.arrive(end.line.popleft())
        end.cut_ns = end.cut_ns or self._world.scheduler.now
        if self._world.scheduler.now - end.cut_ns < GIVEN_UP_NS:
            return self.after(RETRY_NS, self._land, end)
        for each in (end, peer):
            each.fail(TimeoutError("nothing was acknowledged"))

    def _cut(self, source: Owner, target: Owner) -> bool:
        link = self._world.network.link(source.name, target.name)
        return bool(link.blocked or link.clogged)

    # --- invariants and coverage ----------------------------------------------------------------

    def said(self, end: End, message: object) -> None:
        """Check highest_order_wins: a relay never follows an earlier predecessor."""
        if isinstance(message, wire.ChainWelcome):
            boot_id = end.owner.boot_id
            if end.order < self._orders.get(boot_id, 0):
                what = f"{boot_id} takes a predecessor by order {end.order}, but had a later one"
                raise Violation("highest_order_wins", what, end.owner.name)
            self._orders[boot_id] = end.order
        elif isinstance(message, wire.Want) and any(message.have):
            self._world.coverage.hit("relay:resumed")
        elif isinstance(message, wire.PeerRefused):
            self._world.coverage.hit("relay:stale-predecessor")

    def pushed(self, owner: Owner, header: FrameHeader, body: Region) -> None:
        """Check sent_is_proved: the bytes sent are those of the named version."""
        if xxhash.xxh3_64_intdigest(body.view) != header.checksum:
            what = f"{owner.boot_id} sends other bytes than those of {header}"
            raise Violation("sent_is_proved", what, owner.name)
        copy = owner.versions.get(header.version)
        if copy is not None and not copy.complete:
            self._world.coverage.hit("relay:cut-through")
