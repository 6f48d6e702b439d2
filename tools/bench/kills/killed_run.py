"""Run whose processes and machines are hit by faults, one after the other.

Gives   run, which returns Passed; Fault; draw_plan; times of a fault, from the log
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Event
from laminar.names.roles import ROLE_TABLE, Role
from laminar.run.directory import run_config
from laminar.run.lock import holders, try_lock
from laminar.weights.arena.arena import SHARED_MEMORY
from tools.bench.kills.lost_answers import Log, Told, read_log, tells_of_loss
from tools.kit.network import MachinesRun, Network
from tools.kit.real_run import POLL_S, BadRun, Run, check, read_json

REWARD_WORKER = "reward-worker"
MACHINE = "machine"
ROLES = (*(str(role) for role in Role if role != Role.STRATEGY), REWARD_WORKER)
KINDS = ("kill", "stop", "slow", "cut", "disk")
LEASES = (1.5, 5.0)  #: length of a stop or a cut
SLOW_LEASES = 3.0  #: length of a slowdown
SLOW_S = (0.01, 0.09)  #: a slow process runs for the first time, stands for the second
MACHINES = 3  #: of a run whose machines are cut off
DISK_FAULTS = ("write:signal=KILL", "fdatasync:error=EIO", "write:error=ENOSPC")
CALLS_MAX = 40  #: a disk fault hits one of so many next calls
DISK_S = 60.0  #: longest wait for that call
LEAVE_S = 10.0  #: longest time in which the last processes of a run leave
APART_S = 1.5
"""Longest delay of a fault after a step, so that faults hit different parts of the next step."""
LAST_PART = {
    Role.COORDINATOR: "noticed_s",
    Role.NODE: "joined_s",
    Role.STORE: "ready_s",
    Role.TRAINER: "ready_s",
}
"""Event that must precede the next step; steps reported before a kill may be logged later."""
READY = (ev.TrainerReady, ev.DataLoaded, ev.RelayReady, ev.ReplicaReady)


class Fault(NamedTuple):
    """A fault of one process or machine."""

    role: str
    name: str  #: name of the process or machine
    pid: int
    at_ns: int  #: unix time
    kind: str = "kill"
    lasted_s: float = 0.0


class Passed(NamedTuple):
    """Result of a run with faults."""

    kills: list[Fault]
    log: Log
    summary: dict[str, Any]


def draw_plan(
    order: Sequence[tuple[str, str]], rate: float, chance: random.Random
) -> list[tuple[int, str, str]]:
    """Return (step, kind, role) of each fault, for faults that hit this share of the steps."""
    steps = sorted(chance.sample(range(1, 1 + round(len(order) / rate)), len(order)))
    return [(step, *fault) for step, fault in zip(steps, order, strict=True)]


class Injector:
    """Source of the faults of one run."""

    def __init__(
        self, training: Run, chance: random.Random, network: Network | None = None
    ) -> None:
        self._training, self._chance, self._network = training, chance, network

    def strike(self, kind: str, role: str) -> Fault:
        """Hit a process of this role or a machine; return when it is back and a step is done."""
        training = self._training
        time.sleep(self._chance.uniform(0, APART_S))
        if kind == "cut":
            fault = self._cut()
        else:
            training.until(lambda: bool(_processes(training, role)), f"there is a {role}")
            name, process = self._chance.choice(_processes(training, role))
            fault = Fault(role, name, process.pid, time.time_ns(), kind)
            with suppress(psutil.NoSuchProcess):  # given up and replaced meanwhile
                getattr(self, f"_{kind}")(role, process)
            if kind == "disk":  # it waits for the system call
                fault = fault._replace(at_ns=time.time_ns())
            fault = fault._replace(lasted_s=round((time.time_ns() - fault.at_ns) / 1e9, 3))
            gone = process.pid if kind in ("kill", "disk") else 0
            if role != REWARD_WORKER:
                training.until(
                    lambda: find_pids(training.run_dir).get(name, 0) not in (0, gone),
                    f"{name} is back",
                )
        training.until_step(training.step() + 1)
        return fault

    def _kill(self, _: str, process: psutil.Process) -> None:
        process.kill()

    def _stop(self, role: str, process: psutil.Process) -> None:
        self._stand(process, self._lease_s(role) * self._chance.uniform(*LEASES))

    def _slow(self, _: str, process: psutil.Process) -> None:
        end_s = time.monotonic() + SLOW_LEASES * self._lease_s("")
        while time.monotonic() < end_s:
            self._stand(process, SLOW_S[1])
            time.sleep(SLOW_S[0])

    def _stand(self, process: psutil.Process, seconds: float) -> None:
        process.suspend()
        time.sleep(seconds)
        process.resume()

    def _disk(self, role: str, process: psutil.Process) -> None:
        """Make a system call of the process fail, or kill it there."""
        call, what = self._chance.choice(DISK_FAULTS).split(":")
        inject = f"inject={call}:{what}:when={self._chance.randint(1, CALLS_MAX)}"
        words = ["strace", "-qq", "-f", "-o", os.devnull, "-e", f"trace={call}", "-e", inject]
        with subprocess.Popen([*words, "-p", str(process.pid)], stderr=subprocess.DEVNULL) as trace:
            try:
                process.wait(DISK_S)
            except psutil.TimeoutExpired:
                raise BadRun(f"{role} survived {inject}") from None
            finally:
                trace.terminate()

    def _cut(self) -> Fault:
        assert self._network is not None
        machine = self._chance.choice(self._network.machines)
        at_ns = time.time_ns()
        self._network.cut(machine, cut=True)
        time.sleep(self._lease_s("") * self._chance.uniform(*LEASES))
        self._network.cut(machine, cut=False)
        lasted_s = round((time.time_ns() - at_ns) / 1e9, 3)
        return Fault(MACHINE, f"node-{machine}", 0, at_ns, "cut", lasted_s)

    def _lease_s(self, role: str) -> float:
        config = run_config(self._training.run_dir).coordinator
        is_long = role in ROLE_TABLE and ROLE_TABLE[role].long_lease
        return (config.node_lease_ms if is_long else config.lease_ms) / 1000


def _processes(training: Run, role: str) -> list[tuple[str, psutil.Process]]:
    """Return the live processes of a role by their names in the log; none during a restart."""
    place = Role.ROLLOUT if role == REWARD_WORKER else role
    found = []
    for name, pid in sorted(find_pids(training.run_dir).items()):
        with suppress(psutil.NoSuchProcess):
            if name.partition("-")[0] == place:
                process = psutil.Process(pid)
                found += [
                    (name, each)
                    for each in (process.children() if role != place else [process])
                    if role == place or "rewards.worker" in " ".join(each.cmdline())
                ]
    return found


def find_pids(run_dir: Path) -> dict[str, int]:
    return {holder.name: holder.pid for holder in holders(run_dir)}


def find_roles(training: Run) -> list[str]:
    """Return the roles of which a run has a process."""
    return [role for role in ROLES if _processes(training, role)]


def run(
    run_dir: Path,
    config: str,
    settings: Sequence[str],
    order: Sequence[tuple[str, str]],
    seed: int,
    *,
    drained: bool = False,
    rate: float = 1.0,
) -> Passed:
    """Make a run with a fault of each (kind, role) in turn; raise BadRun if it fails.

    Roles that the run does not have are left out.

    drained: whether to stop it when the last hit process is back, even if steps remain.
    rate: share of the steps that are hit.
    """
    if any(kind == "disk" for kind, _ in order) and not shutil.which("strace"):
        raise BadRun("disk faults need the command strace: install the package strace")
    chance = random.Random(seed)
    with ExitStack() as stack:
        network = None
        if any(kind == "cut" for kind, _ in order):
            network = stack.enter_context(Network(MACHINES))
            training: Run = MachinesRun(network, run_dir, "-c", config, *settings)
        else:
            training = Run(run_dir, config, settings)
        stack.enter_context(training)
        injector, kills = Injector(training, chance, network), []
        training.until_step(1)
        present = {*find_roles(training), MACHINE}
        order = [fault for fault in order if fault[1] in present]
        for step, kind, role in draw_plan(order, rate, chance):
            training.until_step(step)
            kills.append(injector.strike(kind, role))
        if drained:
            training.drain()
    check(run_dir)
    check_leftovers(run_dir)
    return Passed(kills, read_log(run_dir), read_json(run_dir / "summary.json"))


def check_leftovers(run_dir: Path) -> None:
    """Raise BadRun if a process, a lock or an arena of a run is left LEAVE_S after its end."""
    deadline = time.monotonic() + LEAVE_S
    while left := _find_leftovers(run_dir):
        if time.monotonic() > deadline:
            raise BadRun(f"left behind: {', '.join(left)}")
        time.sleep(POLL_S)


def _find_leftovers(run_dir: Path) -> list[str]:
    left = [f"{name} (pid {pid})" for name, pid in find_pids(run_dir).items()]
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or ()
        if str(run_dir) in words and any(word.startswith("laminar.") for word in words):
            left.append(" ".join(words))
    for path in run_dir.glob("*.lock"):
        with path.open("rb") as file:
            left += [] if try_lock(file.fileno(), fcntl.LOCK_SH) else [str(path)]
    return left + [str(path) for path in SHARED_MEMORY.glob(f"laminar-{run_dir.name}-*")]


def times(kill: Fault, events: Sequence[Told]) -> dict[str, float]:
    """Return the seconds from a kill to each stage of the recovery."""
    found: dict[str, float] = {}
    for at_ns, _, peer, event in events:
        passed = round((at_ns - kill.at_ns) / 1e9, 3)
        if passed < 0:
            continue
        last = LAST_PART.get(kill.role, "") if kill.kind in ("kill", "disk") else ""
        if isinstance(event, ev.StepCompleted) and last in ("", *found):
            found.setdefault("next_step_s", passed)
            if passed >= kill.lasted_s:
                return found
        if _tells_of(event, kill):
            found.setdefault("noticed_s", passed)
        if isinstance(event, ev.ActorJoined) and event.name == kill.name:
            found.setdefault("joined_s", passed)
        elif isinstance(event, READY) and peer == kill.name:
            found.setdefault("ready_s", passed)
        elif isinstance(event, ev.StepRepeated) and peer == kill.name:
            found["redone_s"] = passed
    return found


def _tells_of(event: Event, kill: Fault) -> bool:
    if isinstance(event, ev.CoordinatorStarted):
        return kill.name == COORDINATOR
    if kill.kind == "cut":
        return isinstance(event, ev.NodeSilent | ev.HeartbeatLost)
    return tells_of_loss(event, kill.name)
