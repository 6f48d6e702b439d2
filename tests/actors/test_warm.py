"""A node's actors: forked from a warm process, children of the node, in nobody else's fate."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import structlog

from laminar.actors.system import warm_process
from laminar.actors.system.roles import Needs
from laminar.actors.system.warm import OWN_ENVIRONMENT, WarmProcess, prestart_child
from laminar.actors.system.warm_process import Launch
from laminar.config import dump_config, load_config
from laminar.names import exit_codes
from laminar.run.child_process import ChildProcess
from laminar.run.directory import CONFIG_FILE
from laminar.run.lock import RunLock, holders
from laminar.run.process_guard import adopt_orphans, reap_orphan
from laminar.run.secret import make_secret
from tests.actors.parts import MINIMAL, until

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36
READY_S = 60.0


@pytest.fixture(autouse=True)
def parent_of_orphans() -> Iterator[None]:
    """As a node is."""
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Machine:
    """What a node has: a run directory with its lock, the end of a pipe that keeps actors alive."""

    def __init__(self, run_dir: Path, modules: Path) -> None:
        run_dir.mkdir()
        (run_dir / CONFIG_FILE).write_text(dump_config(load_config([], MINIMAL)))
        make_secret(run_dir)
        self.run_dir, self.modules = run_dir, modules
        self.lock = RunLock.join(run_dir, "node-0")
        self.stdin, self.lifeline = os.pipe()
        self.warm: list[WarmProcess] = []
        self.actors: list[ChildProcess] = []

    def make_warm(self, *modules: str) -> WarmProcess:
        needs = Needs([*modules], {"PYTHONPATH": f"{ROOT}:{self.modules}"})
        self.warm.append(WarmProcess("torch", needs, structlog.get_logger(), ready_s=READY_S))
        return self.warm[-1]

    def module(self, name: str, text: str) -> str:
        (self.modules / f"{name}.py").write_text(text)
        return name

    async def fork(self, warm: WarmProcess, name: str = "relay-0") -> ChildProcess:
        launch = Launch(
            run_dir=str(self.run_dir),
            name=name,
            role="relay",
            node="node-0",
            address="127.0.0.1",
            environment={"LAMINAR_BOOT": "1"},
        )
        self.actors.append(await warm.fork_actor(launch, self.stdin, self.lock.fd))
        return self.actors[-1]

    async def until_it_works(self, actor: ChildProcess, name: str = "relay-0") -> None:
        """It has its card in the run directory, handles SIGTERM, and waits for a coordinator."""
        await until(lambda: (name, actor.pid) in [(h.name, h.pid) for h in holders(self.run_dir)])
        await until(lambda: catches(actor.pid, signal.SIGTERM))

    async def close(self) -> None:
        for actor in self.actors:
            actor.kill()
            await actor.wait()
        for warm in self.warm:
            await warm.close()
        self.lock.close()


def catches(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest_asyncio.fixture
async def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Machine]:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "modules").mkdir()
    made = Machine(tmp_path / "run", tmp_path / "modules")
    (made.run_dir / "logs" / "latest").mkdir(parents=True)
    yield made
    await made.close()


async def test_an_actor_is_a_child_of_its_node_which_sees_how_it_ends(machine: Machine) -> None:
    """By a signal, by its own code; and by the end of the node, which is that of its input."""
    warm = machine.make_warm()
    killed, ended = await machine.fork(warm), await machine.fork(warm, "relay-1")
    assert [psutil.Process(a.pid).ppid() for a in (killed, ended)] == [os.getpid()] * 2
    killed.kill()
    assert await killed.wait() == killed.returncode == -signal.SIGKILL
    await machine.until_it_works(ended, "relay-1")
    assert Path(f"/proc/{ended.pid}/comm").read_text() == "relay-1\n"
    ended.terminate()
    assert await ended.wait() == exit_codes.TERMINATED
    alone = await machine.fork(warm)
    await machine.until_it_works(alone)
    os.close(machine.lifeline)
    assert await alone.wait() == exit_codes.FAILED


async def test_a_warm_process_that_is_killed_costs_no_actor_and_is_replaced(
    machine: Machine,
) -> None:
    warm = machine.make_warm()
    first = await machine.fork(warm)
    await machine.until_it_works(first)
    pid = warm.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: warm.pid not in (0, pid))  # without being asked
    second = await machine.fork(warm, "relay-1")
    await machine.until_it_works(second, "relay-1")
    assert psutil.Process(first.pid).is_running() and first.returncode is None


THREADS = """
import threading, time
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""
CUDA = """
import sys, types
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True)
"""


@pytest.mark.parametrize(
    ("text", "note"), [(THREADS, "started threads"), (CUDA, "initialized CUDA")]
)
async def test_a_module_that_must_not_be_forked_is_imported_by_each_actor_itself(
    machine: Machine, text: str, note: str
) -> None:
    """A fork may wait for ever for a lock that another thread had, and cannot use such a CUDA."""
    warm = machine.make_warm(machine.module("busy_module", text))
    actor = await machine.fork(warm)
    assert f"importing busy_module has {note}" in warm.note
    assert len(os.listdir(f"/proc/{warm.pid}/task")) == 1
    await machine.until_it_works(actor)


