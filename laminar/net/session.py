"""Sessions: numbered, acknowledged, resent and deduplicated messages over a lossy link.

Reads   frames (bytes) that a transport received, and the time in nanoseconds
Gives   frames to send now, and bodies in order; WireError for bytes that are not a legal frame

A message queue silently drops its content whenever a connection breaks, so delivery is ensured
here. A link joins one client process (boot id) and one server. Each direction numbers its Data from
1. The receiver accepts them in order, ignores duplicates and waits for a missing one;
acknowledgements are cumulative. The sender keeps a body until it is acknowledged, and after a
timeout resends from the first missing one. A server acknowledges only what its owner declared
processed (made durable). Delivery is thus at least once across restarts, exactly once and in order
within one pair of boots, and nothing is dropped in silence: a full outbox is an exception.

Client link                                    | Server link (made by its owner from a Hello)
state     event                   becomes      | state    event                   becomes
--------  ----------------------  -----------  | -------  ----------------------  --------------
joining   Welcome                 up           | up       Hello                   up, Welcome due
joining   Refused                 refused      | up       Hello acked beyond us   refused
up        Welcome, same server    up           | up       refuse_client()         refused
up        Welcome, other server   up, its own  | up       Bye                     closed
                                  inbox, resend| refused  any frame               Refused due
up        Refused                 refused      | closed   any frame               closed (ignored)
any       close()                 closed, Bye  |
refused   any frame               (ignored)    | The client's numbers continue across servers; a
closed    any frame               (ignored)    | new server link numbers its own Data from 1.

`server_boot` names one server link. Sequenced frames carry it, because an acknowledgement for a
dead server must not count for its successor, nor a late frame of the dead one pass for the
successor's. It must differ for every ServerLink ever made.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

import msgspec

from laminar.events.families import WireError
from laminar.net.frames import (
    FRAME_BYTES_MAX,
    MAX_TEXT,
    Ack,
    Ask,
    Bye,
    Data,
    Gauge,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
    decode_client,
    decode_server,
    encode,
)

PEERS_MAX = 16_384  #: clients of one server
GAUGES_WAITING = 16  #: gauges kept between two polls; the newest win
SERVERS_KNOWN = 16  #: server boots whose inboxes a client remembers

MS = 1_000_000  #: nanoseconds
NEVER_NS = 2**63 - 1  #: `next_due_ns` of a link that waits for nothing
RESEND_MIN_NS = 200 * MS  #: timeout above a slow disk sync (130 ms seen), so that resends are rare
RESEND_MAX_NS = 2_000 * MS
WINDOW_MESSAGES = 512  #: messages sent and unacknowledged; a server drains as many per turn
WINDOW_BYTES = 4 * 1024 * 1024  #: limit of the bytes of one resend; a larger body goes alone
FRAME_OVERHEAD = 1024  #: bytes that a frame adds to its body, at most


class Limits(msgspec.Struct, frozen=True):
    """Size limits of one link."""

    max_frame: int = FRAME_BYTES_MAX
    outbox_messages: int = 16_384
    outbox_bytes: int = 64 * 1024 * 1024

    @property
    def max_body(self) -> int:
        return self.max_frame - FRAME_OVERHEAD


class Outbox:
    """Unacknowledged bodies, sent or waiting; decides which are due (go-back-n in a window)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bodies: dict[int, bytes] = {}  #: bodies by sequence number, ascending
        self._bytes = 0
        self._flight_bytes = 0  #: bytes of the bodies first..sent
        self._sent = 0
        self._wait_ns = RESEND_MIN_NS
        self._resend_ns = NEVER_NS
        self.first = 1  #: lowest unacknowledged number, or the next one
        self.next = 1

    def __len__(self) -> int:
        return len(self._bodies)

    def append(self, body: bytes) -> int:
        """Keep `body` and return its number; OutboxFull, or ValueError if it never fits."""
        check_body(body, self._limits)
        full = len(self._bodies) >= self._limits.outbox_messages
        if full or (self._bodies and self._bytes + len(body) > self._limits.outbox_bytes):
            raise OutboxFull(
                f"{len(self._bodies)} messages ({self._bytes} bytes) wait for an acknowledgement"
            )
        seq, self.next = self.next, self.next + 1
        self._bodies[seq] = body
        self._bytes += len(body)
        return seq

    def acknowledge_up_to(self, seq: int, now_ns: int) -> None:
        """Forget everything up to `seq`; progress resets the timeout."""
        if seq >= self.next:
            raise WireError(f"{seq} is acknowledged, but only {self.next - 1} were sent")
        if seq < self.first:
            return
        while self.first <= seq:
            size = len(self._bodies.pop(self.first))
            self._bytes -= size
            if self.first <= self._sent:
                self._flight_bytes -= size
            self.first += 1
        self._sent = max(self._sent, seq)
        self._wait_ns = RESEND_MIN_NS
        self._resend_ns = now_ns + self._wait_ns if self._in_flight else NEVER_NS

    def mark_all_due(self) -> None:
        """Make all unacknowledged bodies due at once, for another server."""
        self._sent = self.first - 1
        self._flight_bytes = 0
        self._wait_ns = RESEND_MIN_NS
        self._resend_ns = NEVER_NS

    def is_ack_overdue(self, now_ns: int) -> bool:
        """Return whether an acknowledgement is overdue."""
        return now_ns >= self._resend_ns

    def take_due(self, now_ns: int) -> list[tuple[int, bytes]]:
        """Return (number, body) of all due messages: unsent ones, or the window after a timeout."""
        if not self._bodies:
            return []
        if self.is_ack_overdue(now_ns):
            wait_ns = min(2 * self._wait_ns, RESEND_MAX_NS)
            self.mark_all_due()
            self._wait_ns = wait_ns
        due: list[tuple[int, bytes]] = []
        while self._may_send():
            self._sent += 1
            body = self._bodies[self._sent]
            self._flight_bytes += len(body)
            due.append((self._sent, body))
        if due and self._resend_ns == NEVER_NS:
            self._resend_ns = now_ns + self._wait_ns
        return due

    def next_due_ns(self) -> int:
        return 0 if self._may_send() else self._resend_ns

    @property
    def _in_flight(self) -> int:
        return self._sent - self.first + 1

    def _may_send(self) -> bool:
        if self._sent + 1 >= self.next:
            return False
        if self._in_flight == 0:
            return True
        size = self._flight_bytes + len(self._bodies[self._sent + 1])
        return self._in_flight < WINDOW_MESSAGES and size <= WINDOW_BYTES


