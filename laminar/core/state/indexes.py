"""Indexes over the state, so that no decision has to iterate over all of it.

Reads   State
Writes  state.members.actors, actor.alive, state.members.replicas, relay.held, state.orders,
        state.work.ready, state.work.lost, state.work.sessions, trajectory.replica,
        trajectory.restart, each together with its index; nothing else in the core changes them
Gives   Indexes (`indexes_of(state)`); `update_replica`, to be called after a change of a
        replica; `live_actor`, `find_trainer`, `working_trainer`, `master_relay`,
        `get_pull_order`, `is_streaming`

Indexes hold nothing that does not follow from the state: they are built from it on first use, are
not part of its encoding or digest, and an invariant compares them with new ones."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

from laminar.core.state import keys
from laminar.core.state.keys import CommandKey, OutstandingCommand, TimerName
from laminar.core.state.lost_work import LostWork
from laminar.core.state.members import ActorState, RelayState, Replica
from laminar.core.state.migrations import StragglerLoad
from laminar.core.state.replica_index import ReplicaIndex
from laminar.core.state.state import State
from laminar.core.state.work import Group, Trajectory
from laminar.events.commands import PullWeights
from laminar.events.reasons import PullPurpose
from laminar.names.ids import GroupId, TrajectoryId
from laminar.names.roles import Role

STALE_TIMERS_MAX = 64
"""The excess of cleared timers in the heap above which it is rebuilt, if they are half of it."""


class Indexes:
    """The indexes of one state, kept up to date by the functions below."""

    def __init__(self, state: State) -> None:
        #: names of all actors by role, in the order of their first join
        self.roles: dict[str, dict[str, None]] = {}
        self.num_alive = 0  #: actors
        #: boot ids of processes that are no longer members, until `take_left` is called
        self.left: list[str] = []
        #: keys of outstanding commands by addressee
        self.commands: dict[str, dict[CommandKey, None]] = {}
        #: heap of (due time in ns, name); entries that state.orders.timers lacks are skipped
        self.timers = [(due, name) for name, due in state.orders.timers.items()]
        heapify(self.timers)
        #: finished groups in the order in which they must be trained: (deadline, order, id)
        self.ready: list[tuple[int, int, str]] = sorted(
            (*_rank_group(state.work.groups[g]), g) for g in state.work.ready
        )
        #: names of replicas by the relay of their machine
        self.served: dict[str, dict[str, None]] = {}
        #: names of the relays that hold a version, by version
        self.held: dict[int, dict[str, None]] = {}
        #: number of orders to load exactly a version, by version
        self.fetched: dict[int, int] = {}
        #: orders to load from another machine, by replica
        self.from_afar: dict[str, PullWeights] = {}
        #: ids by the replica that generates or scores them, or did last
        self.trajectories: dict[str, dict[TrajectoryId, None]] = {}
        #: ids by the host that has their session
        self.sessions: dict[str, dict[TrajectoryId, None]] = {}
        #: number and tokens of finished trajectories by group, where there are any
        self.lengths: dict[GroupId, tuple[int, int]] = {}
        self._index_state(state)
        self.lost = LostWork(state)
        self.replicas = ReplicaIndex(state)
        #: cached loads of replicas with only stragglers, by name (core/repack/stragglers.py)
        self.standings: dict[str, StragglerLoad] = {}

    def _index_state(self, state: State) -> None:
        for actor in state.members.actors.values():
            self.roles.setdefault(actor.role, {})[actor.name] = None
            self.num_alive += actor.alive
        for key, outstanding in state.orders.commands.items():
            self.commands.setdefault(outstanding.command.to, {})[key] = None
            self.count_fetched(outstanding, 1)
        for replica in state.members.replicas.values():
            self.served.setdefault(replica.relay, {})[replica.name] = None
        for relay in state.members.relays.values():
            for version in relay.held:
                self.held.setdefault(version, {})[relay.name] = None
        for trajectory in state.work.trajectories.values():
            self.trajectories.setdefault(trajectory.replica, {})[trajectory.id] = None
            self.count_length(trajectory, 1)
        for trajectory_id, host in state.work.sessions.items():
            self.sessions.setdefault(host, {})[trajectory_id] = None

    def served_by(self, relay: str) -> dict[str, None]:
        """Return names of the replicas of its machine."""
        return self.served.get(relay, {})

    def count_fetched(self, outstanding: OutstandingCommand, change: int) -> None:
        command = outstanding.command
        if isinstance(command, PullWeights) and command.exact:
            self.fetched[command.version] = self.fetched.get(command.version, 0) + change
            if not self.fetched[command.version]:
                del self.fetched[command.version]
            if command.holder and change > 0:
                self.from_afar[command.to] = command
            else:
                self.from_afar.pop(command.to, None)

    def count_length(self, trajectory: Trajectory, change: int) -> None:
        """Count a finished trajectory, or discount a forgotten one."""
        if trajectory.num_tokens:
            count, tokens = self.lengths.pop(trajectory.group, (0, 0))
            count, tokens = count + change, tokens + change * trajectory.num_tokens
            if count:
                self.lengths[trajectory.group] = count, tokens

    def count_ready(self, deadline: int) -> int:
        """Return the number of finished groups with this deadline."""
        first = bisect_left(self.ready, (deadline, -1, ""))
        return bisect_left(self.ready, (deadline + 1, -1, "")) - first


def _rank_group(group: Group) -> tuple[int, int]:
    return group.deadline, group.order


def indexes_of(state: State) -> Indexes:
    """Return the indexes of this state, built on first use and stored as an extra attribute.

    Call this before changing an indexed field: the indexes may be built just then."""
    try:
        kept: Indexes = state.indexes  # type: ignore[attr-defined]
    except AttributeError:
        kept = vars(state)["indexes"] = Indexes(state)
    return kept


# --- actors -----------------------------------------------------------------------------------


def add_actor(state: State, actor: ActorState) -> None:
    """Add an actor; an earlier process of its name is no longer alive."""
    indexes, before = indexes_of(state), state.members.actors.get(actor.name)
    if before is not None:
        indexes.left.append(before.boot_id)
    state.members.actors[actor.name] = actor
    indexes.roles.setdefault(actor.role, {})[actor.name] = None
    indexes.num_alive += 1


def end_actor(state: State, name: str) -> None:
    """Mark an actor's process as gone or fenced."""
    indexes, actor = indexes_of(state), state.members.actors[name]
    indexes.left.append(actor.boot_id)
    indexes.num_alive -= actor.alive
    actor.alive = False
    if name in state.members.replicas:
        indexes.replicas.update(state, state.members.replicas[name])


