"""The channel between a process and its child: length-prefixed MessagePack over a socket pair.

Reads   frames: MAGIC, the length of the body (little-endian u32), and the body, a msgspec struct;
        the first byte of a frame may carry descriptors
Gives   Channel, for an event loop; BlockingChannel, for one without; Ready, Refused and Forked,
        the messages that all kinds of child share; encode_frame
Raises  ChildLost: the other end is gone, or has sent something else than a message
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import msgspec

from laminar.config import ConfigError

MAGIC = b"LMC\x01"
"""The start of each message; the last byte is the version, which may change during a run."""
HEADER = struct.Struct("<4sI")
MESSAGE_BYTES_MAX = 256 << 20
CHUNK = 1 << 18
HANG_UP_S = 5.0  #: wait for the reason why the other end is gone
DESCRIPTORS_MAX = 2  #: with a message


class ChildLost(Exception):
    """The end of a child, or of its channel, before its reply."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The child has started and takes requests."""

    facts: dict[str, Any] = {}  #: what its parent wants to know about the start


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """The child cannot start, or cannot do what was requested."""

    reason: str


class Forked(msgspec.Struct, tag="forked", frozen=True, kw_only=True):
    """The child has forked a process."""

    pid: int
    number: int = 0  #: of the request


def encode_frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(MAGIC, len(body)) + body


def read_size(header: bytes | bytearray, bytes_max: int) -> int:
    """Return the size of the body; raise ChildLost."""
    magic, size = HEADER.unpack_from(header)
    if magic != MAGIC and magic[:-1] == MAGIC[:-1]:
        raise ChildLost(
            f"its messages have version {magic[-1]}, not {MAGIC[-1]}; restart the run if its "
            "package was replaced"
        )
    if magic != MAGIC or size > bytes_max:
        raise make_garbage_error(f"{bytes(header[: HEADER.size])!r}")
    return int(size)


def make_garbage_error(reason: object) -> ChildLost:
    return ChildLost(f"it sent something else than a message ({reason})")


class FrameBuffer:
    """Received bytes, from which whole messages are taken."""

    def __init__(self, kind: Any, bytes_max: int) -> None:
        self._decoder, self._bytes_max = msgspec.msgpack.Decoder(kind), bytes_max
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Add bytes; yield the messages that are complete. ChildLost for other bytes."""
        self._received += data
        try:
            while len(self._received) >= HEADER.size:
                end = HEADER.size + read_size(self._received, self._bytes_max)
                if len(self._received) < end:
                    return
                with memoryview(self._received) as received:
                    message = self._decoder.decode(received[HEADER.size : end])
                del self._received[:end]
                yield message
        except msgspec.DecodeError as error:
            raise make_garbage_error(error) from error


class BlockingChannel:
    """An end of a channel that waits for messages; None is the end of the channel."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.descriptors: list[int] = []  #: those that came with the last message

    def send(self, message: Any) -> None:
        with suppress(ConnectionError):  # the other end is gone, which `receive` tells
            self.socket.sendall(encode_frame(message))

    def receive(self, kind: Any) -> Any:
        """Return the next message, of type `kind`; None at the end, even within a message."""
        try:
            head, self.descriptors, _, _ = socket.recv_fds(
                self.socket, HEADER.size, DESCRIPTORS_MAX
            )
            head += self._read(HEADER.size - len(head))
            body = self._read(read_size(head, MESSAGE_BYTES_MAX))
            return msgspec.msgpack.decode(body, type=kind)
        except (EOFError, ConnectionResetError):  # reset: what this end has sent was not read
            return None
        except msgspec.DecodeError as error:
            raise make_garbage_error(error) from None

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self.socket.recv(min(size - len(parts), CHUNK))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def serve_requests(self, kind: Any, handle: Callable[[Any], Any]) -> None:
        """Answer requests, one at a time, until the channel ends."""
        while (request := self.receive(kind)) is not None:
            self.send(handle(request))

    @contextmanager
    def refuse_errors(self) -> Iterator[None]:
        """Report a ConfigError to the parent and end this process."""
        try:
            yield
        except ConfigError as error:
            self.send_last(Refused(str(error)))

    def send_last(self, message: Any) -> NoReturn:
        """Send a message and end this process without waiting for threads of user code."""
        self.send(message)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


