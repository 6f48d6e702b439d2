"""One hop without sockets: a sender and a receiver joined by links that the test moves.

Every frame crosses the wire's codec. A relay here has the slot table that a real one has, so that
what is pinned and what is given back is checked along the way.
"""

import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from laminar.weights.arena.region import Region
from laminar.weights.arena.slots import HeldSlot, ReadLease, SlotTable, WritingSlot
from laminar.weights.chain import reports, wire
from laminar.weights.chain.fetch_server import TRICKLE_S, FetchHandler
from laminar.weights.chain.receiver import REFUSALS_MAX, SLOW_S, Receiver
from laminar.weights.chain.sender import Sender
from laminar.weights.chain.wire import BadBytes, FrameHeader, FrameKind
from laminar.weights.delta.cache import DeltaCache
from laminar.weights.version.copy import VersionCopy, pack_have
from laminar.weights.version.table import VersionTable
from tools.bench.weights.relay_process import describe, digest_of

SIZE, CHUNK = 4096, 512
CHUNKS = SIZE // CHUNK
SLOTS = 3


def content(version: int) -> np.ndarray:
    return np.random.default_rng(version).integers(0, 256, SIZE, dtype=np.uint8)


def in_thread(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="delta-").start()


class Link:
    """A transport to one side; `frames` is what is on the way."""

    def __init__(self, decoder: Any, handler: Any) -> None:
        self.decoder, self.handler = decoder, handler
        self.frames: deque[tuple[FrameHeader, bytes]] = deque()
        self.spoil: Callable[[FrameHeader, bytes], bytes] = lambda header, body: body
        self.failed = ""
        self.said: list[Any] = []  #: messages so far
        self.hold: FrameKind | None = None  #: stop before the first body of this kind
        self.stopped = False

    @property
    def idle(self) -> bool:
        return not any(header.kind != FrameKind.MESSAGE for header, _ in self.frames)

    def send(self, message: Any) -> None:
        self.said.append(message)
        data = wire.encode(message)
        header = wire.unpack_header(data[: wire.HEADER_BYTES], wire.MESSAGE_BYTES_MAX)
        self.frames.append((header, data[wire.HEADER_BYTES :]))

    def push(self, header: FrameHeader, body: Region) -> None:
        assert self.idle
        self.stopped = header.kind == self.hold
        self.frames.append((header, bytes(body.view)))

    def fail(self, reason: str) -> None:
        self.failed = reason

    def move(self) -> None:
        """One frame arrives."""
        header, body = self.frames.popleft()
        if header.kind == FrameKind.MESSAGE:
            self.handler.handle_message(wire.decode(self.decoder, header, bytearray(body)))
        else:
            target = self.handler.get_buffer(header)
            assert target.nbytes == header.length
            target[:] = self.spoil(header, body)
            self.handler.handle_body(header)


