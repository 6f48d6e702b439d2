"""Failure detection: actors that have been silent for longer than their lease.

Reads   how long each live actor has been silent; how long this loop itself was paused
Gives   HeartbeatLost, NodeSilent and NodeRecovered, which are logged; heartbeats are not

Pure. An actor whose work can move to others has a short lease, other roles a long one: giving them
up early gains nothing. A node that exceeds it while another process of its machine responds is not
a lost machine: it is reported as silent, until it responds again or all of its machine is silent.

A coordinator that was paused (or restarted) could hear no process, and must not give one up for
that: after a pause of more than a third of the short lease every lease restarts. Messages may lie
unread in the socket, so silence counts up to the time of which all messages have been read: the
present one when the socket was seen empty, else the one when the last round through all peers
began.

When most of the machines fall silent together, the coordinator itself is cut off. As after a pause,
that is not a reason to give up any actor: all have the long lease then, and when enough machines
respond again, every lease restarts.

A machine that is silent as a whole may be cut off itself. When its first message arrives, those of
its other processes may take seconds more, since each has a connection of its own: so the leases of
that machine restart. An actor that is given up without a message since its machine was silent is
marked as cut off.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.core.state.members import ActorState
from laminar.events.events import HeartbeatLost, NodeRecovered, NodeSilent
from laminar.names.roles import ROLE_TABLE, Role

ROUND_FRAMES = 4_096
"""The minimum frames of a round: processes that join during it are read in it, too."""
MACHINES_MIN = 3
"""The machines below which the coordinator is never considered cut off: of two, either could be."""
CHECKS_PER_LEASE = 6  #: the checks in a short lease, while most machines are silent

DetectorEvent = HeartbeatLost | NodeSilent | NodeRecovered


class FailureDetector:
    """Two leases for all actors, in the caller's clock."""

    def __init__(self, lease_ns: int, node_lease_ns: int, now_ns: int) -> None:
        """Start all leases now; `node_lease_ns` is the long one."""
        self.lease_ns, self.node_lease_ns = lease_ns, node_lease_ns
        self._grace_from_ns = now_ns
        self._last_turn_ns = now_ns
        self._round_from_ns = now_ns
        self._round_frames = 0  #: frames read in the present round
        self._next_look_ns = now_ns  #: earliest end of a known lease
        self._cut_off = False  #: whether most machines were silent at the last check
        #: last check at which a machine was silent, and the next one at which it was not
        self._silent_at_ns: dict[str, int] = {}
        self._back_at_ns: dict[str, int] = {}

    def get_lease_ns(self, role: str) -> int:
        return self.node_lease_ns if ROLE_TABLE[role].long_lease else self.lease_ns

    def begin_turn(self, now_ns: int, frames: int, socket_empty: bool, peers: int) -> int | None:
        """Begin a turn that has read `frames`; return the time up to which to judge silence.

        None: not in this turn. A socket that is never empty gives one frame of each of its `peers`
        after the other. Frames that a peer had sent when a round of twice as many frames began were
        read in it, so the death of a process is noticed on a busy socket, too."""
        if now_ns - self._last_turn_ns > self.lease_ns // 3:
            self._grace_from_ns = now_ns
        self._last_turn_ns = now_ns
        self._round_frames += frames
        if socket_empty:
            read_up_to_ns = now_ns
        elif self._round_frames >= max(ROUND_FRAMES, 2 * peers):
            read_up_to_ns = self._round_from_ns
        else:
            return None
        self._round_from_ns, self._round_frames = now_ns, 0
        return read_up_to_ns

    def judge_silence(
        self, now_ns: int, actors: Mapping[str, ActorState], heard_ns: Mapping[str, int]
    ) -> list[DetectorEvent]:
        """Return the events that follow from silence until `now_ns`.

        `heard_ns` is by boot id; absent: not heard yet. Messages and pauses only extend leases, and
        a new actor has a whole lease: so no actor is checked before the first of the present leases
        can have ended, or a machine can have fallen silent. A silent node is checked once in a
        short lease."""
        if now_ns <= self._next_look_ns:
            return []
        self._next_look_ns = now_ns + self.lease_ns
        living = [actor for actor in actors.values() if actor.alive]
        silent = self._measure_machines_ns(now_ns, living, heard_ns)
        self._update_cut_off(now_ns, silent)
        self._look_who_is_back(now_ns, silent)
        heard: list[DetectorEvent] = []
        lost: list[DetectorEvent] = []
        nodes: list[ActorState] = []
        quiet_ns: dict[str, int] = {}  #: silence of all but the node, by machine
        for actor in living:
            if actor.role == Role.NODE:
                nodes.append(actor)
                heard += self._report_heard_node(now_ns, actor, heard_ns)
                continue
            silent_ns = self._silent_ns(now_ns, actor, heard_ns)
            if silent_ns > self._lease_now_ns(actor.role):
                lost.append(
                    _make_heartbeat_lost(
                        actor, silent_ns, cut_off=self._was_cut_off(actor, heard_ns)
                    )
                )
            else:
                least_ns = quiet_ns.get(actor.node, silent_ns)
                quiet_ns[actor.node] = min(least_ns, silent_ns)
        for node in nodes:
            silent_ns = self._silent_ns(now_ns, node, heard_ns)
            if silent_ns > self.get_lease_ns(Role.NODE):
                lost += self._judge_node(node, silent_ns, quiet_ns.get(node.name))
        return heard + lost

    def _measure_machines_ns(
        self, now_ns: int, living: list[ActorState], heard_ns: Mapping[str, int]
    ) -> dict[str, int]:
        """Return how long each machine has been silent."""
        found: dict[str, int] = {}
        for actor in living:
            silent_ns = now_ns - max(heard_ns.get(actor.boot_id, 0), self._grace_from_ns)
            found[actor.node] = min(found.get(actor.node, silent_ns), silent_ns)
        return found

    def _is_silent(self, machine_ns: int) -> bool:
        """Return whether a machine's silence is long: all of its processes send heartbeats."""
        return machine_ns > self.lease_ns // 2

    def _update_cut_off(self, now_ns: int, silent: Mapping[str, int]) -> None:
        most = 2 * sum(map(self._is_silent, silent.values())) > len(silent)
        before, self._cut_off = self._cut_off, most and len(silent) >= MACHINES_MIN
        if self._cut_off:
            self._next_look_ns = now_ns + self.lease_ns // CHECKS_PER_LEASE
        elif before:
            self._grace_from_ns = now_ns

    def _look_who_is_back(self, now_ns: int, silent: Mapping[str, int]) -> None:
        """Note machines that respond again, and check soon enough to see each one's silence."""
        for machine, silent_ns in silent.items():
            if self._is_silent(silent_ns):
                self._silent_at_ns[machine] = now_ns
                continue
            self._next_look_ns = min(self._next_look_ns, now_ns - silent_ns + self.lease_ns // 2)
            if self._silent_at_ns.get(machine, -1) >= self._back_at_ns.get(machine, 0):
                self._back_at_ns[machine] = now_ns

    def _was_cut_off(self, actor: ActorState, heard_ns: Mapping[str, int]) -> bool:
        """Return whether the actor was not heard since its whole machine was silent."""
        return heard_ns.get(actor.boot_id, 0) <= self._silent_at_ns.get(actor.node, -1)

    def _lease_now_ns(self, role: str) -> int:
        return self.node_lease_ns if self._cut_off else self.get_lease_ns(role)

    def _silent_ns(self, now_ns: int, actor: ActorState, heard_ns: Mapping[str, int]) -> int:
        """Return how long an actor has been silent; schedule the next check.

        It is due when the actor's lease ends, at the latest. A node may stay alive after that."""
        grace_ns = max(self._grace_from_ns, self._back_at_ns.get(actor.node, 0))
        last_ns = max(heard_ns.get(actor.boot_id, 0), grace_ns)
        ends_ns = last_ns + self._lease_now_ns(actor.role)
        if actor.role != Role.NODE or ends_ns >= now_ns:
            self._next_look_ns = min(self._next_look_ns, ends_ns)
        return now_ns - last_ns

    def _report_heard_node(
        self, now_ns: int, node: ActorState, heard_ns: Mapping[str, int]
    ) -> list[DetectorEvent]:
        """Report a silent node that responds again; a restarted lease does not count."""
        last_ns = heard_ns.get(node.boot_id)
        if not node.silent or last_ns is None or now_ns - last_ns > self.lease_ns:
            return []
        return [NodeRecovered(node=node.name, node_incarnation=node.incarnation)]

    def _judge_node(
        self, node: ActorState, silent_ns: int, quiet_ns: int | None
    ) -> list[DetectorEvent]:
        """Report a node as lost with its machine, or as silent alone; wait if it may be either."""
        if quiet_ns is None:
            return [_make_heartbeat_lost(node, silent_ns, cut_off=True)]
        if node.silent or quiet_ns > self.lease_ns:
            return []
        silent_ms = silent_ns // 1_000_000
        incarnation = node.incarnation
        return [NodeSilent(node=node.name, node_incarnation=incarnation, silent_ms=silent_ms)]


def _make_heartbeat_lost(actor: ActorState, silent_ns: int, *, cut_off: bool) -> HeartbeatLost:
    return HeartbeatLost(
        actor=actor.name,
        actor_incarnation=actor.incarnation,
        silent_ms=silent_ns // 1_000_000,
        cut_off=cut_off,
    )
