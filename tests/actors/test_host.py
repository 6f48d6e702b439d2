"""The shell of every actor: what goes wrong ends the process with its reason, log or no log."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from laminar.actors.disk_full_retry import DiskStayedFull
from laminar.actors.host import ActorRole, Host
from laminar.config import dump_config, load_config
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event
from laminar.names import exit_codes
from laminar.net.client import write_address
from laminar.run.directory import CONFIG_FILE, COORDINATOR_FILE
from tests.actors.parts import MINIMAL, real_host

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def host_on_a_full_disk(run_dir: Path, *settings: str, name: str = "rollout-0") -> Host:
    """Every write of its log and of its timeline fails: No space left on device."""
    (run_dir / CONFIG_FILE).write_text(dump_config(load_config([], [*MINIMAL, *settings])))
    for folder in ("logs/latest", "timeline"):
        (run_dir / folder).mkdir(parents=True)
        (run_dir / folder / f"{name}.jsonl").symlink_to("/dev/full")
    return real_host(run_dir, name, name.partition("-")[0])


class Failing:
    """An actor whose work goes wrong in one of several ways."""

    def __init__(self, host: Host, fail: Callable[[Host], None]) -> None:
        self.host, self.fail, self.stopped = host, fail, False

    async def start(self) -> None:
        self.host.record_span("busy", 0, 1)
        self.host.log.info("started")
        self.fail(self.host)

    def handle_orders(self, orders: list[tuple[cmd.Envelope, Command]]) -> None:
        raise ValueError("no room")

    async def stop(self) -> None:
        self.stopped = True


async def _raises() -> None:
    raise ValueError("no room")


def _raise() -> None:
    raise ValueError("no room")


def in_start(host: Host) -> None:
    _raise()


def in_a_task(host: Host) -> None:
    host.spawn(_raises())


def in_a_callback(host: Host) -> None:
    asyncio.get_running_loop().call_soon(_raise)


def in_a_command(host: Host) -> None:
    asyncio.get_running_loop().call_soon(host._deliver_commands)


def by_its_own_word(host: Host) -> None:
    host.fail_process("ValueError: no room")


async def run_host(host: Host, actor: ActorRole, act: Callable[[], object] = int) -> int:
    """Let the coordinator welcome the process, then do `act`; return the exit code."""
    async with asyncio.timeout(DEADLINE_S):
        work = asyncio.create_task(host.run(actor))
        await asyncio.sleep(0)
        host.handle_welcome(1)
        await asyncio.sleep(0.01)
        act()
        return await work


@pytest.mark.parametrize(
    "fail", [in_start, in_a_task, in_a_callback, in_a_command, by_its_own_word]
)
async def test_a_failure_ends_the_process_though_nothing_can_be_logged(
    fail: Callable[[Host], None], tmp_path: Path
) -> None:
    """With its heartbeats going on it would hold its work for ever."""
    host = host_on_a_full_disk(tmp_path)
    actor = Failing(host, fail)
    assert await run_host(host, actor) == exit_codes.FAILED and actor.stopped
    failed = ev.ActorFailed(reason="ValueError: no room", user_error=False)
    assert host._failure == (failed, exit_codes.FAILED)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DiskStayedFull("the disk was full for 300 s"), exit_codes.USER_ERROR),
        (OSError(errno.EACCES, "Permission denied"), exit_codes.LOG_UNWRITABLE),
        (OSError(errno.ENOENT, "No such file"), exit_codes.FAILED),
    ],
)
async def test_a_process_that_its_disk_ended_leaves_a_run_that_can_continue(
    error: OSError, code: int, tmp_path: Path
) -> None:
    """A mistake of the user stops the run, to be resumed; after a short fault the node restarts."""

    def fail(host: Host) -> None:
        raise error

    host = host_on_a_full_disk(tmp_path)
    assert await run_host(host, Failing(host, fail)) == code


async def test_a_wait_that_the_end_of_the_process_cuts_short_is_no_failure(tmp_path: Path) -> None:
    """As that for room on a disk, in a run that ends before everybody has begun."""

    class Waiting(Failing):
        async def start(self) -> None:
            await self.host.sleep_for(DEADLINE_S)

    host = host_on_a_full_disk(tmp_path)
    stop = cmd.StopActor(to="rollout-0", reason="the run is over")
    order = cmd.Envelope(command_id=1, cause=1, command=stop)
    code = await run_host(host, Waiting(host, in_start), lambda: host.accept_command(order, stop))
    assert code == exit_codes.COMPLETE and host._failure is None


class Working(Failing):
    """An actor that does a piece of work each 10 ms, and may report something each 40 ms."""

    def __init__(self, host: Host, *, reports: bool) -> None:
        super().__init__(host, in_start)
        self.reports = reports

    async def start(self) -> None:
        for count in range(40):
            self.host.count_work()
            if self.reports and not count % 4:
                self.host.emit(ev.RelayLinked(command_id=1, successor=""))
            await asyncio.sleep(0.01)
        self.host.fail_process("done")


@pytest.mark.parametrize("reports", [False, True])
async def test_work_that_no_event_shows_is_reported(
    reports: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.actors.host.REPORTS", 10)  # each 100 ms
    host, gauges = host_on_a_full_disk(tmp_path, "coordinator.stall_timeout_s=1"), list[Event]()
    monkeypatch.setattr(host.process, "send_gauge", gauges.append)
    await run_host(host, Working(host, reports=reports))
    assert bool(gauges) is not reports
    assert all(isinstance(gauge, ev.WorkProgress) for gauge in gauges)


@pytest.mark.parametrize("lives", [True, False])
async def test_a_node_ends_when_its_coordinator_lives_but_answers_nothing(
    lives: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that is gone has more time to be started again."""
    limits = "coordinator.stall_timeout_s=1", "coordinator.coordinator_timeout_ms=3000"
    host, said = host_on_a_full_disk(tmp_path, *limits, name="node-0"), list[str]()
    monkeypatch.setattr(host.process, "print_message", said.append)
    with socket.create_server(("127.0.0.1", 0)) as server:
        write_address(tmp_path / COORDINATOR_FILE, f"tcp://127.0.0.1:{server.getsockname()[1]}")
        if not lives:
            server.close()
        code = await run_host(host, Failing(host, lambda host: None))
    assert code == exit_codes.COORDINATOR_ABSENT and host._failure is not None
    reason = host._failure[0].reason
    assert ("answered nothing" in reason) is lives and ("was silent" in reason) is not lives
    assert f"start laminar-coord {tmp_path} again" in said[0]
