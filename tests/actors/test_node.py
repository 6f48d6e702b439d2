"""Who is started again: every replica and relay that ended without the coordinator's order."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from laminar.actors import node as node_module
from laminar.actors import restart_limit
from laminar.actors.node import Node
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import exit_codes
from tests.actors.parts import FakeHost, order, until


class FakeProcess:
    """Ends when the test says so, or when it is killed."""

    def __init__(self, boot_id: str) -> None:
        self.pid, self.boot_id, self.hears = 1, boot_id, False
        self.returncode: int | None = None
        self.dumps = 0
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set_result(code)

    def dump_stacks(self) -> None:
        assert self.returncode is None, "it can write nothing after its end"
        self.dumps += 1

    def terminate(self) -> None:
        if self.hears:
            self.end(exit_codes.TERMINATED)

    def kill(self) -> None:
        if self.returncode is None:
            self.end(-signal.SIGKILL)


class Machine:
    """The processes of a node, all of them fakes."""

    def __init__(self, run_dir: Path, role: str, *settings: str) -> None:
        self.host = FakeHost(run_dir, "node-0", *settings)
        self.node = Node(self.host, [(role, 1)], self)  # type: ignore[arg-type]
        self.started: list[FakeProcess] = []
        self.launching = asyncio.Event()
        self.launching.set()
        self.calls: list[str] = []

    def prepare_launches(self) -> None:
        self.calls.append("begin")

    async def launch_actor(self, name: str, role: str) -> FakeProcess:
        self.calls.append("launch")
        process = FakeProcess(f"{name}-{len(self.started)}")
        self.started.append(process)
        await self.launching.wait()
        return process

    async def close(self) -> None:
        assert all(process.returncode is not None for process in self.started)
        self.calls.append("close")


@pytest_asyncio.fixture
async def machine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Machine]:
    made = Machine(tmp_path, getattr(request, "param", "rollout"))
    await made.node.start()
    yield made
    made.host.end()


@pytest.fixture
def pauses(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those that the node makes; they take no time."""
    made: list[float] = []

    async def pause(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr(machine.host, "sleep_for", pause)
    return made


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
        ("store", -signal.SIGKILL, True),
        ("store", exit_codes.TERMINATED, False),
        ("store", exit_codes.FAILED, False),
        ("trainer", -signal.SIGKILL, True),
        ("trainer", exit_codes.USER_ERROR, False),
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
    assert exited.boot_id == machine.started[0].boot_id


async def test_a_trainer_without_checkpoints_is_not_started_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "trainer", "trainer.save_freq=0")
    await machine.node.start()
    machine.started[0].end(-signal.SIGKILL)
    assert not (await machine.host.wait(ev.ProcessExited)).restarting
    machine.host.end()


async def test_who_ends_again_and_again_is_started_max_restarts_times(
    machine: Machine, pauses: list[float]
) -> None:
    restarts = machine.host.config.recovery.max_restarts
    for count in range(restarts + 1):
        await until(lambda: len(machine.started) == count + 1)  # noqa: B023
        machine.started[-1].end(exit_codes.FAILED)
        await machine.host.wait(ev.ProcessExited, count + 1)
    exits = machine.host.all(ev.ProcessExited)
    assert [exited.restarting for exited in exits] == [True] * restarts + [False]
    assert [exited.boot_id for exited in exits] == [p.boot_id for p in machine.started]
    reason = "it was restarted 3 times within 3600 s, and recovery.max_restarts is 3"
    assert [exited.reason for exited in exits] == [""] * restarts + [reason]
    assert machine.host.announced == [f"rollout-0 ended with exit code 1; {reason}"]
    assert pauses == [1.0, 2.0]


