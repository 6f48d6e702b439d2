"""Client links in an event loop, and an actor's link to the coordinator.

Reads   frames from a socket; the address file that a server writes into the run directory
Emits   bodies to callbacks, in order; events, gauges and heartbeats to the server

The I/O around `session` and `transport`: each turn drains the socket, delivers bodies in order and
sends the frames that are due; a slow tick of the socket drives resends and heartbeats. The address
of a silent server is looked up again, because it may have restarted elsewhere. A callback that
raises ends the shell, and `wait_closed` raises the same exception: an actor that lost a command
half-way must end. So does LinkStalled: a network that passes handshakes and heartbeats, but drops
large packets, would hold up an actor for ever, and the run with it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from socket import create_connection

import msgspec

from laminar.config import ConfigError
from laminar.events.families import BAD_BYTES, WireError
from laminar.names.ports import is_transient
from laminar.net.addresses import MACHINE, is_loopback
from laminar.net.auth import RunKeys
from laminar.net.calls import FLUSH_S
from laminar.net.session import MS, ClientLink, LinkClosed, LinkState, RunOver
from laminar.net.transport import ClientSocket
from laminar.run.renames import write_whole

GONE_S = 10.0  #: silence after which a server counts as gone; a restarted one is back sooner
STALLS_MAX = 4
"""The connections in a row that end before an awaited message; each takes PROBE_TIMEOUT_MS."""
REACH_S = 3.0  #: timeout of a connection to a live machine
LINGER_MS = 200  #: how long the last frames may take to leave a closed socket

now_ns = time.monotonic_ns


class LinkStalled(LinkClosed):
    """Connections are established, but the awaited message never passes."""


class AddressFile(msgspec.Struct):
    """The fields of an address file that are used; it may have more."""

    address: str
    run_over: bool = False  #: whether the coordinator has ended for good
    machine: str = MACHINE  #: boot id of the server's machine


def write_address(path: Path, address: str, **facts: str | int) -> None:
    """Write an address file atomically and durably; OSError."""
    text = json.dumps({"address": address, "machine": MACHINE, **facts})
    write_whole(path, text.encode(), durable=True)


def read_address(path: Path) -> str | None:
    """Return the address in a file; None if there is no file.

    ConfigError if it is malformed, or is a loopback address of another machine.
    """
    found = _read(path)
    if found is None:
        return None
    if found.machine != MACHINE and is_loopback(found.address):
        raise ConfigError(
            f"{path} gives {found.address}, a loopback address of another machine: set "
            "coordinator.host, or the --host of that node, to an address, name or interface that "
            "the other machines reach"
        )
    return found.address


def accepts_connections(address: str) -> bool:
    """Return whether a process listens at "tcp://host:port", answering or not; blocks."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        create_connection((host, int(port)), REACH_S).close()
    except OSError:
        return False
    return True


def coordinator_address(path: Path) -> str | None:
    """Return the coordinator's address for a process that joins; RunOver if the run has ended."""
    found = _read(path)
    if found is not None and found.run_over:
        raise RunOver("the run is over")
    return read_address(path)


def _read(path: Path) -> AddressFile | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=AddressFile)
    except FileNotFoundError:
        return None
    except OSError as error:
        if is_transient(error):
            return None  # it is read again
        raise
    except BAD_BYTES as error:
        raise ConfigError(
            f"{path} is not an address file ({error}); delete it and restart its server"
        ) from error


class ClientShell:
    """The I/O of one client link, on one socket in the running loop."""

    def __init__(
        self,
        link: ClientLink,
        find_address: Callable[[], str | None],
        heartbeat_ms: int,
        on_body: Callable[[bytes], object],
        on_frame: Callable[[], None],
        keys: RunKeys,
        on_trouble: Callable[[str], None],
        find_awaited: Callable[[], int | None],
    ) -> None:
        """Connect the link to a socket in the running loop.

        `on_frame`: called after each frame, before the body that it may complete. `on_trouble`:
        called once with a reason if the server refuses this process. `find_awaited`: returns the
        number of the message that must pass next; None: nothing is awaited.
        """
        self.link = link
        self.turned = asyncio.Event()  #: set after each turn that received frames
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._find_address = find_address
        self._heartbeat_ns = heartbeat_ms * MS
        self._looked_ns = 0
        self._on_body = on_body
        self._on_frame = on_frame
        self._on_trouble, self._told = on_trouble, ""
        self._find_awaited = find_awaited
        self._stalled: tuple[str, int | None, int] = ("", None, 0)
        self._flush_due = False
        self._socket = ClientSocket(keys, link.limits.max_frame)
        self._socket.attach_loop(asyncio.get_running_loop(), self._run_turn)

    @property
    def address(self) -> str:
        return self._socket.address

    def flush_soon(self) -> None:
        """Send due frames after the running callback, together with what it still queues."""
        if not self._flush_due and not self.closed.done():
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def close(self, flush_s: float) -> int:
        """Wait for acknowledgements, say Bye; return the number of unacknowledged messages."""
        gone = self.link.silent_ns(now_ns()) > GONE_S * 1e9
        try:
            async with asyncio.timeout(0 if gone else flush_s):
                while self.link.outbox and self.link.state is not LinkState.REFUSED:
                    self.turned.clear()
                    await self.turned.wait()
        except TimeoutError:
            pass
        if not self.closed.done():
            self.link.close()
            self._send_due()
            self._end_link(None)
        return len(self.link.outbox)

    def _run_turn(self) -> None:
        try:
            frames = self._socket.drain_frames()
            for frame in frames:
                self._receive_frame(frame)
            self._look_up()
            self._check_stall()
            self._send_due()
            if frames:
                self.turned.set()
        except Exception as error:
            self._end_link(error)

    def _receive_frame(self, frame: bytes) -> None:
        try:
            bodies = self.link.receive(frame, now_ns())
        except WireError:
            return  # as if it were lost
        self._on_frame()
        for body in bodies:
            self._on_body(body)

    def _look_up(self) -> None:
        """Look up the server's address, and again when it is silent: it may have moved."""
        now, known = now_ns(), self._socket.address
        silent = self.link.silent_ns(now) > 2 * self._heartbeat_ns
        if silent or self.link.state is not LinkState.UP:
            self._report_refusal()
        if known and (not silent or now - self._looked_ns < self._heartbeat_ns):
            return
        self._looked_ns = now
        address = self._find_address()
        if address and (address != known or self._socket.given_up):
            self._socket.connect(address)
            self.link.request_hello()

    def _check_stall(self) -> None:
        """Raise LinkStalled if several connections in a row have not passed the same message."""
        awaited, lost = self._find_awaited(), self._socket.lost_connections
        address, before, since = self._stalled
        if awaited is None or (address, before) != (self.address, awaited):
            self._stalled = (self.address, awaited, lost)
        elif lost - since >= STALLS_MAX:
            raise LinkStalled(
                f"{lost - since} connections from {self.link.name} to {self.address} in a row were "
                "established and then stalled: the network between them may drop large packets; "
                "compare the MTU of the two machines"
            )

    def _report_refusal(self) -> None:
        """Report a refusal once and continue: another run's server may have the address."""
        reason = self._socket.find_refusal_reason()
        if reason and reason != self._told:
            self._told = reason
            self._on_trouble(reason)

    def _flush(self) -> None:
        self._flush_due = False
        if not self.closed.done():
            self._send_due()

    def _send_due(self) -> None:
        for frame in self.link.poll(now_ns()):
            self._socket.send(frame)

    def _end_link(self, error: Exception | None) -> None:
        self._socket.close(LINGER_MS)
        self.turned.set()
        if error is None:
            self.closed.set_result(None)
        elif not self.closed.done():
            self.link.close(f"its owner failed ({error!r})")
            self.closed.set_exception(error)


