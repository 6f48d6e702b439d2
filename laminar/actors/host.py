"""The common part of every actor process: joins the run, delivers commands, reports events, ends.

Reads   commands of the coordinator
Emits   events of the actor; ActorFailed and ActorLeft

An actor outlives its coordinator: it finishes its work, idles, and ends by itself only after
coordinator_timeout_ms. A node ends, with its processes, after stall_timeout_s if the coordinator
lives but answers nothing: a supervisor would have restarted it. When an actor's own code fails, in
a task or in a callback of the event loop, it reports that and ends with a non-zero code, so that
its node can restart it. It does not outlive its node or its run directory; a node whose starter is
gone does not wait for another coordinator.

The environment is a Process: a real one (actors/system/process.py), or the simulator's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

from laminar.actors.disk_full_retry import DiskStayedFull
from laminar.actors.protocol import CommandFilter
from laminar.config import Config, ConfigError
from laminar.engines.protocol import EngineError
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.names import exit_codes
from laminar.names.ports import is_transient
from laminar.net.calls import Client, Handler, Server
from laminar.net.session import LinkClosed, OutboxFull, RunOver

ORPHAN_ABSENT_S = 10.0
"""Wait for a coordinator when the starter is gone; `laminar train` would restart one sooner."""
ORPHAN_EXIT_S = 20.0
"""Time limit for an actor without a node, which no process would kill if it did not end."""
UNHEARD = (exit_codes.COORDINATOR_ABSENT, exit_codes.FENCED)
"""Exit codes of processes that no longer have a coordinator to report to."""
WATCH_S = 0.5
PROBE_S = 5.0  #: interval at which a node checks whether a silent coordinator lives
REPORTS = 4  #: reports of work in the time after which a run counts as stalled
ACKNOWLEDGED_POLL_S = 0.1
REASON_CHARS_MAX = 2_000
"""The longest reason of a failure, which goes to every process; the log has all of it."""

_NO_FAILURES = (*UNHEARD, exit_codes.TERMINATED, exit_codes.LOG_UNWRITABLE)
"""Exit codes of processes that end through no fault of their own, such as by a signal."""

Item = TypeVar("Item")
ItemIn = TypeVar("ItemIn", contravariant=True)


class ProcessEnding(RuntimeError):
    """A wait was abandoned because this process is to end, which is not a failure."""


class ActorRole(Protocol):
    """The role of a process."""

    async def start(self) -> None:
        """Get ready and report it; raise ConfigError for mistakes of the user."""

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        """Accept commands that arrived together; must not block."""

    async def stop(self) -> None:
        """Flush and release everything."""


class TelemetryQueue(Protocol[ItemIn]):
    """A queue of items that are written in order by a background thread."""

    def put(self, item: ItemIn) -> None:
        """Queue an item without waiting or raising; items that cannot be written are counted."""


class Process(Protocol):
    """The process of an actor: its operating system and network."""

    name: str
    role: str
    node: str
    boot_id: str  #: unique to this process among those of the same name
    address: str  #: IP of this machine, on which its servers listen
    run_dir: Path
    run_id: str  #: unique to the run, the same wherever the directory is mounted
    bulk_key: bytes  #: shared key of the run's relays
    config: Config
    log: Any  #: debug, info, warning, error and exception, as of structlog
    clock_offset_ns: int

    @property
    def incarnation(self) -> int:
        """The number of this process, assigned by the coordinator; 0 until its first welcome."""
        ...

    @property
    def silent_ns(self) -> int:
        """Nanoseconds since the coordinator was last heard."""
        ...

    async def is_coordinator_listening(self) -> bool:
        """Return whether a process accepts connections at the coordinator's address."""
        ...

    @property
    def work_count(self) -> int:
        """Number of pieces of work that the process has done (run/work_counter.py)."""
        ...

    def count_work(self) -> None:
        """Count one more piece of work, where waiting for a disk is a part of it."""

    @property
    def unacknowledged(self) -> int:
        """Number of events that the coordinator does not have on disk yet."""
        ...

    def join(self, host: Host) -> None:
        """Call accept_command, handle_welcome and handle_refusal of `host` once started."""

    async def start(self) -> None:
        """Start to look for the coordinator, without waiting for it."""

    async def wait_closed(self) -> None:
        """Return after `close`; raise the error that broke the link to the coordinator."""

    async def close(self) -> None:
        """Wait briefly for the coordinator's acknowledgements and say Bye to it."""

    async def hit_failpoint(self, point: str) -> None:
        """Mark a named place in the code where a test may have the process die."""

    def send(self, event: Event) -> None:
        """Send to the coordinator, until it has the event on disk; OutboxFull, LinkClosed."""

    def send_gauge(self, event: Event) -> None:
        """Send a value that the next one replaces; dropped while the coordinator is away."""

    def make_client(self, server: str) -> Client:
        """Return a client, not started, of the store or the relay of this run."""

    def make_server(self, handle_batch: Handler, on_peer_lost: Callable[[str], None]) -> Server:
        """Return a server, not started, on a free port; others find it by publish_address.

        `on_peer_lost(boot_id)`: that process said Bye, or was silent for its lease.
        """

    async def publish_address(self, address: str) -> None:
        """Publish this process's server address for `make_client` in other processes; OSError."""

    def now_ns(self) -> int: ...

    def record_span(self, line: dict[str, Any]) -> None:
        """Write one line of the timeline."""

    def print_message(self, text: str) -> None:
        """Print a sentence on the terminal."""

    def add_outlet(
        self, name: str, write: Callable[[list[Item]], None], *, kept: int = ...
    ) -> TelemetryQueue[Item]:
        """Add an outlet with a background writer; `kept`: the most items that may wait."""

    def watch_for_stop(
        self, terminated: Callable[[str], None], starter_gone: Callable[[], None]
    ) -> None:
        """Call one on a signal to end, with its name; the other when the starter is gone."""

    def force_exit_after(self, after_s: float) -> None:
        """Exit after this time unless the process has ended by then."""

    async def directory_lost(self) -> str:
        """Wait until the run directory no longer belongs to this run, and return the reason."""
        ...

    def freeze_heap(self) -> None:
        """Exclude present objects, which live as long as the process, from collection."""


