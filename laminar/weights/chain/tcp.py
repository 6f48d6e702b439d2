"""Frames between two relays over TCP.

Reads   frames of a neighbour
Writes  frames to the neighbour
Gives   TcpNetwork; Connection; BadBytes and OSError end a connection

Bulk bytes pass from the pages of a slot's file to the socket (sendfile) and from the socket to a
slot, without any other copy or allocation. Each recv or send on a ready socket moves as much as it
can; a chunk is only the unit of checksums. The kernel reads a slot's pages until the other side has
received the bytes, so they must not change before that side reports the version; if they do, the
chunk's checksum reveals it there.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from laminar.events.families import Family
from laminar.run.work_counter import count_work
from laminar.weights.arena.region import NO_FILE, Region
from laminar.weights.chain import wire
from laminar.weights.chain.transport import READABLE, WRITABLE, FrameHandler
from laminar.weights.chain.wire import BadBytes, FrameHeader, FrameKind

BACKLOG = 16
USER_TIMEOUT_MS = 10_000  #: timeout without acknowledgements, as from a machine that lost power
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4))
_SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python has no name for it
_QUEUED_BYTES_MAX = 2 * wire.MESSAGE_BYTES_MAX
_READS_PER_TURN = 8
"""Maximum reads before the other sockets get their turn, above all the one to the successor."""

Incoming = TypeVar("Incoming")


class Connection(Generic[Incoming]):
    """Frames over a non-blocking TCP socket."""

    def __init__(
        self, sock: socket.socket, decoder: Family[Incoming], handler: FrameHandler[Incoming]
    ) -> None:
        """Wrap a socket; raise `message_bytes_max` once the neighbour is authenticated."""
        self.sock = sock
        self.message_bytes_max = wire.HANDSHAKE_BYTES_MAX
        self.moved_at = time.monotonic()  #: time of the last byte in either direction
        self.handler = handler
        self.decoder = decoder
        self._header_bytes = bytearray(wire.HEADER_BYTES)
        self._header: FrameHeader | None = None  #: header of the body that is arriving
        self._message = bytearray()
        self._target = memoryview(self._header_bytes)  #: bytes still to be filled
        self._queue: deque[Region] = deque()
        self._queued_bytes = 0

    @property
    def idle(self) -> bool:
        return not self._queue

    def fileno(self) -> int:
        return self.sock.fileno()

    def get_interest(self) -> int:
        """Return the events to poll for."""
        return READABLE if self.idle else READABLE | WRITABLE

    def finish_connect(self) -> None:
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def send(self, message: wire.FromPredecessor | wire.FromSuccessor) -> None:
        self._enqueue_region(Region(memoryview(wire.encode(message))))

    def push(self, header: FrameHeader, body: Region) -> None:
        self._enqueue_region(Region(memoryview(wire.pack_header(header))))
        if body.nbytes:
            self._enqueue_region(body)

    def _enqueue_region(self, region: Region) -> None:
        self._queued_bytes += region.nbytes
        self._queue.append(region)

    def read(self) -> None:
        """Read what has arrived; raise BadBytes, or OSError if the connection has ended."""
        for _ in range(_READS_PER_TURN):
            try:
                count = self.sock.recv_into(self._target)
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError("the other side closed the connection")
            self.moved_at = time.monotonic()
            if self._header is not None and self._header.kind != FrameKind.MESSAGE:
                count_work()
            short = count < self._target.nbytes
            self._target = self._target[count:]
            if short:
                return  # the socket is empty; another recv would only say so
            self._handle_filled()

    def flush(self) -> None:
        """Send as much as the kernel takes; raise BadBytes, or OSError if the connection ended."""
        if self._queued_bytes > _QUEUED_BYTES_MAX:
            raise BadBytes("never-reads", f"{self._queued_bytes} bytes are unread")
        while self._queue:
            first = self._queue[0]
            try:
                count = self._send_region(first)
            except BlockingIOError:
                return
            self._queued_bytes -= count
            self.moved_at = time.monotonic()
            if count < first.nbytes:
                self._queue[0] = first.slice_bytes(count, first.nbytes)
                return  # the socket is full; another send would only say so
            self._queue.popleft()

    def _send_region(self, region: Region) -> int:
        """Return the bytes that the kernel took; raise BlockingIOError if it takes none now."""
        if region.fd != NO_FILE:
            count = os.sendfile(self.sock.fileno(), region.fd, region.offset, region.nbytes)
            if not count:
                raise OSError(errno.EIO, "the file of the weights was truncated")
            count_work()
            return count
        return self.sock.send(region.view, socket.MSG_MORE if len(self._queue) > 1 else 0)

    def _handle_filled(self) -> None:
        """Handle the full target: a header, or the body behind it."""
        if self._header is None:
            self._begin_body(wire.unpack_header(self._header_bytes, self.message_bytes_max))
            if self._target.nbytes:
                return
        header = self._header
        assert header is not None
        self._header = None
        self._target = memoryview(self._header_bytes)
        if header.kind == FrameKind.MESSAGE:
            self.handler.handle_message(wire.decode(self.decoder, header, self._message))
        else:
            self.handler.handle_body(header)

    def _begin_body(self, header: FrameHeader) -> None:
        self._header = header
        if header.kind == FrameKind.MESSAGE:
            self._message = bytearray(header.length)
            self._target = memoryview(self._message)
        else:
            self._target = self.handler.get_buffer(header)
            assert self._target.nbytes == header.length, header

    def close(self) -> None:
        self.sock.close()


class TcpListener:
    """A listening, non-blocking socket."""

    def __init__(self, host: str, port: int, limit: Callable[[socket.socket], None]) -> None:
        """Listen, or raise OSError if the address is not available.

        Accepted connections inherit the options that `limit` sets, as versions are sent on them.
        """
        self._sock = socket.socket(_get_family(host), socket.SOCK_STREAM)
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            limit(self._sock)
            self._sock.bind((host, port))
            self._sock.listen(BACKLOG)
            self._sock.setblocking(False)
        except OSError:
            self._sock.close()
            raise
        name = self._sock.getsockname()
        self.address: tuple[str, int] = (name[0], name[1])

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(
        self, handler: FrameHandler[wire.FromPredecessor]
    ) -> Connection[wire.FromPredecessor] | None:
        try:
            sock, _ = self._sock.accept()
        except OSError:
            return None  # the peer left or descriptors ran out: the next turn retries
        sock.setblocking(False)
        _tune_socket(sock)
        return Connection(sock, wire.predecessor_decoder, handler)

    def close(self) -> None:
        self._sock.close()


class TcpNetwork:
    """TCP with the user's congestion control and rate limit."""

    def __init__(self, congestion: str, rate: int) -> None:
        """Use the kernel's congestion control of this name (empty: its default).

        `rate` is the maximum of bytes per second and connection; 0: no limit.
        """
        self._congestion, self._rate = congestion, rate

    def listen(self, host: str, port: int) -> TcpListener:
        return TcpListener(host, port, self._apply_limits)

    def connect(
        self, host: str, port: int, source: str, handler: FrameHandler[wire.FromSuccessor]
    ) -> Connection[wire.FromSuccessor]:
        sock = socket.socket(_get_family(host), socket.SOCK_STREAM)
        try:
            self._start_connect(sock, (host, port), source)
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            raise
        return Connection(sock, wire.successor_decoder, handler)

    def _start_connect(self, sock: socket.socket, address: tuple[str, int], source: str) -> None:
        sock.setblocking(False)
        _tune_socket(sock)
        self._apply_limits(sock)
        if not ipaddress.ip_address(source).is_unspecified:
            sock.bind((source, 0))
        sock.connect(address)

    def _apply_limits(self, sock: socket.socket) -> None:
        if self._congestion:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self._congestion.encode())
        if self._rate:
            rate = self._rate.to_bytes(8, "little")
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


def _tune_socket(sock: socket.socket) -> None:
    """Set options so that small messages leave at once and a vanished machine is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _get_family(host: str) -> socket.AddressFamily:
    version = ipaddress.ip_address(host).version
    return socket.AF_INET6 if version == 6 else socket.AF_INET