class Channel:
    """An end of a channel in an event loop.

    A message is the reply to the pending request if there is one; others go to `on_message`.
    """

    def __init__(
        self,
        end: socket.socket,
        kind: Any,
        *,
        on_message: Callable[[Any], object] = id,
        bytes_max: int = MESSAGE_BYTES_MAX,
        hang_up_s: float = HANG_UP_S,
    ) -> None:
        """`kind`: the type of the messages to this end, `bytes_max`: the limit of their size."""
        end.setblocking(False)
        self._socket, self._received = end, FrameBuffer(kind, bytes_max)
        self._on_message, self._hang_up_s = on_message, hang_up_s
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[ChildLost] = self._loop.create_future()  #: why it has ended
        self._reply: asyncio.Future[Any] | None = None
        self._unsent = bytearray()
        self._loop.add_reader(end, self._receive)

    def send(self, message: Any, descriptors: Sequence[int] = ()) -> None:
        """Send a message; `ended` tells if the other end is gone.

        Descriptors cannot wait, so their message ends the channel if earlier ones are unsent."""
        if self.ended.done():
            return
        if self._unsent and descriptors:
            return self.end_channel(ChildLost("it accepts no requests"))
        is_waiting = bool(self._unsent)
        self._unsent += encode_frame(message)
        if not is_waiting:
            self._flush(descriptors)
            if self._unsent and not self.ended.done():
                self._loop.add_writer(self._socket, self._flush)

    async def request_reply(
        self, request: Any, timeout_s: float | None, descriptors: Sequence[int] = ()
    ) -> Any:
        """Send a request and return the reply; raise TimeoutError or ChildLost.

        After a TimeoutError, the reply can still be awaited; it must not be mistaken for the next
        one, so a caller that gives up must end the child."""
        self.expect_reply()
        self.send(request, descriptors)
        return await self.wait_for_reply(timeout_s)

    def expect_reply(self) -> None:
        """Take the next message for a reply."""
        self._reply = self._loop.create_future()
        if self.ended.done():
            self._reply.set_exception(self.ended.result())

    async def wait_for_reply(self, timeout_s: float | None) -> Any:
        """Return the expected reply."""
        assert self._reply is not None
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(self._reply)

    def drain_output(self) -> None:
        """Read all that has been sent before now."""
        while not self.ended.done() and self._receive():
            pass

    def end_channel(self, reason: ChildLost) -> None:
        """Close the channel; only the first reason counts."""
        if not self.ended.done():
            self.ended.set_result(reason)
            if self._reply is not None and not self._reply.done():
                self._reply.set_exception(reason)
                self._reply.exception()  # mark as retrieved, as there may be no waiter
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _flush(self, descriptors: Sequence[int] = ()) -> None:
        try:
            with memoryview(self._unsent) as data:
                if descriptors:
                    sent = socket.send_fds(self._socket, [data], descriptors)
                else:
                    sent = self._socket.send(data)
        except BlockingIOError:
            if descriptors:
                self.end_channel(ChildLost("it accepts no requests"))
            return
        except OSError:  # the reader learns why
            sent = len(self._unsent)
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> bool:
        """Read once; return whether there may be more."""
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket)
            self._loop.call_later(
                self._hang_up_s, self.end_channel, ChildLost("it closed its channel")
            )
            return False
        try:
            for message in self._received.feed(data):
                self._deliver_message(message)
        except ChildLost as error:
            self.end_channel(error)
        return True

    def _deliver_message(self, message: Any) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(message)
        else:
            self._on_message(message)