class Relay:
    """VersionTable, receiver and sender of one relay, and its slots."""

    def __init__(self, name: str, *, grants: bool = True, delta_bytes: int = 0) -> None:
        self.name, self.grants = name, grants
        self.memory = [bytearray(SIZE) for _ in range(SLOTS)]
        self.reports: list[reports.Report] = []
        self.posted: deque[Callable[[], None]] = deque()
        self.table = VersionTable(nullcontext())
        self.slots = SlotTable(SLOTS, self.table.try_forget)
        cache = DeltaCache(delta_bytes)
        self.sender = Sender(
            self.table, cache, self.arriving, in_thread, self.posted.append, self.reports.append
        )
        self.receiver = Receiver(
            self.table, cache, self.sender, self.region, lambda: 0.0, self.handle
        )
        self.slot_due = False
        self.down: Link | None = None  #: to the successor

    def region(self, slot: int) -> Region:
        return Region(memoryview(self.memory[slot]))

    def arriving(self, version: int) -> bool:
        incoming = self.receiver.incoming
        return self.receiver.linked and incoming is not None and incoming.version == version

    def handle(self, report: reports.Report) -> None:
        self.reports.append(report)
        if isinstance(report, reports.SlotWanted):
            self.slot_due = True
        elif isinstance(report, reports.Received):
            state = self.slots.get_state(report.slot)
            assert isinstance(state, WritingSlot)
            self.slots.commit(report.slot, state.writer, report.manifest.version)
        elif isinstance(report, reports.SlotReturned):
            state = self.slots.get_state(report.slot)
            assert isinstance(state, WritingSlot)
            self.slots.abandon_slot(state.writer)

    def publish(self, version: int, data: np.ndarray | None = None, digest: str = "") -> None:
        grant = self.slots.grant_slot("trainer")
        assert grant is not None
        data = content(version) if data is None else data
        self.memory[grant.slot][:] = data.tobytes()
        manifest = describe(version, data, CHUNK, digest)
        self.slots.commit(grant.slot, "trainer", version)
        self.put(VersionCopy(manifest, grant.slot, self.region(grant.slot), complete=True))

    def put(self, copy: VersionCopy) -> None:
        self.table.put(copy)
        self.receiver.handle_publish(copy)
        self.sender.refresh_offer()

    def turn(self) -> None:
        """What the plane and the relay's actor do besides moving bytes."""
        while self.posted:
            self.posted.popleft()()
        while self.receiver.advance_digest():
            pass
        if self.slot_due and self.grants:
            grant = self.slots.grant_slot("plane")
            if grant is not None:
                self.slot_due = False
                self.receiver.take_slot(grant.slot)
        self.sender.push_next()

    def troubles(self) -> list[tuple[str, int]]:
        return [(r.kind, r.version) for r in self.reports if isinstance(r, reports.Trouble)]

    def received(self) -> list[int]:
        return [r.manifest.version for r in self.reports if isinstance(r, reports.Received)]

    def holds(self, version: int) -> bool:
        """Complete, under its digest, in a slot that is held, byte for byte."""
        copy = self.table.get(version)
        if copy is None or not copy.complete:
            return False
        assert self.slots.get_state(copy.slot) == HeldSlot(version)
        assert copy.digest == digest_of(self.memory[copy.slot])
        return True


def join(first: Relay, second: Relay) -> tuple[Link, Link]:
    """Make `second` the successor of `first`; the links to it and from it."""
    down = Link(wire.predecessor_decoder, second.receiver)
    up = Link(wire.successor_decoder, first.sender)
    welcome = wire.ChainWelcome(
        held=second.table.get_complete_digests(), partial=second.table.list_partial()
    )
    second.receiver.attach_link(up, first.name, up.fail)
    first.sender.attach_link(down, second.name, welcome, down.fail)
    first.down = down
    return down, up


def part(first: Relay, second: Relay) -> None:
    first.sender.detach_link()
    second.receiver.detach_link()


def run(relays: list[Relay], links: list[Link], until: Callable[[], bool] = lambda: False) -> None:
    """Move everything until nothing moves, or until something is so."""
    quiet = 0
    while quiet < 3 and not until():
        quiet += 1
        for relay in relays:
            relay.turn()
        for link in links:
            if link.frames and not link.stopped:
                quiet = 0
                link.move()


def chunks_here(relay: Relay) -> int:
    return 0 if relay.receiver.incoming is None else relay.receiver.incoming.num_have


def test_the_pace_of_a_version_is_told_each_minute_in_which_something_came() -> None:
    a, b = Relay("a"), Relay("b")
    links = [*join(a, b)]
    assert b.receiver.report_pace(SLOW_S) is None  # nothing is on its way
    a.publish(0)
    run([a, b], links, lambda: chunks_here(b) == 2)
    assert b.receiver.report_pace(SLOW_S - 1) == SLOW_S and not b.troubles()
    assert b.receiver.report_pace(SLOW_S) == 2 * SLOW_S
    assert b.receiver.report_pace(2 * SLOW_S) == 3 * SLOW_S
    (slow,) = [report for report in b.reports if isinstance(report, reports.Trouble)]
    left = SIZE * (CHUNKS - 2) // CHUNKS
    assert (slow.kind, slow.pace) == ("slow", reports.TransferPace(2 * CHUNK, SLOW_S, left))
    run([a, b], links)
    assert b.holds(0) and b.receiver.report_pace(3 * SLOW_S) is None


def test_a_chunk_goes_on_before_the_next_one_is_here() -> None:
    a, b, c = Relay("a"), Relay("b"), Relay("c")
    links = [*join(a, b), *join(b, c)]
    a.publish(0)
    run([a, b, c], links, lambda: chunks_here(c) == 2)
    assert chunks_here(b) < CHUNKS - 2
    run([a, b, c], links)
    assert c.holds(0)


