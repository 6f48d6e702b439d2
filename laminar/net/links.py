"""The links of one server: connections of the peers, when each was heard, which need attention.

Reads   frames of peers and their connections; times in nanoseconds, of any clock
Gives   Links: bodies that have arrived, frames that are due; WireError for an illegal frame

A peer is known by its boot id, and may be connected before it has a link. A server has ten thousand
links, and a turn concerns a few of them: those that something has happened to, and those whose time
has come. A link may be in the heap of times more than once or needlessly, as its time moves: an
owner that finds nothing to do schedules the next time.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Generic, TypeVar

from laminar.net.session import NEVER_NS, LinkState, ServerLink

Link = TypeVar("Link", bound=ServerLink)


class Links(Generic[Link]):
    """The links of one server, by boot id."""

    def __init__(self, peers_max: int) -> None:
        self.peers_max = peers_max
        self.heard_ns: dict[str, int] = {}  #: times last heard, by boot id; they outlive the links
        self._links: dict[str, Link] = {}
        self._boot_ids: dict[bytes, str] = {}  #: boot ids by the routing id of their connection
        self._routes: dict[str, bytes] = {}  #: routing ids of the newest connections
        self._awake: dict[str, None] = {}  #: links to attend to at the next `take_due`
        self._heap: list[tuple[int, str]] = []
        self._earliest_ns: dict[str, int] = {}  #: earliest time in the heap

    def __len__(self) -> int:
        return len(self._links)

    def __iter__(self) -> Iterator[Link]:
        """Iterate over the present links; they may be dropped meanwhile."""
        return iter(list(self._links.values()))

    def get(self, boot_id: str) -> Link | None:
        return self._links.get(boot_id)

    def find_link(self, route: bytes) -> Link | None:
        """Return the link of the peer on this connection."""
        return self._links.get(self._boot_ids.get(route, ""))

    def get_route(self, boot_id: str) -> bytes:
        return self._routes[boot_id]

    def find_refusal_reason(self, waiting: int = 0) -> str | None:
        """Return why there is no room for another peer while `waiting` others are admitted."""
        if len(self._links) + waiting < self.peers_max:
            return None
        return (
            f"the server has {self.peers_max} clients, its maximum; start fewer processes, or "
            "raise its limit of open files (ulimit -n)"
        )

    def set_route(self, boot_id: str, route: bytes) -> None:
        """Send to this peer on this connection from now on."""
        self._boot_ids.pop(self._routes.get(boot_id, b""), None)
        self._boot_ids[route], self._routes[boot_id] = boot_id, route

    def add(self, link: Link) -> None:
        self._links[link.boot_id] = link
        self.wake_link(link.boot_id)

    def drop_link(self, boot_id: str) -> None:
        del self._links[boot_id]
        self._boot_ids.pop(self._routes.pop(boot_id), None)

    def receive(self, link: Link, frame: bytes, now_ns: int) -> list[tuple[int, bytes]]:
        """Return (number, body) to handle, in order; number 0 is a gauge. WireError if illegal."""
        bodies = link.receive(frame, now_ns)
        self.heard_ns[link.boot_id] = now_ns
        return bodies

    def poll_link(self, link: Link, now_ns: int) -> list[tuple[bytes, bytes]]:
        """Return (routing id, frame) of the frames that are due; drop a closed link after them."""
        route = self._routes[link.boot_id]
        frames = [(route, frame) for frame in link.poll(now_ns)]
        if link.state is LinkState.CLOSED:
            self.drop_link(link.boot_id)
        else:
            self.wake_at(link.boot_id, link.next_due_ns())
        return frames

    def wake_link(self, boot_id: str) -> None:
        self._awake[boot_id] = None

    def wake_at(self, boot_id: str, at_ns: int) -> None:
        """Have `take_due` return this link at that time, or before."""
        if at_ns < self._earliest_ns.get(boot_id, NEVER_NS):
            self._earliest_ns[boot_id] = at_ns
            heappush(self._heap, (at_ns, boot_id))

    def take_due(self, now_ns: int) -> list[Link]:
        """Return the links that were woken, then those whose time has come, and forget both."""
        while self._heap and self._heap[0][0] <= now_ns:
            _, boot_id = heappop(self._heap)
            if self._earliest_ns.pop(boot_id, None) is not None:
                self._awake[boot_id] = None
        due, self._awake = self._awake, {}
        return [self._links[boot_id] for boot_id in due if boot_id in self._links]
