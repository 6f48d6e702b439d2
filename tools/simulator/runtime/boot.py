"""A boot of a simulated process: the Process of actors/host.py in virtual time.

Reads   frames of the coordinator, replies of other processes
Emits   frames, through a real ClientLink; commands to its host, which is the real one

Each boot has its own link, clock and event loop: after it ends, none of its callbacks run. An
unexpected exception of its actor violates the invariant nothing_raises.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laminar.actors.host import ActorRole, Host
from laminar.config import Config
from laminar.events import commands as cmd
from laminar.events.base import Command, Event
from laminar.events.codec import decode_envelope, encode
from laminar.events.families import WireError
from laminar.names import exit_codes
from laminar.net.calls import FLUSH_S, Handler
from laminar.net.session import MS, NEVER_NS, ClientLink, LinkClosed, LinkState
from laminar.training.trainer_state import CheckpointError
from tools.simulator.context import Process
from tools.simulator.runtime.loop import SimLoop
from tools.simulator.runtime.rpc import Replies, SimClient, SimServer
from tools.simulator.runtime.violation import Violation
from tools.simulator.scheduler import Action

FLUSH_POLL_S = 0.05
RUN_DIR = Path("run")
ENDS_A_PROCESS = (TimeoutError, LinkClosed, CheckpointError)
"""Exceptions that end an actor normally: an unreachable server, a refusal by the coordinator, or
a checkpoint that changed since it was written."""


class Log:
    """A log whose warnings count in the coverage, as rare paths, and whose errors are raised."""

    def __init__(
        self, warned: Callable[[str], None], raised: Callable[[BaseException], None]
    ) -> None:
        self._warned, self._raised = warned, raised

    def debug(self, event: str, **facts: Any) -> None: ...

    def info(self, event: str, **facts: Any) -> None: ...

    def warning(self, event: str, **facts: Any) -> None:
        self._warned(event)

    def error(self, event: str, **facts: Any) -> None:
        error = facts.get("exc_info")
        if isinstance(error, BaseException):
            self._raised(error)

    def exception(self, event: str, **facts: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self._raised(error)


class Dropped:
    """An outlet that discards its items."""

    def put(self, item: object) -> None: ...


class Obedient:
    """An actor wrapper that counts commands for the checks; a fault may withhold one."""

    def __init__(self, boot: Boot, actor: ActorRole) -> None:
        self._boot, self._actor = boot, actor

    async def start(self) -> None:
        process = self._boot.process
        process.welcomed = True
        if process.role == "node":
            process.world.checks.node_reports.node_started(process)
        await self._actor.start()

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        process = self._boot.process
        checks, faults = process.world.checks, process.world.faults
        obeyed = []
        for order, command in orders:
            checks.obeyed(process, order, command)
            if not faults.ignores(process, command):
                obeyed.append((order, command))
            if isinstance(command, cmd.GenerateTrajectory):
                self._boot.placed[f"{command.trajectory_id}@{command.placement}"] = command
        if obeyed:
            self._actor.handle_orders(obeyed)

    async def stop(self) -> None:
        await self._actor.stop()


class Boot:
    """The interface of a simulated process to its host, for one boot."""

    def __init__(self, process: Process) -> None:
        world = process.world
        self.process, self.number = process, process.boot
        self.name, self.role, self.node = process.name, process.role, process.node
        self.boot_id, self.run_dir = process.boot_id, RUN_DIR
        self.run_id, self.bulk_key = "run", b"the key of the run"
        number = int(self.node.rpartition("-")[2])
        self.address = f"10.{number >> 8}.{number & 255}.1"
        self.config: Config = world.config
        self.clock_offset_ns = 0
        self.pid = 1000 + self.number
        self.log = Log(lambda what: world.coverage.hit(f"{self.role}:{what}"), self._raised)
        self.loop = SimLoop(self.now_ns, self.after, self._turned)  # type: ignore[abstract]
        started = {}
        if self.role != "node":
            node_boot = world.processes[self.node].boot_id
            started = {"node_boot": node_boot, "start": str(self.number)}
        self.link = ClientLink(
            self.name,
            self.role,
            self.boot_id,
            heartbeat_ns=world.config.coordinator.heartbeat_ms * MS,
            now_ns=world.scheduler.now,
            info={"node": self.node, "pid": str(self.pid), **started},
        )
        #: generation commands by the engine's request id
        self.placed: dict[str, cmd.GenerateTrajectory] = {}
        self._scheduler = world.scheduler
        self._clients: dict[str, SimClient] = {}
        self._after_turn: dict[Callable[[], None], None] = {}
        self._arrived: list[bytes] = []
        self._broken: Violation | None = None
        self._seen = ("", LinkState.JOINING)  #: server boot and link state that the host knows
        self._kept_back: dict[int, bool] = {}  #: stop commands: whether a fault withholds them
        self._wake_ns = NEVER_NS
        self._flush_due = False
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self.work_count = 0
        self.host = Host(self)

    # --- life ---------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        """Whether the process is alive and not paused."""
        return not self.loop.closed and not self.process.paused

    def begin(self, actor: ActorRole) -> None:
        """Connect to the coordinator; the actor starts once it is welcomed."""
        self.loop.enter(self.loop.create_task, self._run(Obedient(self, actor)))

    async def _run(self, actor: ActorRole) -> None:
        self.process.die(await self.host.run(actor))

    def end(self) -> None:
        """End the boot: none of its callbacks run any more."""
        self.loop.closed = True

    def after(self, delay_ns: int, action: Action, *args: Any) -> None:
        """Call `action` after a delay if this boot is still alive then."""
        if not self.loop.closed:
            self._scheduler.after(delay_ns, self.process.due, self.number, action, args)

    def deliver(self, action: Action, *args: Any) -> None:
        """Call `action` now, or as soon as a paused process resumes."""
        self.process.due(self.number, action, args)

    def after_turn(self, action: Callable[[], None]) -> None:
        """Call `action` once when nothing else is ready at this instant."""
        self._after_turn[action] = None

    def _turned(self) -> None:
        if self._broken is not None:
            raise self._broken
        if self._after_turn:
            actions, self._after_turn = self._after_turn, {}
            for action in actions:
                action()
        if self._flush_due:
            self.flush()

    def _raised(self, error: BaseException) -> None:
        if isinstance(error, ENDS_A_PROCESS) or self._broken is not None:
            return
        if isinstance(error, Violation):
            self._broken = error
        else:
            what = f"{self.boot_id}: {type(error).__name__}: {error}"
            self._broken = Violation("nothing_raises", what, self.name)
            self._broken.__cause__ = error

    # --- the host's process ---------------------------------------------------------------------

    def count_work(self) -> None:
        self.work_count += 1

    async def is_coordinator_listening(self) -> bool:
        return self.process.world.coordinator.listening

    @property
    def incarnation(self) -> int:
        return self.link.incarnation

    async def hit_failpoint(self, point: str) -> None:
        if self.process.world.faults.dies_at(self.process, point):
            self.process.die(exit_codes.KILLED)
            await self.loop.create_future()

    @property
    def unacknowledged(self) -> int:
        return len(self.link.outbox)

    @property
    def silent_ns(self) -> int:
        return self.link.silent_ns(self._scheduler.now)

    def join(self, host: Host) -> None: ...

    async def start(self) -> None: ...

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    async def close(self) -> None:
        deadline_s = self.loop.time() + FLUSH_S
        while self.link.outbox and self.link.state is LinkState.UP:
            if self.loop.time() >= deadline_s:
                break
            await asyncio.sleep(FLUSH_POLL_S)
        self.link.close()
        self.flush()

    def send(self, event: Event) -> None:
        body = encode(event)
        self.link.send(body)
        self.process.world.checks.sent(self.process, event, body)
        self.flush_soon()

    def send_gauge(self, event: Event) -> None:
        self.link.send_gauge(encode(event))
        self.flush_soon()

    def make_client(self, server: str) -> SimClient:
        found = self._clients[server] = SimClient(self, server)
        return found

    def make_server(self, handle_batch: Handler, on_peer_lost: Callable[[str], None]) -> SimServer:
        self._server = SimServer(self, handle_batch, on_peer_lost)
        return self._server

    async def publish_address(self, address: str) -> None:
        self.process.world.servers[self.name] = self._server

    def now_ns(self) -> int:
        return self._scheduler.now

    def record_span(self, line: dict[str, Any]) -> None: ...

    def print_message(self, text: str) -> None: ...

    def add_outlet(
        self, name: str, write: Callable[[list[Any]], None], *, kept: int = 0
    ) -> Dropped:
        return Dropped()

    def watch_for_stop(
        self, terminated: Callable[[str], None], starter_gone: Callable[[], None]
    ) -> None:
        self.terminate, self.starter_gone = terminated, starter_gone

    def force_exit_after(self, after_s: float) -> None:
        self.after(int(after_s * 1e9), self.process.die, 1)

    async def directory_lost(self) -> str:
        return str(await self.loop.create_future())

    def freeze_heap(self) -> None: ...

    # --- the link to the coordinator ------------------------------------------------------------

    def enter_reply(self, server: str, replies: Replies) -> None:
        """Deliver the replies of a server."""
        self.loop.enter(self._clients[server].answered, replies)

    def arrive(self, frame: bytes) -> None:
        """Receive a frame of the coordinator; frames of one instant are handled together."""
        if not self._arrived:
            self.after(0, self._take_all)
        self._arrived.append(frame)

    def _take_all(self) -> None:
        self.loop.enter(self._take_frames)

    def _take_frames(self) -> None:
        frames, self._arrived = self._arrived, []
        for frame in frames:
            self._take(frame)
        if self.link.next_due_ns() <= self._scheduler.now:
            self._flush_due = True
        else:
            self._sleep(self.link.next_due_ns())

    def _take(self, frame: bytes) -> None:
        process = self.process
        try:
            bodies = self.link.receive(frame, self._scheduler.now)
        except WireError:
            process.world.coverage.hit("session:actor-refuses-garbage")
            return
        process.world.checks.acknowledged(process)
        seen = self._seen
        self._seen = (self.link.server_boot, self.link.state)
        if seen != self._seen and self.link.state is LinkState.UP:
            self.host.handle_welcome(self.link.incarnation)
        elif seen != self._seen and self.link.state is LinkState.REFUSED:
            process.world.coverage.hit("session:refused")
            self.host.handle_refusal(self.link.reason, self.link.again)
        for body in bodies:
            self._obey(body)

    def _obey(self, body: bytes) -> None:
        order, command = decode_envelope(body)
        world = self.process.world
        world.checks.ordered(self.process, order, command)
        if isinstance(command, cmd.StopActor):
            number = order.command_id
            if number not in self._kept_back:
                self._kept_back[number] = world.faults.ignores(self.process, command)
            if self._kept_back[number]:
                return
        if not self.host.accept_command(order, command):
            world.coverage.hit("session:command-repeated")

    def flush_soon(self) -> None:
        """Flush once everything else at this instant has happened."""
        if not self._flush_due:
            self._flush_due = True
            if not self.loop.is_running():
                self.after(0, self._flush_now)

    def _flush_now(self) -> None:
        if self._flush_due:
            self.flush()

    def flush(self) -> None:
        """Send all due frames and schedule the next wake-up."""
        self._flush_due = False
        for frame in self.link.poll(self._scheduler.now):
            self.process.leave(frame)
        self._sleep(self.link.next_due_ns())

    def _sleep(self, due_ns: int) -> None:
        """Schedule a wake-up at `due_ns`; an earlier wake-up sleeps again."""
        now = self._scheduler.now
        if due_ns < self._wake_ns or self._wake_ns <= now:
            self._wake_ns = max(due_ns, now + 1)
            if due_ns != NEVER_NS:
                self.after(self._wake_ns - now, self._wake, self._wake_ns)

    def _wake(self, when_ns: int) -> None:
        if when_ns == self._wake_ns and not self._flush_due:
            self._wake_ns = NEVER_NS
            due_ns = self.link.next_due_ns()
            if due_ns <= self._scheduler.now:
                self.flush()
            else:
                self._sleep(due_ns)
