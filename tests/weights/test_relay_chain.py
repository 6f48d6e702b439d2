"""Chains of real relay processes over loopback: what dies, slows down or damages bytes on the way.

A gate stands in for the network between two relays: it lets a number of bytes through and then
holds, so that "in the middle of a transfer" is a place and not a moment.
"""

import socket
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from laminar.weights.chain.core import PlaneOptions
from laminar.weights.chain.reports import NeighbourUp, SlotReturned, SlotWanted, Trouble
from tools.bench.weights.relay_process import RelayProcess, digest_of

pytestmark = pytest.mark.process

MB = 1 << 20
SIZE, CHUNK = 8 * MB, MB // 2
WAIT_S = 60.0


def random_fill(version: int, view: np.ndarray) -> None:
    words = view.view(np.uint64)
    words[:] = np.random.default_rng(version).integers(0, 1 << 63, words.size, dtype=np.uint64)


def sparse_fill(version: int, view: np.ndarray) -> None:
    """Versions that differ in one element of a thousand, by one unit in the last place."""
    random_fill(0, view)
    if version:
        view.view(np.uint16)[version::1000] += 1


class Gate:
    """Passes bytes from whoever connects on to a relay, and back."""

    def __init__(self, target: RelayProcess) -> None:
        self.target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host, self.port = self._listener.getsockname()
        self._socks: list[socket.socket] = []
        self._lock = threading.Condition()
        self._allowed: float = float("inf")  #: bytes downstream that may still pass
        self._passed = 0
        self._flips: list[int] = []  #: bytes downstream to damage, by position
        threading.Thread(target=self._serve, daemon=True).start()

    def hold_after(self, nbytes: int) -> None:
        with self._lock:
            self._allowed = nbytes

    def wait_held(self) -> None:
        with self._lock:
            assert self._lock.wait_for(lambda: self._allowed == 0, WAIT_S)

    def release(self) -> None:
        with self._lock:
            self._allowed = float("inf")
            self._lock.notify_all()

    def damage(self, *positions: int) -> None:
        self._flips = sorted(positions)

    def cut(self) -> None:
        """Nothing passes any more, in either direction, not even what is on the way."""
        self._listener.close()
        for sock in self._socks:
            try:
                sock.shutdown(socket.SHUT_RDWR)  # a close alone waits for those who use it
            except OSError:
                pass
        self.release()

    def _serve(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            outer = socket.create_connection((self.target.host, self.target.port))
            self._socks += [inner, outer]
            for source, sink, limited in ((inner, outer, True), (outer, inner, False)):
                arguments = (source, sink, limited)
                threading.Thread(target=self._pass_on, args=arguments, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, limited: bool) -> None:
        data = bytearray(65536)
        try:
            while count := source.recv_into(data):
                view = memoryview(data)[:count]
                while limited and len(view):
                    allowed = self._take(len(view))
                    self._spoil(view[:allowed])
                    sink.sendall(view[:allowed])
                    view = view[allowed:]
                sink.sendall(view)
        except OSError:
            pass
        for sock in (source, sink):
            sock.close()

    def _take(self, wanted: int) -> int:
        """How many bytes may pass now; waits until it is at least one."""
        with self._lock:
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: self._allowed > 0, WAIT_S)
            count = int(min(wanted, self._allowed))
            self._allowed -= count
            self._lock.notify_all()
            return count

    def _spoil(self, view: memoryview) -> None:
        start, self._passed = self._passed, self._passed + len(view)
        while self._flips and self._flips[0] < self._passed:
            view[self._flips.pop(0) - start] ^= 1


class Cluster:
    """Relays and gates that are closed at the end of a test."""

    def __init__(self) -> None:
        self.relays: list[RelayProcess] = []
        self.gates: list[Gate] = []
        self.fill = random_fill
        self.options = PlaneOptions()

    def relay(self, name: str, **changes: object) -> RelayProcess:
        relay = RelayProcess(name, SIZE, self.fill, options=self.options, **changes)
        self.relays.append(relay)
        return relay

    def chain(self, names: str) -> list[RelayProcess]:
        relays = [self.relay(name) for name in names]
        for first, second in pairwise(relays):
            first.set_successor(1, second)
        return relays

    def gate(self, first: RelayProcess, second: RelayProcess, chain: int = 2) -> Gate:
        """Put a gate between two relays."""
        gate = Gate(second)
        self.gates.append(gate)
        first.connect_to(chain, second.name, gate.host, gate.port)
        second.wait_for(lambda r: isinstance(r, NeighbourUp))
        return gate

    def close(self) -> None:
        for gate in self.gates:
            gate.cut()
        for relay in self.relays:
            relay.close()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.close()


def check(relay: RelayProcess, version: int, digest: str) -> None:
    """The relay says that it holds the version, and its bytes are right."""
    report = relay.received(version, WAIT_S).report
    assert report.manifest.digest == digest
    assert digest_of(relay.bytes_of(report.slot)) == digest


def bytes_received(relay: RelayProcess, version: int) -> int:
    """The bytes of chunks and blocks from which the relay made the version."""
    found: int = relay.received(version, WAIT_S).report.num_bytes
    return found


