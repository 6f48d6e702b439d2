"""The coordinator process: a socket, signals and files around the pure tick.

Reads   the control socket; the event log of an earlier incarnation of this run
Writes  the event log, the address file, and through observers metrics.jsonl and status.json
Ends    with the run's exit code, or an exception whose code is in coordinator/exit_reason.py

Start-up is recovery: listen, on the same port as before if it is free; replay the log from its last
snapshot; take it over in a new segment, and publish the address. So a coordinator that cannot
listen has changed nothing. An empty directory counts as an empty log.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from laminar.analysis.log.story import last_lines
from laminar.config import Config, ConfigError, dump_config
from laminar.coordinator import takeover
from laminar.coordinator.background import ChildBackground
from laminar.coordinator.exit_reason import ReplayDiffers
from laminar.coordinator.log_truncation import check_log
from laminar.coordinator.strategy import StrategyWorker
from laminar.coordinator.system import RealDisk
from laminar.coordinator.tick import HandlingFailed, Tick
from laminar.core.machine import StateMachine
from laminar.core.rules import LOGIC_VERSION, NEW_RUN, rules_of
from laminar.core.state.statuses import Phase
from laminar.eventlog.reader import NotInHistory
from laminar.eventlog.replay import Observer
from laminar.eventlog.restore import RestoredRun, restore_log, take_over_log
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Event, Settings
from laminar.names.ports import DiskError
from laminar.net.auth import RunKeys
from laminar.net.client import write_address
from laminar.net.descriptors import clients_allowed
from laminar.net.session import Limits
from laminar.net.transport import SAFETY_TICK_S, PortTaken, ServerSocket
from laminar.observe.logs import get_logger
from laminar.run.directory import COORDINATOR_FILE, EVENTS_DIR, ORIGIN_DIR, ORIGIN_FILE
from laminar.run.fail_points import FailPoints
from laminar.run.stop_requests import (
    NOW,
    PAUSE,
    STARTER_GONE,
    get_pause_timeout_ms,
    handle_signals,
    in_batch_job,
    pause_signals,
    stop_signals,
)
from laminar.run.user_file import run_file_digests

FINAL_FLUSH_S = 3.0  #: the time for the last commands and acknowledgements of an ended run to leave
COMMANDS_BYTES_MAX = 256 << 20
"""The most bytes of commands that wait for one process.

At the end of a run with a million open trajectories, 144 MB wait for the store."""


def read_origin(run_dir: Path) -> ev.ForkOrigin | None:
    """Return the origin that `laminar fork` has left for this run; None: not a fork."""
    try:
        return msgspec.json.decode(
            (run_dir / ORIGIN_DIR / ORIGIN_FILE).read_bytes(), type=ev.ForkOrigin
        )
    except FileNotFoundError:
        return None


def _asked_by(config: Config, line: str) -> ev.DrainRequested:
    """Return the request of the process that started this one.

    If that process is gone, the run ends, or pauses if a batch system restarts it."""
    word, _, reason = line.partition(" ")
    if word == STARTER_GONE:
        reason = "the process that started the coordinator ended"
        return ev.DrainRequested(reason=reason, pause=in_batch_job())
    if word == PAUSE:
        return _make_pause_request(config, reason)
    return ev.DrainRequested(reason=reason, at_once=word == NOW)


def _make_pause_request(config: Config, asked_by: str) -> ev.DrainRequested:
    within_ms = get_pause_timeout_ms(config, asked_by)
    return ev.DrainRequested(reason=asked_by, pause=True, response_timeout_ms=within_ms)


def bind_socket(
    config: Config, run_dir: Path, keys: RunKeys, on_rejected: Callable[[str], None]
) -> ServerSocket:
    """Bind the configured port; else the last one, which the run's actors know, if it is free.

    Actors look for another address when the coordinator is silent."""
    host, port = config.coordinator.host, config.coordinator.port
    try:
        return ServerSocket(host, port or _known_port(run_dir), keys, on_rejected=on_rejected)
    except PortTaken:
        if port:
            raise
        return ServerSocket(host, 0, keys, on_rejected=on_rejected)


def _known_port(run_dir: Path) -> int:
    try:
        known = json.loads((run_dir / COORDINATOR_FILE).read_text())["address"]
    except (FileNotFoundError, ValueError, KeyError):
        return 0
    return int(str(known).rpartition(":")[2])


FULL_GC_INTERVAL = 1 << 30
"""The young collections between two full ones: never one.