def live_actor(state: State, role: Role) -> ActorState | None:
    """Return the live actor of a single role (store, trainer); None while it is not alive."""
    for name in indexes_of(state).roles.get(role, ()):
        if state.members.actors[name].alive:
            return state.members.actors[name]
    return None


def find_trainer(state: State) -> ActorState | None:
    """Return the live trainer; with checkpoints also an absent one that is awaited."""
    live = live_actor(state, Role.TRAINER)
    if live is None and state.settings.keeps_checkpoints:
        for name in indexes_of(state).roles.get(Role.TRAINER, ()):
            return state.members.actors[name]
    return live


def working_trainer(state: State) -> ActorState | None:
    """Return the trainer if it can be given work: ready, and with all steps of the log done."""
    live = live_actor(state, Role.TRAINER)
    return live if live is not None and live.ready and state.steps.repeated < 0 else None


def take_left(state: State) -> list[str]:
    """Return and clear the boot ids of processes that have left, or were replaced."""
    indexes = indexes_of(state)
    left, indexes.left = indexes.left, []
    return left


def add_replica(state: State, replica: Replica) -> None:
    indexes = indexes_of(state)
    state.members.replicas[replica.name] = replica
    indexes.served.setdefault(replica.relay, {})[replica.name] = None
    indexes.replicas.add(state, replica)


def remove_replica(state: State, replica: Replica) -> None:
    indexes = indexes_of(state)
    del state.members.replicas[replica.name]
    del indexes.served[replica.relay][replica.name]
    indexes.replicas.remove(replica)
    indexes.standings.pop(replica.name, None)


def update_replica(state: State, replica: Replica) -> None:
    """Update the index after a change in a replica's weights, share or work."""
    indexes = indexes_of(state)
    indexes.replicas.update(state, replica)
    indexes.standings.pop(replica.name, None)


def load_changed(state: State, replica: Replica) -> None:
    """Update the index after a change in load only, as for every trajectory that comes or goes."""
    indexes = indexes_of(state)
    indexes.replicas.update_load(replica)
    indexes.standings.pop(replica.name, None)


