"""How a process ends: by order, by a signal, with its node, with its run directory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from laminar.actors import host as host_module
from laminar.actors.system import process as process_module
from laminar.config import dump_config, load_config
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.names import exit_codes
from laminar.run.directory import CONFIG_FILE
from tests.actors.parts import MINIMAL, real_host

# --- the process itself: a signal is not the coordinator's order ---------------------------------


class Idle:
    """An actor that does nothing."""

    async def start(self) -> None: ...

    def handle_orders(self, orders: list[Any]) -> None: ...

    async def stop(self) -> None: ...


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CONFIG_FILE).write_text(dump_config(load_config([], MINIMAL)))
    yield tmp_path / "run"
    structlog.reset_defaults()


def fails(reason: str) -> ev.ActorFailed:
    return ev.ActorFailed(reason=reason, user_error=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_who_is_ended_by_a_signal_says_so_and_has_not_failed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr("laminar.net.client.ControlClient.incarnation", 1)
    host, said = real_host(run_dir, "rollout-0", "rollout"), list[Any]()
    monkeypatch.setattr(host, "emit", said.append)
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    os.kill(os.getpid(), number)
    assert await running == exit_codes.TERMINATED and said == [ev.ActorLeft()]
    assert host._failure == (fails(f"ended by {number.name}"), exit_codes.TERMINATED)


@pytest.mark.parametrize(("role", "code"), [("node", exit_codes.PAUSED), ("store", 0)])
async def test_a_node_says_by_its_code_that_the_run_is_paused(
    run_dir: Path, role: str, code: int
) -> None:
    host = real_host(run_dir, f"{role}-0", role)
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    order = cmd.Envelope(command_id=1, cause=1, command=msgspec.Raw(b""))
    host.accept_command(
        order, cmd.StopActor(to=f"{role}-0", reason="the run is paused", paused=True)
    )
    assert await running == code


async def test_the_last_word_is_that_it_has_ended_also_after_a_failure(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's end waits for a store that failed until it is known to be gone, and its node, which
    sees the exit, may be gone, too."""
    monkeypatch.setattr("laminar.net.client.ControlClient.incarnation", 1)
    host = real_host(run_dir, "store-0", "store")
    said: list[Any] = []
    monkeypatch.setattr(host, "emit", said.append)
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    host.fail_process("the disk is broken")
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
    run_dir: Path, role: str, watchdog: list[float]
) -> None:
    host = real_host(run_dir, f"{role}-0", role)
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    host._starter_gone()
    assert await running == exit_codes.FAILED
    assert host._failure == (fails("its node, node-0, is gone"), exit_codes.FAILED)
    assert watchdog == [host_module.ORPHAN_EXIT_S]


@pytest.mark.parametrize("orphaned", [True, False])
async def test_a_node_waits_for_a_coordinator_only_while_somebody_would_start_it(
    run_dir: Path, orphaned: bool, watchdog: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "WATCH_S", 0.01)
    monkeypatch.setattr(host_module, "ORPHAN_ABSENT_S", 0.05)
    host = real_host(run_dir, "node-0", "node")
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0)
    if orphaned:
        host._starter_gone()
        assert await running == exit_codes.COORDINATOR_ABSENT
        assert (
            host._failure is not None
            and "the coordinator was silent for" in host._failure[0].reason
        )
    else:
        await asyncio.sleep(0.3)
        assert not running.done()
        host.fail_process("the test is over")
        await running
    assert watchdog == []


async def test_an_actor_ends_with_its_run_directory(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "WATCH_S", 0.01)
    host = real_host(run_dir, "store-0", "store")
    running = asyncio.create_task(host.run(Idle()))
    await asyncio.sleep(0.05)
    run_dir.rename(run_dir.with_name("elsewhere"))
    assert await running == exit_codes.USER_ERROR
    assert host._failure is not None and f"{run_dir} is gone" in host._failure[0].reason
