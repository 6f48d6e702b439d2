"""Requests and replies over real sockets: batches, errors, deadlines, restarts, lost peers."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from laminar.config import ConfigError
from laminar.net.calls import RpcError
from laminar.net.frames import FRAME_BYTES_MAX, Data, Hello, Welcome, decode_server, encode
from laminar.net.rpc_client import RpcClient
from laminar.net.rpc_server import RpcServer
from laminar.net.session import LinkClosed, ServerLink
from laminar.net.transport import ClientSocket, ServerSocket
from tests.net.conftest import DEADLINE_S, until
from tools.kit.secrets import KEYS


class Store:
    """A handler and what it saw; servers that share it, one after the other."""

    def __init__(self):
        self.batches, self.lost = [], []

    def upper(self, batch):
        self.batches.append(batch)
        return [body.upper() for _, _, body in batch]

    def serve(self, handler=None, port=0, boot="s1", **options):
        options = {"lease_ms": 60_000, **options}
        for _ in range(400):
            try:
                return RpcServer(
                    "127.0.0.1",
                    port,
                    handler or self.upper,
                    keys=KEYS,
                    boot_id=boot,
                    on_peer_lost=self.lost.append,
                    **options,
                )
            except ConfigError:  # a port that closed in this process is free a moment later
                time.sleep(0.005)
        raise AssertionError(f"port {port} stays in use")


def port_of(server):
    return int(server.address.rpartition(":")[2])


def client_at(address, **options):
    options = {"heartbeat_ms": 100, "keys": KEYS, "on_trouble": print, **options}
    return RpcClient(address, "rollout-0", "rollout", "b-rollout-0", server="store", **options)


@asynccontextmanager
async def connected(server, flush_s=None, **options):
    """A client of this server, both at work; `flush_s`: as the client's `close` takes it."""
    await server.start()
    client = client_at(lambda: server.address, **options)
    await client.start()
    yield client
    await (client.close() if flush_s is None else client.close(flush_s=flush_s))
    await server.close()


@pytest.fixture
def store():
    return Store()


async def test_requests_of_one_turn_are_one_batch_in_order(store):
    server = store.serve()
    async with connected(server) as client:
        await client.call(b"warm", 20.0)
        await asyncio.gather(*(client.call(b"%d" % n, 20.0) for n in range(300)))
        seen = [(name, body) for batch in store.batches[1:] for name, _, body in batch]
        assert seen == [("b-rollout-0", b"%d" % n) for n in range(300)]
        assert len(store.batches) < 100


async def test_a_refused_request_raises_the_servers_sentence(store):
    def fence(batch):
        return [
            RpcError(f"placement of {b.decode()} is fenced") if b == b"0.3.1" else b"ok"
            for _, _, b in batch
        ]

    server = store.serve(fence)
    async with connected(server) as client:
        good, bad = client.call(b"0.3.2", 20.0), client.call(b"0.3.1", 20.0)
        assert await good == b"ok"
        with pytest.raises(RpcError, match=r"placement of 0\.3\.1 is fenced"):
            await bad


async def test_a_handler_that_raises_ends_the_server_and_the_next_one_answers(store):
    def disk_full(batch):
        raise OSError(28, "No space left on device")

    server = store.serve(disk_full)
    await server.start()
    address = server.address
    port = port_of(server)
    client = client_at(lambda: address)
    await client.start()
    call = asyncio.create_task(client.call(b"chunk", 20.0))
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(OSError, match="No space left"):
            await server.wait_closed()
    assert not call.done()
    server = store.serve(port=port, boot="s2")
    await server.start()
    assert await call == b"CHUNK"
    await client.close()
    await server.close()


async def test_a_request_that_was_acknowledged_but_never_answered_is_asked_again(store):
    """The first server takes the request, says so, and is gone before its reply."""
    first = ServerSocket("127.0.0.1", 0, KEYS)
    port = port_of(first)
    client = client_at(lambda: first.address)
    await client.start()
    call = asyncio.create_task(client.call(b"chunk", 20.0))
    link, taken = None, []
    async with asyncio.timeout(DEADLINE_S):
        while not taken:
            await asyncio.sleep(0.005)
            for route, frame in first.drain_frames():
                if link is None:
                    hello = Hello("rollout-0", "rollout", "b-rollout-0", 0, 1, {})
                    link = ServerLink(hello, server_boot="s1", incarnation=0)
                taken += link.receive(frame, 0)
                link.mark_processed(len(taken))
                for answer in link.poll(0):
                    first.send(route, answer)
    await until(lambda: not client._link.outbox)
    first.close()
    server = store.serve(port=port, boot="s2")
    await server.start()
    assert await call == b"CHUNK"
    await client.close()
    await server.close()