class Host:
    """The services for an actor: config, events, other servers, background tasks, a timeline."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.name, self.role, self.node = process.name, process.role, process.node
        self.boot_id, self.address, self.run_dir = process.boot_id, process.address, process.run_dir
        self.run_id, self.bulk_key = process.run_id, process.bulk_key
        self.config, self.log = process.config, process.log
        self.clock_offset_ns = process.clock_offset_ns  #: time of day minus now_ns()
        self.incarnation = 0
        self.ordered_to_stop = False  #: whether the coordinator ordered all processes to stop
        self._paused = False  #: whether that order pauses the run
        self.now_ns = process.now_ns  #: monotonic clock with an arbitrary zero
        self.hit_failpoint, self.send_gauge = process.hit_failpoint, process.send_gauge
        self.make_client, self.make_server = process.make_client, process.make_server
        self.count_work = process.count_work
        self.publish_address, self.add_outlet = process.publish_address, process.add_outlet
        self._filter = CommandFilter()
        self._arrived: list[tuple[cmd.Envelope, Command]] = []
        self._actor: ActorRole | None = None
        self._stop = asyncio.Event()
        self._begin = asyncio.Event()  #: set by the first welcome, or by an earlier end
        self._failure: tuple[ev.ActorFailed, int] | None = None  #: with the exit code
        self._emitted = 0  #: number of events sent
        self._tasks: dict[asyncio.Task[Any], None] = {}  #: running tasks, in order of creation
        process.join(self)

    # --- for actors ---------------------------------------------------------------------------

    def emit(self, event: Event, **context: Any) -> None:
        """Send an event; it is kept and resent until the coordinator has it on disk."""
        self.process.send(event)
        self._emitted += 1
        self.log.info(type(event).__struct_config__.tag, **context)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background; an exception there ends the process with its reason."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)

    def record_span(self, state: str, start_ns: int, end_ns: int, **facts: Any) -> None:
        """Record an activity of this process between two values of now_ns()."""
        offset = self.clock_offset_ns
        line = {"state": state, "start_ns": start_ns + offset, "end_ns": end_ns + offset, **facts}
        self.process.record_span(line)

    def notify_user(self, text: str) -> None:
        """Show an urgent message in the log and on the terminal of this process."""
        self.log.warning("announced", text=text)
        self.process.print_message(text)

    async def sleep_for(self, seconds: float) -> None:
        """Wait; raise ProcessEnding if this process is to end meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return
        raise ProcessEnding(f"{self.name} was stopped while it waited")

    async def wait_acknowledged(self) -> None:
        """Wait until all sent events are in the log; ProcessEnding if this process is to end."""
        while self.process.unacknowledged:
            await self.sleep_for(ACKNOWLEDGED_POLL_S)

    def fail_process(
        self, reason: str, exit_code: int = exit_codes.FAILED, error: BaseException | None = None
    ) -> None:
        """End this process with a reason; the first one counts. `error`: the cause, if raised."""
        self._begin_shutdown()
        if self._failure is None:
            self._failure = _describe_failure(reason, exit_code, error), exit_code
            self.log.error("failed", reason=reason)

    # --- the process --------------------------------------------------------------------------

    @property
    def ending(self) -> bool:
        return self._stop.is_set()

    async def run(self, actor: ActorRole) -> int:
        """Run the actor from joining to leaving; return the exit code."""
        self._actor = actor
        asyncio.get_running_loop().set_exception_handler(self._handle_loop_error)
        self.process.watch_for_stop(self._handle_signal, self._starter_gone)
        await self.process.start()
        self.spawn(self.process.wait_closed())
        self.spawn(self._watch_coordinator(self.config.coordinator.coordinator_timeout_ms / 1000))
        if self.role == "node":
            limit_s = self.config.coordinator.stall_timeout_s
            self.spawn(self._watch_coordinator(limit_s, alive=True))
        self.spawn(self._report_work())
        self.spawn(self._watch_directory())
        try:
            await self._begin.wait()
            if not self._stop.is_set():
                await self._start(actor)
            await self._stop.wait()
        finally:
            code = await self._shut_down(actor)
        return code

    def _begin_shutdown(self) -> None:
        self._stop.set()
        self._begin.set()

    def _handle_signal(self, signal_name: str) -> None:
        """Leave gracefully, though not on the coordinator's order."""
        if not self._stop.is_set():
            self.fail_process(f"ended by {signal_name}", exit_codes.TERMINATED)

    def _starter_gone(self) -> None:
        if self._stop.is_set():
            return
        self.log.warning("parent-gone")
        self.spawn(self._watch_coordinator(ORPHAN_ABSENT_S))
        if self.role == "node":  # its coordinator, if any, ends the run
            return
        self.process.force_exit_after(ORPHAN_EXIT_S)
        self.fail_process(f"its node, {self.node}, is gone")

    async def _start(self, actor: ActorRole) -> None:
        try:
            await actor.start()
        except ConfigError as error:
            self.fail_process(str(error), exit_codes.USER_ERROR)
        except Exception as error:
            self._handle_error(error, "start-failed")
        self.process.freeze_heap()

    async def _shut_down(self, actor: ActorRole) -> int:
        paused = self._paused and self.role == "node"
        code = exit_codes.PAUSED if paused else exit_codes.COMPLETE
        if self._failure is not None:
            failed, code = self._failure
            if self.process.incarnation and code not in _NO_FAILURES:
                self._last_word(failed)
        try:
            await actor.stop()
        except Exception:
            self.log.exception("stop-failed")
        if self.process.incarnation and code not in UNHEARD:
            self._last_word(ev.ActorLeft())  # its node may be gone and unable to report it
        for task in self._tasks:
            task.cancel()
        await self.process.close()
        return code

    def _last_word(self, event: Event) -> None:
        """Report and leave; without a coordinator, leave gracefully all the same."""
        try:
            self.emit(event)
        except (OutboxFull, LinkClosed) as error:
            self.log.warning("event-not-sent", message=str(event), reason=str(error))

    async def _watch_coordinator(self, silent_max_s: float, *, alive: bool = False) -> None:
        """End the process if the coordinator is silent for too long; `alive`: only if it lives."""
        while True:
            if (silent_s := self.process.silent_ns / 1e9) <= silent_max_s:
                await asyncio.sleep(silent_max_s - silent_s + WATCH_S)
            elif not alive or await self.process.is_coordinator_listening():
                break
            else:
                await asyncio.sleep(PROBE_S)
        if not self._stop.is_set():
            reason = _describe_silence(silent_s, alive=alive)
            if self.role == "node":
                again = f"to continue, start laminar-coord {self.run_dir} again, then the nodes"
                self.notify_user(f"this machine's processes end: {reason}; {again}")
            self.fail_process(reason, exit_codes.COORDINATOR_ABSENT)

    async def _report_work(self) -> None:
        """Report at intervals work that no event has shown: a process may have one long order."""
        reported = self.process.work_count
        while True:
            emitted = self._emitted
            await asyncio.sleep(self.config.coordinator.stall_timeout_s / REPORTS)
            count = self.process.work_count
            if count != reported and emitted == self._emitted:
                self.process.send_gauge(ev.WorkProgress(count=count))
            reported = count

    async def _watch_directory(self) -> None:
        """End the process once its directory is no longer the one that was locked."""
        self.fail_process(await self.process.directory_lost(), exit_codes.USER_ERROR)

    # --- called by the process ------------------------------------------------------------------

    def handle_welcome(self, incarnation: int) -> None:
        """Handle the first welcome, and that of each other coordinator."""
        self.incarnation = incarnation
        self.log.info("welcome", incarnation=incarnation)
        self._begin.set()

    def handle_refusal(self, reason: str, again: bool) -> None:
        """End, as the link is closed; `again`: a new process may take this one's place."""
        code = exit_codes.FENCED if again else exit_codes.COORDINATOR_ABSENT
        self.fail_process(f"the coordinator refused this process: {reason}", code)

    def accept_command(self, order: cmd.Envelope, command: Command) -> bool:
        """Accept a command; return False for a duplicate."""
        if not self._filter.accept_id(order.command_id):
            return False
        if isinstance(command, cmd.StopActor):
            self.log.info("stop", reason=command.reason, event_seq=order.cause)
            self.ordered_to_stop, self._paused = True, command.paused
            self._begin_shutdown()
            return True
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._deliver_commands)
        self._arrived.append((order, command))
        return True

    def _deliver_commands(self) -> None:
        arrived, self._arrived = self._arrived, []
        if self._actor is not None:
            self._actor.handle_orders(arrived)

    # --- what fails -----------------------------------------------------------------------------

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._handle_error(error, "task-failed")

    def _handle_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Fail if a callback raised, since work is left undone; only log other messages."""
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._handle_error(error, "callback-failed")
        else:
            self.log.warning("event-loop", message=context.get("message"), exc_info=error)

    def _handle_error(self, error: BaseException, what: str) -> None:
        if isinstance(error, RunOver):
            self.log.info("run-over")
            return self._begin_shutdown()
        if isinstance(error, ProcessEnding):
            self.log.info("given-up", reason=str(error))
            return
        code = _find_exit_code(error)
        plain = isinstance(error, EngineError | LinkClosed) or code == exit_codes.USER_ERROR
        name = "" if plain else f"{type(error).__name__}: "
        self.fail_process(f"{name}{error}", code, error)
        if code == exit_codes.LOG_UNWRITABLE:
            self.notify_user(f"the disk fails, this process ends: {error}")
        self.log.error(what, exc_info=error)


def _describe_silence(silent_s: float, *, alive: bool) -> str:
    if alive:
        return f"the coordinator lives, but has answered nothing for {silent_s:.0f} s: kill it"
    return f"the coordinator was silent for {silent_s:.0f} s"


def _describe_failure(reason: str, exit_code: int, error: BaseException | None) -> ev.ActorFailed:
    return ev.ActorFailed(
        reason=reason[:REASON_CHARS_MAX],
        user_error=exit_code == exit_codes.USER_ERROR,
        engine=isinstance(error, EngineError),
        link=isinstance(error, LinkClosed),
    )


def _find_exit_code(error: BaseException) -> int:
    """Return the exit code for an error; a disk that failed leaves a run that can continue."""
    if isinstance(error, ConfigError | DiskStayedFull):
        return exit_codes.USER_ERROR
    return exit_codes.LOG_UNWRITABLE if is_transient(error) else exit_codes.FAILED