async def test_who_is_refused_is_started_again_after_a_pause_that_doubles(
    machine: Machine, pauses: list[float]
) -> None:
    """As often as it takes: nothing is wrong with it. Anything else is tried again at once."""
    refused, failed = exit_codes.COORDINATOR_ABSENT, exit_codes.FAILED
    codes = [*[refused] * 6, failed, refused]
    for count, code in enumerate(codes, 1):
        machine.started[-1].end(code)
        await until(lambda: len(machine.started) == count + 1)  # noqa: B023
    assert pauses == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0, 1.0]
    assert all(exited.restarting for exited in machine.host.all(ev.ProcessExited))


@pytest.mark.parametrize(
    ("machine", "code", "counts"),
    [
        ("rollout", exit_codes.FENCED, False),
        ("store", exit_codes.FENCED, False),
        ("rollout", exit_codes.COORDINATOR_ABSENT, True),
    ],
    indirect=["machine"],
)
async def test_who_was_in_the_run_before_it_was_fenced_for_its_silence_counts_towards_no_limit(
    machine: Machine, code: int, counts: bool, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """Nothing is wrong with it, so it is started again at once; another process that takes its
    place, again and again, has an end."""
    monkeypatch.setattr(restart_limit, "TAKEN_S", 0.0)
    monkeypatch.setattr(node_module, "TAKEN_S", 0.0)
    restarts = machine.host.config.recovery.max_restarts
    for count in range(restarts + 1):
        await until(lambda: len(machine.started) == count + 1)  # noqa: B023
        machine.started[-1].end(code)
        await machine.host.wait(ev.ProcessExited, count + 1)
    exits = machine.host.all(ev.ProcessExited)
    assert [exited.restarting for exited in exits] == [True] * restarts + [not counts]
    assert bool(pauses) == counts


def restart(machine: Machine, process: FakeProcess, **facts: bool) -> None:
    """The coordinator has this process ended and another one started."""
    (name,) = machine.node.children
    command = cmd.RestartActor(
        to="node-0", actor=name, boot_id=process.boot_id, reason="stalled", **facts
    )
    machine.node.handle_orders(order(1, command))


async def test_who_stalls_writes_its_stacks_and_is_killed_and_started_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "DUMP_S", 0.0)
    restart(machine, machine.started[0])
    exited = await machine.host.wait(ev.ProcessExited)
    await until(lambda: len(machine.started) == 2)
    assert (machine.started[0].dumps, exited.code, exited.restarting) == (1, -signal.SIGKILL, True)


async def test_a_late_order_does_not_end_the_process_that_has_come_since(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order was under way while the network was cut; its process had been fenced by then."""
    monkeypatch.setattr(node_module, "DUMP_S", 0.0)
    first = machine.started[0]
    first.end(exit_codes.FAILED)
    await until(lambda: len(machine.started) == 2)
    restart(machine, first)
    restart(machine, machine.started[1])
    await until(lambda: len(machine.started) == 3)
    exits = machine.host.all(ev.ProcessExited)
    assert [exited.boot_id for exited in exits] == [p.boot_id for p in machine.started[:2]]
    assert [p.dumps for p in machine.started] == [0, 1, 0]


async def test_who_is_ended_since_its_machine_was_cut_off_counts_towards_no_limit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    monkeypatch.setattr(node_module, "DUMP_S", 0.0)
    for count in range(machine.host.config.recovery.max_restarts + 3):
        restart(machine, machine.started[-1], cut_off=True)
        await until(lambda: len(machine.started) == count + 2)  # noqa: B023
    assert pauses == []
    restart(machine, machine.started[-1])
    await until(lambda: len(machine.started) == count + 3)
    restart(machine, machine.started[-1])
    await until(lambda: len(machine.started) == count + 4)
    assert pauses == [1.0]


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
    assert machine.calls == ["begin", "launch", "close"]
    assert len(machine.host.all(ev.ProcessExited)) == ordered  # else it leaves with its machine


async def test_who_does_not_leave_in_time_is_killed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "GRACE_S", 0.01)
    await machine.node.stop()
    assert machine.started[0].returncode == -signal.SIGKILL
