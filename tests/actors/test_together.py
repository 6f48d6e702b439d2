"""Emulated replicas share processes: one is forked for all, and its end is the end of all."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from laminar.actors.system.process import _run_until_failure
from laminar.actors.system.processes import MachineProcesses, group_by_process
from laminar.actors.system.warm import WarmProcess
from laminar.actors.system.warm_process import Launch
from laminar.config import Config, dump_config, load_config
from laminar.run.directory import CONFIG_FILE
from tests.actors.parts import FakeHost, real_host

ROLES = [("store", 1), ("relay", 1), ("rollout", 5)]
EMULATED = ("rollout.engine=emulated", "emulation.replicas_per_process=2")


def config(*settings: str) -> Config:
    return load_config([], ["model.name=m", "data.dataset=gcd", *settings])


def test_only_emulated_replicas_share_a_process() -> None:
    found = group_by_process(ROLES, config(*EMULATED), "node-0")
    assert found["store-0"] == ("store-0",)
    assert found["rollout-2"] == found["rollout-3"] == ("rollout-2", "rollout-3")
    assert found["rollout-4"] == ("rollout-4",)
    assert set(found) == {"store-0", "relay-0", *(f"rollout-{i}" for i in range(5))}
    real = group_by_process(ROLES, config("emulation.replicas_per_process=2"), "node-0")
    assert all(names == (name,) for name, names in real.items())


class Forked:
    """A process of the operating system, as far as a member asks for it."""

    def __init__(self, pid: int) -> None:
        self.pid, self.killed = pid, 0
        self.returncode: int | None = None

    async def wait(self) -> int:
        return 0

    def dump_stacks(self) -> None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None:
        self.killed += 1


async def test_whoever_is_launched_next_joins_the_process_that_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forked: list[tuple[str, ...]] = []
    processes: list[Forked] = []

    async def fork(self: MachineProcesses, names: tuple[str, ...], role: str, boot: str) -> Forked:
        forked.append(names)
        processes.append(Forked(len(forked)))
        return processes[-1]

    monkeypatch.setattr(MachineProcesses, "_fork_actors", fork)
    host = FakeHost(tmp_path, "node-0", *EMULATED)

    machine = MachineProcesses(host, None, ROLES)  # type: ignore[arg-type]
    members = [await machine.launch_actor(f"rollout-{i}", "rollout") for i in range(4)]
    assert forked == [("rollout-0", "rollout-1"), ("rollout-2", "rollout-3")]
    assert [member.pid for member in members] == [1, 1, 2, 2]
    boots = [member.boot_id.removeprefix(f"rollout-{i}-") for i, member in enumerate(members)]
    assert boots[0] == boots[1] != boots[2] == boots[3]
    members[1].kill()
    assert processes[0].killed == 1
    processes[0].returncode = -9
    assert members[0].returncode == members[1].returncode == -9
    again = [await machine.launch_actor(f"rollout-{i}", "rollout") for i in (1, 0)]
    assert [member.pid for member in again] == [3, 3]
    assert again[0].boot_id != members[1].boot_id
    await machine.close()


async def test_the_first_that_fails_ends_those_beside_it() -> None:
    async def ends(code: int) -> int:
        return code

    assert await _run_until_failure([ends(0), ends(0)]) == 0
    async with asyncio.timeout(5):
        assert await _run_until_failure([ends(0), asyncio.sleep(60, 0), ends(3)]) == 3


async def test_processes_of_a_machine_take_the_time_of_day_of_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that is set back shifts no timeline of a process that starts later."""
    launches: list[Launch] = []

    async def fork(self: WarmProcess, launch: Launch, *fds: int) -> Forked:
        launches.append(launch)
        return Forked(1)

    monkeypatch.setattr(WarmProcess, "fork_actor", fork)
    host = FakeHost(tmp_path, "node-0", *EMULATED)
    host.clock_offset_ns = 123
    machine = MachineProcesses(host, SimpleNamespace(fd=-1), ROLES)  # type: ignore[arg-type]
    await machine.launch_actor("rollout-0", "rollout")
    await machine.close()
    (tmp_path / CONFIG_FILE).write_text(dump_config(host.config))
    for name, value in launches[0].environment.items():
        monkeypatch.setenv(name, value or "")
    assert real_host(tmp_path, "rollout-0", "rollout").clock_offset_ns == 123
