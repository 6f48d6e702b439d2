"""A whole run in virtual time: coordinator, processes, network, disk, faults, checks; one seed.

Reads   SimConfig, the seed
Gives   the run, event by event, until it has ended; raises Violation

The coordinator's tick, log, codec, session and recovery, the actors' command filter, the store's
rules and the relay's slots are the real ones. What is modelled: engines, trainer, node, network,
disk and time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from laminar import ids
from laminar.core.state import State
from laminar.events.base import Command, Stamped
from laminar.sim.checkers import Checks
from laminar.sim.config import SimConfig
from laminar.sim.coordinator import SimCoordinator
from laminar.sim.faults import Faults
from laminar.sim.marks import Marks
from laminar.sim.models.node import Node
from laminar.sim.models.relay import Relay
from laminar.sim.models.rollout import Rollout
from laminar.sim.models.store import Store
from laminar.sim.models.trainer import Checkpoint, Trainer
from laminar.sim.network import Network
from laminar.sim.process import Model, SimProcess
from laminar.sim.scenario import draw, seconds, stream
from laminar.sim.scheduler import SECOND, Scheduler
from laminar.sim.verdict import judge
from laminar.sim.violation import Violation
from laminar.storage.rules import Row

FIRST_NODE = "node-0"
CALLS_PER_EVENT = 2_000
"""A hundred times what is usual: somebody wakes up again and again and does nothing."""
CALLS_PER_LOOK = 16
"""So often a run is asked whether it has made too many calls or events."""
_MODELS: dict[str, Callable[[SimProcess], Model]] = {
    "node": Node,
    "store": Store,
    "trainer": Trainer,
    "relay": Relay,
    "rollout": Rollout,
}

Observer = Callable[[Stamped, list[Command], State], None]


class World:
    """Everything of one seed."""

    def __init__(self, config: SimConfig, seed: int, observer: Observer | None = None) -> None:
        self.scenario = draw(config, seed)
        self.scheduler = Scheduler()
        self.network = Network(self.scheduler, stream(seed, "network"), self.scenario.delay_ms)
        self.marks = Marks()
        self.checks = Checks(self)
        self.faults = Faults(self, config.faults)
        self.coordinator = SimCoordinator(self)
        self.rows: dict[str, Row] = {}  #: of the store
        self.checkpoints: dict[str, Checkpoint] = {}  #: by directory
        self.healed_ns = 0
        self.processes: dict[str, SimProcess] = {}
        self._children: dict[str, list[SimProcess]] = {}
        self._observer = observer
        self._make_processes()
        self.rollouts = [p for p in self.processes.values() if p.role == "rollout"]

    def _make_processes(self) -> None:
        nodes = [f"node-{index}" for index in range(self.scenario.nodes)]
        for node in nodes:
            self._make("node", node, node)
        for role in ("store", "trainer"):
            self._make(role, f"{role}-0", FIRST_NODE)
        for node in nodes:
            self._make("relay", ids.actor_name("relay", node, 0), node)
        for number in range(self.scenario.replicas):
            node, index = nodes[number % len(nodes)], number // len(nodes)
            self._make("rollout", ids.actor_name("rollout", node, index), node)

    def _make(self, role: str, name: str, node: str) -> None:
        process = self.processes[name] = SimProcess(self, name, role, node)
        if role != "node":
            self._children.setdefault(node, []).append(process)

    # --- running ------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return self.coordinator.ended

    def run(self) -> str:
        """To the end of the run; the digest of its last state. Raises Violation."""
        self.begin()
        quiet_ns = seconds(self.scenario.checks.quiet_s)
        scheduler, checks, coordinator = self.scheduler, self.checks, self.coordinator
        step = scheduler.step
        while not coordinator.ended:
            if not step():
                raise Violation("progress", "nothing will ever happen")
            if scheduler.now - checks.progress_ns > quiet_ns:
                self._stands_still()
            if not scheduler.made % CALLS_PER_LOOK:
                self._must_not_be_endless()
        digest = judge(self)
        if self.coordinator.state is not None:
            self.marks.finish(self.coordinator.state)
        return digest

    def begin(self) -> None:
        """The coordinator and the machines start."""
        self.coordinator.start()
        for process in self.processes.values():
            if process.role == "node":
                process.start()
        self.faults.begin()

    def _must_not_be_endless(self) -> None:
        calls, events, limit = self.scheduler.made, self.checks.events, self.scenario.checks
        if events > limit.events_max:
            what = f"the run does not end within {limit.events_max} events"
            raise Violation("progress", what)
        if calls > CALLS_PER_EVENT * (events + 1_000):
            raise Violation("progress", f"{calls} calls led to {events} events")

    def _stands_still(self) -> None:
        state = self.coordinator.state
        phase = state.phase if state is not None else "none"
        waits = ", ".join(sorted(state.commands)[:5]) if state is not None else ""
        quiet_s = (self.scheduler.now - self.checks.progress_ns) / SECOND
        what = f"nothing ended for {quiet_s:.0f} s in phase {phase}; outstanding: {waits}"
        raise Violation("progress", what)

    def observed(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        if self._observer is not None:
            self._observer(stamped, commands, state)

    # --- processes ----------------------------------------------------------------------------

    def make_model(self, process: SimProcess) -> Model:
        return _MODELS[process.role](process)

    def chance_of(self, process: SimProcess) -> random.Random:
        return stream(self.scenario.seed, process.boot_id)

    def children_of(self, node: str) -> list[SimProcess]:
        return self._children.get(node, [])

    def process_ended(self, process: SimProcess, code: int, boot_id: str) -> None:
        """Its node sees it; the relay, after a lease, too."""
        self.scheduler.after(self.scenario.lease_ns, self._peer_lost, process)
        if process.role != "node":
            node = self.processes[process.node]
            if node.alive:
                model = node.model
                assert isinstance(model, Node)
                node.after(0, model.child_ended, process, boot_id, code)

    def _peer_lost(self, process: SimProcess) -> None:
        relay = self.processes[ids.actor_name("relay", process.node, 0)]
        if relay.alive and relay.welcomed:
            assert isinstance(relay.model, Relay)
            relay.model.peer_lost(process.name)

    # --- connections --------------------------------------------------------------------------

    def connect_all(self) -> None:
        """A coordinator listens: every process finds it a little later."""
        chance = stream(self.scenario.seed, f"connect {self.coordinator.incarnations}")
        for process in self.processes.values():
            self.scheduler.after(seconds(chance.uniform(0, 0.3)), self.reconnect, process)

    def reconnect(self, process: SimProcess) -> None:
        if process.alive and not process.route:
            process.connect()
