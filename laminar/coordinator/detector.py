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
        self._nobody_until_ns = now_ns  #: no lease of those known so far ends before

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
        """Live actors whose lease ran out; `heard_ns` by boot id, absent: not heard yet.

        Words and a grace only move the end of a lease away, and who joins has a whole one before
        it: so nobody is looked at before the first of the present leases can have ended.
        """
        events: list[HeartbeatLost] = []
        if now_ns <= self._nobody_until_ns:
            return events
        self._nobody_until_ns = now_ns + self.lease_ns
        for actor in actors.values():
            if not actor.alive:
                continue
            heard = max(heard_ns.get(actor.boot_id, 0), self._grace_from_ns)
            silent_ns = now_ns - heard
            self._nobody_until_ns = min(self._nobody_until_ns, heard + self.lease_ns)
            if silent_ns > self.lease_ns:
                events.append(
                    HeartbeatLost(
                        actor=actor.name,
                        actor_incarnation=actor.incarnation,
                        silent_ms=silent_ns // 1_000_000,
                    )
                )
        return events
