"""What the parts of a simulated world know of each other, and no more.

Gives   World, Process, Boot, Server, Coordinator, Checks, Faults, Model: one face each;
        EXIT_FAILED, EXIT_KILLED

Faults, checks, models and the runtime import these faces; world.py alone puts the parts together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from laminar.actors.host import Actor, Host
from laminar.config import Config
from laminar.core.machine import Machine
from laminar.core.state import State
from laminar.events import commands as cmd
from laminar.events.base import Command, Event, Stamped
from laminar.names import exit_codes
from laminar.net.session import ClientLink
from laminar.sim.checks.coverage import Coverage
from laminar.sim.runtime.disk import CrashMode, SimDisk
from laminar.sim.runtime.loop import SimLoop
from laminar.sim.runtime.network import Network
from laminar.sim.runtime.scheduler import Action, Scheduler
from laminar.sim.scenario import Scenario
from laminar.storage.rules import Row

EXIT_FAILED, EXIT_KILLED = exit_codes.FAILED, -9
"""Of a process that says that it cannot go on, and of one that is killed."""


class Server(Protocol):
    """The serving end of requests (runtime/rpc.py)."""

    def receive(self, client: Boot, message: Any) -> None:
        """A message arrives at the machine of this server."""


class Boot(Protocol):
    """One boot of a process (runtime/boot.py)."""

    name: str
    boot_id: str
    pid: int
    config: Config
    loop: SimLoop
    link: ClientLink
    host: Host
    run_dir: Any
    placed: dict[str, cmd.GenerateTrajectory]
    terminate: Callable[[str], None]
    starter_gone: Callable[[], None]

    @property
    def process(self) -> Process: ...

    @property
    def runs(self) -> bool: ...

    def after(self, delay_ns: int, action: Action, *args: Any) -> None: ...

    def after_turn(self, action: Callable[[], None]) -> None: ...

    def deliver(self, action: Action, *args: Any) -> None: ...

    def enter_reply(self, server: str, replies: Any) -> None: ...


class Model(Protocol):
    """What a role needs of the world, and how time passes for it."""

    def make_actor(self, host: Host) -> Actor: ...

    def pause(self) -> None:
        """The process stands still from now on."""

    def resume(self) -> None:
        """It goes on, or at another speed."""


class Process(Protocol):
    """A process slot of a machine (runtime/process.py)."""

    name: str
    role: str
    node: str
    boot: int
    boot_id: str
    started_by: str
    alive: bool
    paused: bool
    slow: float
    welcomed: bool
    route: bytes

    @property
    def world(self) -> World: ...

    @property
    def current(self) -> Boot: ...

    @property
    def model(self) -> Model: ...

    @property
    def key(self) -> tuple[str, int]: ...

    @property
    def link(self) -> ClientLink: ...

    @property
    def stopping(self) -> bool: ...

    def start(self) -> None: ...

    def die(self, code: int) -> None: ...

    def replace(self) -> None: ...

    def fail(self, reason: str) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def now_ns(self) -> int: ...

    def after(self, delay_ns: int, action: Action, *args: Any) -> None: ...

    def compute(self, duration_s: float, action: Action, *args: Any) -> None: ...

    def due(self, boot: int, action: Action, args: tuple[Any, ...]) -> None: ...

    def connect(self) -> None: ...

    def disconnect(self) -> None: ...

    def emit(self, event: Event) -> None: ...

    def leave(self, frame: bytes) -> None: ...

    def carry(self, frame: bytes) -> None: ...


class Coordinator(Protocol):
    """The coordinator's process (runtime/coordinator.py)."""

    state: State | None
    disk: SimDisk
    incarnations: int
    wall_offset_ns: int
    ended: bool
    over: Any
    exits: Any

    @property
    def up(self) -> bool: ...

    def accept(self, process: Any) -> bytes: ...

    def hang_up(self, route: bytes) -> None: ...

    def receive(self, route: bytes, frame: bytes) -> None: ...

    def report(self, event: Event) -> None: ...

    def kill(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Checks(Protocol):
    """What is told to the checks (checks/safety.py); each call may raise Violation."""

    events: int
    replays: int
    bodies: dict[str, list[bytes]]
    boots: dict[tuple[str, int], tuple[str, int]]
    failure: tuple[int, list[str]]
    durability: Any
    leases: Any
    prompts: Any
    training: Any
    node_reports: Any
    released: Any

    def observe(self, stamped: Stamped, commands: list[Command], state: State) -> None: ...

    def replayed(self, stamped: Stamped, commands: list[Command], state: State) -> None: ...

    def coordinator_started(self, coordinator: Any, machine: Machine) -> None: ...

    def coordinator_crashed(self) -> None: ...

    def turned(self, disk: SimDisk, sends: bool) -> None: ...

    def process_started(self, process: Any) -> None: ...

    def sent(self, process: Any, event: Event, body: bytes) -> None: ...

    def heard(self, process: Any) -> None: ...

    def acknowledged(self, process: Any) -> None: ...

    def ordered(self, process: Any, order: cmd.Order, command: Command) -> None: ...

    def obeyed(self, process: Any, order: cmd.Order, command: Command) -> None: ...

    def obeyed_here(self, command_id: int, command: Command) -> None: ...

    def stored(self, row: Row, placement: int) -> None: ...

    def generates(self, command: cmd.GenerateTrajectory, digest: str) -> None: ...

    def poisoned(self, command: cmd.GenerateTrajectory, node: str) -> None: ...


class Faults(Protocol):
    """What the parts of a world ask: does something of theirs go wrong? (faults/faults.py)"""

    active: list[str]
    healed: bool
    storm: bool
    fatal_role: str
    full_for_good: bool
    left_hanging: int
    ended_before: set[str]
    wedged_until_ns: int
    reward_slow: float
    unscorable: set[str]

    def turned(self, state: State) -> None: ...

    def is_gone(self, node: Any) -> bool: ...

    def ignores(self, process: Any, command: Command) -> bool: ...

    def start_hangs(self) -> bool: ...

    def hangs(self, command: cmd.GenerateTrajectory) -> bool: ...

    def refuses(self, command: cmd.GenerateTrajectory) -> bool: ...

    def poisonous(self, command: cmd.GenerateTrajectory) -> bool: ...

    def loses_reward_worker(self) -> bool: ...

    def reward_reason(self) -> str: ...

    def corrupts_weights(self) -> bool: ...

    def damages_chunk(self) -> bool: ...

    def sticks(self) -> bool: ...

    def publish_fails(self) -> bool: ...

    def publish_differs(self) -> bool: ...

    def engine_differs(self) -> bool: ...

    def trainers_disk_is_full(self) -> bool: ...

    def long_step_s(self) -> float: ...

    def dies_at(self, process: Process, point: str) -> bool: ...

    def dead_for_good(self, process: Any) -> bool: ...

    def doomed(self) -> Iterable[Any]: ...

    def begun_again(self) -> None: ...

    def before_disk_use(self, disk: SimDisk) -> None: ...

    def crash_mode(self) -> CrashMode: ...

    def restart_delay_ns(self) -> int: ...


class World(Protocol):
    """Everything of one seed (world.py)."""

    scenario: Scenario
    scheduler: Scheduler
    network: Network
    coverage: Coverage
    config: Config
    arenas: dict[str, Any]
    weights: dict[str, bytes]
    models: dict[str, Any]
    outcomes: dict[str, Any]
    names: dict[bytes, str]
    database: Any
    healed_ns: int

    machines: Any

    @property
    def bulk(self) -> Any: ...

    @property
    def checks(self) -> Checks: ...

    @property
    def faults(self) -> Faults: ...

    @property
    def coordinator(self) -> Coordinator: ...

    @property
    def rows(self) -> dict[str, Row]: ...

    @property
    def processes(self) -> Mapping[str, Process]: ...

    @property
    def rollouts(self) -> Collection[Process]: ...

    @property
    def servers(self) -> dict[str, Any]: ...

    @property
    def boots(self) -> list[Any]: ...

    @property
    def finished(self) -> bool: ...

    def observed(self, stamped: Stamped, commands: list[Command], state: State) -> None: ...

    def make_model(self, process: Any) -> Model: ...

    def chance_of(self, process: Any) -> random.Random: ...

    def lose_checkpoints(self) -> None: ...

    def children_of(self, node: str) -> list[Any]: ...

    def machine_of(self, relay: str) -> Any: ...

    def process_ended(self, process: Any, code: int, boot_id: str) -> None: ...

    def connect_all(self) -> None: ...

    def reconnect(self, process: Any) -> None: ...

    def begin_again(self) -> None: ...
