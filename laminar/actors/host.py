"""The shell of every actor process: joins the run, hands out commands, reports events, ends.

Reads   the run directory (config.toml, coordinator.json), commands of the coordinator
Writes  logs, timeline/NAME.*, by the telemetry thread
Emits   events of the actor; ActorFailed and ActorLeft

An actor outlives its coordinator: it finishes what it was given, idles, and ends by itself only
after coordinator_absent_ms. When its own code fails, in a task or in a callback of the event loop,
it says so and ends with a non-zero code, so that its node can start it again. It does not outlive
its node, nor its run directory; a node whose starter is gone waits no longer for a coordinator that
nobody would start again.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol, TextIO

from laminar import exit_codes
from laminar.actors.protocol import CommandFilter
from laminar.config import Config, ConfigError, load
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.events.codec import decode_order, encode
from laminar.net.client import ControlClient, read_address
from laminar.net.rpc import RpcClient
from laminar.net.session import LinkClosed, OutboxFull
from laminar.observe.files import GrowingFile
from laminar.observe.logs import configure, get_logger
from laminar.observe.telemetry import print_lines
from laminar.run_lock import RunLock
from laminar.rundir import CONFIG_FILE, COORDINATOR_FILE, LOGS_DIR, TIMELINE_DIR
from laminar.stop_requests import (
    STARTER_GONE,
    follow_starter,
    handle_signals,
    not_ignored,
    stop_signals,
)

SWITCH_INTERVAL_S = 0.0005
"""A thread that computes must not keep the event loop waiting for Python's default 5 ms."""
WATCH_S = 0.5
ORPHAN_ABSENT_S = 10.0
"""A coordinator that is started again is back sooner; without `laminar train` nobody does that."""
ORPHAN_STORE_S = 10.0
"""What the others leave unfinished is written down first, if a coordinator still says so."""
ORPHAN_EXIT_S = 20.0
"""An actor without a node has nobody who would kill it when it does not come to its end."""
REASON_CHARS_MAX = 2_000
"""Of a failure: it goes to every process of the run. The log of this one has all of it."""


class Actor(Protocol):
    """One process role."""

    async def start(self) -> None:
        """Get ready and report it; raises ConfigError for what the user has to mend."""

    def handle(self, orders: list[tuple[cmd.Order, Command]]) -> None:
        """Take commands that arrived together; must not block."""

    async def stop(self) -> None:
        """Flush and let go of everything."""