def test_without_a_free_slot_the_version_is_owed_and_the_newest_is_sent_when_there_is_one() -> None:
    a, b = Relay("a"), Relay("b", grants=False)
    links = [*join(a, b)]
    for version in (0, 1, 2):
        a.publish(version)
        run([a, b], links)
    assert [type(r) for r in b.reports] == [reports.SlotWanted]  # asked once
    assert a.sender.current is not None and not a.sender.current.wanted
    b.grants = True
    run([a, b], links)
    assert b.received() == [2]


def test_a_dead_relay_is_spliced_out_and_only_what_lacks_is_sent() -> None:
    a, b, c = Relay("a"), Relay("b"), Relay("c")
    links = [*join(a, b), *join(b, c)]
    a.publish(0)
    run([a, b, c], links, lambda: chunks_here(c) == 3)
    part(b, c)
    part(a, b)
    down, up = join(a, c)
    sent = []
    down.spoil = lambda header, body: (sent.append(header.position), body)[1]
    run([a, c], [down, up])
    assert sent == list(range(3, CHUNKS))
    assert c.holds(0)
    [have] = [message.have for message in up.said if isinstance(message, wire.Want)]
    assert list(np.unpackbits(np.frombuffer(have, np.uint8))) == [1, 1, 1, 0, 0, 0, 0, 0]


def test_a_version_that_died_with_its_publisher_gives_its_slot_to_the_next() -> None:
    a, b, c = Relay("a"), Relay("b"), Relay("c")
    links = [*join(a, b), *join(b, c)]
    a.publish(0)
    run([a, b, c], links, lambda: chunks_here(c) == 3)
    part(a, b)
    run([b, c], links[2:])
    assert not b.holds(0) and chunks_here(c) >= 3
    master = Relay("d")
    links[:2] = join(master, b)
    master.publish(1)
    run([master, b, c], links)
    assert b.received() == c.received() == [1]
    for relay in (b, c):
        assert sum(isinstance(relay.slots.get_state(i), WritingSlot) for i in range(SLOTS)) == 0


@pytest.mark.parametrize("hold", [FrameKind.CHUNK, None])
def test_a_slot_is_not_reused_under_chunks_that_go_or_went_out(hold: FrameKind | None) -> None:
    a, b, c = Relay("a"), Relay("b"), Relay("c")
    links = [*join(a, b), *join(b, c)]
    links[2].hold = hold
    a.publish(0)
    run([a, b, c], links, lambda: chunks_here(b) == 3)
    part(a, b)
    master = Relay("d")
    links[:2] = join(master, b)
    master.publish(1)
    run([master, b], links[:2])
    assert "evicted while it was being sent" in links[2].failed
    part(b, c)
    links[2:] = join(b, c)
    run([master, b, c], links)
    assert c.received() == [1] and not c.troubles()


def test_a_publisher_does_not_wait_for_the_chain_that_is_over() -> None:
    a, b, c = Relay("a"), Relay("b"), Relay("c")
    links = [*join(a, b), *join(b, c)]
    a.publish(0)
    run([a, b, c], links, lambda: chunks_here(c) == 3)
    b.publish(1)  # a is silent, but its connection is still there
    assert "version 1 was published here" in links[1].failed
    assert b.receiver.incoming is None
    part(a, b)
    run([b, c], links[2:])
    assert c.received() == [1]


def test_a_damaged_chunk_is_asked_for_again_and_never_forwarded() -> None:
    a, b, c = Relay("a"), Relay("b"), Relay("c")
    links = [*join(a, b), *join(b, c)]
    damage = [2, 2, 5]

    def spoil(header: FrameHeader, body: bytes) -> bytes:
        if header.position in damage:
            damage.remove(header.position)
            return body[:-1] + bytes([body[-1] ^ 1])
        return body

    links[0].spoil = spoil
    a.publish(0)
    run([a, b, c], links)
    assert b.holds(0) and c.holds(0)
    assert b.troubles() == [("damaged-chunk", 0)] * 3
    assert c.troubles() == []


def test_a_chunk_that_is_damaged_again_and_again_ends_the_connection() -> None:
    a, b = Relay("a"), Relay("b")
    links = [*join(a, b)]
    links[0].spoil = lambda header, body: bytes(len(body)) if header.position == 4 else body
    a.publish(0)
    with pytest.raises(BadBytes, match="damaged-chunk"):
        run([a, b], links)
    assert b.troubles() == [("damaged-chunk", 0)] * REFUSALS_MAX
    part(a, b)
    run([a, b], [*join(a, b)])  # over another path it goes well
    assert b.holds(0)


