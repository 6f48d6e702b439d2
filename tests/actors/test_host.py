"""The shell of every actor: what goes wrong ends the process with its reason, log or no log."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from laminar.actors.disk_full_retry import DiskStayedFull
from laminar.actors.host import Host
from laminar.config import dump_config, load_config
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names import exit_codes
from laminar.run.directory import CONFIG_FILE
from tests.actors.parts import MINIMAL, real_host

DEADLINE_S = 30.0


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def host_on_a_full_disk(run_dir: Path) -> Host:
    """Every write of its log and of its timeline fails: No space left on device."""
    (run_dir / CONFIG_FILE).write_text(dump_config(load_config([], MINIMAL)))
    for folder in ("logs/latest", "timeline"):
        (run_dir / folder).mkdir(parents=True)
        (run_dir / folder / "rollout-0.jsonl").symlink_to("/dev/full")
    return real_host(run_dir, "rollout-0", "rollout")


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


@pytest.mark.parametrize(
    "fail", [in_start, in_a_task, in_a_callback, in_a_command, by_its_own_word]
)
def test_a_failure_ends_the_process_though_nothing_can_be_logged(
    fail: Callable[[Host], None], tmp_path: Path
) -> None:
    """With its heartbeats going on it would hold its work for ever."""

    async def run() -> tuple[Failing, Host, int]:
        host = host_on_a_full_disk(tmp_path)
        actor = Failing(host, fail)
        async with asyncio.timeout(DEADLINE_S):
            work = asyncio.create_task(host.run(actor))
            await asyncio.sleep(0)
            host.handle_welcome(1)
            return actor, host, await work

    actor, host, code = asyncio.run(run())
    assert code == exit_codes.FAILED and actor.stopped
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
def test_a_process_that_its_disk_ended_leaves_a_run_that_can_continue(
    error: OSError, code: int, tmp_path: Path
) -> None:
    """A mistake of the user stops the run, to be resumed; after a short fault the node restarts."""

    def fail(host: Host) -> None:
        raise error

    async def run() -> int:
        host = host_on_a_full_disk(tmp_path)
        async with asyncio.timeout(DEADLINE_S):
            work = asyncio.create_task(host.run(Failing(host, fail)))
            await asyncio.sleep(0)
            host.handle_welcome(1)
            return await work

    assert asyncio.run(run()) == code


def test_a_wait_that_the_end_of_the_process_cuts_short_is_no_failure(tmp_path: Path) -> None:
    """As that for room on a disk, in a run that ends before everybody has begun."""

    class Waiting(Failing):
        async def start(self) -> None:
            await self.host.sleep_for(DEADLINE_S)

    async def run() -> tuple[Host, int]:
        host = host_on_a_full_disk(tmp_path)
        actor = Waiting(host, in_start)
        async with asyncio.timeout(DEADLINE_S):
            work = asyncio.create_task(host.run(actor))
            await asyncio.sleep(0)
            host.handle_welcome(1)
            await asyncio.sleep(0.01)
            stop = cmd.StopActor(to="rollout-0", reason="the run is over")
            host.accept_command(cmd.Envelope(command_id=1, cause=1, command=stop), stop)
            return host, await work

    host, code = asyncio.run(run())
    assert code == exit_codes.COMPLETE and host._failure is None