def troubles(relay: RelayProcess) -> list[str]:
    relay.held()  # what it said before this
    return [h.report.kind for h in relay.happened if isinstance(h.report, Trouble)]


def test_every_relay_gets_every_version_byte_for_byte(cluster: Cluster) -> None:
    head, *others = cluster.chain("abcd")
    for version in range(5):  # more than there are slots
        digest, _ = head.publish(version, CHUNK)
        for relay in others:
            check(relay, version, digest)
    for relay in others:
        assert troubles(relay) == []
        assert relay.held() == (2, 3, 4)


def test_kill_9_in_the_middle_of_a_transfer_and_splice(cluster: Cluster) -> None:
    a, b, c, d = (cluster.relay(name) for name in "abcd")
    a.set_successor(1, b)
    gate = cluster.gate(b, c, 1)
    c.set_successor(1, d)
    gate.hold_after(SIZE // 2)
    digest, _ = a.publish(1, CHUNK)
    gate.wait_held()
    b.kill()
    a.set_successor(2, c)
    for relay in (c, d):
        check(relay, 1, digest)
    # What c had is not sent again, but for the chunk that was cut in two; d noticed nothing.
    assert bytes_received(c, 1) < SIZE + 2 * CHUNK
    assert bytes_received(d, 1) < SIZE + CHUNK
    assert troubles(c) == troubles(d) == []
    back = cluster.relay("b", incarnation=2)
    d.set_successor(3, back)  # it rejoins at the end, while nothing is being published
    check(back, 1, digest)
    digest, _ = a.publish(2, CHUNK)
    for relay in (c, d, back):
        check(relay, 2, digest)


def test_the_death_of_the_publishers_relay_leaves_the_rest_working(cluster: Cluster) -> None:
    a, b, c = (cluster.relay(name) for name in "abc")
    gate = cluster.gate(a, b, 1)
    b.set_successor(1, c)
    gate.hold_after(SIZE // 2)
    a.publish(1, CHUNK)
    gate.wait_held()
    a.kill()
    gate.cut()
    digest, _ = b.publish(2, CHUNK)  # the trainer publishes on another machine
    check(c, 2, digest)
    b.wait_for(lambda r: isinstance(r, SlotReturned))  # that of version 1


def test_damage_on_the_way_is_found_at_the_next_relay(cluster: Cluster) -> None:
    a, b, c = (cluster.relay(name) for name in "abc")
    gate = cluster.gate(a, b, 1)
    b.set_successor(1, c)
    gate.damage(2 * CHUNK, 5 * CHUNK, 12 * CHUNK)
    digest, _ = a.publish(1, CHUNK)
    for relay in (b, c):
        check(relay, 1, digest)
    assert troubles(b) == ["damaged-chunk"] * 3
    assert troubles(c) == []


def test_a_slow_successor_does_not_slow_those_before_it(cluster: Cluster) -> None:
    a, b, c, d = (cluster.relay(name) for name in "abcd")
    a.set_successor(1, b)
    b.set_successor(1, c)
    gate = cluster.gate(c, d, 1)
    gate.hold_after(SIZE // 4)
    for version in range(1, 6):
        digest, _ = a.publish(version, CHUNK)
        for relay in (b, c):
            check(relay, version, digest)
    assert 1 in c.held()  # pinned: it is still being sent
    gate.release()
    check(d, 5, digest)
    received = [h.report for h in d.happened if not isinstance(h.report, (NeighbourUp, SlotWanted))]
    assert [r.manifest.version for r in received] == [1, 5]


def test_versions_published_during_a_broadcast(cluster: Cluster) -> None:
    a, b, c = (cluster.relay(name) for name in "abc")
    gate = cluster.gate(a, b, 1)
    b.set_successor(1, c)
    gate.hold_after(SIZE // 2)
    a.publish(1, CHUNK)
    gate.wait_held()
    for version in (2, 3, 4):
        digest, _ = a.publish(version, CHUNK)  # never waits for the chain
    gate.release()
    for relay in (b, c):
        check(relay, 4, digest)
        received = {h.report.manifest.version for h in relay.happened if "manifest" in repr(h)}
        assert received == {1, 4}


def test_deltas_go_down_the_chain_and_fall_back_to_chunks(cluster: Cluster) -> None:
    cluster.fill, cluster.options = sparse_fill, PlaneOptions(delta_bytes_max=SIZE)
    a, b, c = cluster.chain("abc")
    digest, _ = a.publish(0, CHUNK)
    for relay in (b, c):
        check(relay, 0, digest)
    digest, _ = a.publish(1, CHUNK)
    for relay in (b, c):
        check(relay, 1, digest)
        assert bytes_received(relay, 1) < SIZE * 0.1  # after a whole one hardly any
        assert troubles(relay) == []
    slot = b.received(1).report.slot
    b.bytes_of(slot)[3 * CHUNK] ^= 1  # the base goes bad in b's memory, and only there
    digest, _ = a.publish(2, CHUNK)
    for relay in (b, c):
        check(relay, 2, digest)
    assert troubles(b) == ["wrong-delta"] and troubles(c) == []
    assert bytes_received(b, 2) < SIZE * 0.1 + 2 * CHUNK  # one chunk, not the version
