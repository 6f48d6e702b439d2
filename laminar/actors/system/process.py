"""A real process of an actor: its sockets, clock, signals, files, and its main function.

Reads   the run directory (config.toml, coordinator.json, the addresses of other servers)
Writes  logs, timeline/NAME.*, by the telemetry thread; NAME.json, where others find it
Emits   the events of its actor; requests and replies

Implements the Process of actors/host.py and nothing else of an actor; the simulator implements it
for its own world.
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
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TextIO

from laminar.actors.host import ActorRole, Host
from laminar.config import Config, ConfigError
from laminar.events.base import Event
from laminar.events.codec import decode_envelope, encode
from laminar.names import exit_codes
from laminar.names.roles import ROLE_TABLE
from laminar.net.addresses import check_reachable
from laminar.net.auth import RunKeys
from laminar.net.calls import Handler
from laminar.net.client import ControlClient, accepts_connections, read_address, write_address
from laminar.net.rpc_client import RpcClient
from laminar.net.rpc_server import RpcServer
from laminar.observe.files import GrowingFile
from laminar.observe.logs import configure_logging, get_logger, make_logger
from laminar.observe.telemetry import print_lines
from laminar.run import stop_requests
from laminar.run.directory import COORDINATOR_FILE, TIMELINE_DIR, run_config
from laminar.run.fail_points import FailPoints
from laminar.run.lock import RunLock
from laminar.run.loop_watch import open_stacks, watch_loop
from laminar.run.secret import read_secret
from laminar.run.work_counter import count_work, get_work_count

SWITCH_INTERVAL_S = 0.0005
"""Lower than Python's 5 ms, so that a computing thread does not delay the event loop."""
STACK_SIGNAL = signal.SIGUSR2  #: the signal on which an actor writes the stacks of its threads
WATCH_S = 0.5