def test_chunks_nobody_asked_for_end_the_connection() -> None:
    a, b = Relay("a"), Relay("b")
    links = [*join(a, b)]
    a.publish(0)
    run([a, b], links, lambda: chunks_here(b) == 3)
    for header in (
        FrameHeader(FrameKind.CHUNK, CHUNK, 0, 0, 0),  # proved already
        FrameHeader(FrameKind.CHUNK, CHUNK, CHUNKS, 0, 0),
        FrameHeader(FrameKind.CHUNK, CHUNK, 5, 9, 0),
        FrameHeader(FrameKind.CHUNK, CHUNK - 1, 5, 0, 0),
    ):
        with pytest.raises(BadBytes, match="unasked-chunk"):
            b.receiver.get_buffer(header)
    run([a, b], links)
    assert b.holds(0)


def test_wrong_answers_end_the_connection() -> None:
    a, b = Relay("a"), Relay("b")
    links = [*join(a, b)]
    a.publish(0)
    run([a, b], links, lambda: chunks_here(b) == 3)
    for message, reason in (
        (wire.Resend(version=0, position=CHUNKS), "bad-again"),
        (wire.Want(offer=1, have=b"", from_block=None), "bad-have"),
        (wire.PeerRefused(reason="?"), "second-welcome"),
    ):
        with pytest.raises(BadBytes, match=reason):
            a.sender.handle_message(message)
    with pytest.raises(BadBytes, match="second-hello"):
        b.receiver.handle_message(
            wire.ChainHello(run="r", name="a", incarnation=1, chain=1, nonce=bytes(16))
        )
    run([a, b], links)
    assert b.holds(0)


def test_a_wrong_digest_is_declined_and_the_slot_given_back() -> None:
    a, b = Relay("a"), Relay("b")
    links = [*join(a, b)]
    a.publish(0, digest="f" * 32)
    run([a, b], links)
    assert b.received() == [] and b.troubles() == [("wrong-digest", 0)]
    assert a.troubles() == [("declined", 0)]
    assert all(not isinstance(b.slots.get_state(i), WritingSlot) for i in range(SLOTS))
    a.publish(1)
    run([a, b], links)
    assert b.received() == [1]


def test_a_version_that_does_not_fit_is_declined() -> None:
    a, b = Relay("a"), Relay("b")
    b.memory = [bytearray(SIZE - 1) for _ in range(SLOTS)]
    links = [*join(a, b)]
    a.publish(0)
    run([a, b], links)
    assert b.troubles() == [("denied", 0)] and a.troubles() == [("declined", 0)]
    assert b.slots.grant_slot("plane") is not None


# --- deltas -----------------------------------------------------------------------------------


def settle(relays: list[Relay], links: list[Link], done: Callable[[], bool]) -> None:
    """Run until something is so, and until no thread encodes any more."""
    for _ in range(20):
        run(relays, links)
        encoders = [t for t in threading.enumerate() if t.name.startswith("delta-")]
        for thread in encoders:
            thread.join()
        if done() and not encoders:
            return
    raise AssertionError([relay.reports for relay in relays])


def close_to(version: int) -> np.ndarray:
    data = content(version).copy()
    data[::997] ^= 1
    return data


def kinds_of(link: Link) -> list[FrameKind]:
    seen: list[FrameKind] = []
    link.spoil = lambda header, body: (seen.append(header.kind), body)[1]
    return seen


def test_a_delta_is_encoded_once_and_goes_down_the_chain() -> None:
    a, b, c = (Relay(name, delta_bytes=1 << 20) for name in "abc")
    links = [*join(a, b), *join(b, c)]
    a.publish(0)
    settle([a, b, c], links, lambda: c.holds(0))
    first, second = kinds_of(links[0]), kinds_of(links[2])
    a.publish(1, close_to(0))
    settle([a, b, c], links, lambda: c.holds(1))
    assert set(first) == set(second) == {FrameKind.BLOCK}
    assert b.received() == c.received() == [0, 1]
    assert b.table.try_forget(0) and a.table.try_forget(0)  # no base stays pinned


def test_a_relay_without_the_base_gets_chunks_while_its_predecessor_gets_a_delta() -> None:
    a, b, c = (Relay(name, delta_bytes=1 << 20) for name in "abc")
    c.grants = False
    links = [*join(a, b), *join(b, c)]
    a.publish(0)
    settle([a, b, c], links, lambda: b.holds(0))
    first, second = kinds_of(links[0]), kinds_of(links[2])
    a.publish(1, close_to(0))
    settle([a, b, c], links, lambda: b.holds(1))
    c.grants = True
    settle([a, b, c], links, lambda: c.holds(1))
    assert set(first) == {FrameKind.BLOCK} and set(second) == {FrameKind.CHUNK}


