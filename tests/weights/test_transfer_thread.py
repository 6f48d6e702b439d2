"""A plane and what connects to its port: strangers, wrong relays, hostile bytes."""

import queue
import select
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from laminar.weights.arena.region import Region
from laminar.weights.chain import downstream, reports, upstream, wire
from laminar.weights.chain.core import PlaneError, PlaneOptions
from laminar.weights.chain.handshake import PREDECESSOR, SUCCESSOR, compute_proof, verify_proof
from laminar.weights.chain.tcp import _SO_MAX_PACING_RATE, TcpNetwork
from laminar.weights.chain.transfer_thread import Plane
from laminar.weights.chain.transport import FrameHandler
from laminar.weights.chain.upstream import RelayIdentity
from laminar.weights.chain.wire import FrameHeader, FrameKind
from laminar.weights.version.table import VersionTable
from tools.bench.weights.relay_process import describe
from tools.kit.greetings import KEY, NONCE, WAIT_S, ended, greet, hello, received

DIGEST = "0" * 32


def no_slots(slot: int) -> Region:
    raise AssertionError(slot)


def make_plane(notify: Callable[[reports.Report], None]) -> Plane:
    table = VersionTable(threading.Lock())
    return Plane(RelayIdentity("run", "relay-0", 1, KEY), no_slots, notify, PlaneOptions(), table)


class Probe:
    """A plane in this process, and its reports."""

    def __init__(self, name: str, run: str = "run", key: bytes = KEY) -> None:
        self.reports: queue.SimpleQueue[reports.Report] = queue.SimpleQueue()
        self.slots = slots = [bytearray(4096) for _ in range(3)]
        self.plane = Plane(
            RelayIdentity(run, name, 1, key),
            lambda slot: Region(memoryview(slots[slot])),
            self.reports.put,
            PlaneOptions(),
            VersionTable(threading.Lock()),
        )
        self.name, self.closed = name, False
        self.host, self.port = self.plane.start("127.0.0.1")

    def wait(self, wanted: type[reports.Report] | Callable[[reports.Report], bool]) -> Any:
        """The next report of this kind; others are passed over, but a fault of the plane."""
        while True:
            report = self.reports.get(timeout=WAIT_S)
            assert not isinstance(report, reports.PlaneFailed), report
            if isinstance(report, wanted) if isinstance(wanted, type) else wanted(report):
                return report

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.plane.close()

    def feed(self, other: "Probe", chain: int = 1) -> None:
        self.plane.set_successor(chain, (other.name, other.host, other.port))