class SystemProcess:
    """An actor's process in the operating system: the Process of actors/host.py."""

    def __init__(self, own: OwnProcess, name: str, node: str, address: str) -> None:
        """Create the process; `address`: the IP of this machine, on which its servers listen."""
        self.own, self.run_dir, self.config = own, own.run_dir, own.config
        self.name, self.role, self.node, self.address = name, own.role, node, address
        self.keys = own.keys
        self.run_id, self.bulk_key = own.secret.run_id, own.secret.derive_key("bulk")
        self.boot_id = f"{name}-{os.environ.get('LAMINAR_BOOT', secrets.token_hex(8))}"
        self.log, self.clock_offset_ns = own.get_log(name), own.clock_offset_ns
        self.now_ns, self.add_outlet = time.monotonic_ns, own.telemetry.add_outlet
        self.count_work = count_work
        self.watch_for_stop, self.directory_lost = own.watch_for_stop, own.directory_lost
        spans = GrowingFile(self.run_dir, f"{TIMELINE_DIR}/{name}.jsonl", in_parts=True)
        self._spans = self.add_outlet("timeline", spans.write)
        self._fail_points = FailPoints(self.run_dir)

    def join(self, host: Host) -> None:
        coordinator = self.config.coordinator
        self.control = ControlClient(
            self._find_coordinator,
            self.name,
            self.role,
            self.boot_id,
            {
                "node": self.node,
                "pid": str(os.getpid()),
                "node_boot": os.environ.get("LAMINAR_NODE_BOOT", ""),
                "start": os.environ.get("LAMINAR_START", ""),
                **(job_of(os.environ) if self.role == "node" else {}),
            },
            coordinator.heartbeat_ms,
            lambda body: host.accept_command(*decode_envelope(body)),
            host.handle_welcome,
            host.handle_refusal,
            keys=self.keys,
            on_trouble=self._report_refused,
        )

    def _find_coordinator(self) -> str | None:
        """Return the coordinator's address, if known.

        ConfigError if other machines reach it but not the servers of this machine.
        """
        address = read_address(self.run_dir / COORDINATOR_FILE)
        if address is not None:
            check_reachable(self.address, address)
        return address

    def _report_refused(self, reason: str) -> None:
        self.log.warning("join-refused", reason=reason)
        self.print_message(reason)

    # --- the coordinator ----------------------------------------------------------------------

    @property
    def incarnation(self) -> int:
        return self.control.incarnation

    @property
    def silent_ns(self) -> int:
        return self.control.absent_ns

    async def is_coordinator_listening(self) -> bool:
        address = read_address(self.run_dir / COORDINATOR_FILE)
        return address is not None and await asyncio.to_thread(accepts_connections, address)

    @property
    def work_count(self) -> int:
        return get_work_count()

    @property
    def unacknowledged(self) -> int:
        return self.control.unacknowledged

    async def hit_failpoint(self, point: str) -> None:
        self._fail_points.hit_failpoint(point)

    async def start(self) -> None:
        await self.control.start()

    async def wait_closed(self) -> None:
        try:
            await self.control.wait_closed()
        except ConfigError as error:  # an unusable address can be reported nowhere else
            self.print_message(str(error))
            raise

    async def close(self) -> None:
        await self.control.close()

    def send(self, event: Event) -> None:
        self.control.send(encode(event))

    def send_gauge(self, event: Event) -> None:
        self.control.send_gauge(encode(event))

    # --- other processes ----------------------------------------------------------------------

    def make_client(self, server: str) -> RpcClient:
        file = self.run_dir / f"{server}.json"
        return RpcClient(
            lambda: read_address(file),
            self.name,
            self.role,
            self.boot_id,
            server=server,
            heartbeat_ms=self.config.coordinator.heartbeat_ms,
            keys=self.keys,
            on_trouble=self._report_refused,
        )

    def make_server(self, handle_batch: Handler, on_peer_lost: Callable[[str], None]) -> RpcServer:
        return RpcServer(
            self.address,
            0,
            handle_batch,
            keys=self.keys,
            boot_id=self.boot_id,
            lease_ms=self.config.coordinator.lease_ms,
            on_peer_lost=on_peer_lost,
            on_rejected=lambda told: self.log.warning("peer-rejected", what=told),
        )

    async def publish_address(self, address: str) -> None:
        write_address(self.run_dir / f"{self.name}.json", address)

    # --- the operating system -----------------------------------------------------------------

    def record_span(self, line: dict[str, Any]) -> None:
        self._spans.put(json.dumps(line).encode() + b"\n")

    def print_message(self, text: str) -> None:
        self.own.terminal.put(f"{self.name}: {text}\n".encode(errors="replace"))

    def force_exit_after(self, after_s: float) -> None:
        self.own.force_exit_after(after_s)

    def freeze_heap(self) -> None:
        gc.collect()
        gc.freeze()  # a full collection should not scan objects that live as long as the process


