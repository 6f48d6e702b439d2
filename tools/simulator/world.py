"""A whole run in virtual time: coordinator, processes, network, disk, faults, checks; one seed.

Reads   Choices, the seed
Gives   the run, event by event, until it has ended; raises Violation

The coordinator's tick, log, codec, session and recovery, the actors' host, the node, the store, the
trainer and the relay's slots are the real ones. Models replace engines, the learner, the network,
the disk, time and the operating system's processes.
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events.base import Command, Stamped
from laminar.names import exit_codes, ids
from laminar.run.directory import CHECKPOINTS_DIR
from laminar.storage.rules import Row
from tools.simulator.config import Choices
from tools.simulator.context import Checks, Context, Faults, Process, Server
from tools.simulator.coverage import Coverage
from tools.simulator.machine.bulk import BulkNetwork
from tools.simulator.machine.database import StoreDatabase
from tools.simulator.machine.memory import SimArena
from tools.simulator.machine.model_files import lay_origin
from tools.simulator.machine.processes import MachineProcesses
from tools.simulator.machine.relay import Relay, SimMachine
from tools.simulator.machine.versions import VERSION_BYTES, ModelDirectory
from tools.simulator.models.agents import HostProcess
from tools.simulator.models.learner import Lineage, SimTrainer
from tools.simulator.models.replica import Replica
from tools.simulator.models.store import StoreProcess
from tools.simulator.network import Network
from tools.simulator.runtime.coordinator import SimCoordinator
from tools.simulator.runtime.machines import Machines
from tools.simulator.runtime.process import Idle, SimProcess
from tools.simulator.runtime.violation import Violation
from tools.simulator.scenario import draw, seconds, stream
from tools.simulator.scheduler import SECOND, Scheduler

FIRST_NODE = "node-0"
CALLS_PER_EVENT = 2_000
"""Limit at a hundred times the usual: beyond it something wakes up repeatedly and does nothing."""
CALLS_PER_LOOK = 16  #: calls between two looks whether a run has made too many calls or events
Observer = Callable[[Stamped, list[Command], State], None]


class World(Context):
    """Simulated world of one seed."""

    def __init__(
        self,
        choices: Choices,
        seed: int,
        make_checks: Callable[[World], Checks],
        make_faults: Callable[[World], Faults],
        observer: Observer | None = None,
    ) -> None:
        self.scenario = draw(choices, seed)
        self.config = self.scenario.config
        self.scheduler = Scheduler()
        delay_ms = self.scenario.world.delay_ms
        self.network = Network(self.scheduler, stream(seed, "network"), delay_ms)
        self.coverage = Coverage()
        bytes_per_s = VERSION_BYTES / self.scenario.world.transfer_s
        self.bulk = BulkNetwork(self, delay_ms, bytes_per_s)
        self.arenas: dict[str, SimArena] = {}  #: arenas of all machines by path
        self.checks = make_checks(self)
        self.faults = make_faults(self)
        self.coordinator: SimCoordinator = SimCoordinator(self)
        self.machines = Machines(self)
        self.database = StoreDatabase(self)
        self.models: dict[str, ModelDirectory] = {}  #: models on the shared disk by path
        self._lineage = Lineage()
        lay_origin(self, self.models, self._lineage.names)
        self.processes: dict[str, SimProcess] = {}
        self.servers: dict[str, Server] = {}
        self._children: dict[str, list[SimProcess]] = {}
        self._observer = observer
        self._make_processes()
        self.rollouts = [p for p in self.processes.values() if p.role == "rollout"]

    def _make_processes(self) -> None:
        nodes = [f"node-{index}" for index in range(self.scenario.world.nodes)]
        for node in nodes:
            self._make("node", node, node)
        for role in ("store", "trainer"):
            self._make(role, f"{role}-0", FIRST_NODE)
        for node in nodes:
            self._make("relay", ids.actor_name("relay", node, 0), node)
        for number in range(self.scenario.config.rollout.replicas):
            node, index = nodes[number % len(nodes)], number // len(nodes)
            self._make("rollout", ids.actor_name("rollout", node, index), node)
        for node in nodes if self.config.has_sessions else ():
            self._make("agent", ids.actor_name("agent", node, 0), node)

    def _make(self, role: str, name: str, node: str) -> None:
        process = self.processes[name] = SimProcess(self, name, role, node, self._make_model)
        if role != "node":
            self._children.setdefault(node, []).append(process)

    @property
    def rows(self) -> dict[str, Row]:
        """Rows of the store."""
        return self.database.tables.saved

    # --- running ------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.coordinator.ended

    def run(self) -> str:
        """Run the world to the end of the run, and return the digest of its last state."""
        with self:
            return self._run()

    def _run(self) -> str:
        self.begin()
        quiet_ns = seconds(self.scenario.world.checks.quiet_s)
        scheduler, checks, coordinator = self.scheduler, self.checks, self.coordinator
        step = scheduler.step
        while not coordinator.ended:
            if not step():
                raise Violation("progress", "nothing will ever happen")
            if scheduler.now - checks.progress_ns > quiet_ns:
                self._stands_still()
            if not scheduler.made % CALLS_PER_LOOK:
                self._must_not_be_endless()
        digest = self.checks.judge()
        if self.coordinator.state is not None:
            self.coverage.finish(self.coordinator.state)
        return digest

    def begin(self) -> None:
        """Start the coordinator and the machines."""
        self.coordinator.start()
        for process in self.processes.values():
            if process.role == "node":
                process.start()
        self.faults.begin()

    def begin_again(self) -> None:
        """End all processes at once; a while later the user restarts the run."""
        nodes = [process for process in self.processes.values() if process.role == "node"]
        for process in (*nodes, *self.processes.values()):  # nodes first: none sees the others die
            process.die(exit_codes.KILLED)
        self.machines.die()  # the starter of the nodes dies, too
        self.machines = Machines(self)
        self.faults.begun_again()
        self.coordinator.kill()
        again_s = stream(self.scenario.seed, f"again {self.scheduler.now}")
        for node in nodes:
            self.scheduler.after(seconds(again_s.uniform(0, 3)), self._start, node)

    def _start(self, node: SimProcess) -> None:
        if not node.alive and not self.faults.dead_for_good(node):
            node.start()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Discard what actors were doing when the world ended, so that none of it runs any more."""
        boots = [boot for process in self.processes.values() for boot in process.boots]
        for boot in boots:
            boot.end()
        for boot in boots:
            boot.loop.discard()

    def _must_not_be_endless(self) -> None:
        calls, events, limit = self.scheduler.made, self.checks.events, self.scenario.world.checks
        gauges = self.coverage.counts.get("event:TokenProgress", 0)  # they come with time
        if events - gauges > limit.events_max:
            what = f"the run does not end within {limit.events_max} events, gauges excluded"
            raise Violation("progress", what)
        if calls > CALLS_PER_EVENT * (events + 1_000):
            raise Violation("progress", f"{calls} calls led to {events} events")

    def _stands_still(self) -> None:
        state = self.coordinator.state
        phase = state.run.phase if state is not None else "none"
        waits = ", ".join(sorted(state.orders.commands)[:5]) if state is not None else ""
        quiet_s = (self.scheduler.now - self.checks.progress_ns) / SECOND
        what = f"nothing ended for {quiet_s:.0f} s in phase {phase}; outstanding: {waits}"
        raise Violation("progress", what)

    def observed(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        if self._observer is not None:
            self._observer(stamped, commands, state)

    # --- processes ----------------------------------------------------------------------------

    def _make_model(self, process: SimProcess) -> Idle:
        match process.role:
            case "node":
                return MachineProcesses(process, self.children_of(process.name))
            case "store":
                return StoreProcess(process, self.database)
            case "trainer":
                return SimTrainer(process, self.arenas, self.models, self._lineage, self.rows)
            case "relay":
                return Relay(process, self.bulk, self.arenas)
            case "agent":
                return HostProcess(process, self.rows)
            case _:
                return Replica(process, self.arenas, self.models, self.rows)

    def lose_checkpoints(self) -> None:
        """Remove all checkpoints from the disk, except one that is being written.

        Do nothing while a trainer needs them to come back: there may be no other way if the store
        has removed tokens.
        """
        if self.database.tables.without_payload and not self._trains():
            return
        self.faults.harm("trainer")
        for path in [path for path in self.models if f"/{CHECKPOINTS_DIR}/step" in path]:
            del self.models[path]
            self.checks.training.lost.add(path)

    def _trains(self) -> bool:
        """Return whether the trainer has loaded what it continues from."""
        state, trainer = self.coordinator.state, self.processes["trainer-0"]
        actor = state.members.actors.get(trainer.name) if state is not None else None
        if state is None or actor is None or not trainer.alive or trainer.paused:
            return False
        return actor.ready and not {keys.LOAD, keys.REPEAT} & state.orders.commands.keys()

    def machine_of(self, relay: str) -> SimMachine:
        """Return this relay's current view of its machine."""
        model = self.processes[relay].model
        assert isinstance(model, Relay)
        return model.machine

    def children_of(self, node: str) -> list[SimProcess]:
        return self._children.get(node, [])

    def process_ended(self, process: Process, code: int, boot_id: str) -> None:
        """Close the connections of an ended process, as its kernel does, and tell its starter."""
        self.bulk.process_ended(boot_id)
        if process.role == "node":
            self.machines.ended(self.processes[process.name], code)
        else:
            node = self.processes[process.node]
            if node.alive:
                model = node.model
                assert isinstance(model, MachineProcesses)
                node.call_later(0, model.ended, boot_id, process.name, code)

    # --- connections --------------------------------------------------------------------------

    def connect_all(self) -> None:
        """Let every process connect, a little later, to a coordinator that listens."""
        chance = stream(self.scenario.seed, f"connect {self.coordinator.incarnations}")
        for process in self.processes.values():
            self.scheduler.after(seconds(chance.uniform(0, 0.3)), self.reconnect, process)

    def reconnect(self, process: SimProcess) -> None:
        if process.alive and not process.route:
            process.connect()