class Inbox:
    """The next expected number, and the acknowledgement that is due."""

    def __init__(self, last_seq: int = 0) -> None:
        self.delivered = last_seq
        self.processed = last_seq
        self.ack_due = False

    def accept_number(self, seq: int) -> bool:
        """Return whether to deliver this number; a duplicate or an early one triggers an Ack."""
        if seq == self.delivered + 1:
            self.delivered = seq
            return True
        self.ack_due = True
        return False

    def mark_processed(self, seq: int) -> None:
        """Mark everything up to `seq` as processed; ValueError for an undelivered number."""
        if seq > self.delivered:
            raise ValueError(f"{seq} is marked processed, but only {self.delivered} were delivered")
        self.processed = max(self.processed, seq)
        self.ack_due = True

    def skip_to(self, seq: int) -> None:
        """Start after `seq`, up to which a predecessor has acknowledged everything."""
        self.delivered = self.processed = seq


def check_body(body: bytes, limits: Limits) -> None:
    """Raise ValueError for a body that the peer would never accept, however often resent."""
    if len(body) > limits.max_body:
        raise ValueError(f"a body of {len(body)} bytes exceeds the limit of {limits.max_body}")


class LinkClosed(ConnectionError):
    """The link was refused or closed; it can send nothing more."""


class RunOver(Exception):
    """The coordinator has ended, and the run with it; there is no successor to wait for."""


