"""What the tests of actors share: a host without a coordinator, small versions, waiting."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import structlog
import torch

from laminar.actors.host import Host
from laminar.actors.service_clients import RelayClient, StoreClient
from laminar.actors.system.process import OwnProcess, SystemProcess
from laminar.config import Config, load_config
from laminar.events import commands as cmd
from laminar.events.base import Event
from laminar.net.rpc_client import RpcClient
from laminar.observe.telemetry import Telemetry
from laminar.run.lock import RunLock
from laminar.run.secret import make_secret
from laminar.storage import messages as store_messages
from laminar.weights import messages as m
from laminar.weights.arena.arena import Arena
from laminar.weights.version import manifest as mf
from laminar.weights.version.tensors import write_tensors
from tools.kit.secrets import KEYS, SECRET

DEADLINE_S = 30.0
MINIMAL = ["model.name=none", "data.dataset=none"]
PROBE = mf.Probe(sequences=((1, 2),), logprobs=((-0.5,),), tolerance=0.1, mean_tolerance=0.1)
SHAPE = (4, 16)
SPECS = mf.make_layout([("w", SHAPE)], "float32")
VERSION_BYTES = mf.check_tensors(SPECS)

#: unlike those of other workers of pytest: arenas of all processes of a user lie in one directory,
#: and names of tests, which are cut at 30 characters, do not tell cases of one test apart
_boots = itertools.count(os.getpid() << 32)
Kind = TypeVar("Kind", bound=Event)


class FakeHost:
    """An actor's host: events are kept, tasks run, a failure is noted."""

    def __init__(
        self, run_dir: Path, name: str, *settings: str, node: str = "node-0", incarnation: int = 1
    ) -> None:
        self.run_dir, self.name, self.node = run_dir, name, node
        self.role, self.address = name.rpartition("-")[0], "127.0.0.1"
        self.keys, self.run_id, self.bulk_key = KEYS, SECRET.run_id, SECRET.derive_key("bulk")
        self.boot_id = f"{name}-{next(_boots):016x}"
        self.incarnation = incarnation
        self.ordered_to_stop = self.ending = False
        self.clock_offset_ns = 0
        self.config: Config = load_config([], [*MINIMAL, "coordinator.heartbeat_ms=50", *settings])
        self.log = structlog.get_logger()
        self.telemetry = Telemetry()
        self.add_outlet = self.telemetry.add_outlet
        self.events: list[Event] = []
        self.gauges: list[Event] = []
        self.failures: list[str] = []
        self.exit_code = 0
        self.announced: list[str] = []
        self.points: list[str] = []  #: named places in the code, as they were reached
        self.process = SimpleNamespace(work_count=0)
        self.durable = asyncio.Event()  #: what was sent; cleared by a test that looks before that
        self.durable.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def emit(self, event: Event, **context: Any) -> None:
        self.events.append(event)

    def send_gauge(self, event: Event) -> None:
        self.gauges.append(event)

    def record_span(self, state: str, start_ns: int, end_ns: int, **facts: Any) -> None:
        pass

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.fail_process(repr(task.exception()))

    def fail_process(self, reason: str, exit_code: int = 1) -> None:
        self.failures.append(reason)
        self.exit_code = exit_code

    def notify_user(self, text: str) -> None:
        self.announced.append(text)

    def count_work(self) -> None:
        self.process.work_count += 1

    async def sleep_for(self, seconds: float) -> None:
        await asyncio.sleep(0.001)

    async def hit_failpoint(self, point: str) -> None:
        self.points.append(point)

    async def wait_acknowledged(self) -> None:
        await self.durable.wait()

    def _report_refused(self, reason: str) -> None:
        self.failures.append(reason)

    now_ns = staticmethod(time.monotonic_ns)
    make_client = SystemProcess.make_client
    make_server = SystemProcess.make_server
    publish_address = SystemProcess.publish_address

    def end(self) -> None:
        """What a killed process does: none of its tasks goes on."""
        for task in self._tasks:
            task.cancel()

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait(self, kind: type[Kind], count: int = 1) -> Kind:
        """The event of this kind with this number, from 1."""
        await until(lambda: len(self.all(kind)) >= count or bool(self.failures))
        assert not self.failures, self.failures
        return self.all(kind)[count - 1]


def removed(*ids: str) -> StoreClient:
    """Of a store that has removed the tokens of these, whatever it is asked for."""

    class Removed:
        async def call(self, request: bytes, timeout_s: float) -> bytes:
            reply = store_messages.FetchReply(trajectories=(), removed=ids)
            return store_messages.encode(reply)

    return StoreClient(cast(RpcClient, Removed()), disk_full_timeout_s=1.0)


def real_host(run_dir: Path, name: str, role: str) -> Host:
    """One that joins the run in this directory, on its first machine."""
    make_secret(run_dir)
    own = OwnProcess(RunLock.join(run_dir, name), name, role)
    return Host(SystemProcess(own, name, "node-0", "127.0.0.1"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


def order(command_id: int, command: Any) -> list[tuple[cmd.Envelope, Any]]:
    return [(cmd.Envelope(command_id=command_id, cause=1, command=command), command)]


def tensor(version: int) -> torch.Tensor:
    """The weights of a version."""
    return torch.full(SHAPE, float(version))


class Writer:
    """A trainer's side of the relay, step by step."""

    def __init__(self, host: FakeHost, relay: str) -> None:
        self.host = host
        self.relay = RelayClient(host.make_client(relay))
        self.arena = ""

    async def open(self) -> None:
        await self.relay.start()
        request = m.OpenArena(version_bytes=VERSION_BYTES)
        self.arena = (await self.relay.send_request(request, m.ArenaOpened)).arena

    async def grant(self) -> int:
        slot = -1
        while slot < 0:
            granted = await self.relay.send_request(m.GrantSlot(arena=self.arena), m.SlotGranted)
            slot = granted.slot
        return slot

    def write(self, slot: int, version: int) -> None:
        view = Arena.attach(Path(self.arena)).get_slot(slot)
        write_tensors(view, SPECS, [("w", tensor(version))])

    async def publish(self, version: int) -> None:
        slot = await self.grant()
        self.write(slot, version)
        await self.relay.send_request(commit(self.arena, slot, version), m.SlotCommitted)


def commit(arena: str, slot: int, version: int) -> m.CommitSlot:
    return m.CommitSlot(
        arena=arena, slot=slot, version=version, step=version, tensors=SPECS, probe=PROBE
    )
