"""What one direction of a link keeps: an outbox of what is sent, an inbox of what has arrived.

Reads   bodies to send, acknowledgements, sequence numbers, the time in nanoseconds
Gives   Outbox, Inbox; Limits, OutboxFull; which bodies are due, what may be acknowledged

Go-back-n in a window: the sender keeps a body until it is acknowledged and goes back to the first
missing one after a timeout; the receiver takes bodies in order. Both ends of a link (session.py)
have one of each.
"""

from __future__ import annotations

import msgspec

from laminar.events.base import WireError
from laminar.net.frames import FRAME_BYTES_MAX

MS = 1_000_000  #: nanoseconds
NEVER_NS = 2**63 - 1  #: `next_due_ns` of a link that waits for nothing
RESEND_MIN_NS = 200 * MS  #: above a slow disk sync (130 ms seen), so that resends are rare
RESEND_MAX_NS = 2_000 * MS
WINDOW_MESSAGES = 512  #: sent and unacknowledged: what a server drains in one turn
WINDOW_BYTES = 4 * 1024 * 1024  #: bounds what one resend costs; a larger body goes alone
FRAME_OVERHEAD = 1024  #: bytes of a frame besides its body, at most


class OutboxFull(RuntimeError):
    """The peer acknowledges more slowly than we send: hold back and try again."""


class Limits(msgspec.Struct, frozen=True):
    """What one link may hold."""

    max_frame: int = FRAME_BYTES_MAX
    outbox_messages: int = 16_384
    outbox_bytes: int = 64 * 1024 * 1024

    @property
    def max_body(self) -> int:
        return self.max_frame - FRAME_OVERHEAD


class Outbox:
    """Bodies sent or waiting, until acknowledged; says which are due (go-back-n in a window)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._bodies: dict[int, bytes] = {}  #: by sequence number, ascending
        self._bytes = 0
        self._flight_bytes = 0  #: of the bodies first..sent
        self._sent = 0
        self._wait_ns = RESEND_MIN_NS
        self._resend_ns = NEVER_NS
        self.first = 1  #: lowest unacknowledged number, or the next one
        self.next = 1

    def __len__(self) -> int:
        return len(self._bodies)

    def append(self, body: bytes) -> int:
        """Keep `body`, give its number; OutboxFull, or ValueError for a body that never fits."""
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

    def acknowledge(self, seq: int, now_ns: int) -> None:
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

    def rewind(self) -> None:
        """Everything unacknowledged is due again, at once: the server is another one."""
        self._sent = self.first - 1
        self._flight_bytes = 0
        self._wait_ns = RESEND_MIN_NS
        self._resend_ns = NEVER_NS

    def expired(self, now_ns: int) -> bool:
        """An acknowledgement is overdue."""
        return now_ns >= self._resend_ns

    def take(self, now_ns: int) -> list[tuple[int, bytes]]:
        """(number, body) of what must go now: what was never sent, or the window once more."""
        if not self._bodies:
            return []
        if self.expired(now_ns):
            wait_ns = min(2 * self._wait_ns, RESEND_MAX_NS)
            self.rewind()
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
    """Which number comes next, and what may be acknowledged."""

    def __init__(self, last_seq: int = 0) -> None:
        self.delivered = last_seq
        self.processed = last_seq
        self.ack_due = False

    def accept(self, seq: int) -> bool:
        """True: deliver it. What came before, or too early, is answered with a new Ack."""
        if seq == self.delivered + 1:
            self.delivered = seq
            return True
        self.ack_due = True
        return False

    def done(self, seq: int) -> None:
        """Everything up to `seq` is processed; ValueError for what was never delivered."""
        if seq > self.delivered:
            raise ValueError(f"{seq} is declared processed, but {self.delivered} came last")
        self.processed = max(self.processed, seq)
        self.ack_due = True

    def skip_to(self, seq: int) -> None:
        """A predecessor has acknowledged everything up to `seq`."""
        self.delivered = self.processed = seq


def check_body(body: bytes, limits: Limits) -> None:
    """ValueError for a body that the peer would never accept: resending it could not end."""
    if len(body) > limits.max_body:
        raise ValueError(f"a body of {len(body)} bytes exceeds the limit of {limits.max_body}")