def require_started(shell: ClientShell | None) -> ClientShell:
    """Return the shell; RuntimeError if the client was never started."""
    if shell is None:
        raise RuntimeError("call start() first, in a running event loop")
    return shell


class ControlClient:
    """An actor's link to the coordinator: sends events, receives commands."""

    def __init__(
        self,
        find_address: Callable[[], str | None],
        name: str,
        role: str,
        boot_id: str,
        info: dict[str, str],
        heartbeat_ms: int,
        on_body: Callable[[bytes], object],
        on_welcome: Callable[[int], None],
        on_refused: Callable[[str, bool], None],
        *,
        keys: RunKeys,
        on_trouble: Callable[[str], None],
    ) -> None:
        """Create a client that is not started.

        `find_address`: None if there is none yet; ConfigError if it is unusable.
        `on_welcome(incarnation)`: called at the first welcome and at each by another coordinator.
        `on_refused(reason, again)`: called once; nothing is sent or received after it. `again`: a
        new process may take this one's place. `on_trouble(reason)`: called if the server at the
        address refuses this process, which keeps trying.
        """
        self._keys, self._on_trouble = keys, on_trouble
        self._find_address = find_address
        self._heartbeat_ms = heartbeat_ms
        self._on_body, self._on_welcome, self._on_refused = on_body, on_welcome, on_refused
        self._link = ClientLink(
            name, role, boot_id, heartbeat_ns=heartbeat_ms * MS, now_ns=now_ns(), info=info
        )
        self._shell: ClientShell | None = None
        self._seen = ("", LinkState.JOINING)  #: server boot and state last reported to the owner

    @property
    def incarnation(self) -> int:
        """The incarnation of this process; 0 until the first welcome."""
        return self._link.incarnation

    @property
    def unacknowledged(self) -> int:
        """Messages that the coordinator has not yet made durable."""
        return len(self._link.outbox)

    @property
    def absent_ns(self) -> int:
        """Nanoseconds since the coordinator was last heard."""
        return self._link.silent_ns(now_ns())

    def send(self, body: bytes) -> int:
        """Queue an event and return its number; OutboxFull: pause, LinkClosed: refused or closed.

        Events may be queued before `start` and during an outage.
        """
        seq = self._link.send(body)
        if self._shell is not None:
            self._shell.flush_soon()
        return seq

    def send_gauge(self, body: bytes) -> None:
        """Send a value that the next one replaces; dropped while the coordinator is away."""
        self._link.send_gauge(body)
        if self._shell is not None:
            self._shell.flush_soon()

    async def start(self) -> None:
        """Start to look for the coordinator and to join it, without waiting for either."""
        self._shell = ClientShell(
            self._link,
            self._find_address,
            self._heartbeat_ms,
            self._on_body,
            self._handle_link_state,
            self._keys,
            self._on_trouble,
            lambda: self._link.outbox.first if self._link.outbox else None,
        )

    async def wait_closed(self) -> None:
        """Return after `close`; raise what a callback raised."""
        await asyncio.shield(require_started(self._shell).closed)

    async def close(self, flush_s: float = FLUSH_S) -> int:
        """Wait at most `flush_s` for acknowledgements, say Bye; return how many are missing."""
        return await require_started(self._shell).close(flush_s)

    def _handle_link_state(self) -> None:
        seen, self._seen = self._seen, (self._link.server_boot, self._link.state)
        if self._seen == seen:
            return
        if self._link.state is LinkState.UP:
            self._on_welcome(self._link.incarnation)
        elif self._link.state is LinkState.REFUSED:
            self._on_refused(self._link.reason, self._link.again)