A full one takes 60 to 100 ms with 160,000 trajectories, looking for cycles that the core never
makes."""
STORY_LINES = 20
"""The log lines shown about the subject of an event that the core could not handle."""


class Coordinator:
    """An incarnation of the coordinator of a run."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        keys: RunKeys,
        *,
        on_replayed: Observer,
        on_event: Observer,
        replay_from: int | None = None,
        asking: takeover.ResumeRequest = takeover.ResumeRequest.NOTHING,
    ) -> None:
        """Recover from the log, if there is one.

        `on_replayed` sees its events again: those after a snapshot, but if the log has it, event
        `replay_from` and all after it. `asking`: whether the user asks to resume a stopped run."""
        self._asking = asking
        self.config, self.run_dir = config, run_dir
        self._settings = Settings.from_config(config, NEW_RUN)
        self.log = get_logger()
        self.socket = bind_socket(config, run_dir, keys, self._log_rejected_peer)
        self._own: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None
        self._ended: asyncio.Event = asyncio.Event()
        self._error: BaseException | None = None
        self._observer = on_event
        self._background = ChildBackground(self.log)
        self._strategy = StrategyWorker(config.algorithm.batch_strategy, self.report_event)
        events = run_dir / EVENTS_DIR
        disk = RealDisk(events) if events.is_dir() else RealDisk.make_directory(events)
        restored = restore_log(disk, on_replayed, observe_from=replay_from)
        for name, fault in restored.unusable.items():
            self.log.warning("snapshot-passed-over", file=name, reason=fault)
        if restored.tail.torn_bytes:
            self.log.warning("torn-tail", bytes=restored.tail.torn_bytes)
        if restored.replay.difference is not None:
            raise ReplayDiffers(str(restored.replay.difference))
        self._resumed = self._found_alone(restored.replay.machine)
        self._fail_points = FailPoints(run_dir)
        self._fail_points.hit_failpoint("coordinator-replayed")
        self._open_tick(disk, restored)

    def _log_rejected_peer(self, what: str) -> None:
        self.log.warning("peer-rejected", what=what)

    def _found_alone(self, machine: StateMachine) -> ev.RunResumed | None:
        """Return the event that resumes a run without processes, before anything is written."""
        if not machine.started:
            return None
        check_log(self.run_dir, machine.state)
        asked = self._asking.applies_to(self.run_dir, machine.state)
        return takeover.decide_resume(self.run_dir, machine.state, self._settings, asked=asked)

    def _open_tick(self, disk: RealDisk, restored: RestoredRun) -> None:
        self._incarnation = restored.incarnation
        text, machine = dump_config(self.config), restored.replay.machine
        writer = take_over_log(
            disk,
            restored,
            logic=LOGIC_VERSION,
            run=self.config.run.name,
            seed=self.config.seed,
            config_hash=hashlib.sha256(text.encode()).hexdigest()[:16],
            keep_bytes=self.config.coordinator.log_keep_mb << 20,
        )
        self.tick = Tick(
            machine,
            writer,
            boot=f"coordinator-{self._incarnation}-{secrets.token_hex(4)}",
            lease_ms=self.config.coordinator.lease_ms,
            node_lease_ms=self.config.coordinator.node_lease_ms,
            stall_ms=int(self.config.coordinator.stall_timeout_s * 1000),
            clock_ns=time.monotonic_ns(),
            observer=self._observer,
            limits=Limits(outbox_bytes=COMMANDS_BYTES_MAX),
            peers_max=clients_allowed(),
            background=self._background,
        )
        self._log_start(restored, text)

    def _log_start(self, restored: RestoredRun, text: str) -> None:
        machine = restored.replay.machine
        self.log.info(
            "started",
            incarnation=self._incarnation,
            snapshot=restored.snapshot.name if restored.snapshot else None,
            replayed_events=restored.replay.events,
            decisions_logged_late=len(restored.replay.unlogged),
            rules=rules_of(machine.state.settings if machine.started else self._settings),
        )
        self._own.append(
            ev.CoordinatorStarted(
                incarnation=self._incarnation,
                logic=LOGIC_VERSION,
                settings=self._settings,
                clock_ns=time.time_ns(),
                config=text,
                origin=None if machine.started else read_origin(self.run_dir),
                files=run_file_digests(self.config),
            )
        )
        if self._resumed is not None:
            self.log.warning("run-resumed", asked=self._resumed.asked)
            self._own.append(self._resumed)

    # --- the process --------------------------------------------------------------------------

    async def run(self) -> int:
        """Serve until the run has ended; return its exit code."""
        gc.set_threshold(*gc.get_threshold()[:2], FULL_GC_INTERVAL)
        try:
            self._write_address()
            loop = asyncio.get_running_loop()
            handle_signals(stop_signals(), self._request_drain)
            handle_signals(
                pause_signals(),
                lambda name: self.report_event(_make_pause_request(self.config, name)),
            )
            handle_signals([signal.SIGINT, signal.SIGQUIT], self._handle_interrupt)
            self.socket.attach_loop(loop, self._try_turn)
            await self._ended.wait()
            if isinstance(self._error, HandlingFailed):
                self._log_unhandled(self._error)
            if self._error is not None:
                raise self._error
            await self._last_messages()
            if not self.tick.machine.state.run.paused:
                self._write_address(run_over=True)
        finally:
            self.socket.close()
            self._background.close()
            await self._strategy.close()
        state = self.tick.machine.state
        self.log.info(
            "ended",
            failure=state.run.failure,
            failure_kind=state.run.failed.kind if state.run.failed is not None else None,
            exit_code=state.run.exit_code,
            event_seq=state.seq,
            bad_frames=self.tick.bad_frames,
        )
        return state.run.exit_code

    def report_event(self, event: Event) -> None:
        """Report an event of the coordinator itself, for the next turn."""
        self._own.append(event)
        asyncio.get_running_loop().call_soon(self._try_turn)

    def _write_address(self, *, run_over: bool = False) -> None:
        """Publish the address; with `run_over`, processes that join or wait are to leave."""
        path = self.run_dir / COORDINATOR_FILE
        try:
            write_address(path, self.socket.address, pid=os.getpid(), run_over=run_over)
        except OSError as error:
            raise DiskError(error.errno, f"writing {path} failed: {error.strerror}") from error

    def handle_request(self, line: str) -> None:
        """Handle a request of the process that started this one."""
        self.report_event(_asked_by(self.config, line))

    def give_up(self, error: ConfigError) -> None:
        """End this process for a reason outside the run; nothing more is decided."""
        self._error = error
        self._ended.set()

    def _request_drain(self, name: str) -> None:
        self.report_event(ev.DrainRequested(reason=name))

    def _handle_interrupt(self, name: str) -> None:
        """Drain at once on SIGQUIT, or on Ctrl-C when the run is already stopping."""
        machine = self.tick.machine
        stopping = machine.started and machine.state.run.draining and not machine.state.run.pausing
        at_once = stopping or name == signal.SIGQUIT.name
        self.report_event(ev.DrainRequested(reason=name, at_once=at_once))

    def _try_turn(self) -> None:
        if self._error is not None:
            return  # the process is about to end, and its state is not to be trusted
        try:
            self._run_turn()
        except BaseException as error:
            self._error = error
            self._ended.set()

    def _run_turn(self) -> None:
        frames = self.socket.drain_frames()
        own, self._own = self._own, []
        empty = len(frames) < 512
        if frames:
            self._fail_points.hit_failpoint("coordinator-received")
        sent = self.tick.run_turn(frames, own, time.monotonic_ns(), empty)
        if sent:
            self._fail_points.hit_failpoint("coordinator-durable")
        for routing_id, frame in sent:
            self.socket.send(routing_id, frame)
        if sent:
            self._fail_points.hit_failpoint("coordinator-sent")
        for _, command in self.tick.local:
            if isinstance(command, cmd.ProposeBatch):
                self._strategy.propose_batch(command)
        self.tick.local.clear()
        if self.tick.machine.started and self.tick.machine.state.run.phase == Phase.ENDED:
            self._ended.set()
        self._wake_for_timer()

    def _log_unhandled(self, failed: HandlingFailed) -> None:
        """Log an unhandled event and its history; tell later nodes that the run is over."""
        try:
            story = last_lines(self.run_dir, failed.stamped, STORY_LINES)
        except (ConfigError, NotInHistory) as error:
            story = [f"no story: {error}"]
        event = msgspec.to_builtins(failed.stamped.event)
        self.log.error("not-handled", what=failed.what, body=event, story=story, exc_info=failed)
        with contextlib.suppress(DiskError):  # a later node then waits for a coordinator in vain
            self._write_address(run_over=True)

    def _wake_for_timer(self) -> None:
        """Schedule a turn for a timer that is due before the socket's slow tick."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ns = self.tick.next_timer_ns() if self.tick.machine.started else None
        if due_ns is not None and not self._ended.is_set():
            delay_s = (due_ns - time.monotonic_ns()) / 1e9
            if delay_s < SAFETY_TICK_S:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(max(delay_s, 0.0), self._try_turn)

    async def _last_messages(self) -> None:
        """Let the last commands and acknowledgements leave, then close the log with a hash."""
        deadline = time.monotonic() + FINAL_FLUSH_S
        while not self.tick.everything_acknowledged and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._background.close()
        self.tick.log_state_hash()
        self.tick.log.commit()
        self.tick.log.close()
