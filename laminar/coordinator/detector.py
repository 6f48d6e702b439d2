"""Failure detection: who has been silent for longer than its lease.

Reads   how long each live actor has been silent; how long this loop itself was away
Gives   HeartbeatLost events, which the log holds; heartbeats themselves it need not hold

Pure. A coordinator that was paused (or restarted) has heard nobody and may judge nobody: a pause of
more than a third of the lease gives everybody a full grace. Silence is judged only after the socket
was seen empty, since words may lie unread in it, but at most a few turns later.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.core.state import Actor
from laminar.events.events import HeartbeatLost

TURNS_UNTIL_JUDGED = 8
"""A socket that is never empty must not keep the dead alive for ever."""


class FailureDetector:
    """One lease for all actors; its clock is whatever the caller's is."""

    def __init__(self, lease_ns: int, now_ns: int) -> None:
        self.lease_ns = lease_ns
        self._grace_from_ns = now_ns
        self._last_turn_ns = now_ns
        self._turns_not_empty = 0

    def turn(self, now_ns: int, socket_empty: bool) -> bool:
        """Begin a turn; True when silence may be judged in it."""
        if now_ns - self._last_turn_ns > self.lease_ns // 3:
            self._grace_from_ns = now_ns
        self._last_turn_ns = now_ns
        self._turns_not_empty = 0 if socket_empty else self._turns_not_empty + 1
        return socket_empty or self._turns_not_empty >= TURNS_UNTIL_JUDGED

    def lost(
        self, now_ns: int, actors: Mapping[str, Actor], heard_ns: Mapping[str, int]
    ) -> list[HeartbeatLost]:
        """Live actors whose lease ran out; `heard_ns` by boot id, absent: not heard yet."""
        events = []
        for actor in actors.values():
            heard = max(heard_ns.get(actor.boot_id, 0), self._grace_from_ns)
            silent_ns = now_ns - heard
            if actor.alive and silent_ns > self.lease_ns:
                events.append(
                    HeartbeatLost(
                        actor=actor.name,
                        actor_incarnation=actor.incarnation,
                        silent_ms=silent_ns // 1_000_000,
                    )
                )
        return events
