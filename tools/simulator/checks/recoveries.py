"""no_recovery_without_a_cause: what is done again has a fault or a limit that explains it, and what
would have cost less was impossible at that moment.

Reads   what is decided, the state that it leads to, where faults have struck
Raises  Violation

Cheapest first: lost work goes on at once where its version is served, then where an empty replica
can load that, then, when its wait is over or the version is gone, from its prompt; in flight at
once on any replica that is at least as new as its tokens, and nowhere else; weights come from the
relay of the machine before the disk; a process is started again when something of it is
overdue. A limit that the scenario sets is the wait of a batch, or of a hand-over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from laminar.core.loading import FAILED_LOADS_MAX
from laminar.core.state import keys
from laminar.core.state.state import Replica, State, Trajectory
from laminar.core.state.statuses import Phase, TrajectoryStatus
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.events.reasons import DropReason, PullPurpose
from laminar.names.ids import Purpose
from tools.simulator.context import Process
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import MS
from tools.simulator.world import World

NAME = "no_recovery_without_a_cause"
_OVERDUE: tuple[type[Event], ...] = (
    ev.HeartbeatLost, ev.TimerFired, ev.WeightsPublished, ev.WeightsReceived, ev.WeightsRejected,
)  # fmt: skip
"""What may make a coordinator have a process started again."""
_OVER = (Phase.ENDING, Phase.STOPPING, Phase.ENDED)


class Placed(NamedTuple):
    """Where work was placed last, as it was decided."""

    seq: int
    attempt: int
    version: int
    replica: str


class Lost(NamedTuple):
    """Work without a place: since when, and whether a limit took it from its replica."""

    since_ns: int
    by_limit: bool


class Recoveries:
    """The recoveries of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._placed: dict[str, list[Placed]] = {}  #: by trajectory
        self._lost: dict[str, Lost] = {}  #: likewise

    def note(self, stamped: Stamped, commands: Iterable[Command]) -> None:
        """Note what is decided, now or before a crash."""
        for command in commands:
            if isinstance(command, cmd.GenerateTrajectory):
                placed = Placed(stamped.seq, command.attempt, command.version, command.to)
                self._placed.setdefault(command.trajectory_id, []).append(placed)

    def take_back(self, seq: int) -> None:
        """What came after this event was lost with its coordinator."""
        for trajectory, placed in list(self._placed.items()):
            self._placed[trajectory] = [entry for entry in placed if entry.seq <= seq]

    def process_started(self, process: Process) -> None:
        """A process has ended before, and another one takes its place."""
        faults, starts = self._world.faults, process.boot - 1
        if starts and not faults.explains(process):
            self._uncaused(f"{process.boot_id} is started, and nothing struck {process.name}")
        cuts = faults.cuts[process.name]
        if starts > cuts and faults.only_cut_off(process):
            self._uncaused(f"{process.boot_id} is started after {cuts} cuts of its machine")

    def observe(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """The coordinator has handled an event; `note` comes after this."""
        for command in commands:
            if isinstance(command, cmd.GenerateTrajectory):
                self._generates(stamped, command, state)
            elif isinstance(command, cmd.PullWeights):
                self._loads(command, state)
            elif isinstance(command, cmd.RestartActor):
                self._restarts(stamped, command)
            elif isinstance(command, cmd.EndTrajectories):
                self._quarantined(command)
        for name in state.lost:
            self._look_at_lost(stamped, state.trajectories[name], state)
        self._keep_lost(state, self._just_lost(stamped))

    def replayed(self, stamped: Stamped, state: State) -> None:
        """A successor comes by this event, which its predecessor may not have lived to tell: since
        when what it lost waits is not judged."""
        self._keep_lost(state, Lost(stamped.time_ns, True))

    def _keep_lost(self, state: State, just: Lost) -> None:
        if not state.lost and not self._lost:
            return
        known, self._lost = self._lost, {}
        for name in state.lost:
            lost = known.get(name, just)
            by_limit = lost.by_limit or state.trajectories[name].restart
            self._lost[name] = Lost(lost.since_ns, by_limit)

    # --- work that is placed again ----------------------------------------------------------------

    def _generates(self, stamped: Stamped, command: cmd.GenerateTrajectory, state: State) -> None:
        before = self._placed.get(command.trajectory_id)
        if not before or isinstance(stamped.event, ev.TrajectoriesReleased):
            return
        lost = self._lost.get(command.trajectory_id) or self._just_lost(stamped)
        self._is_explained(command.trajectory_id, before[-1].replica, lost)
        if command.purpose == Purpose.TRAIN and command.attempt > before[-1].attempt:
            self._starts_over(stamped, command, state, before[-1].version, lost)
        elif command.purpose == Purpose.TRAIN:
            self._goes_on_with_its_tokens(command, state)

    def _quarantined(self, command: cmd.EndTrajectories) -> None:
        """What is quarantined has run on a replica that may have ended for it."""
        for ending in command.endings:
            if ending.reason != DropReason.QUARANTINED:
                continue
            faults, processes = self._world.faults, self._world.processes
            names = [entry.replica for entry in self._placed.get(ending.trajectory_id, [])]
            if all(faults.only_cut_off(processes[name]) for name in names):
                what = f"{ending.trajectory_id} is quarantined, and its replicas were only cut off"
                self._uncaused(what, ending.trajectory_id)

    def _just_lost(self, stamped: Stamped) -> Lost:
        turn = isinstance(stamped.event, ev.TrajectoryContinues)  # it only waits for a place
        return Lost(stamped.time_ns, turn or _is_limit(stamped))

    def _is_explained(self, trajectory: str, replica: str, lost: Lost) -> None:
        if not lost.by_limit and not self._world.faults.explains(self._world.processes[replica]):
            self._uncaused(f"{replica} has lost {trajectory}, and nothing struck it", trajectory)

    def _starts_over(
        self,
        stamped: Stamped,
        command: cmd.GenerateTrajectory,
        state: State,
        version: int,
        lost: Lost,
    ) -> None:
        """A trajectory's tokens are given up: nobody serves their version, and no wait for it is
        left."""
        if lost.by_limit or _is_limit(stamped):
            return
        what = f"{command.trajectory_id} starts over at event {stamped.seq}"
        if state.settings.in_flight:
            self._uncaused(f"{what}, and may go on with any weights", command.trajectory_id)
        able = next((r for r in state.replicas.values() if _serves(state, r, version)), None)
        if able is not None:
            self._uncaused(
                f"{what}, and {able.name} serves version {version}", command.trajectory_id
            )
        waited_ns = stamped.time_ns - lost.since_ns
        gone = version not in state.saved and not any(
            version in relay.held for relay in state.relays.values()
        )
        if waited_ns < state.settings.resume_wait_ms * MS and not gone:
            self._uncaused(f"{what}, and version {version} is there yet", command.trajectory_id)

    def _goes_on_with_its_tokens(self, command: cmd.GenerateTrajectory, state: State) -> None:
        """Its tokens in the store are of the same weights; in flight they may be of older ones."""
        row = self._world.rows.get(command.trajectory_id)
        if row is None or not row.num_tokens or row.attempt != command.attempt:
            return
        version = row.latest[0] or 0
        if command.version < version or (
            command.version > version and not state.settings.in_flight
        ):
            what = f"{command.trajectory_id} has tokens of version {version}, and goes on with"
            self._uncaused(f"{what} {command.version}", command.trajectory_id)

    def _look_at_lost(self, stamped: Stamped, trajectory: Trajectory, state: State) -> None:
        """A trajectory has no place: since this event, or though there is one."""
        if trajectory.id not in self._lost:
            self._is_explained(trajectory.id, trajectory.replica, self._just_lost(stamped))
        if not trajectory.restart and state.phase not in _OVER:
            self._has_no_place(trajectory, state)

    def _has_no_place(self, trajectory: Trajectory, state: State) -> None:
        """Nobody serves its version with room for it; nobody who is empty could load that."""
        version = trajectory.version
        replicas = [r for r in state.replicas.values() if state.actor_alive(r.name)]
        usable = {version}  # a held-out answer has one version
        if state.settings.in_flight and state.groups[trajectory.group].purpose == Purpose.TRAIN:
            usable = {r.version for r in replicas if r.version >= version}
        able = next((r for r in replicas for v in usable if _serves(state, r, v)), None)
        if able is not None:
            self._uncaused(
                f"{trajectory.id} waits, and {able.name} serves {able.version}", trajectory.id
            )
        if state.settings.in_flight:
            return
        if any(r.version == version or _loads(state, r, version) for r in replicas):
            return
        empty = next((r for r in replicas if _could_load(state, r, version)), None)
        if empty is not None:
            what = f"{trajectory.id} waits, and {empty.name} could load {version}"
            self._uncaused(what, trajectory.id)

    # --- weights and processes --------------------------------------------------------------------

    def _loads(self, command: cmd.PullWeights, state: State) -> None:
        replica = state.replicas[command.to]
        if command.purpose == PullPurpose.STREAM:
            if state.newest_for(replica) >= 0:
                self._uncaused(f"{command.to} is to stream, and {replica.relay} has weights")
        elif replica.version == command.version:
            self._uncaused(f"{command.to} has version {command.version}, and is to load it")
        if command.purpose == PullPurpose.IN_FLIGHT:
            self._loads_while_it_runs(command, replica, state)
        if command.checkpoint and command.version in state.held_for(replica):
            what = f"{command.to} is to load version {command.version} from the disk"
            self._uncaused(f"{what}, and {replica.relay} holds it")

    def _loads_while_it_runs(
        self, command: cmd.PullWeights, replica: Replica, state: State
    ) -> None:
        """Newer weights, and what runs there may go on with them."""
        what = f"{command.to} is to load version {command.version} while it runs"
        if not state.settings.in_flight or command.version < replica.version:
            self._uncaused(f"{what}, after {replica.version}")
        for name in replica.running:
            if state.groups[state.trajectories[name].group].purpose == Purpose.EVAL:
                self._uncaused(f"{what} the held-out {name}", name)

    def _restarts(self, stamped: Stamped, command: cmd.RestartActor) -> None:
        what = f"{command.actor} is to be started again ({command.reason})"
        if not isinstance(stamped.event, _OVERDUE):
            self._uncaused(f"{what} because of {stamped.event!r}")
        if not self._world.faults.explains(self._world.processes[command.actor]):
            self._uncaused(f"{what}, and nothing struck it")

    def _uncaused(self, what: str, *subjects: str) -> None:
        raise Violation(NAME, what, *subjects)


def _is_limit(stamped: Stamped) -> bool:
    """A batch has waited for long enough, or a hand-over took too long."""
    if not isinstance(stamped.event, ev.TimerFired):
        return False
    timer = stamped.event.timer
    return timer == keys.BATCH_WAIT or timer.startswith("command:release:")


def _serves(state: State, replica: Replica, version: int) -> bool:
    """Whether a replica serves the version, with room for one more."""
    alive = state.actor_alive(replica.name) and replica.version == version
    busy = replica.loading or bool(replica.given)
    return alive and not busy and replica.load < replica.capacity


def _loads(state: State, replica: Replica, version: int) -> bool:
    pulled = state.commands.get(keys.pull(replica.name))
    return pulled is not None and getattr(pulled.command, "version", -1) == version


def _could_load(state: State, replica: Replica, version: int) -> bool:
    """Whether a replica is empty and loads or streams nothing, its relay has the version, and it
    neither waits to be started again nor keeps its weights for the next turn of what an environment
    answers there."""
    loads = keys.pull(replica.name) in state.commands
    busy = loads or bool(replica.running or replica.incoming or replica.given)
    busy = busy or any(
        t.replica == replica.name
        and t.version == replica.version
        and t.status in (TrajectoryStatus.GENERATED, TrajectoryStatus.LOST)
        for t in state.trajectories.values()
        if state.settings.environment
    )
    return not busy and replica.failed_loads < FAILED_LOADS_MAX and state.in_reach(replica, version)