class Host:
    """What an actor may use: config, events out, other servers, background tasks, a timeline."""

    def __init__(self, lock: RunLock, name: str, role: str, node: str, address: str) -> None:
        """`address`: the IP of this machine, which its servers listen on."""
        self.lock, self.run_dir = lock, (run_dir := lock.run_dir)
        self.name, self.role, self.node, self.address = name, role, node, address
        self.config: Config = load([run_dir / CONFIG_FILE])
        self.boot_id = f"{name}-{os.environ.get('LAMINAR_BOOT', secrets.token_hex(8))}"
        self.telemetry = configure(run_dir, self.config.run.name, name)
        self.log = get_logger()
        #: add to time.monotonic_ns() to get the time of day
        self.clock_offset_ns = time.time_ns() - time.monotonic_ns()
        self.incarnation = 0
        self._filter = CommandFilter()
        self._arrived: list[tuple[cmd.Order, Command]] = []
        self._actor: Actor | None = None
        self._stop = asyncio.Event()
        self._welcome = asyncio.Event()
        self._failure: tuple[str, int] | None = None
        self.ordered_to_stop = False  #: by the coordinator, as everybody else is
        self._orphaned = False  #: whoever started this process is gone
        self._tasks: set[asyncio.Task[Any]] = set()
        coordinator = self.config.coordinator
        self.control = ControlClient(
            run_dir / COORDINATOR_FILE,
            name,
            role,
            self.boot_id,
            {"node": node, "pid": str(os.getpid())},
            coordinator.heartbeat_ms,
            coordinator.coordinator_absent_ms,
            self._on_body,
            self._on_welcome,
            self._on_refused,
        )
        spans = GrowingFile(run_dir, f"{TIMELINE_DIR}/{name}.jsonl", in_parts=True)
        self._spans = self.telemetry.outlet("timeline", spans.write)
        self._terminal = self.telemetry.outlet("terminal", print_lines)

    # --- for actors ---------------------------------------------------------------------------

    def emit(self, event: Event, **context: Any) -> None:
        """Send an event; it is kept and resent until the coordinator has it on disk."""
        self.control.send(encode(event))
        self.log.info(type(event).__struct_config__.tag, **context)

    def gauge(self, event: Event) -> None:
        self.control.gauge(encode(event))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background; an exception there ends the process with its reason."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def span(self, state: str, start_ns: int, end_ns: int, **facts: Any) -> None:
        """Record what this process did from one time.monotonic_ns() to another."""
        offset = self.clock_offset_ns
        line = {"state": state, "start_ns": start_ns + offset, "end_ns": end_ns + offset, **facts}
        self._spans.put(json.dumps(line).encode() + b"\n")

    def announce(self, text: str) -> None:
        """Say what people have to know now: in the log, and on the terminal of this process."""
        self.log.warning("announced", text=text)
        self._terminal.put(f"{self.name}: {text}\n".encode(errors="replace"))

    async def pause(self, seconds: float) -> None:
        """Wait; RuntimeError when this process is to end meanwhile."""
        try:
            await asyncio.wait_for(self._stop.wait(), seconds)
        except TimeoutError:
            return
        raise RuntimeError(f"{self.name} was ended while it waited")

    def client(self, server: str) -> RpcClient:
        """A client of the store or the relay of this run (not started)."""
        file = self.run_dir / f"{server}.json"
        return RpcClient(
            lambda: read_address(file),
            self.name,
            self.role,
            self.boot_id,
            server=server,
            heartbeat_ms=self.config.coordinator.heartbeat_ms,
        )

    def fail(self, reason: str, exit_code: int = exit_codes.FAILED) -> None:
        """End this process with a reason; the first one counts."""
        self._stop.set()
        if self._failure is None:
            self._failure = (reason[:REASON_CHARS_MAX], exit_code)
            self.log.error("failed", reason=reason)

    # --- the process --------------------------------------------------------------------------

    async def run(self, actor: Actor) -> int:
        """From joining to leaving; returns the exit code."""
        self._actor = actor
        asyncio.get_running_loop().set_exception_handler(self._loop_told)
        handle_signals(stop_signals(), self._terminated)
        if self.role == "node":
            handle_signals(not_ignored(signal.SIGINT), self._terminated)
        else:  # a terminal's Ctrl-C goes to everybody in it, and actors wait for their node
            handle_signals([signal.SIGINT], lambda name: None)
        if self.lock.inherited:
            follow_starter(self._requested)
        await self.control.start()
        self.spawn(self._watch())
        self.spawn(self._watch_directory())
        try:
            await self._until_welcome()
            if not self._stop.is_set():
                await self._start(actor)
            await self._stop.wait()
        finally:
            code = await self._end(actor)
        return code

    def _terminated(self, signal_name: str) -> None:
        """Leave in good order; but it was not the coordinator who wanted that."""
        if not self._stop.is_set():
            self.fail(f"ended by {signal_name}", exit_codes.TERMINATED)

    def _requested(self, word: str) -> None:
        """Whoever started this process speaks to a coordinator only; here its end counts."""
        if word != STARTER_GONE or self._stop.is_set():
            return
        self._orphaned = True
        self.log.warning("starter-gone")
        if self.role == "node":  # its coordinator, if there is one, ends the run
            return
        faulthandler.dump_traceback_later(ORPHAN_EXIT_S, exit=True)
        reason = f"its node, {self.node}, is gone"
        if self.role != "store":
            return self.fail(reason)
        asyncio.get_running_loop().call_later(ORPHAN_STORE_S, self.fail, reason)

    async def _until_welcome(self) -> None:
        waits = [asyncio.ensure_future(w.wait()) for w in (self._welcome, self._stop)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for waiting in waits:
            waiting.cancel()

    async def _start(self, actor: Actor) -> None:
        try:
            await actor.start()
        except ConfigError as error:
            self.fail(str(error), exit_codes.USER_ERROR)
        except Exception as error:
            self._failed_with(error, "start-failed")
        gc.collect()
        gc.freeze()  # a full collection must not walk what lives as long as the process

    async def _end(self, actor: Actor) -> int:
        code = exit_codes.COMPLETE
        if self._failure is not None:
            reason, code = self._failure
            if self.control.incarnation and code != exit_codes.COORDINATOR_ABSENT:
                user_error = code == exit_codes.USER_ERROR
                self._last_word(ev.ActorFailed(reason=reason, user_error=user_error))
        try:
            await actor.stop()
        except Exception:
            self.log.exception("stop-failed")
        if self.control.incarnation and code != exit_codes.COORDINATOR_ABSENT:
            self._last_word(ev.ActorLeft())  # its node may be gone, and cannot tell it
        for task in self._tasks:
            task.cancel()
        await self.control.close()
        return code

    def _last_word(self, event: Event) -> None:
        """Nobody to say it to must not keep this process from leaving in good order."""
        try:
            self.emit(event)
        except (OutboxFull, LinkClosed) as error:
            self.log.warning("not-said", message=str(event), reason=str(error))

    async def _watch(self) -> None:
        """A coordinator that stays away ends the process; so does a failed control line."""
        closed = asyncio.ensure_future(self.control.wait_closed())
        while not self._stop.is_set():
            await asyncio.wait([closed], timeout=WATCH_S)
            if closed.done() and not closed.cancelled() and closed.exception():
                return self.fail(f"the line to the coordinator failed: {closed.exception()!r}")
            absent_s = self.control.absent_ns / 1e9
            if self.control.absent or (self._orphaned and absent_s > ORPHAN_ABSENT_S):
                return self.fail(
                    f"no coordinator for {absent_s:.0f} s", exit_codes.COORDINATOR_ABSENT
                )

    async def _watch_directory(self) -> None:
        """What has its path must be the directory that was locked; a disk may take long to say."""
        while not (reason := await asyncio.to_thread(self.lock.lost)):
            await asyncio.sleep(WATCH_S)
        self.fail(reason, exit_codes.USER_ERROR)

    # --- callbacks of the control line ----------------------------------------------------------

    def _on_welcome(self, incarnation: int) -> None:
        self.incarnation = incarnation
        self.log.info("welcome", incarnation=incarnation)
        self._welcome.set()

    def _on_refused(self, reason: str) -> None:
        self.fail(f"the coordinator refused this process: {reason}", exit_codes.COORDINATOR_ABSENT)

    def _on_body(self, body: bytes) -> None:
        order, command = decode_order(body)
        if not self._filter.take(order.command_id):
            return
        if isinstance(command, cmd.StopActor):
            self.log.info("stop", reason=command.reason, event_seq=order.cause)
            self.ordered_to_stop = True
            self._stop.set()
            return
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._arrived.append((order, command))

    def _hand_over(self) -> None:
        arrived, self._arrived = self._arrived, []
        if self._actor is not None:
            self._actor.handle(arrived)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed_with(error, "task-failed")

    def _loop_told(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback that raised has left something undone; other words of the loop are notes."""
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._failed_with(error, "callback-failed")
        else:
            self.log.warning("event-loop", message=context.get("message"), exc_info=error)

    def _failed_with(self, error: BaseException, what: str) -> None:
        code = exit_codes.USER_ERROR if isinstance(error, ConfigError) else exit_codes.FAILED
        self.fail(f"{type(error).__name__}: {error}", code)
        self.log.error(what, exc_info=error)


def _open_stacks(path: Path) -> TextIO:
    """For the stacks of a stalled process: the terminal, where there is no room for a file."""
    try:
        return open(path, "a")
    except OSError:
        return sys.stderr


def run_actor(
    lock: RunLock, name: str, role: str, node: str, address: str, make: Callable[[Host], Actor]
) -> int:
    """Body of an actor process; returns its exit code."""
    import uvloop

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stacks = _open_stacks(lock.run_dir / LOGS_DIR / "latest" / f"{name}.stacks")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)

    async def main() -> int:
        host = Host(lock, name, role, node, address)
        return await host.run(make(host))

    try:
        return uvloop.run(main())
    finally:
        lock.close()
