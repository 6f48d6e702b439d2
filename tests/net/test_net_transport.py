"""Real sockets on loopback, under asyncio and uvloop."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest
import uvloop
import zmq

from laminar.config import ConfigError
from laminar.net.session import PEERS_MAX
from laminar.net.transport import HIGH_WATER_MARK, ClientSocket, ServerSocket
from tests.net.conftest import until
from tools.kit.secrets import KEYS

RUNNERS = [asyncio.run, uvloop.run]


def connected(opened, address):
    client = opened(ClientSocket(KEYS))
    client.connect(address)
    return client


def wait_for_frames(server):
    frames = []
    while not frames:
        frames = server.drain_frames()
    return frames


def test_all_clients_may_wait_to_be_accepted_at_the_same_time(opened):
    """The kernel knows how many: in what it says of a socket that listens."""
    server = opened(ServerSocket("127.0.0.1", 0, KEYS))
    port = int(server.address.rpartition(":")[2])
    allowed = int(Path("/proc/sys/net/core/somaxconn").read_text())
    assert listening(port) == min(PEERS_MAX, allowed)


def listening(port: int) -> int:
    """How many connections to a port of this process may wait to be accepted."""
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as found:
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 1:
                continue
            if found.getsockname()[1] == port:
                info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
                return int.from_bytes(info[28:32], "little")  # tcpi_sacked: the limit
    raise AssertionError(f"nobody listens on {port}")


def test_a_server_leaves_the_probing_of_its_connections_to_the_kernel(opened):
    """One heartbeat of ZeroMQ costs the server a look at every other one: with ten thousand
    clients it did nothing else, and no client was answered."""
    server, client = opened(ServerSocket("127.0.0.1", 0, KEYS)), opened(ClientSocket(KEYS))
    assert server._socket.get(zmq.HEARTBEAT_IVL) == 0
    assert server._socket.get(zmq.TCP_KEEPALIVE) == 1
    assert client._socket.get(zmq.HEARTBEAT_IVL) > 0


def test_a_port_in_use_is_named_with_the_fix(opened):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*in use.*coordinator.port=0"):
            ServerSocket("127.0.0.1", port, KEYS)


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "10.255.0.1", "no-such-host.invalid", "::"])
def test_only_an_address_of_this_machine_is_bound_and_never_all_of_them(host):
    with pytest.raises(ConfigError, match=r"coordinator\.host"):
        ServerSocket(host, 0, KEYS)


def test_a_bad_address_is_named(opened):
    with pytest.raises(ConfigError, match=r"'localhost'.*tcp://host:port"):
        opened(ClientSocket(KEYS)).connect("localhost")


def test_sending_to_nobody_says_false(opened):
    server = opened(ServerSocket("127.0.0.1", 0, KEYS))
    assert server.send(b"\x00abcd", b"frame") is False
    assert opened(ClientSocket(KEYS)).send(b"frame") is False


def test_a_full_queue_says_false(opened):
    client = connected(opened, "tcp://127.0.0.1:9")  # nobody listens there
    taken = 0
    while client.send(b"frame"):
        taken += 1
    assert taken == HIGH_WATER_MARK


def test_a_message_of_many_parts_becomes_an_illegal_frame(opened):
    server = opened(ServerSocket("127.0.0.1", 0, KEYS))
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        KEYS.secure_client(stranger)
        stranger.connect(server.address)
        stranger.send_multipart([b"a", b"b", b"c"])
        stranger.send(b"d")
        frames = wait_for_frames(server)
        while len(frames) < 2:
            frames += server.drain_frames()
    assert [frame for _, frame in frames] == [b"", b"d"]


def test_an_oversized_frame_does_not_arrive_and_others_go_on(opened):
    server = opened(ServerSocket("127.0.0.1", 0, KEYS, max_message=1000))
    good, bad = (connected(opened, server.address) for _ in range(2))
    bad.send(b"x" * 1001)
    good.send(b"y" * 1000)
    assert [frame for _, frame in wait_for_frames(server)] == [b"y" * 1000]


@pytest.mark.parametrize("run", RUNNERS, ids=["asyncio", "uvloop"])
def test_every_frame_of_a_burst_is_seen_although_the_callback_takes_few_at_a_time(opened, run):
    """The descriptor signals once; the rest of the burst must be found without it."""

    async def main():
        server = opened(ServerSocket("127.0.0.1", 0, KEYS))
        client = connected(opened, server.address)
        seen = []
        server.attach_loop(
            asyncio.get_running_loop(), lambda: seen.extend(f for _, f in server.drain_frames(7))
        )
        sent = [b"%d" % n for n in range(1000)]
        for frame in sent:
            assert client.send(frame)
        await until(lambda: len(seen) == len(sent))
        assert seen == sent
        server.detach_loop()

    run(main())


@pytest.mark.parametrize("run", RUNNERS, ids=["asyncio", "uvloop"])
def test_ping_pong_survives_sends_that_consume_the_edge(opened, run):
    async def main():
        loop = asyncio.get_running_loop()
        server = opened(ServerSocket("127.0.0.1", 0, KEYS))
        client = connected(opened, server.address)
        pongs = []

        def answer():
            for route, frame in server.drain_frames():
                server.send(route, frame)

        def count():
            for frame in client.drain_frames():
                pongs.append(frame)
                client.send(b"%d" % len(pongs))

        server.attach_loop(loop, answer)
        client.attach_loop(loop, count)
        client.send(b"0")
        await until(lambda: len(pongs) >= 500)
        assert pongs[:500] == [b"%d" % n for n in range(500)]
        server.detach_loop()
        client.detach_loop()

    run(main())


async def test_after_connecting_elsewhere_nothing_arrives_from_the_former_server(opened):
    first, second = (opened(ServerSocket("127.0.0.1", 0, KEYS)) for _ in range(2))
    client = connected(opened, first.address)
    seen = []
    client.attach_loop(asyncio.get_running_loop(), lambda: seen.extend(client.drain_frames()))
    client.send(b"hello")
    ((route, _),) = wait_for_frames(first)
    first.send(route, b"old")
    client.connect(second.address)
    client.send(b"hello again")
    ((route, _),) = wait_for_frames(second)
    second.send(route, b"new")
    await until(lambda: seen)
    assert seen == [b"new"]
    client.detach_loop()