def invalidate_gauges(state: State, replica: Replica) -> None:
    """Invalidate cached loads after new gauges of a replica."""
    standings = indexes_of(state).standings
    standings.pop(replica.name, None)
    for trajectory_id in replica.outgoing:
        standings.pop(state.repack.progress[trajectory_id].destination, None)


def invalidate_straggler(state: State, trajectory: Trajectory) -> None:
    """Invalidate the cached loads of a trajectory's replica and destination."""
    standings = indexes_of(state).standings
    standings.pop(trajectory.replica, None)
    standings.pop(state.repack.progress[trajectory.id].destination, None)


def set_length(state: State, trajectory: Trajectory, num_tokens: int) -> None:
    """Record the length of a finished trajectory: its siblings are expected to be as long."""
    indexes = indexes_of(state)
    indexes.count_length(trajectory, -1)
    trajectory.num_tokens = num_tokens
    indexes.count_length(trajectory, 1)
    invalidate_lengths(state, state.work.groups[trajectory.group])


def invalidate_lengths(state: State, group: Group) -> None:
    """Invalidate cached loads after a trajectory of the group has finished, or is forgotten."""
    if indexes_of(state).standings:
        for name in group.members:
            if name in state.work.trajectories:
                invalidate_straggler(state, state.work.trajectories[name])


# --- relays -------------------------------------------------------------------------------------


def master_relay(state: State) -> RelayState | None:
    """Return the relay of the trainer's machine, if it is ready: the source of every version.

    Versions that an absent trainer has published count, too."""
    source = find_trainer(state)
    if source is None or not state.members.relay_chain:
        return None
    head = state.members.relays[state.members.relay_chain[0]]
    return head if head.node == source.node else None


def remove_relay(state: State, relay: RelayState) -> None:
    set_held(state, relay, [])
    del state.members.relays[relay.name]
    update_relay(state, relay)


def update_relay(state: State, relay: RelayState) -> None:
    """Update the replicas of a relay's machine after it got a newer version, or is gone."""
    indexes = indexes_of(state)
    for name in indexes.served_by(relay.name):
        indexes.replicas.update(state, state.members.replicas[name])


def set_held(state: State, relay: RelayState, held: list[int]) -> bool:
    """Record the versions that can be pulled from a relay; return whether anything changed."""
    holders = indexes_of(state).held
    if relay.held == held:
        return False
    for version in relay.held:
        del holders[version][relay.name]
        if not holders[version]:
            del holders[version]
    for version in held:
        holders.setdefault(version, {})[relay.name] = None
    relay.held = held
    return True


# --- commands and timers ----------------------------------------------------------------------


def add_command(state: State, key: CommandKey, outstanding: OutstandingCommand) -> None:
    """Add an outstanding command, in place of an earlier one under the same key."""
    indexes = indexes_of(state)
    _forget_command(indexes, key, state.orders.commands.get(key))
    state.orders.commands[key] = outstanding
    indexes.commands.setdefault(outstanding.command.to, {})[key] = None
    indexes.count_fetched(outstanding, 1)


def end_command(state: State, key: CommandKey) -> OutstandingCommand | None:
    """Remove and return an outstanding command; None if it was not outstanding."""
    indexes = indexes_of(state)
    outstanding = state.orders.commands.pop(key, None)
    _forget_command(indexes, key, outstanding)
    return outstanding


def _forget_command(
    indexes: Indexes, key: CommandKey, outstanding: OutstandingCommand | None
) -> None:
    if outstanding is not None:
        del indexes.commands[outstanding.command.to][key]
        indexes.count_fetched(outstanding, -1)


def get_pull_order(state: State, replica: str) -> PullWeights | None:
    """Return the outstanding order to load of a replica, or None."""
    outstanding = state.orders.commands.get(keys.pull_key(replica))
    command = outstanding.command if outstanding is not None else None
    return command if isinstance(command, PullWeights) else None


def is_streaming(state: State, replica: str) -> bool:
    """Return whether it is to begin with weights that its relay is still receiving."""
    ordered = get_pull_order(state, replica)
    return ordered is not None and ordered.purpose == PullPurpose.STREAM


