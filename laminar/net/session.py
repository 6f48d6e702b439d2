"""Sessions: numbered, acknowledged, resent and deduplicated messages over a link that loses some.

Reads   frames (bytes) that a transport received, and the time in nanoseconds
Gives   frames to send now, and bodies in order; WireError for any bytes that are not a legal frame

A message queue drops what it held whenever a connection breaks, without notice, so
delivery is ensured here. A link joins one client process (boot id) and one server. Each direction
numbers its Data from 1; the receiver takes them in order, ignores what it had, waits where one is
missing; acknowledgements are cumulative; the sender keeps a body until it is acknowledged and goes
back to the first missing one after a timeout. A server acknowledges only what its owner declared
`processed` (made durable). So delivery is at least once across restarts, exactly once and in order
within one pair of boots, and nothing is dropped in silence: a full outbox is an exception.

Client link                                    | Server link (made by its owner from a Hello)
state     what happens            becomes      | state    what happens            becomes
--------  ----------------------  -----------  | -------  ----------------------  --------------
joining   Welcome                 up           | up       Hello                   up, Welcome due
joining   Refused                 refused      | up       Hello acked beyond us   refused
up        Welcome, same server    up           | up       refuse()                refused
up        Welcome, other server   up, its own  | up       Bye                     closed
                                  inbox, resend| refused  any frame               Refused due
up        Refused                 refused      | closed   any frame               closed (ignored)
any       close()                 closed, Bye  |
refused   any frame               (ignored)    | The client's numbers go on across servers; a new
closed    any frame               (ignored)    | server link numbers its own Data from 1.

`server_boot` names one server link. Sequenced frames carry it, because an acknowledgement that was
meant for a server that died must not count for its successor, and a late frame of the ended one
must not pass for the successor's. It must differ for every ServerLink ever made.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from laminar.events.base import WireError
from laminar.net.frames import (
    MAX_TEXT,
    Ack,
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
from laminar.net.session_boxes import (
    NEVER_NS,
    RESEND_MAX_NS,
    RESEND_MIN_NS,
    Inbox,
    Limits,
    Outbox,
    check_body,
)

PEERS_MAX = 16_384  #: clients of one server
GAUGES_WAITING = 16  #: between two polls; the newest win
SERVERS_KNOWN = 16  #: whose place in their numbers a client remembers


class LinkClosed(ConnectionError):
    """The link was refused or closed: nothing can be sent on it any more."""


class LinkState(StrEnum):
    JOINING = "joining"
    UP = "up"
    REFUSED = "refused"
    CLOSED = "closed"


def full(clients: int) -> str:
    """What is answered to a client that comes too late."""
    return (
        f"{clients} clients are connected, more are not possible; start fewer processes, or raise "
        "the limit of open files where the server runs (ulimit -n)"
    )


class _Link:
    """What both ends share: the boxes, the state, and the sequenced frames that are due."""

    def __init__(self, state: LinkState, server_boot: str, limits: Limits, now_ns: int) -> None:
        self.state = state
        self.reason = ""  #: why it was refused or closed
        self.server_boot = server_boot
        self.limits = limits
        self.outbox = Outbox(limits)
        self.inbox = Inbox()
        self._heard_ns = now_ns

    def send(self, body: bytes) -> int:
        """Queue `body`, give its number; OutboxFull, LinkClosed, or ValueError if too large."""
        if self.state in (LinkState.REFUSED, LinkState.CLOSED):
            raise LinkClosed(f"the link is {self.state}: {self.reason}")
        return self.outbox.append(body)

    def silent_ns(self, now_ns: int) -> int:
        """How long nothing was heard from the peer."""
        return now_ns - self._heard_ns

    def _sequenced(self, now_ns: int) -> list[bytes]:
        inbox, boot, due = self.inbox, self.server_boot, self.outbox.take(now_ns)
        if not (due or inbox.ack_due):
            return []
        inbox.ack_due = False
        if not due:
            return [encode(Ack(boot, inbox.processed))]
        return [encode(Data(boot, seq, inbox.processed, body)) for seq, body in due]


class ClientLink(_Link):
    """The connecting end. Owner: feed `receive`, send what `poll` gives, look at `state`."""

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
        super().__init__(LinkState.JOINING, "", limits, now_ns)
        self.name = name
        self.role = role
        self.boot_id = boot_id
        self.info = info or {}
        self.incarnation = 0
        self._heartbeat_ns = heartbeat_ns
        self._inboxes: dict[str, Inbox] = {}  #: by server boot, the current one last
        self._gauges: deque[bytes] = deque(maxlen=GAUGES_WAITING)
        self._asked_ns = now_ns  #: when a frame that wants an answer went out last
        self._hello_ns = now_ns  #: when the next Hello is due
        self._hello_wait_ns = RESEND_MIN_NS
        self._bye_due = False

    def gauge(self, body: bytes) -> None:
        """Send `body` with the next poll; forgotten if the link is not up."""
        check_body(body, self.limits)
        if self.state is LinkState.UP:
            self._gauges.append(body)

    def reintroduce(self) -> None:
        """The connection is a new one: say Hello with the next poll."""
        self._hello_ns = 0
        self._hello_wait_ns = RESEND_MIN_NS

    def close(self, reason: str = "closed by its owner") -> None:
        """Say Bye with the next poll; what is unacknowledged is given up."""
        self.reason = reason
        self._bye_due = self.state in (LinkState.JOINING, LinkState.UP)
        self.state = LinkState.CLOSED

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """Bodies to handle, in order (none or one); WireError for an illegal frame."""
        message = decode_server(frame, self.limits.max_frame)
        if self.state in (LinkState.REFUSED, LinkState.CLOSED):
            return []
        if isinstance(message, Welcome):
            self._welcomed(message, now_ns)
        elif isinstance(message, Refused):
            self.state, self.reason = LinkState.REFUSED, message.reason
        elif self.state is LinkState.UP and message.boot == self.server_boot:
            return self._sequel(message, now_ns)
        return []

    def poll(self, now_ns: int) -> list[bytes]:
        """Frames that must go now."""
        if self.state is LinkState.JOINING:
            return self._hello(now_ns) if now_ns >= self._hello_ns else []
        if self.state is LinkState.UP:
            return self._poll_up(now_ns)
        frames = [encode(Bye())] if self._bye_due else []
        self._bye_due = False
        return frames

    def next_due_ns(self) -> int:
        """When `poll` will give something if nothing else happens; 0: now."""
        if self.state is LinkState.JOINING:
            return self._hello_ns
        if self.state is LinkState.UP:
            if self._gauges or self.inbox.ack_due:
                return 0
            heartbeat_ns = self._asked_ns + self._heartbeat_ns
            return min(self._hello_ns, heartbeat_ns, self.outbox.next_due_ns())
        return 0 if self._bye_due else NEVER_NS

    def _welcomed(self, welcome: Welcome, now_ns: int) -> None:
        self.outbox.acknowledge(welcome.last_seq, now_ns)
        if welcome.server_boot != self.server_boot:
            self._turn_to(welcome.server_boot)
        self.incarnation = welcome.incarnation
        self.state = LinkState.UP
        self._heard_ns = now_ns
        self._hello_ns, self._hello_wait_ns = NEVER_NS, RESEND_MIN_NS

    def _turn_to(self, server_boot: str) -> None:
        """Another server than before, or, after a late Welcome of one that ended, the same
        again."""
        self.server_boot = server_boot
        self.inbox = self._inboxes.pop(server_boot, Inbox())
        self._inboxes[server_boot] = self.inbox
        if len(self._inboxes) > SERVERS_KNOWN:
            del self._inboxes[next(iter(self._inboxes))]
        self.outbox.rewind()

    def _sequel(self, message: Data | Ack, now_ns: int) -> list[bytes]:
        self.outbox.acknowledge(message.ack, now_ns)
        self._heard_ns = now_ns
        if isinstance(message, Ack) or not self.inbox.accept(message.seq):
            return []
        self.inbox.done(message.seq)
        return [message.body]

    def _poll_up(self, now_ns: int) -> list[bytes]:
        # An overdue answer may mean that another server listens now: it must hear who we are.
        overdue = now_ns - self._asked_ns >= self._heartbeat_ns
        unanswered = overdue and self._heard_ns < self._asked_ns
        say_hello = unanswered or now_ns >= self._hello_ns or self.outbox.expired(now_ns)
        frames = self._hello(now_ns) if say_hello else []
        waiting = self.outbox.next_due_ns()
        frames += self._sequenced(now_ns)
        if waiting <= now_ns:
            self._asked_ns = now_ns
        elif overdue and not say_hello:
            frames.append(encode(Heartbeat(self.server_boot, self.inbox.processed)))
            self._asked_ns = now_ns
        if self._gauges:
            frames += [encode(Gauge(body)) for body in self._gauges]
            self._gauges.clear()
        return frames

    def _hello(self, now_ns: int) -> list[bytes]:
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

    Owner: make it from a Hello once the client is admitted, feed `receive`, call `processed` when
    the bodies are durable, then send what `poll` gives to wherever the client was heard last.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        server_boot: str,
        incarnation: int,
        now_ns: int,
        last_seq: int | None = None,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
    ) -> None:
        """`last_seq`: the last number of this client that the owner has on record, 0 for a new
        client; None for an owner without a record, which starts where the client says."""
        super().__init__(LinkState.UP, server_boot, limits, now_ns)
        self.name = hello.name
        self.role = hello.role
        self.boot_id = hello.boot_id
        self.info = hello.info
        self.incarnation = incarnation
        self._has_record = last_seq is not None
        self._answer_due = True  #: Welcome, or Refused
        self.inbox = Inbox(last_seq or 0)
        self._resume(hello.first_seq)

    def receive(self, frame: bytes, now_ns: int) -> list[tuple[int, bytes]]:
        """(number, body) to handle, in order; number 0 is a gauge. WireError if illegal."""
        message = decode_client(frame, self.limits.max_frame)
        if self.state is not LinkState.UP:
            self._answer_due = self.state is LinkState.REFUSED
            return []
        if isinstance(message, Hello):
            self._introduced(message)
        elif isinstance(message, Gauge):
            self._heard_ns = now_ns
            return [(0, message.body)]
        elif isinstance(message, Bye):
            self.state, self.reason = LinkState.CLOSED, "the client said Bye"
        else:
            return self._sequel(message, now_ns)
        self._heard_ns = now_ns
        return []

    def processed(self, peer_seq: int) -> None:
        """Everything up to `peer_seq` is durable: its acknowledgement may go out."""
        self.inbox.done(peer_seq)

    def refuse(self, reason: str) -> None:
        """Take nothing more from this client and tell it why, as often as it asks."""
        self.state, self._answer_due = LinkState.REFUSED, True
        self.reason = reason[:MAX_TEXT]

    def pardon(self, now_ns: int) -> None:
        """Count silence from now: the owner itself was paused and could not listen."""
        self._heard_ns = now_ns

    def poll(self, now_ns: int) -> list[bytes]:
        """Frames that must go now."""
        frames = [self._answer()] if self._answer_due else []
        self._answer_due = False
        if self.state is LinkState.UP:
            frames += self._sequenced(now_ns)
        return frames

    def next_due_ns(self) -> int:
        """When `poll` will give something if nothing else happens; 0: now."""
        if self._answer_due:
            return 0
        if self.state is not LinkState.UP:
            return NEVER_NS
        return 0 if self.inbox.ack_due else self.outbox.next_due_ns()

    def _answer(self) -> bytes:
        if self.state is LinkState.REFUSED:
            return encode(Refused(self.reason))
        return encode(Welcome(self.server_boot, self.incarnation, self.inbox.processed))

    def _introduced(self, hello: Hello) -> None:
        if (hello.name, hello.boot_id) != (self.name, self.boot_id):
            raise WireError(f"{hello.name} speaks on the link of {self.name}")
        self._answer_due = True
        self._resume(hello.first_seq)

    def _resume(self, first_seq: int) -> None:
        """The client forgot everything below `first_seq`: some server has acknowledged it."""
        if first_seq <= self.inbox.delivered + 1:
            return
        if self._has_record:
            self.refuse(
                f"{self.name} was acknowledged up to {first_seq - 1}, but the record ends at "
                f"{self.inbox.delivered}: restart it, so that its work is recovered"
            )
        else:
            self.inbox.skip_to(first_seq - 1)

    def _sequel(self, message: Data | Ack | Heartbeat, now_ns: int) -> list[tuple[int, bytes]]:
        if message.boot == self.server_boot:
            self.outbox.acknowledge(message.ack, now_ns)
        self._heard_ns = now_ns
        if isinstance(message, Heartbeat):
            self.inbox.ack_due = True
        elif isinstance(message, Data) and self.inbox.accept(message.seq):
            return [(message.seq, message.body)]
        return []
