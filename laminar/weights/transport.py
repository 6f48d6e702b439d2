"""Frames between two relays: what a transport promises, and TCP, the one that there is.

Reads   frames of one neighbour
Writes  frames to it
Gives   Transport, FrameHandler; Connection, listen, connect; BadBytes and OSError end a connection

Bulk bytes go from the pages of a slot's file into the socket (sendfile) and from the socket into a
slot: nothing else is copied or allocated on the way. One recv or send per readiness of the socket
takes whatever there is; a chunk is only the unit of checksums. The kernel reads a slot's pages
until the other side has taken the bytes, so they must not change before that side says what it
holds; should they, the chunk's checksum shows it there.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import select
import socket
import time
from collections import deque
from typing import Generic, Protocol, TypeVar

import msgspec

from laminar.weights import wire
from laminar.weights.region import NO_FILE, Region
from laminar.weights.wire import BadBytes, Header, Kind

BACKLOG = 16
USER_TIMEOUT_MS = 10_000
"""A machine that lost power acknowledges nothing: then the connection ends after this."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4))
_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it
_QUEUED_BYTES_MAX = 2 * wire.MESSAGE_BYTES_MAX
_READS_PER_TURN = 8
"""Then the other sockets get their turn, above all the one to the successor."""

Incoming = TypeVar("Incoming")
Taken = TypeVar("Taken", contravariant=True)


class Transport(Protocol):
    """One neighbour, as those see it who decide what to send.

    TCP needs nothing but the bytes; a transport that writes into the successor's memory finds its
    place there from the header.
    """

    @property
    def idle(self) -> bool:
        """Everything sent and pushed so far was handed over: more can be pushed."""
        ...

    def send(self, message: wire.FromPredecessor | wire.FromSuccessor) -> None:
        """Queue a message."""
        ...

    def push(self, header: Header, body: Region) -> None:
        """Queue a chunk or block; it must not change until the neighbour is known to have it."""
        ...


class FrameHandler(Protocol[Taken]):
    """Who takes what arrives; may raise BadBytes, which ends the connection."""

    def message(self, message: Taken) -> None: ...

    def place(self, header: Header) -> memoryview:
        """Where the body of this chunk or block goes; exactly header.length bytes."""
        ...

    def landed(self, header: Header) -> None:
        """The body is there."""
        ...


class Connection(Generic[Incoming]):
    """Frames over one non-blocking TCP socket."""

    def __init__(
        self,
        sock: socket.socket,
        decoder: msgspec.msgpack.Decoder[Incoming],
        handler: FrameHandler[Incoming],
        message_bytes_max: int = wire.GREETING_BYTES_MAX,
    ) -> None:
        """`message_bytes_max`: until the neighbour is known; raise it then."""
        self.sock = sock
        self.message_bytes_max = message_bytes_max
        self.bytes_in = self.bytes_out = 0
        self.moved_at = time.monotonic()  #: when bytes last came or went
        self.handler = handler
        self._decoder = decoder
        self._header_bytes = bytearray(wire.HEADER_BYTES)
        self._header: Header | None = None  #: of the body that is arriving
        self._message = bytearray()
        self._target = memoryview(self._header_bytes)  #: what is still to be filled
        self._queue: deque[Region] = deque()
        self._queued_bytes = 0

    @property
    def idle(self) -> bool:
        return not self._queue

    def fileno(self) -> int:
        return self.sock.fileno()

    def interest(self) -> int:
        """Poll events to wait for."""
        return select.POLLIN if self.idle else select.POLLIN | select.POLLOUT

    def send(self, message: wire.FromPredecessor | wire.FromSuccessor) -> None:
        self._enqueue(Region(memoryview(wire.encode(message))))

    def push(self, header: Header, body: Region) -> None:
        self._enqueue(Region(memoryview(wire.pack_header(header))))
        if body.nbytes:
            self._enqueue(body)

    def _enqueue(self, region: Region) -> None:
        self._queued_bytes += region.nbytes
        self._queue.append(region)

    def read(self) -> None:
        """Take what has arrived. BadBytes, or OSError when the connection has ended."""
        for _ in range(_READS_PER_TURN):
            try:
                count = self.sock.recv_into(self._target)
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("the other side closed the connection")
            self.bytes_in += count
            self.moved_at = time.monotonic()
            short = count < self._target.nbytes
            self._target = self._target[count:]
            if short:
                return  # the socket is empty; another recv would only say so
            self._filled()

    def flush(self) -> None:
        """Hand the kernel what it takes now. BadBytes, or OSError when the connection has ended."""
        if self._queued_bytes > _QUEUED_BYTES_MAX:
            raise BadBytes("never-reads", f"{self._queued_bytes} bytes wait to be taken")
        while self._queue:
            first = self._queue[0]
            try:
                count = self._hand_over(first)
            except BlockingIOError:
                return
            self.bytes_out += count
            self._queued_bytes -= count
            self.moved_at = time.monotonic()
            if count < first.nbytes:
                self._queue[0] = first.part(count, first.nbytes)
                return  # the socket is full; another send would only say so
            self._queue.popleft()

    def _hand_over(self, region: Region) -> int:
        """Bytes of it that the kernel took; BlockingIOError if it takes none now."""
        if region.fd != NO_FILE:
            count = os.sendfile(self.sock.fileno(), region.fd, region.offset, region.nbytes)
            if not count:
                raise OSError(errno.EIO, "somebody has cut the file of the weights short")
            return count
        return self.sock.send(region.view, socket.MSG_MORE if len(self._queue) > 1 else 0)

    def _filled(self) -> None:
        """The target is full: a header, or the body behind it."""
        if self._header is None:
            self._begin(wire.unpack_header(self._header_bytes, self.message_bytes_max))
            if self._target.nbytes:
                return
        header = self._header
        assert header is not None
        self._header = None
        self._target = memoryview(self._header_bytes)
        if header.kind == Kind.MESSAGE:
            self.handler.message(wire.decode(self._decoder, header, self._message))
        else:
            self.handler.landed(header)

    def _begin(self, header: Header) -> None:
        self._header = header
        if header.kind == Kind.MESSAGE:
            self._message = bytearray(header.length)
            self._target = memoryview(self._message)
        else:
            self._target = self.handler.place(header)
            assert self._target.nbytes == header.length, header

    def close(self) -> None:
        self.sock.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening, non-blocking socket; OSError if the address cannot be had."""
    listener = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def connect(host: str, port: int, source: str, *, congestion: str, rate: int) -> socket.socket:
    """Begin to connect from address `source`; writable when that is decided. OSError.

    `congestion`: name of the kernel's congestion control; empty: its default. `rate`: bytes per
    second at most; 0: no limit.
    """
    sock = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        tune(sock)
        if congestion:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        if rate:
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate.to_bytes(8, "little"))
        if not ipaddress.ip_address(source).is_unspecified:
            sock.bind((source, 0))
        sock.connect((host, port))
    except BlockingIOError:
        pass
    except OSError:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and a machine that vanished is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _family(host: str) -> socket.AddressFamily:
    version = ipaddress.ip_address(host).version
    return socket.AF_INET6 if version == 6 else socket.AF_INET
