"""The coordinator process in virtual time: the real Tick, log and recovery on a simulated disk.

Reads   frames that arrive, timers of the state, faults of its disk and of itself
Writes  the event log, on a SimDisk
Emits   frames; results of the user's batch strategy, as its own events

The counterpart of coordinator/loop.py. All frames that arrive within a quantum form one turn. Its
supervisor restarts it after every death, until the run has ended, or is given up because the disk
stays full (exits.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

from laminar.coordinator.restarts import GiveUp
from laminar.coordinator.tick import Tick
from laminar.core.machine import StateMachine
from laminar.core.members import resumption
from laminar.core.rules import LOGIC_VERSION
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.eventlog.restore import RestoredRun, restore_log, take_over_log
from laminar.eventlog.writer import LogTaken
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.names.ports import Background, DiskError, InlineBackground
from laminar.net.session import MS, NEVER_NS, Limits
from laminar.observe.warnings import WarningMonitor
from tools.simulator.context import Context, Process
from tools.simulator.disk import PowerCut, SimDisk
from tools.simulator.network import Garbage
from tools.simulator.runtime.exits import Exits
from tools.simulator.runtime.violation import Violation
from tools.simulator.scenario import seconds, stream

SAFETY_NS = 250 * MS  #: maximum time between two looks of a loop at its socket and links
FRAMES_PER_TURN = 512
FAREWELL_NS = seconds(3.0)
LATE_S = 3.0
"""Maximum delay of an ended process's frames: a stalled connection resends with growing pauses."""
UNIX_START_NS = 1_700_000_000 * 10**9