async def test_a_timeout_says_what_was_waited_for(store):
    client = client_at(lambda: None)
    await client.start()
    with pytest.raises(
        TimeoutError,
        match=r"the store at an unknown address did not answer request 1 \(5 bytes\) of "
        r"rollout-0 within 0\.\d s; its last message came 0\.\d s ago",
    ):
        await client.call(b"chunk", 0.1)
    await client.close(flush_s=0.0)


async def test_open_calls_fail_when_the_client_closes(store):
    client = client_at(lambda: None)
    await client.start()
    call = asyncio.create_task(client.call(b"chunk", 20.0))
    await asyncio.sleep(0)
    await client.close(flush_s=0.0)
    with pytest.raises(LinkClosed, match="the link to the store is closed"):
        await call
    with pytest.raises(LinkClosed):
        await client.call(b"chunk", 20.0)


async def test_too_large_bodies_are_errors_in_both_directions(store):
    large = bytes(FRAME_BYTES_MAX)
    server = store.serve(lambda batch: [large] * len(batch))
    async with connected(server) as client:
        with pytest.raises(RpcError, match=f"reply of {len(large)} bytes is too large"):
            await client.call(b"small", 20.0)
        with pytest.raises(ValueError, match="exceeds the limit"):
            await client.call(large, 20.0)


async def test_replies_beyond_the_outbox_wait_for_the_reader(store):
    """100 replies of 1 MiB exceed the server's outbox of 64 MiB; none is lost or refused."""
    large = b"x" * 1024 * 1024
    server = store.serve(lambda batch: [body + large for _, _, body in batch])
    async with connected(server, heartbeat_ms=1_000) as client:
        replies = await asyncio.gather(*(client.call(b"%03d" % n, 60.0) for n in range(100)))
        assert [reply[:3] for reply in replies] == [b"%03d" % n for n in range(100)]


async def test_a_silent_peer_is_lost_after_its_lease_and_welcome_again(store):
    server = store.serve(lease_ms=600)
    async with connected(server) as client:
        await client.call(b"a", 20.0)
        client._shell._socket.detach_loop()  # the process is paused: it neither hears nor speaks
        await until(lambda: store.lost == ["b-rollout-0"])
        client._shell._socket.attach_loop(asyncio.get_running_loop(), client._shell._run_turn)
        assert await client.call(b"b", 20.0) == b"B"


async def test_a_server_that_was_paused_itself_gives_every_peer_a_new_lease(store):
    server = store.serve(lease_ms=600)
    async with connected(server, flush_s=0.0) as client:
        await client.call(b"a", 20.0)
        client._shell._socket.detach_loop()
        time.sleep(0.8)
        await asyncio.sleep(0.2)
        assert store.lost == []
        await until(lambda: store.lost == ["b-rollout-0"])


async def test_a_peer_whose_message_is_no_request_is_refused_and_bad_frames_are_ignored(store):
    server = store.serve()
    await server.start()
    stranger = ClientSocket(KEYS)
    stranger.connect(server.address)
    stranger.send(b"\xff")
    stranger.send(encode(Hello("x", "rollout", "b", 0, 1, {})))
    stranger.send(encode(Data("", 1, 0, b"\xc1")))
    frames = []
    async with asyncio.timeout(DEADLINE_S):
        while len(frames) < 2:
            await asyncio.sleep(0.005)
            frames += [decode_server(frame, 10_000) for frame in stranger.drain_frames()]
            stranger.send(encode(Data("", 1, 0, b"\xc1")))
    assert not any(isinstance(frame, Welcome) for frame in frames[1:])
    assert "not a request" in frames[-1].reason
    assert store.batches == []
    stranger.close()
    await server.close()
