"""A small world for the pure machine: actors with random timing and faults, in virtual time.

Reads   commands
Gives   events, to a Machine

It decides from events and commands only, never from the state (except for the next timer, which is
the coordinator's own), so every discrepancy is an error. All invariants are checked after every
event. Random choices come from `random.Random(seed)`, so a failing seed can be rerun.
"""

from __future__ import annotations

import heapq
import random
from typing import Any

from laminar.core import invariants
from laminar.core.machine import StateMachine
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Settings, Stamped
from laminar.names import ids
from tools.kit.world_actors import Actors
from tools.kit.world_parts import SECOND, Faults, Process, Row, Wake, coordinator_started


class World(Actors):
    """A driver that brings a Machine to the end of a run."""

    def __init__(
        self,
        config: Settings,
        *,
        replicas: int = 2,
        nodes: int = 1,
        capacity: int = 8,
        num_train: int = 40,
        num_eval: int = 0,
        faults: Faults | None = None,
        seed: int = 0,
    ) -> None:
        self.settings, self.faults = config, faults or Faults()
        self.random = random.Random(seed)
        self.machine = StateMachine()
        self.capacity, self.num_train, self.num_eval = capacity, num_train, num_eval
        self.max_batch, self.kv_capacity = 0, 100  #: of every replica; repack needs the first
        self.now = 0
        self.seq = 0
        self.queue: list[tuple[int, int, Process, Any, int]] = []
        self.order = 0
        self.log: list[tuple[Stamped, list[Command]]] = []
        self.processes: dict[str, Process] = {}
        self.strategy = Process(COORDINATOR, COORDINATOR)
        self.step_of: dict[int, int] = {}
        #: checkpoints on the disk: the batches that made them, by version
        self.saved: dict[int, tuple[tuple[str, ...], ...]] = {}
        self.rounding_of: dict[int, str] = {}
        self.rows: dict[str, Row] = {}  #: the store's book
        self.consumed: dict[int, list[str]] = {}  #: the trainer's book: last rows of each step
        self._make_processes(nodes, replicas)

    def _make_processes(self, nodes: int, replicas: int) -> None:
        """Make one relay per machine, and distribute the replicas over the machines."""
        machines = [f"node-{i}" for i in range(nodes)]
        made = [Process(node, "node", node) for node in machines]
        made += [Process("store-0", "store")]
        made += [Process(ids.actor_name("relay", node, 0), "relay", node) for node in machines]
        made += [Process("trainer-0", "trainer")]
        for i in range(replicas):
            node = machines[i % nodes]
            name = ids.actor_name("rollout", node, i // nodes)
            made.append(Process(name, "rollout", node))
        self.processes = {process.name: process for process in made}
        if self.settings.has_environment:
            self.add_hosts()

    def add_hosts(self) -> None:
        """Add a host of sessions to each machine, and one more machine with a host of ranks."""
        roles = {p.name: "agent" for p in self.processes.values() if p.role == "node"}
        further = ids.trainer_node(1)
        roles[further] = "ranks"
        self.processes[further] = Process(further, "node", further)
        for node, role in roles.items():
            name = ids.actor_name(role, node, 0)
            self.processes[name] = Process(name, role, node)

    @property
    def state(self) -> State:
        return self.machine.state

    @property
    def trained(self) -> list[str]:
        return [row for rows in self.consumed.values() for row in rows]

    # --- running ------------------------------------------------------------------------------

    def run(self, max_events: int = 200_000) -> World:
        self.begin()
        while self.state.run.phase != Phase.ENDED:
            assert self.seq < max_events, "the run does not end"
            self.step()
        return self

    def begin(self) -> None:
        self.say_own(self.started(1))
        for process in self.processes.values():
            self.join(process)
            self._schedule_faults(process)
        if self.faults.drain_at_s:
            drain = ev.DrainRequested(reason="SIGINT", pause=self.faults.drain_pauses)
            self.later(self.strategy, self.faults.drain_at_s, drain)

    def started(self, incarnation: int) -> ev.CoordinatorStarted:
        return coordinator_started(self.settings, incarnation)

    def step(self) -> None:
        """Let the next thing happen: something in the world, or a timer."""
        timers = self.state.orders.timers
        timer = min(timers, key=lambda name: timers[name], default=None)
        if self.queue and (timer is None or self.queue[0][0] <= timers[timer]):
            self.happen_next()
        else:
            assert timer is not None, ("nothing will ever happen", self.state)
            self.now = max(self.now, timers[timer])
            self.say_own(ev.TimerFired(timer=timer))

    def happen_next(self) -> None:
        self.now, _, process, item, boot = heapq.heappop(self.queue)
        if process.boot == boot and process.alive:
            if process.silent and not isinstance(item, Wake):
                process.waiting.append(item)
            else:
                self._happen(process, item)

    def later(self, process: Process, seconds: float, item: Any) -> None:
        self.order += 1
        when = self.now + int(seconds * SECOND)
        heapq.heappush(self.queue, (when, self.order, process, item, process.boot))

    def say(self, process: Process, event: Event) -> None:
        for _ in range(1 + (self.random.random() < self.faults.repeat_event)):
            process.peer_seq += 1
            self.deliver(process.name, process.incarnation, process.peer_seq, event)

    def say_own(self, event: Event) -> None:
        """Deliver an event of the coordinator itself."""
        self.deliver(COORDINATOR, 0, 0, event)

    def gauge(self, process: Process, event: Event) -> None:
        """Deliver an event that is neither numbered nor repeated."""
        self.deliver(process.name, process.incarnation, 0, event)

    def deliver(self, peer: str, incarnation: int, peer_seq: int, event: Event) -> list[Command]:
        self.seq += 1
        stamped = Stamped(
            seq=self.seq,
            time_ns=self.now,
            peer=peer,
            incarnation=incarnation,
            peer_seq=peer_seq,
            event=event,
        )
        commands = self.machine.handle_event(stamped)
        self.log.append((stamped, commands))
        invariants.check_invariants(self.state)
        for i, command in enumerate(commands):
            self.obey(command, (self.seq << 20) + i)
        return commands