class SimCoordinator:
    """The coordinator of a run across all its incarnations."""

    def __init__(self, world: Context) -> None:
        self.world = world
        self.disk = SimDisk()
        self.tick: Tick | None = None  #: None while no process runs
        self.incarnations = 0
        self.paused = False
        self.ended = False  #: whether the run ended and said so, or was given up
        self.over: GiveUp | None = None  #: verdict that gave the run up
        self.exits = Exits(world)
        self.keep_bytes = 0  #: log bytes to keep; 0: all
        self.background: Callable[[], Background] = (
            InlineBackground  #: executor of a process's background work
        )
        self.wall_offset_ns = 0  #: offset of the wall clock; steps of it must change nothing
        self.state: State | None = None  #: state of the last process, kept after its death
        self._chance = stream(world.scenario.seed, "coordinator")
        self._late = stream(world.scenario.seed, "outlived")
        self._strategy = stream(world.scenario.seed, "strategy")
        self._routes: dict[bytes, Process] = {}
        #: connections of ended processes whose last frames have yet to arrive: boot id, and
        #: additional delay of those frames
        self._outlived: dict[bytes, tuple[str, int]] = {}
        self._introduced: dict[bytes, None] = {}  #: connections that sent a hello
        self._connections = 0
        self._inbox: list[tuple[bytes, bytes]] = []
        self._own: list[Event] = []
        self._turn_ns = NEVER_NS  #: time of the next planned turn
        self._wakes: list[int] = []  #: heap of scheduled wake-up times
        self._closing_ns = NEVER_NS
        self._asked = False  #: whether the user asked to resume a stopped run
        self._limits = Limits()
        self._quantum_ns = world.scenario.world.quantum_ms * MS

    @property
    def up(self) -> bool:
        return self.tick is not None

    # --- life ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process that recovers from the log, takes it over and listens."""
        if self.tick is not None or self.ended:
            return
        self.world.faults.before_disk_use(self.disk)
        try:
            self._recover()
        except (PowerCut, DiskError, LogTaken) as error:
            self.world.coverage.hit("coordinator:died-at-its-start")
            self._died(error)

    def _recover(self) -> None:
        scenario = self.world.scenario
        restored = restore_log(self.disk, self.world.checks.replayed)
        found = restored.replay
        if found.difference is not None:
            raise Violation("replay_equal", str(found.difference))
        _note_start(restored, self.world.coverage.hit)
        self.incarnations = restored.incarnation
        self._watch = WarningMonitor(self.report)
        writer = take_over_log(
            self.disk,
            restored,
            logic=LOGIC_VERSION,
            run="simulated",
            seed=scenario.seed,
            config_hash="",
            segment_bytes=scenario.world.segment_bytes,
            snapshot_every=scenario.world.snapshot_every,
            keep_bytes=self.keep_bytes,
        )
        self.tick = Tick(
            found.machine,
            writer,
            boot=f"c{self.incarnations}",
            lease_ms=scenario.config.coordinator.lease_ms,
            node_lease_ms=scenario.config.coordinator.node_lease_ms,
            stall_ms=int(scenario.config.coordinator.stall_timeout_s * 1000),
            clock_ns=self.world.scheduler.now,
            observer=self._observe,
            limits=self._limits,
            background=self.background(),
        )
        self.exits.serves()
        self.world.checks.coordinator_started(self.disk, found.machine)
        self._tell_start(found.machine)
        self.world.connect_all()
        self._plan(self.world.scheduler.now)

    def _tell_start(self, machine: StateMachine) -> None:
        scenario = self.world.scenario
        self._own = [
            ev.CoordinatorStarted(
                incarnation=self.incarnations,
                logic=LOGIC_VERSION,
                settings=scenario.settings,
                clock_ns=UNIX_START_NS + self.wall_offset_ns + self.world.scheduler.now,
                config="",
                origin=None if machine.started else scenario.origin,
            ),
            *self._resumed(machine),
            *(event for event in self._own if isinstance(event, ev.DrainRequested)),
        ]

    def _resumed(self, machine: StateMachine) -> list[Event]:
        """Return the resume event if no process is left or the user resumes a stopped run."""
        asked, self._asked = self._asked, False
        if not machine.started:
            return []
        alive = [process for process in self.world.processes.values() if process.alive]
        living = {(process.name, process.pid) for process in alive}
        settings = self.world.scenario.settings
        news = resumption.make_resume_event(machine.state, settings, living, asked=asked)
        if news is None:
            return []
        self.world.coverage.hit(f"coordinator:resumes-{'asked' if asked else 'unasked'}")
        return [news]

    def kill(self) -> None:
        """Kill the process; the machine keeps what it has written."""
        if self.tick is not None:
            self.world.coverage.hit("coordinator:killed-between-turns")
            self._died(None)

    def _died(self, error: Exception | None) -> None:
        """Break every connection, apply this death to the disk, and consult the supervisor."""
        if isinstance(error, PowerCut):
            mode = self.world.faults.crash_mode()
            self.world.coverage.hit(f"disk:power-cut-{mode}")
            self.disk = self.disk.after_crash(mode, self._chance)
        else:
            self.disk = self.disk.after_kill()
        self.tick = None
        self.paused = False
        self._inbox.clear()
        self._outlived.clear()
        self._turn_ns = NEVER_NS
        for process in list(self._routes.values()):
            process.disconnect()
        verdict = self.exits.ended(error)
        if isinstance(verdict, GiveUp):
            self.over, self.ended = verdict, True
            return
        delay = self.world.faults.restart_delay_ns() + seconds(verdict.pause_s)
        self.world.scheduler.after(delay, self.start)

    @property
    def listening(self) -> bool:
        """Return whether a process has the socket, paused or not."""
        return self.tick is not None

    def pause(self) -> None:
        self.paused = self.tick is not None

    def resume(self) -> None:
        if self.paused:
            self.paused = False
            self.world.checks.leases.read_late()
            self._plan(self.world.scheduler.now)

    # --- connections --------------------------------------------------------------------------

    def accept(self, process: Process) -> bytes:
        """Return the routing id of a new connection, or empty if no coordinator listens."""
        if self.tick is None:
            return b""
        self._connections += 1
        route = b"%d" % self._connections
        self._routes[route] = process
        return route

    def hang_up(self, route: bytes, *, outlived: str = "") -> None:
        """End a connection.

        `outlived`: boot id of an ended process whose machine has yet to send its last frames.
        They still arrive, but cannot be answered."""
        if outlived and self._routes.pop(route, None) is not None:
            self._outlived[route] = outlived, seconds(self._late.uniform(0, LATE_S))
        else:
            self._routes.pop(route, None)
            self._introduced.pop(route, None)

    def receive(self, route: bytes, frame: bytes) -> None:
        """Receive a frame at the socket; frames of broken connections are lost."""
        process = self._routes.get(route)
        if process is not None:
            self._take(route, process.boot_id, frame)
        elif route in self._outlived:
            boot_id, late_ns = self._outlived[route]
            self.world.scheduler.after(late_ns, self._take_late, route, boot_id, frame)

    def _take_late(self, route: bytes, boot_id: str, frame: bytes) -> None:
        if route in self._outlived:  # no new coordinator since
            self.world.coverage.hit("session:outlived-its-sender")
            self._take(route, boot_id, frame)

    def _take(self, route: bytes, boot_id: str, frame: bytes) -> None:
        self._inbox.append((route, frame))
        self._hear(route, boot_id, frame)
        now = self.world.scheduler.now
        if self._turn_ns - now > self._quantum_ns:  # else a turn is planned for this quantum
            self._plan(now)

    def _hear(self, route: bytes, boot_id: str, frame: bytes) -> None:
        """Count a process as alive if it sends a readable frame on an introduced connection."""
        if isinstance(frame, Garbage):
            return
        if b"\xa5hello" in frame[:16]:
            self._introduced[route] = None
        if route in self._introduced:
            self.world.checks.heard(boot_id)
            if self.paused:
                self.world.checks.leases.not_read_yet(boot_id)

    def _observe(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        self.world.checks.observe(stamped, commands, state)
        self._watch(stamped, commands, state)

    # --- turns --------------------------------------------------------------------------------

    def report(self, event: Event) -> None:
        """Queue an event of the coordinator itself."""
        self._own.append(event)
        self._plan(self.world.scheduler.now)

    def _plan(self, when_ns: int) -> None:
        """Plan a turn at the end of this time's quantum, unless an earlier one is planned."""
        quantum = self._quantum_ns
        when_ns = (max(when_ns, self.world.scheduler.now) // quantum + 1) * quantum
        if when_ns < self._turn_ns and self.tick is not None and not self.paused:
            self._turn_ns = when_ns
            self._wake_at(when_ns)

    def _wake_at(self, when_ns: int) -> None:
        """Schedule a wake-up no later than `when_ns`; an earlier wake-up sleeps again."""
        if not self._wakes or when_ns < self._wakes[0]:
            heappush(self._wakes, when_ns)
            self.world.scheduler.at(when_ns, self._wake)

    def _wake(self) -> None:
        when_ns = heappop(self._wakes)
        if when_ns < self._turn_ns < NEVER_NS:
            self._wake_at(self._turn_ns)
        elif when_ns == self._turn_ns:
            self._turn_ns = NEVER_NS
            if self.tick is not None and not self.paused:
                self._turn(self.tick)

    def _turn(self, tick: Tick) -> None:
        frames = self._inbox[:FRAMES_PER_TURN]
        del self._inbox[:FRAMES_PER_TURN]
        own, self._own = self._own, []
        now = self.world.scheduler.now
        self.world.faults.before_disk_use(self.disk)
        try:
            down = tick.run_turn(frames, own, now, not self._inbox)
        except (PowerCut, DiskError, LogTaken) as error:
            self._own = own
            self.world.coverage.hit(f"coordinator:{type(error).__name__.lower()}-in-a-turn")
            return self._died(error)
        self.state = tick.machine.state
        self.world.checks.turned(self.disk, bool(down))
        for route, frame in down:
            process = self._routes.get(route)
            if process is not None:
                process.carry(frame)
        for command_id, command in tick.local:
            self._local(command_id, command)
        tick.local.clear()
        self.world.faults.turned(self.state)
        self._after_turn(tick)

    def _after_turn(self, tick: Tick) -> None:
        now = self.world.scheduler.now
        if tick.machine.state.run.phase == Phase.ENDED:
            self._closing_ns = min(self._closing_ns, now + FAREWELL_NS)
            if tick.everything_acknowledged or now >= self._closing_ns:
                return self._close(tick)
        due = tick.next_timer_ns()
        self._plan(min(now + SAFETY_NS, due if due is not None else NEVER_NS))
        if self._inbox:
            self._plan(now)

    def _close(self, tick: Tick) -> None:
        """Close the log of an ended run with a hash of the state."""
        self.world.faults.before_disk_use(self.disk)
        try:
            tick.log_state_hash()
            tick.log.commit()
            tick.log.close()
        except (PowerCut, DiskError, LogTaken) as error:
            return self._died(error)
        if tick.machine.state.run.stopped:
            self._asked, self._closing_ns = True, NEVER_NS
            return self.world.begin_again()
        self.ended = True

    # --- the user's batch strategy ----------------------------------------------------------------

    def _local(self, command_id: int, command: Command) -> None:
        """Answer as a worker process would: a little later, never, or with nonsense."""
        self.world.checks.obeyed_here(command_id, command)
        if not isinstance(command, cmd.ProposeBatch):
            raise Violation("commands_reach_their_owner", f"{command!r} came to the coordinator")
        groups = [candidate.group for candidate in command.candidates]
        self._strategy.shuffle(groups)
        chosen = groups[: command.count]
        fate = self._strategy.random()
        if fate < 0.05:
            return  # it hangs: the proposal's deadline applies
        if fate < 0.1:
            chosen = chosen[:-1]
        answer = ev.BatchProposed(step_index=command.step_index, groups=tuple(chosen))
        delay = seconds(self._strategy.uniform(0.001, 0.05))
        self.world.scheduler.after(delay, partial(self._answered, self.incarnations, answer))

    def _answered(self, incarnation: int, answer: ev.BatchProposed) -> None:
        if incarnation == self.incarnations and self.tick is not None:
            self.report(answer)


def _note_start(restored: RestoredRun, hit: Callable[[str], None]) -> None:
    """Record in the coverage how a log was restored."""
    if restored.tail.torn_bytes:
        hit("log:torn-tail")
    if restored.snapshot is not None:
        hit("log:snapshot-start")
    if restored.replay.unlogged:
        hit("log:decisions-of-the-dead-completed")
