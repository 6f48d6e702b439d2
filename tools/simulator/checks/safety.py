"""Independent checks of a simulated run while it runs, one function and one name each.

Reads   what goes over the wire, what the store writes, what the disk holds, what was decided
Raises  Violation: the name of the promise, what contradicts it, whose story to tell

Checks of the end are in final_checks.py, which reads the books that are kept here. Checks of
durability, leases, prompts, contents, training, migrations, recoveries, relays and nodes have
files in this folder.

They are written from the promises (docs/simulator.md), not from the code that keeps them: they
count again, in separate books, what the coordinator's state only claims. The invariants of the
state itself (core/invariants.py) are called from here as well.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from laminar.core import invariants, store_orders
from laminar.core.machine import StateMachine
from laminar.core.state import keys
from laminar.core.state.state import State, hash_state
from laminar.core.state.statuses import GroupStatus
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped
from laminar.names.ids import Purpose
from laminar.storage.rules import Row
from tools.simulator.checks import held
from tools.simulator.checks.contents import Contents
from tools.simulator.checks.durability import Durability, reported_is_stored
from tools.simulator.checks.held import late_transfer_has_an_end
from tools.simulator.checks.leases import Leases
from tools.simulator.checks.moves import Moves, Released
from tools.simulator.checks.node_reports import NodeReports
from tools.simulator.checks.prompts import Prompts, answers_its_prompt
from tools.simulator.checks.recoveries import Recoveries
from tools.simulator.checks.training import TrainingChecks
from tools.simulator.context import Process
from tools.simulator.disk import SimDisk
from tools.simulator.runtime.violation import Violation
from tools.simulator.world import World

SMALL = 16  #: trajectories and replicas up to which the whole state is checked after every event
DEATHS_MAX = 3
WAITS_MAX = 3
UNBLAMED = CUT_OFF, LEFT = "cut off", "left"
"""Reasons of a loss that no prompt is blamed for: silent with its whole machine; left by itself."""
Key = tuple[str, int]  #: process in the log: name and incarnation
_encode_state = msgspec.msgpack.Encoder().encode
_decode_state = msgspec.msgpack.Decoder(State).decode


class Checks:
    """All books of one run that the coordinator does not keep."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.events = 0
        self.replays = 0
        self.leases = Leases(world)
        self.prompts = Prompts(world.scenario)
        self.node_reports = NodeReports(world)
        self.log_time = LogTime()
        self.training = TrainingChecks(world, lambda: bool(self.failed_at))
        self.contents = Contents(world.scenario, self.training.made_as)
        self.released = Released()
        self.moves = Moves()
        self.recoveries = Recoveries(world)
        self.bodies: dict[str, list[bytes]] = {}  #: numbered bodies by boot id
        #: boot id and event of the join, by name and incarnation
        self.boots: dict[Key, tuple[str, int]] = {}
        self._keys: dict[str, Key] = {}  #: keys by boot id
        self._newest: dict[str, Key] = {}  #: latest keys by name
        self._fenced: dict[Key, tuple[str, int]] = {}  #: reasons and events of the fences
        self._placements: dict[str, int] = {}  #: highest accepted by the store
        self._owners: dict[tuple[str, int], str | None] = {}  #: replicas that opened them
        #: (event of the decision, placement) by trajectory, ascending
        self._placed: dict[str, list[tuple[int, int]]] = {}
        self._acted = Acted()
        self._decided: dict[int, str] = {}  #: kinds of commands by id
        #: log positions of the numbered events, by boot id; the first is number 1
        self._numbers: dict[str, list[int]] = {}
        self._idle_waits = 0
        self._refused = Counter[str]()  #: refused messages of fenced processes
        self.failed_at = 0  #: event of the failure; 0: none
        self._kills: dict[str, list[tuple[int, str, str]]] = {}  #: placements and boots
        self._taken: set[tuple[str, int]] = set()  #: work taken from a living replica
        self._last_seq = 0
        self._recent: list[Stamped] = []  #: events that a crash may lose
        self.durability = Durability(world.coverage)
        self._machine: StateMachine | None = None
        self._until_full = 0
        self._progress = (-1, "")
        self.progress_ns = 0

    # --- what is decided ------------------------------------------------------------------------

    def observe(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """Check an event that the coordinator has handled."""
        self.events += 1
        self._recent.append(stamped)
        self.log_time.observe(stamped, self.world.scheduler.now)
        self.old_placement_has_no_effect(stamped, commands)
        self.placement_is_raised(stamped, commands)
        self.recoveries.observe(stamped, commands, state)
        self._note(stamped, commands)
        self.durability.logged(len(commands), bool(commands or stamped.peer_seq))
        self.no_command_to_fenced(stamped, commands, state)
        has_turns = self.world.scenario.settings.has_environment
        reported_is_stored(stamped.event, self.world.rows, has_turns)
        self.released.observe(stamped.event, commands, self.world.rows)
        self.moves.observe(stamped, commands, state)
        self.joins_once(stamped, commands)
        self._learn_fences(stamped, state)
        self.leases.observe(stamped, commands, state)
        self.node_reports.refusals(stamped, commands, state)
        self.node_reports.ordered(commands, state)
        self._note_failure(stamped, state)
        if self.failed_at == stamped.seq:
            self.node_reports.failed(stamped, state)
        self.training.observe(stamped, state)
        self.waiting_leads_to_something(stamped, commands, state)
        late_transfer_has_an_end(stamped, state)
        self._invariants(stamped, state)
        self._note_progress(state)
        self.world.coverage.observe(stamped, commands, state)
        self.world.observed(stamped, commands, state)

    def _note(self, stamped: Stamped, commands: list[Command]) -> None:
        self._last_seq = stamped.seq
        self.prompts.note(stamped, commands)
        self.moves.note(stamped, commands)
        first = stamped.seq << 20
        for index, command in enumerate(commands):
            self._decided[first + index] = type(command).__name__
            self._note_placement(stamped, command)
            self.training.decided(command)
        if number := stamped.peer_seq:
            boot_id, _ = self.boots.get((stamped.peer, stamped.incarnation), ("", 0))
            places = self._numbers.setdefault(boot_id, [])
            del places[number - 1 :]
            places.append(stamped.seq)

    def _note_placement(self, stamped: Stamped, command: Command) -> None:
        if isinstance(command, cmd.OpeningCommand):
            placed = self._placed.setdefault(command.trajectory_id, [])
            placed.append((stamped.seq, command.placement))
        elif isinstance(command, cmd.AbortTrajectories | cmd.ReleaseTrajectories):
            self._taken.update((item.trajectory_id, item.placement) for item in command.items)

    def _invariants(self, stamped: Stamped, state: State) -> None:
        self._until_full -= 1
        if self._until_full > 0:
            return
        size = len(state.work.trajectories) + len(state.members.replicas)
        self._until_full = self.world.scenario.world.checks.invariants_every or 1 + size // SMALL
        state_is_sound(state, stamped.seq)

    def _note_progress(self, state: State) -> None:
        """Note the time if something that the run needs has completed."""
        ledger = state.work.ledger
        ended = ledger.trajectories.issued - ledger.trajectories.live
        now = (ended + state.steps.completed + state.versions.newest, state.run.phase)
        if now != self._progress:
            self._progress, self.progress_ns = now, self.world.scheduler.now

    def no_command_to_fenced(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """Check that a message of a fenced process is refused by name and has no effect."""
        name = f"{type(stamped.event).__name__}: fenced"
        refused, before = state.run.ignored.get(name, 0), self._refused.get(name, 0)
        if refused != before:
            self._refused[name] = refused
        fenced = self._fenced.get((stamped.peer, stamped.incarnation))
        if fenced is None or isinstance(stamped.event, ev.ActorJoined):
            return
        why, _ = fenced
        if commands or refused <= before:
            done = "acted on" if commands else "believed"
            what = f"{stamped.peer} is fenced ({why}), and event {stamped.seq} of it was {done}"
            raise Violation("no_command_to_fenced", what, stamped.peer)

    def old_placement_has_no_effect(self, stamped: Stamped, commands: list[Command]) -> None:
        """Check that an event of a placement replaced since leads to no command."""
        if not commands:
            return
        trajectory = getattr(stamped.event, "trajectory_id", "")
        placement = getattr(stamped.event, "placement", 0)
        _, newest = self._placed.get(trajectory, [(0, 0)])[-1]
        if trajectory and placement < newest:
            what = f"event {stamped.seq} is of placement {placement}, and was acted on"
            raise Violation("old_placement_has_no_effect", what, trajectory)

    def placement_is_raised(self, stamped: Stamped, commands: list[Command]) -> None:
        """Check that work sent to an engine again has a placement higher than any before."""
        for command in commands:
            if not isinstance(command, cmd.OpeningCommand):
                continue
            _, newest = self._placed.get(command.trajectory_id, [(0, 0)])[-1]
            if command.placement <= newest:
                what = f"event {stamped.seq} places it as {command.placement}, after {newest}"
                raise Violation("placement_is_raised", what, command.trajectory_id)

    def joins_once(self, stamped: Stamped, commands: list[Command]) -> None:
        """Check that a former member does not join again: it would displace its successor."""
        event = stamped.event
        accepted = any(isinstance(command, cmd.AcceptActor) for command in commands)
        if isinstance(event, ev.ActorJoined) and accepted and event.boot_id in self._keys:
            what = f"{event.boot_id} joins at event {stamped.seq}, and was a member before"
            raise Violation("joins_once", what, event.name)

    def _learn_fences(self, stamped: Stamped, state: State) -> None:
        event = stamped.event
        if isinstance(event, ev.ActorJoined):
            actor = state.members.actors.get(event.name)
            if actor is not None and actor.boot_id == event.boot_id:
                before = self._newest.get(event.name)
                if before is not None and before[1] < actor.incarnation:
                    self._fence(before, "replaced", stamped)
                self._boot((event.name, actor.incarnation), event.boot_id, stamped.seq)
        elif isinstance(event, ev.HeartbeatLost | ev.ActorLeft):
            self._fence(*_given_up(stamped, event), stamped)
        elif isinstance(event, ev.ProcessExited) and event.boot_id in self._keys:
            self._fence(self._keys[event.boot_id], "dead", stamped)

    def _note_failure(self, stamped: Stamped, state: State) -> None:
        if state.run.failed is None:
            self.failed_at = 0
        elif not self.failed_at:
            self.failed_at = stamped.seq

    def _boot(self, key: Key, boot_id: str, seq: int) -> None:
        self.boots[key] = (boot_id, seq)
        self._keys[boot_id] = self._newest[key[0]] = key

    def _fence(self, key: Key, why: str, stamped: Stamped) -> None:
        self._fenced.setdefault(key, (why, stamped.seq))

    def waiting_leads_to_something(
        self, stamped: Stamped, commands: list[Command], state: State
    ) -> None:
        """Check that a batch wait leads to an action after at most `WAITS_MAX` idle ones."""
        if commands:
            self._idle_waits = 0
        elif isinstance(stamped.event, ev.TimerFired) and stamped.event.timer == keys.BATCH_TIMEOUT:
            waits = [
                g.id
                for g in state.work.groups.values()
                if g.status == GroupStatus.OPEN and g.purpose == Purpose.TRAIN
            ]
            self._idle_waits += bool(waits) and not store_orders.is_store_awaited(state)
            if self._idle_waits > WAITS_MAX:
                what = f"the trainer has waited {self._idle_waits} times, but nothing was done"
                raise Violation("waiting_leads_to_something", what, *waits)

    # --- what goes over the wire ------------------------------------------------------------------

    def process_started(self, process: Process) -> None:
        self.bodies[process.boot_id] = []

    def log_is_whole(self) -> bool:
        return self.durability.is_whole()

    def sent(self, process: Process, event: Event, body: bytes) -> None:
        self.bodies[process.boot_id].append(body)
        held.reported(self.world, process.name, event)
        if isinstance(event, ev.ProcessExited):
            self.node_reports.sent(process, event)
        self.training.reported(process, event)

    def heard(self, boot_id: str) -> None:
        self.leases.heard(boot_id)

    def acknowledged(self, process: Process) -> None:
        """Check that only events in the log are acknowledged."""
        acknowledged = process.link.outbox.first - 1
        logged = len(self._numbers.get(process.boot_id, ()))
        if acknowledged > logged:
            what = f"{process.boot_id} was acknowledged up to {acknowledged}, the log has {logged}"
            raise Violation("acknowledged_is_logged", what, process.name)

    def ordered(self, process: Process, order: cmd.Envelope, command: Command) -> None:
        """Check cause_exists: a command names the event that caused it, and was decided there."""
        kind = self._decided.get(order.command_id)
        right = order.cause == order.command_id >> 20 and kind == type(command).__name__
        if not right or command.to != process.name:
            what = f"{process.name} was told {command!r}, of event {order.cause}: {kind}"
            raise Violation("cause_exists", what, process.name)

    def obeyed(self, process: Process, order: cmd.Envelope, command: Command) -> None:
        self._acted.note(order.command_id, command, process.name, process.boot_id)
        self.training.told(process, command)
        held.obeyed(self.world, process.name, command)

    def obeyed_here(self, command_id: int, command: Command) -> None:
        self._acted.note(command_id, command, COORDINATOR, COORDINATOR)

    # --- what is durable --------------------------------------------------------------------------

    def turned(self, disk: SimDisk, sends: bool) -> None:
        """Check durability when messages are sent; no crash takes durable events back."""
        if sends and self.durability.sent(disk):
            self._recent.clear()

    # --- the coordinator's deaths -----------------------------------------------------------------

    def coordinator_started(self, disk: SimDisk, machine: StateMachine) -> None:
        """Check that a successor has recovered the state of its predecessor."""
        if machine.started and self._machine is not None:
            self.same_state_as_before(machine.state)
        self.log_time.coordinator_started(machine, self.world.scheduler.now)
        self.leases.coordinator_started(machine)
        self._take_back(machine.state.seq if machine.started else 0)
        self._machine = machine
        self._idle_waits = 0
        self._refused = Counter(machine.state.run.ignored if machine.started else {})
        self._recent.clear()
        self.durability.begin(disk)
        self.world.coverage.hit("log:taken-over" if machine.started else "log:begun")

    def _take_back(self, seq: int) -> None:
        """Forget what was handled after this event: it was lost with the coordinator."""
        for command_id in [c for c in reversed(self._decided) if c >> 20 > seq]:
            del self._decided[command_id]
        self.prompts.take_back(seq)
        self.moves.take_back(seq)
        self.recoveries.take_back(seq)
        self.training.take_back(seq)
        for places in self._numbers.values():
            while places and places[-1] > seq:
                places.pop()
        for trajectory, placed in list(self._placed.items()):
            self._placed[trajectory] = [entry for entry in placed if entry[0] <= seq]
            if not self._placed[trajectory]:
                del self._placed[trajectory]
        for key in [k for k, (_, since) in self._fenced.items() if since > seq]:
            del self._fenced[key]
        if self.failed_at > seq:
            self.failed_at = 0
        boots, self.boots, self._keys, self._newest = self.boots, {}, {}, {}
        for key, (boot_id, since) in boots.items():
            if since <= seq:
                self._boot(key, boot_id, since)

    def replayed(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        """Note an event that a successor replays, and decisions its predecessor did not make."""
        self._note(stamped, commands)
        self.node_reports.ordered(commands, state)
        self.recoveries.replayed(stamped, state)
        self._note_failure(stamped, state)
        self.training.observe(stamped, state)

    def same_state_as_before(self, state: State) -> None:
        """Check that the log leads to the dead coordinator's state, as far as the log reaches."""
        live = self._machine.state if self._machine is not None else None
        if live is None or live.seq < state.seq:
            raise Violation("same_state_as_before", f"the log continues to event {state.seq}")
        clone = StateMachine(_decode_state(_encode_state(state)))
        for stamped in self._recent:
            if stamped.seq > state.seq:
                clone.handle_event(stamped)
        if hash_state(clone.state) != hash_state(live):
            what = f"event {state.seq} of the log leads to another state than it did"
            raise Violation("same_state_as_before", what)

    # --- the store and the trainer ----------------------------------------------------------------

    def stored(self, row: Row, placement: int) -> None:
        """Check that the store accepts a trajectory's newest placement only, from one replica."""
        highest = self._placements.get(row.id, 0)
        if placement < highest:
            what = f"{row.id} was changed under placement {placement}, {highest} has it"
            raise Violation("fence_holds", what, row.id)
        self._placements[row.id] = placement
        owner = self._owners.setdefault((row.id, placement), row.replica)
        if owner != row.replica and row.end is None:
            what = f"{row.replica} has {row.id} under placement {placement}, as had {owner}"
            raise Violation("placement_has_one_owner", what, row.id)

    def generates(
        self, command: cmd.GenerateTrajectory, digest: str, prompt_ids: tuple[int, ...]
    ) -> None:
        """Check generated_by_its_version: an engine has the weights of the order's version.

        In flight it may have newer weights already, or be about to load them (then it has none).
        """
        answers_its_prompt(self.world.scenario, command, prompt_ids)
        in_flight = self.world.scenario.settings.in_flight and command.purpose == Purpose.TRAIN
        if in_flight and (not digest or self.training.made_since(command.version, digest)):
            return
        if not self.training.made_as(command.version, digest):
            what = f"{command.to} has weights {digest}, and began {command}"
            raise Violation("generated_by_its_version", what, command.trajectory_id)

    def poisoned(self, command: cmd.GenerateTrajectory, node: str) -> None:
        """Check that a prompt that kills replicas is quarantined after the third.

        The coordinator cannot blame the prompt for a replica whose machine was lost as well, even
        if that is back by now, nor for one that left, that died while its machine was silent, or
        that died of work taken from it.
        """
        found, processes = self._kills.setdefault(command.trajectory_id, []), self.world.processes
        found.append((command.placement, processes[command.to].boot_id, processes[node].boot_id))
        nodes = {p.boot_id for p in processes.values() if p.role == "node" and p.alive}
        kills = sum(
            of_node in nodes
            and self._fenced.get(self._keys.get(boot_id, ("", 0)), ("", 0))[0] not in UNBLAMED
            and (command.trajectory_id, placement) not in self._taken
            for placement, boot_id, of_node in found
        )
        if kills > DEATHS_MAX:
            raise Violation("poison_is_quarantined", f"{kills} died of it", command.trajectory_id)


def _given_up(stamped: Stamped, event: ev.HeartbeatLost | ev.ActorLeft) -> tuple[Key, str]:
    if isinstance(event, ev.ActorLeft):
        return (stamped.peer, stamped.incarnation), LEFT
    why = CUT_OFF if event.cut_off else "silent"
    return (event.actor, event.actor_incarnation), why


class Acted:
    """Check that each command is carried out at most once.

    The ends of trajectories are the exception: if the store died before it confirmed that it wrote
    them, its next process writes them again.
    """

    def __init__(self) -> None:
        self._acted: dict[tuple[int, str], None] = {}

    def note(self, command_id: int, command: Command, name: str, boot_id: str) -> None:
        """acted_once: every command is acted on at most once."""
        by = boot_id if isinstance(command, cmd.EndTrajectories) else ""
        if (command_id, by) in self._acted:
            what = f"{name} acted twice on command {command_id} of event {command_id >> 20}"
            raise Violation("acted_once", what, name)
        self._acted[command_id, by] = None


class LogTime:
    """Check of the log's time: it never goes back, and advances as the coordinator's clock does.

    Timers are in log time. If it stood still, every deadline would come late, though in order.
    """

    def __init__(self) -> None:
        self._log_ns = 0
        self._world_ns = 0

    def coordinator_started(self, machine: StateMachine, now_ns: int) -> None:
        """Continue where the predecessor's log ends: no time passes in between."""
        self._log_ns = machine.state.time_ns if machine.started else 0
        self._world_ns = now_ns

    def observe(self, stamped: Stamped, now_ns: int) -> None:
        """Check log_time_goes_on: an event's log time agrees with the coordinator's clock."""
        expected_ns = self._log_ns + now_ns - self._world_ns
        if stamped.time_ns != expected_ns:
            what = f"event {stamped.seq} is of {stamped.time_ns} ns, the clock says {expected_ns}"
            raise Violation("log_time_goes_on", what)


def state_is_sound(state: State, seq: int) -> None:
    """Check that the state after this event keeps every invariant."""
    try:
        invariants.check_invariants(state)
    except AssertionError as error:
        what = f"after event {seq}: {error}"
        raise Violation(_failed_invariant(error), what, *_named(error)) from error


def _failed_invariant(error: AssertionError) -> str:
    """Return the name of the invariant function that raised the error."""
    traceback = error.__traceback__
    names = []
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    known = [invariant.__name__ for invariant in invariants.ALL]
    return next((name for name in names if name in known), "invariant")


def _named(error: AssertionError) -> tuple[str, ...]:
    """Return the ids of what an invariant complains about."""
    found = [getattr(part, "id", None) or getattr(part, "name", None) for part in error.args]
    return tuple(name for name in found if isinstance(name, str))