class LinkState(StrEnum):
    JOINING = "joining"
    UP = "up"
    REFUSED = "refused"
    CLOSED = "closed"


class _Link:
    """The common part of both ends: outbox, inbox, state, and the sequenced frames that are due."""

    def __init__(self, state: LinkState, server_boot: str, limits: Limits) -> None:
        self.state = state
        self.reason = ""  #: why it was refused or closed
        self.again = False  #: refused for its silence; a new process may take its place
        self.server_boot = server_boot
        self.limits = limits
        self.outbox = Outbox(limits)
        self.inbox = Inbox()

    def send(self, body: bytes) -> int:
        """Queue `body` and return its number; OutboxFull, LinkClosed, ValueError: too large."""
        if self.state in (LinkState.REFUSED, LinkState.CLOSED):
            raise LinkClosed(f"the link is {self.state}: {self.reason}")
        return self.outbox.append(body)

    def _take_sequenced(self, now_ns: int) -> list[bytes]:
        inbox, boot, due = self.inbox, self.server_boot, self.outbox.take_due(now_ns)
        if not (due or inbox.ack_due):
            return []
        inbox.ack_due = False
        if not due:
            return [encode(Ack(boot, inbox.processed))]
        return [encode(Data(boot, seq, inbox.processed, body)) for seq, body in due]