@pytest.fixture
def probe() -> Iterator[Callable[..., Probe]]:
    made: list[Probe] = []

    def make(*args: Any) -> Probe:
        made.append(Probe(*args))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert not any(isinstance(r, reports.PlaneFailed) for r in drained(each))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why relays have ended connections for what came over them, in order."""
    reasons: list[str] = []

    def watch(side: Any, name: str) -> None:
        end = getattr(side, name)

        def record(self: Any, *args: Any) -> None:
            reasons.extend(error.reason for error in args if isinstance(error, wire.BadBytes))
            end(self, *args)

        monkeypatch.setattr(side, name, record)

    watch(upstream.Upstream, "_end_connection")
    watch(downstream.Downstream, "end_connection")
    return reasons


def drained(each: Probe) -> list[reports.Report]:
    found = []
    while not each.reports.empty():
        found.append(each.reports.get())
    return found


def framed(header: FrameHeader, body: bytes = b"") -> bytes:
    return wire.pack_header(header) + body


STRANGERS = [
    (b"GET / HTTP/1.1\r\nHost: relay-1:5555\r\n\r\n", "not-a-relay"),
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), "not-a-relay"),
    (framed(FrameHeader(FrameKind.MESSAGE, wire.HANDSHAKE_BYTES_MAX + 1, 0, 0, 0)), "bad-length"),
    (framed(FrameHeader(FrameKind.MESSAGE, 3, 0, 0, 7), b"abc"), "damaged-message"),
    (framed(FrameHeader(FrameKind.CHUNK, 8, 0, 0, 0), bytes(8)), "no-hello"),
    (wire.encode(wire.Proof(proof=bytes(32))), "no-hello"),
    (wire.encode(wire.VersionDone(version=1, digest=DIGEST)), "not-a-message"),
    (wire.encode(hello(run="another")), "other-run"),
]


@pytest.mark.parametrize(("data", "reason"), STRANGERS, ids=range(len(STRANGERS)))
def test_a_stranger_is_sent_away_and_counted(
    probe: Callable[..., Probe], data: bytes, reason: str, refused: list[str]
) -> None:
    relay = probe("relay-0")
    with socket.create_connection((relay.host, relay.port)) as sock:
        sock.sendall(data)
        said = ended(sock)
    assert refused == [reason]
    assert (b"not belong to run another" in said) == (reason == "other-run")
    told = relay.wait(reports.PeerRejected)
    assert f"refused 1 connection to 127.0.0.1:{relay.port}" in told.what


def test_a_stranger_that_says_nothing_is_sent_away(
    probe: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch, refused: list[str]
) -> None:
    monkeypatch.setattr(upstream, "HANDSHAKE_TIMEOUT_S", 0.0)
    relay = probe("relay-0")
    with socket.create_connection((relay.host, relay.port)) as sock:
        assert ended(sock) == b""
    assert refused == ["no-hello"]


def test_strangers_are_few(probe: Callable[..., Probe]) -> None:
    relay = probe("relay-0")
    socks = [socket.create_connection((relay.host, relay.port)) for _ in range(12)]
    refused = [sock for sock in socks[upstream.PENDING_PEERS_MAX :] if ended(sock) == b""]
    assert len(refused) == 4
    relay.wait(reports.PeerRejected)
    assert drained(relay) == []  # strangers cannot fill the log
    for sock in socks:
        sock.close()
    probe("relay-1").feed(relay)
    relay.wait(reports.NeighbourUp)


def proof_with_another_key(challenge: wire.Challenge) -> bytes:
    return compute_proof(b"another key", PREDECESSOR, hello(), challenge)


def proof_of_the_other_side(challenge: wire.Challenge) -> bytes:
    """What the relay itself has just proved, sent back to it."""
    return challenge.proof


@pytest.mark.parametrize("prove", [proof_with_another_key, proof_of_the_other_side])
def test_who_cannot_prove_that_it_is_of_the_run_is_refused(
    probe: Callable[..., Probe], prove: Callable[[wire.Challenge], bytes], refused: list[str]
) -> None:
    relay = probe("relay-0")
    with socket.create_connection((relay.host, relay.port)) as sock:
        sock.sendall(wire.encode(hello()))
        challenge = received(sock, wire.successor_decoder)
        assert verify_proof(KEY, SUCCESSOR, hello(), challenge, challenge.proof)
        sock.sendall(wire.encode(wire.Proof(proof=prove(challenge))))
        assert b"relay-9 does not have the secret of run run" in ended(sock)
    assert refused == ["other-secret"]
    relay.wait(reports.PeerRejected)
    assert drained(relay) == []


def test_a_greeting_that_was_overheard_is_refused(
    probe: Callable[..., Probe], refused: list[str]
) -> None:
    """All that a predecessor said to this relay, said to it once more."""
    relay = probe("relay-0")
    with socket.create_connection((relay.host, relay.port)) as sock:
        said = greet(sock)
        assert relay.wait(reports.NeighbourUp).name == "relay-9"
        with socket.create_connection((relay.host, relay.port)) as again:
            again.sendall(said)
            assert b"does not have the secret" in ended(again)
        assert not any(isinstance(r, reports.NeighbourDown) for r in drained(relay))
    assert refused == ["other-secret"]


def test_who_says_hello_and_then_anything_but_its_proof_is_sent_away(
    probe: Callable[..., Probe], refused: list[str]
) -> None:
    relay = probe("relay-0")
    with socket.create_connection((relay.host, relay.port)) as sock:
        sock.sendall(2 * wire.encode(hello()))
        ended(sock)
    assert refused == ["no-proof"]


def test_relays_with_other_secrets_say_so_and_are_no_neighbours(
    probe: Callable[..., Probe],
) -> None:
    relay, other = probe("relay-0"), probe("relay-1", "run", b"another key")
    relay.feed(other)
    trouble = relay.wait(reports.Trouble)
    assert (trouble.kind, trouble.peer) == ("other-secret", "relay-1")
    assert "the peer does not have the secret of run run" in trouble.detail
    assert {type(report) for report in drained(other)} <= {reports.PeerRejected}


def test_a_successor_with_the_proof_of_another_greeting_is_not_fed(
    probe: Callable[..., Probe],
) -> None:
    """It asks the true successor with a nonce of its own, and tells what that answers."""
    relay, true = probe("relay-0"), probe("relay-1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay.plane.set_successor(1, (true.name, "127.0.0.1", server.getsockname()[1]))
        sock, _ = server.accept()
        with sock, socket.create_connection((true.host, true.port)) as asked:
            told = received(sock, wire.predecessor_decoder)
            assert told.nonce != NONCE
            again = hello(name=told.name, incarnation=told.incarnation, chain=told.chain)
            asked.sendall(wire.encode(again))
            sock.sendall(wire.encode(received(asked, wire.successor_decoder)))
            ended(sock)
    assert relay.wait(reports.Trouble).kind == "other-secret"


HOSTILE = [
    (wire.encode(hello()), "second-hello"),
    (framed(FrameHeader(FrameKind.CHUNK, 8, 0, 3, 0), bytes(8)), "unasked-chunk"),
    (framed(FrameHeader(FrameKind.CHUNK, wire.CHUNK_BYTES_MAX + 1, 0, 3, 0)), "bad-length"),
    (b"\0" * wire.HEADER_BYTES, "not-a-relay"),
    (framed(FrameHeader(FrameKind.MESSAGE, 0, 0, 0, 0)), "damaged-message"),
]


@pytest.mark.parametrize(("data", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_predecessor_that_goes_wrong_is_reported(
    probe: Callable[..., Probe], data: bytes, reason: str, refused: list[str]
) -> None:
    relay = probe("relay-0")
    with socket.create_connection((relay.host, relay.port)) as sock:
        greet(sock)
        assert isinstance(received(sock, wire.successor_decoder), wire.ChainWelcome)
        sock.sendall(data)
        ended(sock)
    assert relay.wait(reports.NeighbourUp) == reports.NeighbourUp(
        reports.Side.PREDECESSOR, "relay-9", 1
    )
    assert relay.wait(reports.Trouble).kind == reason
    down = relay.wait(reports.NeighbourDown)
    assert (down.side, down.name) == (reports.Side.PREDECESSOR, "relay-9")
    assert refused == [reason]
    probe("relay-1").feed(relay, 2)  # and it goes on with another one
    assert relay.wait(reports.NeighbourUp).name == "relay-1"


def test_a_block_that_belongs_to_nothing_is_dropped(probe: Callable[..., Probe]) -> None:
    relay = probe("relay-0")
    offer = wire.Offer(number=1, manifest=describe(1, bytes(4096), 1024), base=None)
    with socket.create_connection((relay.host, relay.port)) as sock:
        greet(sock)
        sock.sendall(framed(FrameHeader(FrameKind.BLOCK, 8, 0, 3, 0), bytes(8)))
        sock.sendall(framed(FrameHeader(FrameKind.BLOCK, 0, 0, 3, 0)) + wire.encode(offer))
        assert relay.wait(reports.SlotWanted) == reports.SlotWanted(1, 4096)


def test_the_higher_chain_wins(probe: Callable[..., Probe], refused: list[str]) -> None:
    old, new, relay = probe("relay-1"), probe("relay-2"), probe("relay-0")
    old.feed(relay, 4)
    assert relay.wait(reports.NeighbourUp).name == "relay-1"
    new.feed(relay, 5)
    assert relay.wait(reports.NeighbourDown).reason == "relay-2 took its place"
    assert relay.wait(reports.NeighbourUp).name == "relay-2"
    assert old.wait(reports.NeighbourDown).name == "relay-0"
    told = old.wait(reports.Trouble)  # it tries again, as if it had not heard
    assert (told.kind, "chain 4 has ended" in told.detail) == ("refused", True)
    assert "old-chain" in refused
    assert not any(isinstance(r, reports.NeighbourDown) for r in drained(relay))


def test_a_successor_at_another_ones_address_is_not_fed(probe: Callable[..., Probe]) -> None:
    relay, other = probe("relay-0"), probe("relay-1")
    relay.plane.set_successor(1, ("relay-7", other.host, other.port))
    trouble = relay.wait(reports.Trouble)
    assert (trouble.kind, trouble.peer) == ("other-relay", "relay-7")


def test_a_successor_that_is_not_there_is_reported_once_and_found_later(
    probe: Callable[..., Probe],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        relay = probe("relay-0")
        relay.plane.set_successor(1, ("relay-1", "127.0.0.1", port))
        assert relay.wait(reports.Trouble).kind == "unreachable"
    late = probe("relay-1")
    relay.feed(late, 2)
    assert relay.wait(lambda r: not isinstance(r, reports.Trouble)).name == "relay-1"
    relay.plane.set_successor(3, None)
    assert relay.wait(reports.NeighbourDown).side == reports.Side.SUCCESSOR
    assert late.wait(reports.NeighbourDown).name == "relay-0"


def test_a_successor_that_is_no_relay_is_reported(
    probe: Callable[..., Probe], monkeypatch: pytest.MonkeyPatch, refused: list[str]
) -> None:
    monkeypatch.setattr(downstream, "RETRY_S_MAX", 0.05)
    relay = probe("relay-0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay.plane.set_successor(1, ("relay-1", "127.0.0.1", server.getsockname()[1]))
        for answer in (
            b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n",
            wire.encode(wire.VersionDone(version=1, digest=DIGEST)),
            framed(FrameHeader(FrameKind.CHUNK, 8, 0, 0, 0), bytes(8)),
        ):
            sock, _ = server.accept()
            with sock:
                sock.sendall(answer)
                ended(sock)
        assert relay.wait(reports.Trouble).kind == "not-a-relay"
        server.accept()[0].close()  # it has counted the answer before it tried again
    assert refused == ["not-a-relay", "no-welcome", "unasked-chunk"]


def test_rate_and_congestion_control_are_set_on_both_sides_before_anything_is_sent() -> None:
    """Who connects sends what the chain brings; who accepts sends what is fetched."""
    to, by = cast(FrameHandler[wire.FromSuccessor], None), cast(Any, None)  # nothing arrives
    network = TcpNetwork(congestion="reno", rate=5_000_000)
    listener = network.listen("127.0.0.1", 0)
    connecting = network.connect(*listener.address, "127.0.0.1", to)
    select.select([listener], [], [], 10)
    accepted = listener.accept(by)
    assert accepted is not None
    for sock in (connecting.sock, accepted.sock):
        name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        rate = sock.getsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 8)
        assert name.rstrip(b"\0") == b"reno"
        assert int.from_bytes(rate, "little") == 5_000_000
    for end in (connecting, accepted, listener):
        end.close()


def test_a_mistake_of_the_user_is_one_sentence() -> None:
    plane = make_plane(print)
    with pytest.raises(PlaneError, match=r"cannot listen for weights on relay-host:0 .*numeric"):
        plane.start("relay-host")
    plane.close()
    with socket.create_server(("127.0.0.1", 0)) as server:
        plane = make_plane(print)
        with pytest.raises(PlaneError, match=r"in use.*a free port"):
            plane.start("127.0.0.1", server.getsockname()[1])
        plane.close()


def test_a_fault_of_the_plane_is_reported_and_ends_it(probe: Callable[..., Probe]) -> None:
    failed: queue.SimpleQueue[reports.Report] = queue.SimpleQueue()

    def notify(report: reports.Report) -> None:
        if not isinstance(report, reports.PlaneFailed):
            raise RuntimeError("a bug")
        failed.put(report)

    plane = make_plane(notify)
    host, port = plane.start("127.0.0.1")
    with socket.create_connection((host, port)) as sock:
        greet(sock)
        assert "a bug" in failed.get(timeout=WAIT_S).reason
        ended(sock)
    plane.close()


# --- an exact version, beside the chain -----------------------------------------------------------


def published(relay: Probe, version: int, slot: int) -> None:
    """A whole version of eight chunks."""
    relay.slots[slot][:] = bytes((version + i) % 251 for i in range(4096))
    relay.plane.publish_version(describe(version, relay.slots[slot], 512), slot)


def holder_of(relay: Probe) -> tuple[str, str, int]:
    return relay.name, relay.host, relay.port


def test_an_older_version_is_fetched_and_the_chain_goes_on(probe: Callable[..., Probe]) -> None:
    holder, other = probe("relay-0"), probe("relay-1")
    published(holder, 3, 0)
    published(holder, 7, 1)
    holder.feed(other)
    other.wait(reports.SlotWanted)
    other.plane.grant_slot(0)
    assert other.wait(reports.Received).manifest.version == 7
    other.plane.fetch(3, holder_of(holder))
    assert other.wait(reports.SlotWanted) == reports.SlotWanted(3, 4096, fetched=True)
    other.plane.fetch_into(1)
    came = other.wait(reports.Received)
    assert (came.manifest.version, came.slot, came.fetched, came.num_bytes) == (3, 1, True, 4096)
    assert other.slots[1] == holder.slots[0]
    published(holder, 8, 2)
    other.wait(reports.SlotWanted)
    other.plane.grant_slot(2)
    assert other.wait(reports.Received).manifest.version == 8


def test_a_version_that_is_not_there_is_not_fetched(probe: Callable[..., Probe]) -> None:
    holder, other = probe("relay-0"), probe("relay-1")
    published(holder, 7, 1)
    other.plane.fetch(3, holder_of(holder))
    assert "version 3 is not held here" in other.wait(reports.NotFetched).reason
    other.plane.fetch(7, ("relay-9", holder.host, holder.port))
    assert "relay-0 has the address of relay-9" in other.wait(reports.NotFetched).reason
    holder.close()
    other.plane.fetch(7, holder_of(holder))
    assert other.wait(reports.NotFetched).version == 7


def test_a_fetch_proves_that_it_is_of_the_run(probe: Callable[..., Probe]) -> None:
    holder, other = probe("relay-0"), probe("relay-1", "run", b"another key, as long as it")
    published(holder, 7, 1)
    other.plane.fetch(7, holder_of(holder))
    assert "does not have the secret" in other.wait(reports.NotFetched).reason


def test_the_slot_of_a_fetch_that_breaks_comes_back(probe: Callable[..., Probe]) -> None:
    """Its holder ends before a slot was found; another fetch is served afterwards."""
    holder, second, other = probe("relay-0"), probe("relay-2"), probe("relay-1")
    published(holder, 3, 0)
    published(second, 3, 0)
    other.plane.fetch(3, holder_of(holder))
    other.wait(reports.SlotWanted)
    holder.close()
    other.wait(reports.NotFetched)
    other.plane.fetch(3, holder_of(second))
    other.plane.fetch_into(0)
    assert other.wait(reports.SlotReturned) == reports.SlotReturned(0, fetched=True)
    other.wait(reports.SlotWanted)
    other.plane.fetch_into(0)
    assert other.wait(reports.Received).manifest.version == 3