def test_a_delta_that_does_not_pay_is_not_sent() -> None:
    a, b = (Relay(name, delta_bytes=1 << 20) for name in "ab")
    links = [*join(a, b)]
    a.publish(0)
    settle([a, b], links, lambda: b.holds(0))
    seen = kinds_of(links[0])
    a.publish(1)  # nothing in common with version 0
    settle([a, b], links, lambda: b.holds(1))
    assert set(seen) == {FrameKind.CHUNK} and not b.troubles()


def test_chunks_that_a_delta_leaves_wrong_are_sent_in_full() -> None:
    a, b = (Relay(name, delta_bytes=1 << 20) for name in "ab")
    links = [*join(a, b)]
    a.publish(0)
    settle([a, b], links, lambda: b.holds(0))
    base = b.table.get(0)
    assert base is not None
    b.memory[base.slot][3 * CHUNK] ^= 1  # a cosmic ray in the receiver's base
    positions: list[tuple[FrameKind, int]] = []
    links[0].spoil = lambda header, body: (positions.append((header.kind, header.position)), body)[
        1
    ]
    a.publish(1, close_to(0))
    settle([a, b], links, lambda: b.received() == [0, 1])
    assert positions == [(FrameKind.BLOCK, 0), (FrameKind.CHUNK, 3)]
    assert b.troubles() == [("wrong-delta", 1)]
    assert b.holds(1)


@pytest.mark.parametrize("damages", [1, REFUSALS_MAX])
def test_a_damaged_block_is_sent_again(damages: int) -> None:
    a, b = (Relay(name, delta_bytes=1 << 20) for name in "ab")
    links = [*join(a, b)]
    a.publish(0)
    settle([a, b], links, lambda: b.holds(0))
    left = [damages]

    def spoil(header: FrameHeader, body: bytes) -> bytes:
        left[0] -= 1
        return bytes(len(body)) if left[0] >= 0 else body

    links[0].spoil = spoil
    a.publish(1, close_to(0))
    if damages == REFUSALS_MAX:
        with pytest.raises(BadBytes, match="damaged-block"):
            settle([a, b], links, lambda: b.holds(1))
        part(a, b)
        links = [*join(a, b)]
    settle([a, b], links, lambda: b.holds(1))
    assert b.troubles() == [("damaged-block", 1)] * damages


def test_a_delta_cut_short_is_finished_in_chunks() -> None:
    a, b = (Relay(name, delta_bytes=1 << 20) for name in "ab")
    links = [*join(a, b)]
    a.publish(0)
    settle([a, b], links, lambda: b.holds(0))
    links[0].hold = FrameKind.BLOCK
    a.publish(1, close_to(0))
    settle([a, b], links, lambda: links[0].stopped)
    part(a, b)
    links = [*join(a, b)]
    seen = kinds_of(links[0])
    settle([a, b], links, lambda: b.holds(1))
    assert set(seen) == {FrameKind.CHUNK}
    assert b.table.try_forget(0)


# --- everything at once -----------------------------------------------------------------------


