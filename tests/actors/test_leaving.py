"""Who is started again: every replica and relay that ended without the coordinator's order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import structlog

from laminar import exit_codes
from laminar.actors import host as host_module
from laminar.actors import node as node_module
from laminar.actors.host import Host
from laminar.actors.node import Node
from laminar.config import dumps, load
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.codec import encode
from laminar.run_lock import RunLock
from laminar.rundir import CONFIG_FILE
from laminar.stop_requests import STARTER_GONE
from tests.actors.parts import MINIMAL, FakeHost, until

# --- the process itself: a signal is not the coordinator's order ---------------------------------


class Idle:
    """An actor that does nothing."""

    async def start(self) -> None: ...

    def handle(self, orders: list[Any]) -> None: ...

    async def stop(self) -> None: ...


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CONFIG_FILE).write_text(dumps(load([], MINIMAL)))
    yield tmp_path / "run"
    structlog.reset_defaults()


async def test_who_is_told_to_stop_has_done_what_was_wanted(run_dir: Path) -> None:
    host = Host(RunLock.join(run_dir, "rollout-0"), "rollout-0", "rollout", "node-0", "127.0.0.1")
    running = asyncio.create_task(host.run(Idle()))
    stop = cmd.StopActor(to="rollout-0", reason="the run is complete")
    await asyncio.sleep(0)
    host._on_body(encode(cmd.Order(command_id=1, cause=1, command=stop)))
    assert await running == exit_codes.COMPLETE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_who_is_ended_by_a_signal_says_so(run_dir: Path, number: signal.Signals) -> None:
    host = Host(RunLock.join(run_dir, "rollout-0"), "rollout-0", "rollout", "node-0", "127.0.0.1")
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    assert await running == exit_codes.TERMINATED
    assert host._failure == (f"ended by {number.name}", exit_codes.TERMINATED)


async def test_the_last_word_is_that_it_has_ended_also_after_a_failure(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's end waits for a store that failed until it is known to be gone, and its node, which
    sees the exit, may be gone, too."""
    monkeypatch.setattr("laminar.net.client.ControlClient.incarnation", 1)
    host = Host(RunLock.join(run_dir, "store-0"), "store-0", "store", "node-0", "127.0.0.1")
    said: list[Any] = []
    monkeypatch.setattr(host, "emit", said.append)
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    host.fail("the disk is broken")
    assert await running == exit_codes.FAILED
    failed = ev.ActorFailed(reason="the disk is broken", user_error=False)
    assert said == [failed, ev.ActorLeft()]


# --- whoever started it is gone, or the run directory --------------------------------------------


@pytest.fixture
def watchdog(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What would end this process by force, in seconds."""
    armed: list[float] = []
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda seconds, exit: armed.append(seconds)
    )
    return armed


@pytest.mark.parametrize("role", ["rollout", "store"])
async def test_an_actor_does_not_outlive_its_node(
    run_dir: Path, role: str, watchdog: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store stays for as long as it may take to close the books."""
    monkeypatch.setattr(host_module, "ORPHAN_STORE_S", 0.05)
    host = Host(RunLock.join(run_dir, f"{role}-0"), f"{role}-0", role, "node-0", "127.0.0.1")
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    host._requested(STARTER_GONE)
    assert (host._failure is None) == (role == "store")
    assert await running == exit_codes.FAILED
    assert host._failure == ("its node, node-0, is gone", exit_codes.FAILED)
    assert watchdog == [host_module.ORPHAN_EXIT_S]


@pytest.mark.parametrize("orphaned", [True, False])
async def test_a_node_waits_for_a_coordinator_only_while_somebody_would_start_it(
    run_dir: Path, orphaned: bool, watchdog: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "WATCH_S", 0.01)
    monkeypatch.setattr(host_module, "ORPHAN_ABSENT_S", 0.05)
    host = Host(RunLock.join(run_dir, "node-0"), "node-0", "node", "node-0", "127.0.0.1")
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    if orphaned:
        host._requested(STARTER_GONE)
        assert await running == exit_codes.COORDINATOR_ABSENT
        assert host._failure is not None and "no coordinator for" in host._failure[0]
    else:
        await asyncio.sleep(0.3)
        assert not running.done()
        host.fail("the test is over")
        await running
    assert watchdog == []


async def test_an_actor_ends_with_its_run_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "WATCH_S", 0.01)
    host = Host(RunLock.join(run_dir, "store-0"), "store-0", "store", "node-0", "127.0.0.1")
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0.05)
    run_dir.rename(run_dir.with_name("elsewhere"))
    assert await running == exit_codes.USER_ERROR
    assert host._failure is not None and f"{run_dir} is gone" in host._failure[0]


