"""The actor's line to a coordinator that dies, comes back, moves or refuses."""

import asyncio
import time
from functools import partial

import pytest
import zmq

from laminar.config import ConfigError
from laminar.net.client import STALLS_MAX, ControlClient, LinkStalled, read_address, write_address
from laminar.net.frames import Hello, decode_client
from laminar.net.session import Limits, LinkClosed, ServerLink
from laminar.net.transport import ClientSocket, ServerSocket
from tests.net.conftest import DEADLINE_S, until
from tools.kit.secrets import KEYS

HEARTBEAT_MS = 100
SMALL_BYTES = 900


def bind(port):
    """The port of a server that closed in this process is free a moment later."""
    for _ in range(400):
        try:
            return ServerSocket("127.0.0.1", port, KEYS)
        except ConfigError:
            time.sleep(0.005)
    raise AssertionError(f"port {port} stays in use")


class Coordinator:
    """A loop with a record that outlives it: (name -> events), like a log on disk."""

    def __init__(self, record, address_file, boot, port=0, refuse=""):
        self.record, self.boot, self.refuse = record, boot, refuse
        self.socket = bind(port)
        self.links, self.gauges = {}, []
        write_address(address_file, self.socket.address, boot=boot)
        self.socket.attach_loop(asyncio.get_running_loop(), self.tick)

    @property
    def port(self):
        return int(self.socket.address.rpartition(":")[2])

    def tick(self):
        now = time.monotonic_ns()
        for route, frame in self.socket.drain_frames():
            if route not in self.links:
                self.admit(route, decode_client(frame, Limits().max_frame), now)
                continue
            for seq, body in self.links[route].receive(frame, now):
                self.apply(self.links[route], seq, body)
        for route, link in self.links.items():
            for frame in link.poll(now):
                self.socket.send(route, frame)

    def admit(self, route, hello, now):
        if not isinstance(hello, Hello):
            return
        events = self.record.setdefault(hello.name, [])
        self.links[route] = link = ServerLink(
            hello, server_boot=f"{self.boot}-{len(self.links)}", incarnation=7, last_seq=len(events)
        )
        if self.refuse:
            link.refuse_client(self.refuse)
        else:
            link.send(f"run for {self.boot}".encode())

    def apply(self, link, seq, body):
        if seq == 0:
            self.gauges.append(body)
            return
        self.record[link.name].append(body)
        link.mark_processed(seq)

    def close(self):
        self.socket.close()


class Actor:
    def __init__(self, address_file, name="rollout-0", heartbeat_ms=HEARTBEAT_MS, on_body=None):
        self.commands, self.welcomes, self.refusals, self.troubles = [], [], [], []
        self.client = ControlClient(
            partial(read_address, address_file),
            name,
            "rollout",
            f"boot-of-{name}",
            {"host": "n1"},
            heartbeat_ms,
            on_body or self.commands.append,
            self.welcomes.append,
            lambda reason, again: self.refusals.append((reason, again)),
            keys=KEYS,
            on_trouble=self.troubles.append,
        )


@pytest.fixture
def address_file(tmp_path):
    return tmp_path / "coordinator.json"


async def test_two_clients_lose_nothing_when_the_server_dies_and_comes_back(address_file):
    record = {}
    server = Coordinator(record, address_file, "s1")
    actors = [Actor(address_file, f"rollout-{n}") for n in range(2)]
    sent = []
    for actor in actors:
        await actor.client.start()
    for n in range(300):
        sent.append(b"%d" % n)
        for actor in actors:
            actor.client.send(sent[-1])
        if n in (100, 200):
            await until(lambda: all(actor.client.incarnation for actor in actors))
            server.close()
            server = Coordinator(record, address_file, f"s{n}", server.port)
        if n % 20 == 0:
            await asyncio.sleep(0.01)
    await until(lambda: not any(actor.client.unacknowledged for actor in actors))
    assert record == {"rollout-0": sent, "rollout-1": sent}
    await until(lambda: all(a.commands[-1] == b"run for s200" for a in actors))
    for actor in actors:
        assert len(actor.commands) == len(actor.welcomes)
        assert await actor.client.close() == 0
    server.close()


async def test_a_server_that_moved_is_found_by_its_address_file(address_file):
    record = {}
    first = Coordinator(record, address_file, "s1")
    actor = Actor(address_file)
    await actor.client.start()
    actor.client.send(b"before")
    await until(lambda: record.get("rollout-0") == [b"before"])
    first.close()
    actor.client.send(b"during")
    second = Coordinator(record, address_file, "s2")
    assert second.socket.address != first.socket.address
    await until(lambda: record["rollout-0"] == [b"before", b"during"])
    await until(lambda: actor.commands == [b"run for s1", b"run for s2"])
    assert actor.welcomes == [7, 7]
    await actor.client.close()
    second.close()