def job_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the batch system's job and its restarts.

    Of two nodes with one name, that of the job's last start counts.
    """
    restarts = environment.get("SLURM_RESTART_COUNT", "0")
    return {"job": environment.get("SLURM_JOB_ID", ""), "job_restarts": restarts}


def run_actors(
    lock: RunLock,
    names: Sequence[str],
    role: str,
    node: str,
    address: str,
    make: Callable[[Host], ActorRole],
) -> int:
    """Run these actors as the body of a process; return its exit code."""
    import uvloop

    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stacks = open_stacks(lock.run_dir, names[0])
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, stacks, all_threads=True)

    async def main() -> int:
        own = OwnProcess(lock, names[0], role)
        own.watch_loop(stacks)
        hosts = [Host(SystemProcess(own, name, node, address)) for name in names]
        return await _run_until_failure([host.run(make(host)) for host in hosts])

    try:
        return uvloop.run(main())
    finally:
        lock.close()


async def _run_until_failure(runs: Sequence[Coroutine[Any, Any, int]]) -> int:
    """Run all until they have ended; a failed one ends the others, and the node restarts all."""
    left = {asyncio.ensure_future(run) for run in runs}
    while left:
        done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            if code := ended.result():
                return code
    return exit_codes.COMPLETE


class OwnProcess:
    """The shared part of all actors in an operating system process: telemetry, signals, lock.

    The end of standard input reveals that the starter is gone. Each actor has a separate process,
    except emulated replicas, many of which share one.
    """

    def __init__(self, lock: RunLock, name: str, role: str) -> None:
        """Open the run's files; `name`: of its first actor, which names its log."""
        self.lock, self.run_dir, self.role = lock, lock.run_dir, role
        self.config: Config = run_config(lock.run_dir)
        self.secret = read_secret(lock.run_dir)
        self.keys = RunKeys(self.secret)
        offset_ns = time.time_ns() - time.monotonic_ns()
        self.clock_offset_ns = int(os.environ.get("LAMINAR_CLOCK_OFFSET_NS", offset_ns))
        self.telemetry = configure_logging(self.run_dir, self.config.run.name, name)
        self.terminal = self.telemetry.add_outlet("terminal", print_lines)
        self._name = name
        self._terminated: list[Callable[[str], None]] = []
        self._starter_gone: list[Callable[[], None]] = []
        self._lost: asyncio.Task[str] | None = None
        self._watch: asyncio.Future[None] | None = None

    def watch_loop(self, stacks: TextIO) -> None:
        """Have the stacks written when the loop stands still for this role's lease."""
        leases = self.config.coordinator
        lease_ms = leases.node_lease_ms if ROLE_TABLE[self.role].long_lease else leases.lease_ms

        def report(seconds: float) -> None:
            get_logger().warning("loop-stood-still", seconds=round(seconds, 1))

        self._watch = asyncio.ensure_future(watch_loop(stacks, lease_ms / 1000, report))

    def force_exit_after(self, after_s: float) -> None:
        """Exit after this time; the timer is no longer needed for the loop."""
        if self._watch is not None:
            self._watch.add_done_callback(
                lambda _: faulthandler.dump_traceback_later(after_s, exit=True)
            )
            self._watch.cancel()
        else:
            faulthandler.dump_traceback_later(after_s, exit=True)

    def get_log(self, name: str) -> Any:
        """Return an actor's log; each has a separate one."""
        if name == self._name:
            return get_logger()
        return make_logger(self.run_dir, self.config.run.name, name, self.telemetry)

    def watch_for_stop(
        self, terminated: Callable[[str], None], starter_gone: Callable[[], None]
    ) -> None:
        """Call them when a signal asks this process to end, or its starter is gone."""
        first = not self._terminated
        self._terminated.append(terminated)
        self._starter_gone.append(starter_gone)
        if first:
            self._install_handlers()

    def _install_handlers(self) -> None:
        stop_requests.handle_signals(
            stop_requests.leave_signals(warned=self.role == "node"), self._end_all
        )
        if self.role == "node":
            stop_requests.handle_signals(stop_requests.drop_ignored(signal.SIGINT), self._end_all)
        else:  # a terminal's Ctrl-C reaches all its processes, but actors wait for their node
            stop_requests.handle_signals([signal.SIGINT], lambda name: None)
        if self.lock.inherited:  # the starter writes to a coordinator only; here its end counts
            stop_requests.follow_starter(self._handle_starter_line)

    def _end_all(self, signal_name: str) -> None:
        for terminated in self._terminated:
            terminated(signal_name)

    def _handle_starter_line(self, word: str) -> None:
        if word == stop_requests.STARTER_GONE:
            for starter_gone in self._starter_gone:
                starter_gone()

    async def directory_lost(self) -> str:
        """Wait until the run directory no longer belongs to this run, and return the reason."""
        if self._lost is None:
            self._lost = asyncio.ensure_future(self._watch_directory())
        return await asyncio.shield(self._lost)

    async def _watch_directory(self) -> str:
        while not (reason := await asyncio.to_thread(self.lock.find_lost_reason)):
            await asyncio.sleep(WATCH_S)
        return reason