def set_timer(state: State, name: TimerName, due_ns: int) -> None:
    timers, heap = state.orders.timers, indexes_of(state).timers
    timers[name] = due_ns
    heappush(heap, (due_ns, name))
    if len(heap) > 2 * len(timers) + STALE_TIMERS_MAX:
        heap[:] = [(due, name) for name, due in timers.items()]
        heapify(heap)


def clear_timer(state: State, name: TimerName) -> bool:
    """Clear a timer and return whether it was set; the heap drops its entry later."""
    indexes_of(state)  # build the indexes first: whether lost work waits follows from its timer
    return state.orders.timers.pop(name, None) is not None


def get_next_timer_ns(state: State) -> int | None:
    """Return when the earliest timer is due; None without timers."""
    timers, heap = state.orders.timers, indexes_of(state).timers
    while heap and timers.get(heap[0][1]) != heap[0][0]:
        heappop(heap)
    return heap[0][0] if heap else None


def due_timers(state: State, now_ns: int) -> list[TimerName]:
    """Return names of the due timers, earliest first; they stay set until they are handled."""
    heap = indexes_of(state).timers
    if not heap or heap[0][0] > now_ns:
        return []  # called constantly: mostly none is due
    due: dict[TimerName, int] = {}
    while (due_ns := get_next_timer_ns(state)) is not None and due_ns <= now_ns:
        due[heappop(heap)[1]] = due_ns
    for name, due_ns in due.items():
        heappush(heap, (due_ns, name))
    return list(due)


# --- trajectories and finished groups ---------------------------------------------------------


def assign_replica(state: State, trajectory: Trajectory, replica: str) -> None:
    """Record the replica that generates or scores a trajectory."""
    by_replica = indexes_of(state).trajectories
    if trajectory.replica != replica:
        by_replica.get(trajectory.replica, {}).pop(trajectory.id, None)
        trajectory.replica = replica
    by_replica.setdefault(replica, {})[trajectory.id] = None


def assign_session(state: State, trajectory_id: TrajectoryId, host: str) -> None:
    """Record the host that has a trajectory's session; empty: none has."""
    sessions = indexes_of(state).sessions
    former = state.work.sessions.pop(trajectory_id, "")
    if former:
        del sessions[former][trajectory_id]
    if host:
        state.work.sessions[trajectory_id] = host
        sessions.setdefault(host, {})[trajectory_id] = None


def close_trajectory(state: State, trajectory_id: TrajectoryId) -> Trajectory:
    """Remove and return a trajectory that has ended."""
    by_replica = indexes_of(state).trajectories
    trajectory = state.work.trajectories.pop(trajectory_id)
    state.repack.progress.pop(trajectory_id, None)
    assign_session(state, trajectory_id, "")
    del by_replica[trajectory.replica][trajectory_id]
    indexes_of(state).count_length(trajectory, -1)
    return trajectory


def add_ready(state: State, group: Group) -> None:
    ready = indexes_of(state).ready
    state.work.ready[group.id] = None
    insort(ready, (*_rank_group(group), group.id))


def remove_ready(state: State, group: Group) -> None:
    """Remove a group that is in a batch, or dropped; do nothing if it was not ready."""
    ready = indexes_of(state).ready
    if group.id in state.work.ready:
        del state.work.ready[group.id]
        del ready[bisect_left(ready, (*_rank_group(group), group.id))]


def add_lost(state: State, trajectory: Trajectory) -> None:
    indexes = indexes_of(state)
    state.work.lost[trajectory.id] = None
    indexes.lost.add(state, trajectory)


def remove_lost(state: State, trajectory: Trajectory) -> None:
    """Remove lost work that has a place again, or ends; do nothing if it was not lost."""
    lost = indexes_of(state).lost
    if trajectory.id in state.work.lost:
        del state.work.lost[trajectory.id]
        lost.remove(trajectory)


def end_version_wait(state: State, trajectory_id: TrajectoryId) -> None:
    """End the wait of lost work for its version: any newer one will do."""
    lost = indexes_of(state).lost
    if trajectory_id in state.work.lost:
        lost.end_version_wait(state.work.trajectories[trajectory_id])


def restart_from_prompt(state: State, trajectory: Trajectory) -> None:
    """Restart lost work from the prompt."""
    lost = indexes_of(state).lost
    trajectory.restart = True
    lost.restart_from_prompt(trajectory)
