"""Strangers take no descriptors that the process of a server needs."""

import gc
import os
import socket
import threading
import time

import pytest

from laminar.net import listener
from laminar.net.transport import ClientSocket, ServerSocket
from tools.kit.secrets import KEYS

STRANGERS = 60
ROOM = 20


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


def count_settled_descriptors():
    """Count them once the threads of ZeroMQ have closed those of earlier tests."""
    gc.collect()
    counts = [open_descriptors()]
    while len(counts) < 20 or len(set(counts[-20:])) > 1:
        time.sleep(0.02)
        counts.append(open_descriptors())
    return counts[-1]


@pytest.fixture
def server(opened, monkeypatch):
    """A server that has room for few connections more than the client ends of the strangers."""
    monkeypatch.setattr(listener, "RETRY_S", 0.05)
    monkeypatch.setattr(listener, "HELD", 4)
    limit = count_settled_descriptors() + STRANGERS + ROOM
    monkeypatch.setattr(listener, "connection_limit", lambda: limit)
    return opened(ServerSocket("127.0.0.1", 0, KEYS))


@pytest.fixture
def strangers():
    socks = [socket.socket() for _ in range(STRANGERS)]
    yield socks
    for sock in socks:
        sock.close()


def connect(sock, server):
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    sock.connect((host, int(port)))


def is_served(opened, server):
    client = opened(ClientSocket(KEYS))
    client.connect(server.address)
    client.send(b"frame")
    deadline = time.monotonic() + 20
    while not (frames := server.drain_frames()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [frame for _, frame in frames] == [b"frame"]


def test_a_connection_on_which_nothing_is_sent_takes_no_descriptor(opened, server, strangers):
    before = open_descriptors()
    for sock in strangers:
        connect(sock, server)
    assert is_served(opened, server)
    assert open_descriptors() < before + STRANGERS / 2
    assert server._listener.rejected == 0


def test_strangers_that_begin_a_handshake_leave_the_reserve(opened, server, strangers, monkeypatch):
    """Their connections end in time, so that a client of the run is served then."""
    free, freed = server._listener._free_descriptors, threading.Event()
    monkeypatch.setattr(server._listener, "_free_descriptors", lambda: (free(), freed.set()))
    for sock in strangers[: STRANGERS // 2]:  # attempts to connect are dropped beyond the limit
        connect(sock, server)
        sock.send(b"\xff")
    assert freed.wait(20)
    assert is_served(opened, server)


def test_a_closed_server_leaves_no_descriptor_and_no_thread(opened):
    first = ServerSocket("127.0.0.1", 0, KEYS)  # also makes what a process keeps
    before = open_descriptors()
    first.close()
    first.close()  # has no effect
    while any(thread.name == "listener" for thread in threading.enumerate()):
        time.sleep(0.01)
    assert open_descriptors() < before