# --- its node ------------------------------------------------------------------------------------


class FakeProcess:
    """Ends when the test says so, or when it is killed."""

    def __init__(self) -> None:
        self.pid, self.returncode, self.hears = 1, None, False
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def end(self, code: int) -> None:
        self.returncode = code  # type: ignore[assignment]
        self._ended.set_result(code)

    def terminate(self) -> None:
        if self.hears:
            self.end(exit_codes.TERMINATED)

    def kill(self) -> None:
        if self.returncode is None:
            self.end(-signal.SIGKILL)


class Machine:
    """A node whose processes are fakes."""

    def __init__(self, run_dir: Path, role: str) -> None:
        self.host = FakeHost(run_dir, "node-0")
        self.host.lock = RunLock.join(run_dir, "node-0")
        self.node = Node(self.host, [(role, 1)])  # type: ignore[arg-type]
        self.started: list[FakeProcess] = []
        self.launching = asyncio.Event()
        self.launching.set()

    async def launch(self, *arguments: Any, **options: Any) -> FakeProcess:
        process = FakeProcess()
        self.started.append(process)
        await self.launching.wait()
        return process


@pytest_asyncio.fixture
async def machine(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Machine]:
    made = Machine(tmp_path, getattr(request, "param", "rollout"))
    monkeypatch.setattr(node_module.WarmProcess, "begin", lambda warm: None)
    monkeypatch.setattr(node_module.WarmProcess, "fork", made.launch)
    monkeypatch.setattr(node_module, "adopt_orphans", lambda: None)
    monkeypatch.setattr(node_module, "reap_orphan", lambda known, seen: 0)
    await made.node.start()
    yield made
    made.host.end()


@pytest.mark.parametrize(
    ("machine", "code", "again"),
    [
        ("rollout", exit_codes.TERMINATED, True),
        ("rollout", -signal.SIGTERM, True),  # before it could answer signals
        ("rollout", -signal.SIGKILL, True),
        ("rollout", exit_codes.FAILED, True),
        ("relay", exit_codes.TERMINATED, True),
        ("rollout", exit_codes.COMPLETE, False),
        ("rollout", exit_codes.USER_ERROR, False),
        ("store", exit_codes.TERMINATED, False),
    ],
    indirect=["machine"],
)
async def test_who_ends_without_an_order_is_started_again(
    machine: Machine, code: int, again: bool
) -> None:
    machine.started[0].end(code)
    exited = await machine.host.wait(ev.ProcessExited)
    await until(lambda: len(machine.started) == 1 + again)
    assert (exited.code, exited.restarting) == (code, again)


async def test_nothing_is_left_of_a_node_that_stops_while_it_starts_a_process_again(
    machine: Machine,
) -> None:
    """Everybody on a machine gets the signal: a child may end before its node stops."""
    machine.launching.clear()
    machine.started[0].end(exit_codes.TERMINATED)
    await until(lambda: len(machine.started) == 2)
    stopping = asyncio.create_task(machine.node.stop())
    await asyncio.sleep(0)
    machine.launching.set()
    await stopping
    assert [process.returncode for process in machine.started] == [143, -signal.SIGKILL]


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_node_that_was_not_told_by_the_coordinator_tells_its_actors_to_leave(
    machine: Machine, ordered: bool
) -> None:
    """The coordinator tells everybody; nobody else does."""
    process = machine.started[0]
    process.hears, machine.host.ordered_to_stop = True, ordered
    stopping = asyncio.create_task(machine.node.stop())
    await asyncio.sleep(0.05)
    assert process.returncode == (None if ordered else exit_codes.TERMINATED)
    if ordered:
        process.end(exit_codes.COMPLETE)
    await stopping
