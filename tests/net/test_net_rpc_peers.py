"""Which peers a server's turn looks at, however many are connected: those that it is about."""

import msgspec
import pytest

from laminar.net import rpc_server
from laminar.net.calls import Reply, Request
from laminar.net.frames import Bye, Data, Hello, Refused, decode_server, encode
from laminar.net.links import Links
from laminar.net.rpc_server import RpcServer
from laminar.net.session import MS, PEERS_MAX, RESEND_MIN_NS, ServerLink
from tools.kit.secrets import KEYS

LEASE_MS = 5_000
IDLE = 500


class Wire:
    """A socket in memory: frames to hand over at the next turn, and what was sent."""

    def __init__(self):
        self.frames, self.sent = [], []

    def drain_frames(self):
        frames, self.frames = self.frames, []
        return frames

    def send(self, route, frame):
        self.sent.append((route, decode_server(frame, 1 << 20)))

    def close(self, linger_ms):
        pass


class Desk:
    """A server on such a socket, with a clock of its own and idle peers."""

    def __init__(self, monkeypatch, peers):
        self.now, self.lost, self.looks, self.handled = 0, [], [], []
        monkeypatch.setattr(rpc_server, "now_ns", lambda: self.now)
        self.server = RpcServer(
            "127.0.0.1",
            0,
            self._handle,
            keys=KEYS,
            boot_id="s",
            lease_ms=LEASE_MS,
            on_peer_lost=self.lost.append,
        )
        self.server._socket.close()
        self.wire = self.server._socket = Wire()
        for number in range(peers):
            self.hear(number, Hello(f"rollout-{number}", "rollout", f"b{number}", 0, 1, {}))
        self.turn()
        poll, iterate = ServerLink.poll, Links.__iter__
        monkeypatch.setattr(ServerLink, "poll", lambda link, now: poll(self.look(link), now))
        monkeypatch.setattr(Links, "__iter__", lambda links: map(self.look, iterate(links)))

    def _handle(self, batch):
        self.handled += [boot_id for boot_id, _, _ in batch]
        return [b"ok"] * len(batch)

    def look(self, link):
        self.looks.append(link.name)
        return link

    def hear(self, number, frame):
        self.wire.frames.append((b"r%d" % number, encode(frame)))

    def turn(self):
        self.wire.sent.clear()
        self.server._run_turn()

    def ask(self, number, seq):
        body = msgspec.msgpack.encode(Request(seq, b"question"))
        self.hear(number, Data(self.boot_of(number), seq, 0, body))

    def boot_of(self, number):
        return self.server._links.get(f"b{number}").server_boot


@pytest.fixture
def desk(monkeypatch):
    return Desk(monkeypatch, IDLE)


def test_a_request_costs_a_look_at_its_sender_and_a_turn_without_words_none(desk):
    desk.ask(7, 1)
    desk.turn()
    assert [route for route, _ in desk.wire.sent] == [b"r7"]
    assert set(desk.looks) == {"rollout-7"} and len(desk.looks) <= 2
    desk.looks.clear()
    desk.turn()
    assert desk.looks == [] and desk.wire.sent == []


def test_a_reply_that_was_lost_goes_out_again_when_its_time_has_come(desk):
    desk.ask(7, 1)
    desk.turn()
    desk.looks.clear()
    desk.now += RESEND_MIN_NS - 1
    desk.turn()
    assert desk.wire.sent == [] and desk.looks == []
    desk.now += 1
    desk.turn()
    ((route, frame),) = desk.wire.sent
    assert route == b"r7" and msgspec.msgpack.decode(frame.body, type=Reply) == Reply(1, b"ok")
    assert set(desk.looks) == {"rollout-7"}


def test_what_a_peer_asked_before_its_bye_in_the_same_turn_is_not_handled(desk):
    """It would be given something, a lease for example, that nobody ends any more."""
    desk.ask(7, 1)
    desk.hear(7, Bye())
    desk.ask(8, 1)
    desk.turn()
    assert desk.lost == ["b7"] and desk.handled == ["b8"]


def test_silence_is_looked_for_once_per_lease_and_ends_the_silent(desk):
    """One peer goes on talking; the others are given up together, each once."""
    step = LEASE_MS * MS // 4
    for seq in range(1, 5):
        desk.now += step
        desk.ask(7, seq)
        desk.turn()
    judged = [name for name in desk.looks if name != "rollout-7"]
    assert desk.lost == [] and len(judged) <= IDLE
    desk.now += step
    desk.ask(7, 5)
    desk.turn()
    assert sorted(desk.lost) == sorted(f"b{n}" for n in range(IDLE) if n != 7)


def test_ten_thousand_replicas_are_let_in_and_too_many_are_told_why(monkeypatch):
    assert PEERS_MAX > 10_000
    monkeypatch.setattr(rpc_server, "clients_allowed", lambda: IDLE)
    desk = Desk(monkeypatch, IDLE)
    desk.hear(IDLE, Hello("one-more", "rollout", "b", 0, 1, {}))
    desk.turn()
    (refused,) = (f for r, f in desk.wire.sent if r == b"r%d" % IDLE and isinstance(f, Refused))
    assert f"the server has {IDLE} clients" in refused.reason and "ulimit -n" in refused.reason


def test_a_key_is_named_once_when_its_earliest_time_has_come():
    links = Links(2)
    a, b = (ServerLink(Hello(n, "r", n, 0, 1, {}), server_boot=n, incarnation=0) for n in "ab")
    links.add(a)
    links.add(b)
    assert links.take_due(0) == [a, b]
    for key, at in (("a", 30), ("b", 20), ("a", 10), ("b", 40)):
        links.wake_at(key, at)
    assert links.take_due(9) == []
    assert links.take_due(20) == [a, b]
    assert links.take_due(50) == []  # the later times were for what has been looked at since
    links.wake_at("a", 60)
    assert links.take_due(60) == [a]


def test_a_link_is_dropped_after_the_last_frames_of_its_peer():
    links = Links(PEERS_MAX)
    link = ServerLink(Hello("a", "r", "a", 0, 1, {}), server_boot="s", incarnation=0)
    links.set_route("a", b"route")
    links.add(link)
    links.receive(link, encode(Bye()), 0)
    assert [route for route, _ in links.poll_link(link, 0)] == [b"route"]  # the welcome
    assert len(links) == 0 and links.find_link(b"route") is None