async def test_a_client_may_start_before_its_server(address_file):
    actor, record = Actor(address_file), {}
    actor.client.send(b"early")
    await actor.client.start()
    await asyncio.sleep(0.1)
    assert actor.client.absent_ns > 0
    server = Coordinator(record, address_file, "s1")
    await until(lambda: record.get("rollout-0") == [b"early"])
    await actor.client.close()
    server.close()


async def test_a_refused_client_is_told_once_and_sends_no_more(address_file):
    server = Coordinator({}, address_file, "s1", refuse="a newer rollout-0 joined")
    actor = Actor(address_file)
    await actor.client.start()
    await until(lambda: actor.refusals)
    await asyncio.sleep(0.3)
    assert actor.refusals == [("a newer rollout-0 joined", False)]
    assert actor.welcomes == []
    with pytest.raises(LinkClosed, match="a newer rollout-0 joined"):
        actor.client.send(b"event")
    await actor.client.close()
    server.close()


async def test_close_does_not_wait_for_a_server_that_is_silent_for_long(address_file, monkeypatch):
    """What is unacknowledged is lost: nobody who would take it comes back in the time."""
    actor = Actor(address_file)
    await actor.client.start()
    actor.client.send(b"a")
    monkeypatch.setattr("laminar.net.client.GONE_S", 0.0)
    async with asyncio.timeout(DEADLINE_S):
        assert await actor.client.close(flush_s=1_000.0) == 1


async def test_close_says_how_many_messages_nobody_took(address_file):
    actor = Actor(address_file)
    await actor.client.start()
    actor.client.send(b"a")
    actor.client.send(b"b")
    assert await actor.client.close(flush_s=0.1) == 2
    await actor.client.wait_closed()
    with pytest.raises(LinkClosed):
        actor.client.send(b"c")


async def test_a_callback_that_raises_ends_the_client(address_file):
    def fail(body):
        raise RuntimeError(f"no handler for {body!r}")

    server = Coordinator({}, address_file, "s1")
    actor = Actor(address_file, on_body=fail)
    await actor.client.start()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(RuntimeError, match="no handler for b'run for s1'"):
            await actor.client.wait_closed()
    with pytest.raises(LinkClosed, match="no handler"):
        actor.client.send(b"event")
    server.close()


async def pass_small(source, sink):
    """Pass small packets on; after a large one, nothing passes on this connection."""
    large = False
    while data := await source.read(1 << 16):
        large = large or len(data) > SMALL_BYTES
        if not large:
            sink.write(data)
    sink.close()


@pytest.fixture
async def narrow(address_file, monkeypatch):
    """A server behind a network that drops large packets, and its connections so far."""
    probes = ((zmq.HEARTBEAT_IVL, 50), (zmq.HEARTBEAT_TIMEOUT, 150))
    monkeypatch.setattr(ClientSocket, "_probes", probes)
    server = Coordinator({}, address_file, "s1")
    connections = []

    async def join(reader, writer):
        connections.append(writer)
        inner, outer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(pass_small(reader, outer), pass_small(inner, writer))

    network = await asyncio.start_server(join, "127.0.0.1", 0)
    host, port = network.sockets[0].getsockname()
    write_address(address_file, f"tcp://{host}:{port}")
    yield connections
    network.close()
    server.close()


async def test_a_client_whose_large_messages_never_pass_ends_with_the_likely_cause(
    address_file, narrow
):
    """Its connections are established, and its heartbeats pass: it would wait for ever."""
    actor = Actor(address_file)
    await actor.client.start()
    actor.client.send(b"x" * 10 * SMALL_BYTES)
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(LinkStalled, match=r"rollout-0 to tcp://.* drop large packets"):
            await actor.client.wait_closed()
    assert len(narrow) >= STALLS_MAX
    with pytest.raises(LinkClosed):
        actor.client.send(b"event")


def test_an_address_file_is_replaced_whole(address_file):
    assert read_address(address_file) is None
    write_address(address_file, "tcp://127.0.0.1:1", incarnation=1)
    write_address(address_file, "tcp://127.0.0.1:2", incarnation=2)
    assert read_address(address_file) == "tcp://127.0.0.1:2"
    assert [path.name for path in address_file.parent.iterdir()] == [address_file.name]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": 1}', '{"address": 5}', "\xff"])
def test_a_malformed_address_file_is_named_with_the_fix(address_file, text):
    address_file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"coordinator\.json is not an address file.*delete it"):
        read_address(address_file)
