"""Sockets: ZeroMQ ROUTER and DEALER, drained without blocking from an asyncio loop.

Reads   frames of peers, from TCP
Emits   frames to peers; ConfigError for an address that cannot be bound or connected
Why     `zmq.asyncio` costs six times as much per message as a non-blocking drain when the socket's
        descriptor is readable. That descriptor is edge-triggered, and reading the socket's events
        or sending consumes the edge. The events are therefore checked again after every callback
        and every send, and a slow tick covers any edge that is still missed.

Every socket has the keys of its run (auth.py): a stranger can neither send nor receive frames. A
monitor tells a client that it was refused, and a server that it refused one.

Delivery is unreliable: a frame that a socket cannot take now, or that dies with a connection, is
lost, and the session above resends it. Routing ids are chosen by ZeroMQ (it would silently ignore a
second peer with the same explicit id); frames name their sender.

Probes end a connection whose other side vanished without closing it: ZeroMQ's at a client, the
kernel's at a server. ZeroMQ scans all timers of all connections to clear one, so its heartbeats
alone would keep the server of ten thousand clients busy.

When a server comes back, all clients connect at once. ZeroMQ's default backlog is 100; beyond that
all retry, and of thousands some never get through.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable

import zmq

from laminar.config import ConfigError
from laminar.net import auth
from laminar.net.addresses import own_ip
from laminar.net.frames import FRAME_BYTES_MAX
from laminar.net.listener import Listener
from laminar.net.rejected_peers import RejectedPeers
from laminar.net.session import PEERS_MAX

HIGH_WATER_MARK = 1_024  #: frames queued per peer: two session windows; then `send` returns False
DRAIN_FRAMES = 512  #: frames per turn, so that commands leave between two turns
SAFETY_TICK_S = 0.05
RECONNECT_MIN_MS = 50
RECONNECT_MAX_MS = 500
PROBE_MS = 2_000  #: interval of ZeroMQ's heartbeat at a client, to detect a vanished server
PROBE_TIMEOUT_MS = 6_000
REFUSALS_SAID = 3  #: refusals that are certain; a server that dies in a handshake looks the same
KEEPALIVE_S = 5  #: interval of the kernel's probes at a server; three lost ones end a connection


class _Socket:
    """A ZeroMQ socket and its place in an event loop."""

    _probes: tuple[tuple[int, int], ...]  #: socket options of this end

    def __init__(self, kind: int, keys: auth.RunKeys, max_message: int) -> None:
        self._kind, self._keys = kind, keys
        self._max_message = max_message
        self._loop: asyncio.AbstractEventLoop | None = None
        self._callback: Callable[[], None] = lambda: None
        self._monitor: zmq.Socket[bytes] | None = None
        self._tick: asyncio.Handle | None = None
        self._recheck_due = False
        self._open()

    @property
    def fileno(self) -> int:
        return int(self._socket.get(zmq.FD))

    def attach_loop(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        """Call `callback` when frames may have come, and at least every SAFETY_TICK_S.

        It should drain the socket; it is called again while frames are left, after other work of
        the loop.
        """
        self._loop, self._callback = loop, callback
        loop.add_reader(self.fileno, self._on_readable)
        self._tick = loop.call_soon(self._on_tick)

    def detach_loop(self) -> None:
        if self._loop is None:
            return
        self._loop.remove_reader(self.fileno)
        if self._tick is not None:
            self._tick.cancel()
        self._loop = None

    def close(self, linger_ms: int = 0) -> None:
        """Close; queued frames have `linger_ms` to leave, in the background.

        The port is free again some milliseconds later, or when the process has ended.
        """
        self.detach_loop()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(0)
            self._monitor = None
        self._socket.close(linger=linger_ms)

    def _open(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(self._kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.MAXMSGSIZE, self._max_message + auth.CURVE_BYTES),
            (zmq.RECONNECT_IVL, RECONNECT_MIN_MS),
            (zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS),
            *self._probes,
        ):
            self._socket.set(option, value)

    def _send(self, parts: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:
            self._recheck_soon()
        return True

    def _receive_frame(self) -> bytes:
        """Receive the next part; return b"" for an (invalid) message of several parts."""
        frame = self._socket.recv(zmq.NOBLOCK)
        while self._socket.get(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK)
            frame = b""
        return frame

    def _on_tick(self) -> None:
        if self._loop is not None:
            self._tick = self._loop.call_later(SAFETY_TICK_S, self._on_tick)
            self._on_readable()

    def _on_readable(self) -> None:
        self._callback()
        self._recheck_soon()

    def _recheck_soon(self) -> None:
        if self._loop is not None and not self._recheck_due:
            self._recheck_due = True
            self._loop.call_soon(self._recheck_events)

    def _recheck_events(self) -> None:
        self._recheck_due = False
        if self._loop is not None and int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._on_readable()


class PortTaken(ConfigError):
    """Another process listens on the port."""


class ServerSocket(_Socket):
    """The bound end: many peers, each known by the routing id of its connection."""

    _probes = (
        (zmq.TCP_KEEPALIVE, 1),
        (zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S),
        (zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S),
        (zmq.TCP_KEEPALIVE_CNT, 3),
    )

    def __init__(
        self,
        host: str,
        port: int,
        keys: auth.RunKeys,
        max_message: int = FRAME_BYTES_MAX,
        on_rejected: Callable[[str], object] = lambda told: None,
    ) -> None:
        """Bind tcp://host:port (port 0: any free one); PortTaken, ConfigError: not our host.

        A frame above `max_message` bytes ends the connection of its sender. `on_rejected`: called
        with a report, at a limited rate, while strangers try to connect.
        """
        ip = own_ip(host, "coordinator.host")
        super().__init__(zmq.ROUTER, keys, max_message)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        keys.secure_server(self._socket)
        try:
            self._listener = Listener(ip, port, PEERS_MAX)
        except OSError as error:
            super().close()
            raise _bind_error(host, port, error) from error
        self._listener.bind_server(self._socket)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT)
        self._rejected = 0
        self._strangers = RejectedPeers(self.address, on_rejected)

    def close(self, linger_ms: int = 0) -> None:
        if not self._socket.closed:
            self._listener.close(self._socket)
        super().close(linger_ms)

    def drain_frames(self, max_frames: int = DRAIN_FRAMES) -> list[tuple[bytes, bytes]]:
        """Return (routing id, frame) of what has arrived, at most `max_frames`."""
        frames: list[tuple[bytes, bytes]] = []
        try:
            for _ in range(max_frames):
                routing_id = self._socket.recv(zmq.NOBLOCK)
                frames.append((routing_id, self._receive_frame()))
        except zmq.Again:
            pass
        return frames

    def _on_tick(self) -> None:
        count, self._rejected = self._listener.rejected - self._rejected, self._listener.rejected
        self._strangers.record_rejected(count, time.monotonic())
        super()._on_tick()

    def send(self, routing_id: bytes, frame: bytes) -> bool:
        """Send, and return False if the peer is gone or its queue full; the session sends again."""
        return self._send([routing_id, frame])


class ClientSocket(_Socket):
    """The connecting end: one server at a time, to which ZeroMQ reconnects indefinitely."""

    _probes = ((zmq.HEARTBEAT_IVL, PROBE_MS), (zmq.HEARTBEAT_TIMEOUT, PROBE_TIMEOUT_MS))

    def __init__(self, keys: auth.RunKeys, max_message: int = FRAME_BYTES_MAX) -> None:
        super().__init__(zmq.DEALER, keys, max_message)
        self.address = ""  #: empty: not connected yet
        self._refusals = self._last_refusal = 0
        self._established = False
        self.lost_connections = 0  #: established connections to this address that ended
        self.given_up = False  #: ZeroMQ does not retry after a refusal with a reason

    def connect(self, address: str) -> None:
        """Connect to "tcp://host:port", in place of any former server.

        A new socket is used, so that nothing from the former server can still arrive. ConfigError
        for an invalid address.
        """
        loop = self._loop
        self.close()
        self._open()
        self._keys.secure_client(self._socket)
        self._monitor = self._socket.get_monitor_socket(auth.REFUSALS | auth.CONNECTIONS)
        self._refusals = self._last_refusal = self.lost_connections = 0
        self._established = self.given_up = False
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot connect to {address!r}: {error}; an address reads tcp://host:port"
            ) from error
        self.address = address
        if loop is not None:
            self.attach_loop(loop, self._callback)

    def drain_frames(self, max_frames: int = DRAIN_FRAMES) -> list[bytes]:
        """Return the frames that have arrived, at most `max_frames`."""
        frames: list[bytes] = []
        try:
            for _ in range(max_frames):
                frames.append(self._receive_frame())
        except zmq.Again:
            pass
        return frames

    def find_refusal_reason(self) -> str | None:
        """Return why the server refuses this end; None if it does not, or does not respond.

        A refusal without a reason counts only after REFUSALS_SAID times.
        """
        self._read_monitor()
        last, self._last_refusal = self._last_refusal, 0
        certain = self.given_up or self._refusals >= REFUSALS_SAID
        return auth.why_refused(self.address, last) if last and certain else None

    def _on_tick(self) -> None:
        self._read_monitor()
        super()._on_tick()

    def _read_monitor(self) -> None:
        while self._monitor is not None and (event := auth.next_event(self._monitor)):
            if event & auth.REFUSALS:
                self._last_refusal = event
                self._refusals += 1
                self.given_up = self.given_up or bool(event & auth.FINAL_REFUSALS)
            elif event == zmq.EVENT_DISCONNECTED:
                self.lost_connections += self._established
            self._established = event == zmq.EVENT_HANDSHAKE_SUCCEEDED

    def send(self, frame: bytes) -> bool:
        """Send, and return False if not connected or the queue is full; the session sends again."""
        return self._send([frame])


def _bind_error(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno != errno.EADDRINUSE:
        return ConfigError(f"cannot listen on {host}:{port}: {error}; check coordinator.host")
    return PortTaken(
        f"cannot listen on {host}:{port}: the port is in use by another process; end it, or set "
        "coordinator.port=0 to take any free port"
    )
