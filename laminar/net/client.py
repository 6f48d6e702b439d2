"""Client links in an event loop, and the actor's line to the coordinator.

Reads   frames from a socket; the address file that a server writes next to the run
Emits   bodies to callbacks, in order; events, gauges and heartbeats to the server

The shell of `session` and `transport`: each turn drains the socket, hands over what came in
order, and sends what the session says is due; the socket's slow tick drives resends and
heartbeats. A server that falls silent is looked up again, because one that restarts may listen
elsewhere. A callback that raises ends the shell and `wait_closed` raises what it raised: an actor
that lost a command half-way must end, not go on.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from laminar.config import ConfigError
from laminar.events.base import WireError
from laminar.net.addresses import MACHINE, is_loopback
from laminar.net.auth import RunKeys
from laminar.net.calls import FLUSH_S
from laminar.net.frames import BAD_BYTES
from laminar.net.session import MS, ClientLink, LinkState, RunOver
from laminar.net.transport import ClientSocket
from laminar.run.renames import write_whole

GONE_S = 10.0
"""A server that is started again is back sooner; one that is silent for longer is gone."""
LINGER_MS = 200  #: how long the last frames may take to leave a closed socket

now_ns = time.monotonic_ns


class AddressFile(msgspec.Struct):
    """What we read of an address file; it may hold more."""

    address: str
    run_over: bool = False  #: of the coordinator's: it was the last one
    machine: str = MACHINE  #: where the server is


def write_address(path: Path, address: str, **facts: str | int) -> None:
    """Write an address file. OSError. After a power cut the next server writes it again, but those
    that read it before must not find half of it."""
    text = json.dumps({"address": address, "machine": MACHINE, **facts})
    write_whole(path, text.encode(), durable=True)


def read_address(path: Path) -> str | None:
    """The address in the file, None while there is no file; ConfigError for a malformed one, and
    for a loopback address of another machine."""
    found = _read(path)
    if found is None:
        return None
    if found.machine != MACHINE and is_loopback(found.address):
        raise ConfigError(
            f"{path} gives {found.address}, which only its own machine reaches, and this is "
            "another one: set coordinator.host, or the --host of that node, to an address, a name "
            "or an interface that the others reach"
        )
    return found.address


def coordinator_address(path: Path) -> str | None:
    """The same of a coordinator, for one that joins the run; RunOver when it is too late for
    that."""
    found = _read(path)
    if found is not None and found.run_over:
        raise RunOver("the run is over")
    return read_address(path)


def _read(path: Path) -> AddressFile | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=AddressFile)
    except FileNotFoundError:
        return None
    except BAD_BYTES as error:
        raise ConfigError(
            f"{path} is not an address file ({error}); delete it and restart its server"
        ) from error


class ClientShell:
    """One client link on one socket in the running loop."""

    def __init__(
        self,
        link: ClientLink,
        find_address: Callable[[], str | None],
        heartbeat_ms: int,
        on_body: Callable[[bytes], object],
        on_frame: Callable[[], None],
        keys: RunKeys,
        on_trouble: Callable[[str], None],
    ) -> None:
        """`on_frame` is called after each frame, before the body that it may have completed;
        `on_trouble` with a sentence, once, when the server does not let this process in."""
        self.link = link
        self.bad_frames = 0
        self.turned = asyncio.Event()  #: set after each turn that received frames
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._find_address = find_address
        self._heartbeat_ns = heartbeat_ms * MS
        self._looked_ns = 0
        self._on_body = on_body
        self._on_frame = on_frame
        self._on_trouble, self._told = on_trouble, ""
        self._flush_due = False
        self._socket = ClientSocket(keys, link.limits.max_frame)
        self._socket.attach_loop(asyncio.get_running_loop(), self._run_turn)

    @property
    def address(self) -> str:
        return self._socket.address

    def flush_soon(self) -> None:
        """Send what is due after the running callback, together with what follows in it."""
        if not self._flush_due and not self.closed.done():
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def close(self, flush_s: float) -> int:
        """Wait for acknowledgements, say Bye; how many messages stayed unacknowledged."""
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
            self._send_due()
            if frames:
                self.turned.set()
        except Exception as error:
            self._end_link(error)

    def _receive_frame(self, frame: bytes) -> None:
        try:
            bodies = self.link.receive(frame, now_ns())
        except WireError:
            self.bad_frames += 1
            return
        self._on_frame()
        for body in bodies:
            self._on_body(body)

    def _look_up(self) -> None:
        """Find the server, and find it again when it is silent: it may listen elsewhere now."""
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

    def _report_refusal(self) -> None:
        """Say it and go on: the address may be of a server that is gone, and another run's now."""
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
    """The shell, or RuntimeError for a client that was never started."""
    if shell is None:
        raise RuntimeError("call start() first, in a running event loop")
    return shell


class ControlClient:
    """An actor's line to the coordinator: events out, commands in, found by the address file."""

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
        """`find_address`: None while there is none, ConfigError for one that is of no use;
        `on_welcome(incarnation)`: at the first welcome and at each by another coordinator;
        `on_refused(reason, again)`: once; nothing is sent or received after it; `again`: a new
        process in the place of this one is welcome; `on_trouble(reason)`: what
        listens on the address does not let this process in, which goes on trying."""
        self._keys, self._on_trouble = keys, on_trouble
        self._find_address = find_address
        self._heartbeat_ms = heartbeat_ms
        self._on_body, self._on_welcome, self._on_refused = on_body, on_welcome, on_refused
        self._link = ClientLink(
            name,
            role,
            boot_id,
            heartbeat_ns=heartbeat_ms * MS,
            now_ns=now_ns(),
            info=info,
        )
        self._shell: ClientShell | None = None
        self._seen = ("", LinkState.JOINING)  #: server boot and state that the owner knows of

    @property
    def incarnation(self) -> int:
        """0 until the first welcome."""
        return self._link.incarnation

    @property
    def unacknowledged(self) -> int:
        """Messages that the coordinator has not yet made durable."""
        return len(self._link.outbox)

    @property
    def absent_ns(self) -> int:
        """How long the coordinator has been silent."""
        return self._link.silent_ns(now_ns())

    def send(self, body: bytes) -> int:
        """Queue an event, give its number; OutboxFull: hold back, LinkClosed: refused or closed.

        Events may be queued before `start` and during an outage.
        """
        seq = self._link.send(body)
        if self._shell is not None:
            self._shell.flush_soon()
        return seq

    def send_gauge(self, body: bytes) -> None:
        """Send a value that the next one replaces; forgotten when the coordinator is away."""
        self._link.send_gauge(body)
        if self._shell is not None:
            self._shell.flush_soon()

    async def start(self) -> None:
        """Begin to look for the coordinator and to join it; does not wait for either."""
        self._shell = ClientShell(
            self._link,
            self._find_address,
            self._heartbeat_ms,
            self._on_body,
            self._handle_link_state,
            self._keys,
            self._on_trouble,
        )

    async def wait_closed(self) -> None:
        """Return after `close`; raise what a callback raised."""
        await asyncio.shield(require_started(self._shell).closed)

    async def close(self, flush_s: float = FLUSH_S) -> int:
        """Wait at most `flush_s` for acknowledgements, say Bye; how many messages are lost."""
        return await require_started(self._shell).close(flush_s)

    def _handle_link_state(self) -> None:
        seen, self._seen = self._seen, (self._link.server_boot, self._link.state)
        if self._seen == seen:
            return
        if self._link.state is LinkState.UP:
            self._on_welcome(self._link.incarnation)
        elif self._link.state is LinkState.REFUSED:
            self._on_refused(self._link.reason, self._link.again)