class Chain:
    """Relays in a row under random use: published to, moved, cut, restarted, starved of slots."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.delta_bytes = self.random.choice([0, 0, 600, 1 << 20])
        self.relays = [self.fresh(i) for i in range(self.random.randint(2, 5))]
        self.hops: dict[int, tuple[Link, Link]] = {}  #: by index of the predecessor
        self.version = -1
        self.leases: list[tuple[Relay, int]] = []
        self.damage = 0.0

    def fresh(self, index: int) -> Relay:
        return Relay(f"relay-{index}", delta_bytes=self.delta_bytes)

    def connect(self, index: int) -> None:
        down, up = join(self.relays[index], self.relays[index + 1])
        down.spoil = self.spoil
        self.hops[index] = down, up

    def cut(self, index: int) -> None:
        if self.hops.pop(index, None) is not None:
            part(self.relays[index], self.relays[index + 1])

    def spoil(self, header: FrameHeader, body: bytes) -> bytes:
        if body and self.random.random() < self.damage:
            at = self.random.randrange(len(body))
            return body[:at] + bytes([body[at] ^ 0xFF]) + body[at + 1 :]
        return body

    def publish(self) -> None:
        head = self.relays[0]
        grant = head.slots.grant_slot("trainer")
        if grant is None:
            return  # skipped: every slot is leased or being sent
        head.slots.abandon_slot("trainer")
        self.version += 1
        near = self.random.random() < 0.6 and self.version > 0
        head.publish(self.version, changed(self.version) if near else None)

    def move(self, index: int) -> None:
        down, up = self.hops[index]
        link = self.random.choice([down, up])
        if down.failed:
            return self.cut(index)
        try:
            if link.frames:
                link.move()
        except BadBytes:
            self.cut(index)

    def restart(self, index: int) -> None:
        """A relay dies and comes back with nothing; the first one is the trainer's."""
        for hop in (index - 1, index):
            self.cut(hop)
        self.leases = [(r, lease) for r, lease in self.leases if r is not self.relays[index]]
        self.relays[index] = self.fresh(index)

    def splice(self, index: int) -> None:
        """A relay is taken out of the row for good."""
        for hop in range(index - 1, len(self.relays)):
            self.cut(hop)
        relay = self.relays.pop(index)
        self.leases = [(r, lease) for r, lease in self.leases if r is not relay]

    def lease(self) -> None:
        relay = self.random.choice(self.relays)
        lease = relay.slots.lease_version(0, "reader", exact=False)
        if isinstance(lease, ReadLease):
            self.leases.append((relay, lease.lease_id))

    def step(self) -> None:
        draw = self.random.random()
        hop = self.random.randrange(len(self.relays) - 1)
        if draw < 0.01:
            self.publish()
        elif draw < 0.017:
            self.cut(hop)
        elif draw < 0.02:
            self.restart(hop + 1)
        elif draw < 0.021 and len(self.relays) > 2:
            self.splice(hop + 1)
        elif draw < 0.03:
            self.lease()
        elif draw < 0.04 and self.leases:
            relay, lease_id = self.leases.pop()
            relay.slots.release(lease_id)
        elif draw < 0.045:
            self.relays[hop + 1].grants = not self.relays[hop + 1].grants
        elif draw < 0.05:
            self.damage = self.random.choice([0.0, 0.02, 0.2])
        elif draw < 0.4:
            self.random.choice(self.relays).turn()
        elif hop in self.hops:
            self.move(hop)
        else:
            self.connect(hop)

    def heal(self) -> None:
        """No more faults: everything that is owed must arrive."""
        self.damage = 0.0
        for relay, lease_id in self.leases:
            relay.slots.release(lease_id)
        for relay in self.relays:
            relay.grants = True
        self.publish()
        for index in range(len(self.relays) - 1):
            if index in self.hops and self.hops[index][0].failed:
                self.cut(index)
            if index not in self.hops:
                self.connect(index)
        links = [link for pair in self.hops.values() for link in pair]
        settle(self.relays, links, lambda: all(r.holds(self.version) for r in self.relays))


def changed(version: int) -> np.ndarray:
    """A version that differs little from all others of its kind."""
    data = content(0).copy()
    data[version % 97 :: 997] ^= version & 0xFF
    return data


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_no_wrong_version_is_held_and_the_newest_arrives(seed: int) -> None:
    chain = Chain(seed)
    for _ in range(1500):
        chain.step()
        for relay in chain.relays:
            for version in relay.slots.versions_held:
                assert relay.table.get(version) is None or relay.holds(version), (seed, version)
    chain.heal()
    for relay in chain.relays:
        writing = [relay.slots.get_state(i) for i in range(SLOTS)]
        assert not any(isinstance(state, WritingSlot) for state in writing), (seed, writing)
        assert all(relay.table.try_forget(v) for v in relay.slots.versions_held), seed


def test_a_fetch_gets_a_chunk_now_and_then_while_the_chain_sends() -> None:
    relay, now, busy = Relay("a"), [0.0], [False]
    relay.publish(1)
    link = Link(wire.holder_decoder, None)
    holding = FetchHandler(relay.table, link, 1, lambda: busy[0], lambda: now[0])
    holding.handle_message(wire.Want(offer=1, have=pack_have(bytearray(CHUNKS)), from_block=None))
    link.frames.clear()

    def sent() -> list[int]:
        holding.push_next()
        return [link.frames.popleft()[0].position] if link.frames else []

    assert sent() == [0]
    busy[0] = True
    assert sent() == [] and holding.get_due_time() == TRICKLE_S
    now[0] = TRICKLE_S
    assert sent() == [1] and sent() == []
    busy[0] = False
    assert sent() == [2] and sent() == [3]