async def test_what_cannot_be_imported_is_left_to_the_actor_that_needs_it(machine: Machine) -> None:
    """It says so in the run, as one that was started alone would."""
    with structlog.testing.capture_logs() as lines:
        warm = machine.make_warm("no_such_module")
        await machine.until_it_works(await machine.fork(warm))
    said = [line["missing"] for line in lines if line["event"] == "warm"]
    assert said == [["no_such_module: ModuleNotFoundError: No module named 'no_such_module'"]]


def test_an_actor_of_which_its_node_was_not_told_never_begins(tmp_path: Path) -> None:
    """Its warm process has died between two words; the successor forks another one."""
    ours, theirs = socket.socketpair()
    ours.close()
    launch = Launch(
        run_dir=str(tmp_path), name="x", role="relay", node="", address="", environment={}
    )
    actor = warm_process._Actor(launch, theirs, stdin=-1, lock_fd=-1)
    assert warm_process._run_actor(actor, os.getpid()) == exit_codes.FAILED


WITHOUT_CONFIG = """
import os, socket, sys
from pathlib import Path
from laminar.actors.system import warm_process
from laminar.actors.system.warm_process import Launch
from laminar.run.lock import RunLock

run = sys.argv[1]
node, actor = socket.socketpair()
node.send(b"1")
launch = Launch(run_dir=run, name="relay-0", role="relay", node="", address="", environment={})
lock_fd = os.dup(RunLock.join_idle_run(Path(run), "node-0").fd)
forked = warm_process._Actor(launch, actor, os.open(os.devnull, os.O_RDONLY), lock_fd)
sys.exit(warm_process._run_actor(forked, os.getppid()))
"""


def test_an_actor_whose_configuration_is_gone_says_so(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    words = [sys.executable, "-c", WITHOUT_CONFIG, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True)
    said = f"relay-0: {tmp_path} is not a run directory: it has no config.toml\n"
    assert (done.returncode, done.stderr) == (exit_codes.USER_ERROR, said)


async def test_a_launch_names_what_differs_from_the_nodes_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What only the warm process needs, its actors do not have."""
    monkeypatch.setattr(warm_process, "_take_name", lambda name: None)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    sent: list[Launch] = []

    async def ask(warm: WarmProcess, launch: Launch, fds: list[int]) -> Any:
        sent.append(launch)

    monkeypatch.setattr(WarmProcess, "ensure_started", lambda warm: None)
    monkeypatch.setattr(WarmProcess, "_request_fork", ask)
    environment: dict[str, str | None] = {"LAMINAR_BOOT": "7"}
    launch = Launch(
        run_dir="", name="x", role="relay", node="", address="", environment=environment
    )
    await WarmProcess("torch", Needs([], {}), None, ready_s=1).fork_actor(launch, 0, 0)
    for name, value in OWN_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LAMINAR_BOOT", "")
    warm_process._apply_launch(sent[0])
    found = {name: os.environ.get(name) for name in ("LAMINAR_BOOT", *OWN_ENVIRONMENT)}
    assert found == {
        "LAMINAR_BOOT": "7",
        "OPENBLAS_NUM_THREADS": "4",
        "PYTORCH_NVML_BASED_CUDA_CHECK": None,
    }


async def test_a_dead_child_that_nobody_knows_is_reaped_the_second_time_it_is_seen() -> None:
    while other := reap_orphan(set(), 0):  # of an earlier test in this process
        os.waitpid(other, 0)
    known, orphan = os.fork(), 0
    if known == 0:
        os._exit(3)
    assert reap_orphan({known}, 0) == 0
    child = ChildProcess(known)
    assert await child.wait() == 3
    orphan = os.fork()
    if orphan == 0:
        os._exit(0)
    await until(lambda: psutil.Process(orphan).status() == psutil.STATUS_ZOMBIE)
    assert reap_orphan(set(), 0) == orphan
    assert reap_orphan(set(), orphan) == 0
    assert not psutil.pid_exists(orphan)


async def test_a_signal_to_a_process_that_has_ended_is_no_error() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    child = ChildProcess(pid)
    child.kill()
    assert await asyncio.wait_for(child.wait(), 5) == 0
    child.kill()


def test_a_warm_process_ends_in_good_order_when_its_socket_is_closed() -> None:
    seed = prestart_child(Needs([], {}))
    seed.socket.close()
    assert os.waitstatus_to_exitcode(os.waitpid(seed.pid, 0)[1]) == exit_codes.COMPLETE


LEAVING = """
import atexit
from laminar.actors.system.warm_process import exit_process

class Module:
    def __del__(self):
        print("taken apart")

module = Module()
atexit.register(print, "logs are written")
print("last words")
exit_process(7)
"""


def test_an_actor_leaves_with_its_last_words_and_takes_nothing_apart() -> None:
    """All that it has imported goes with the process; what was to be written is written first."""
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "last words\nlogs are written\n"), done.stderr