class ClientLink(_Link):
    """The connecting end. Owner: feed `receive`, send the frames of `poll`, check `state`."""

    def __init__(
        self,
        name: str,
        role: str,
        boot_id: str,
        *,
        heartbeat_ns: int,
        now_ns: int,
        info: dict[str, str] | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__(LinkState.JOINING, "", limits)
        self.name = name
        self.role = role
        self.boot_id = boot_id
        self.info = info or {}
        self.incarnation = 0
        self._heartbeat_ns = heartbeat_ns
        self._inboxes: dict[str, Inbox] = {}  #: inboxes by server boot, the current one last
        self._gauges: deque[bytes] = deque(maxlen=GAUGES_WAITING)
        self._heard_ns = now_ns
        self._asked_ns = now_ns  #: when a frame that wants an answer was last sent
        self._hello_ns = now_ns  #: when the next Hello is due
        self._hello_wait_ns = RESEND_MIN_NS
        self._bye_due = False

    def silent_ns(self, now_ns: int) -> int:
        """Return the nanoseconds since the server was last heard."""
        return now_ns - self._heard_ns

    def send_gauge(self, body: bytes) -> None:
        """Send `body` with the next poll; dropped if the link is not up."""
        check_body(body, self.limits)
        if self.state is LinkState.UP:
            self._gauges.append(body)

    def request_hello(self) -> None:
        """Send a Hello with the next poll, because the connection is new."""
        self._hello_ns = 0
        self._hello_wait_ns = RESEND_MIN_NS

    def close(self, reason: str = "closed by its owner") -> None:
        """Say Bye with the next poll; unacknowledged bodies are abandoned."""
        self.reason = reason
        self._bye_due = self.state in (LinkState.JOINING, LinkState.UP)
        self.state = LinkState.CLOSED

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """Return the bodies to handle, in order (none or one); WireError for an illegal frame."""
        message = decode_server(frame, self.limits.max_frame)
        if self.state in (LinkState.REFUSED, LinkState.CLOSED):
            return []
        if isinstance(message, Welcome):
            self._handle_welcome(message, now_ns)
        elif isinstance(message, Refused):
            self.state, self.reason = LinkState.REFUSED, message.reason
            self.again = message.again
        elif self.state is LinkState.UP and message.boot == self.server_boot:
            return self._handle_sequenced(message, now_ns)
        return []

    def poll(self, now_ns: int) -> list[bytes]:
        """Return the frames that are due now."""
        if self.state is LinkState.JOINING:
            return self._make_hello(now_ns) if now_ns >= self._hello_ns else []
        if self.state is LinkState.UP:
            return self._poll_up(now_ns)
        frames = [encode(Bye())] if self._bye_due else []
        self._bye_due = False
        return frames

    def next_due_ns(self) -> int:
        """Return when `poll` has a frame if nothing else happens; 0: now."""
        if self.state is LinkState.JOINING:
            return self._hello_ns
        if self.state is LinkState.UP:
            if self._gauges or self.inbox.ack_due:
                return 0
            heartbeat_ns = self._asked_ns + self._heartbeat_ns
            return min(self._hello_ns, heartbeat_ns, self.outbox.next_due_ns())
        return 0 if self._bye_due else NEVER_NS

    def _handle_welcome(self, welcome: Welcome, now_ns: int) -> None:
        self.outbox.acknowledge_up_to(welcome.last_seq, now_ns)
        if welcome.server_boot != self.server_boot:
            self._turn_to(welcome.server_boot)
        self.incarnation = welcome.incarnation
        self.state = LinkState.UP
        self._heard_ns = now_ns
        self._hello_ns, self._hello_wait_ns = NEVER_NS, RESEND_MIN_NS

    def _turn_to(self, server_boot: str) -> None:
        """Switch to the inbox of a server, new or (after a late Welcome) known before."""
        self.server_boot = server_boot
        self.inbox = self._inboxes.pop(server_boot, Inbox())
        self._inboxes[server_boot] = self.inbox
        if len(self._inboxes) > SERVERS_KNOWN:
            del self._inboxes[next(iter(self._inboxes))]
        self.outbox.mark_all_due()

    def _handle_sequenced(self, message: Data | Ack, now_ns: int) -> list[bytes]:
        self.outbox.acknowledge_up_to(message.ack, now_ns)
        self._heard_ns = now_ns
        if isinstance(message, Ack) or not self.inbox.accept_number(message.seq):
            return []
        self.inbox.mark_processed(message.seq)
        return [message.body]

    def _poll_up(self, now_ns: int) -> list[bytes]:
        # An overdue answer may mean that another server listens now, which needs a Hello.
        overdue = now_ns - self._asked_ns >= self._heartbeat_ns
        unanswered = overdue and self._heard_ns < self._asked_ns
        say_hello = unanswered or now_ns >= self._hello_ns or self.outbox.is_ack_overdue(now_ns)
        frames = self._make_hello(now_ns) if say_hello else []
        waiting = self.outbox.next_due_ns()
        frames += self._take_sequenced(now_ns)
        if waiting <= now_ns:
            self._asked_ns = now_ns
        elif overdue and not say_hello:
            frames.append(encode(Heartbeat(self.server_boot, self.inbox.processed)))
            self._asked_ns = now_ns
        if self._gauges:
            frames += [encode(Gauge(body)) for body in self._gauges]
            self._gauges.clear()
        return frames

    def _make_hello(self, now_ns: int) -> list[bytes]:
        self._asked_ns = now_ns
        joining = self.state is LinkState.JOINING
        self._hello_ns = now_ns + self._hello_wait_ns if joining else NEVER_NS
        self._hello_wait_ns = min(2 * self._hello_wait_ns, RESEND_MAX_NS)
        first = self.outbox.first
        return [
            encode(Hello(self.name, self.role, self.boot_id, self.incarnation, first, self.info))
        ]


class ServerLink(_Link):
    """The accepting end of one client process.

    Owner: make it from a Hello once the client is admitted, feed `receive`, call `mark_processed`
    when the bodies are durable, then send the frames of `poll` to where the client was heard last.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        server_boot: str,
        incarnation: int,
        last_seq: int | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
    ) -> None:
        """Create the link from a Hello.

        `last_seq`: the last number of this client on the owner's record, 0 for a new client; None
        for an owner without a record, which starts where the client says.
        """
        super().__init__(LinkState.UP, server_boot, limits)
        self.name = hello.name
        self.role = hello.role
        self.boot_id = hello.boot_id
        self.incarnation = incarnation
        self._has_record = last_seq is not None
        self._answer_due = True  #: whether Welcome or Refused is due
        self.inbox = Inbox(last_seq or 0)
        self._resume_from(hello.first_seq)

    def receive(self, frame: bytes, now_ns: int) -> list[tuple[int, bytes]]:
        """Return (number, body) to handle, in order; number 0 is a gauge. WireError if illegal."""
        message = decode_client(frame, self.limits.max_frame)
        if self.state is not LinkState.UP:
            self._answer_due = self.state is LinkState.REFUSED
            return []
        if isinstance(message, Hello):
            self._handle_hello(message)
        elif isinstance(message, Gauge):
            return [(0, message.body)]
        elif isinstance(message, Ask):
            raise WireError(f"{self.name} sent a user's request on the link of a process")
        elif isinstance(message, Bye):
            self.state, self.reason = LinkState.CLOSED, "the client sent Bye"
        else:
            return self._handle_sequenced(message, now_ns)
        return []

    def mark_processed(self, peer_seq: int) -> None:
        """Mark everything up to `peer_seq` as durable, so that it may be acknowledged."""
        self.inbox.mark_processed(peer_seq)

    def refuse_client(self, reason: str, *, again: bool = False) -> None:
        """Refuse this client and tell it why; `again`: a new process may take its place."""
        self.state, self._answer_due = LinkState.REFUSED, True
        self.reason, self.again = reason[:MAX_TEXT], again

    def poll(self, now_ns: int) -> list[bytes]:
        """Return the frames that are due now."""
        frames = [self._make_answer()] if self._answer_due else []
        self._answer_due = False
        if self.state is LinkState.UP:
            frames += self._take_sequenced(now_ns)
        return frames

    def next_due_ns(self) -> int:
        """Return when `poll` has a frame if nothing else happens; 0: now."""
        if self._answer_due:
            return 0
        if self.state is not LinkState.UP:
            return NEVER_NS
        return 0 if self.inbox.ack_due else self.outbox.next_due_ns()

    def _make_answer(self) -> bytes:
        if self.state is LinkState.REFUSED:
            return encode(Refused(self.reason, self.again))
        return encode(Welcome(self.server_boot, self.incarnation, self.inbox.processed))

    def _handle_hello(self, hello: Hello) -> None:
        if (hello.name, hello.boot_id) != (self.name, self.boot_id):
            raise WireError(f"Hello of {hello.name} on the link of {self.name}")
        self._answer_due = True
        self._resume_from(hello.first_seq)

    def _resume_from(self, first_seq: int) -> None:
        """Continue from `first_seq`; some server has acknowledged everything below it."""
        if first_seq <= self.inbox.delivered + 1:
            return
        if self._has_record:
            self.refuse_client(
                f"{self.name} was acknowledged up to {first_seq - 1}, but the log ends at "
                f"{self.inbox.delivered}: restart it, so that its work is recovered"
            )
        else:
            self.inbox.skip_to(first_seq - 1)

    def _handle_sequenced(
        self, message: Data | Ack | Heartbeat, now_ns: int
    ) -> list[tuple[int, bytes]]:
        if message.boot == self.server_boot:
            self.outbox.acknowledge_up_to(message.ack, now_ns)
        if isinstance(message, Heartbeat):
            self.inbox.ack_due = True
        elif isinstance(message, Data) and self.inbox.accept_number(message.seq):
            return [(message.seq, message.body)]
        return []


class OutboxFull(RuntimeError):
    """The peer acknowledges more slowly than this end sends: pause and retry."""
