"""Server of fetches: sends an exact version to a relay that requests it, outside the chain.

Reads   the table, frames of relays that fetch
Emits   Offer, Decline and chunks

The chain has priority: while a newer version waits to be sent to the successor, a fetch gets only a
chunk now and then, so that it does not time out. The version is pinned until the connection ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from laminar.weights.chain import wire
from laminar.weights.chain.transport import Link
from laminar.weights.version.copy import VersionCopy, unpack_have
from laminar.weights.version.table import VersionTable

TRICKLE_S = 10.0
"""Pause between two chunks of a fetch while the chain is busy: 0.4 MB/s in chunks of 4 MiB."""


class FetchHandler:
    """The frame handler of a connection over which a relay fetches a version."""

    def __init__(
        self,
        table: VersionTable,
        link: Link,
        version: int,
        chain_busy: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """Pin and offer the version; `chain_busy` returns whether the successor is served."""
        self._table, self._link, self._chain_busy = table, link, chain_busy
        self._clock, self._sent_at = clock, clock()
        self._copy: VersionCopy | None = None
        self._todo: deque[int] = deque()
        copy = table.pin(version)
        if copy is not None and not copy.complete:
            table.unpin(version)
            copy = None
        if copy is None:
            link.send(wire.Decline(version=version, reason=f"version {version} is not held here"))
            return
        self._copy = copy
        link.send(wire.Offer(number=1, manifest=copy.get_manifest(), base=None))

    @property
    def ready(self) -> bool:
        """Whether a chunk can be sent now."""
        late = self._clock() >= self._sent_at + TRICKLE_S
        return bool(self._todo) and (late or not self._chain_busy())

    def get_due_time(self) -> float | None:
        """Return when the next chunk is due although the chain is busy; None: none waits."""
        return self._sent_at + TRICKLE_S if self._todo and self._link.idle else None

    def handle_message(self, message: object) -> None:
        copy = self._copy
        if isinstance(message, wire.VersionDone):
            return self.end_fetch()
        if copy is None or not isinstance(message, wire.Want | wire.Resend):
            raise wire.BadBytes("no-fetch", type(message).__name__)
        if isinstance(message, wire.Want):
            have = unpack_have(message.have, copy.num_chunks)
            if have is None:
                raise wire.BadBytes("bad-have", f"{len(message.have)} bytes for {copy.num_chunks}")
            self._todo.extend(index for index, there in enumerate(have) if not there)
        elif message.position < copy.num_chunks:
            self._todo.appendleft(message.position)
        else:
            raise wire.BadBytes("bad-again", f"chunk {message.position}")

    def push_next(self) -> None:
        """Push the next chunk to an idle link, if there is one and the chain permits it."""
        copy = self._copy
        if copy is None or not self.ready or not self._link.idle:
            return
        position, self._sent_at = self._todo.popleft(), self._clock()
        body = copy.get_chunk(position)
        header = wire.FrameHeader(
            wire.FrameKind.CHUNK, body.nbytes, position, copy.version, copy.get_checksum(position)
        )
        self._link.push(header, body)

    def end_fetch(self) -> None:
        """Unpin the version, when the connection ends or the version has arrived."""
        if self._copy is not None:
            self._table.unpin(self._copy.version)
            self._copy = None
        self._todo.clear()

    def get_buffer(self, header: wire.FrameHeader) -> memoryview:
        raise wire.BadBytes("unasked-chunk", f"{header}")

    def handle_body(self, header: wire.FrameHeader) -> None:
        raise AssertionError(header)
