"""Run whose processes are killed one after the other.

Gives   run, which returns Passed; kill_one process; times of a kill, from the log
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Event
from laminar.names.roles import Role
from laminar.run.lock import holders
from tools.bench.kills.lost_answers import Log, Told, read_log, tells_of_loss
from tools.kit.real_run import BadRun, Run, check, read_json

REWARD_WORKER = "reward-worker"
ROLES = (*(str(role) for role in Role if role != Role.STRATEGY), REWARD_WORKER)
APART_S = 1.5
"""Longest delay of a kill after a step, so that kills hit different parts of the next step."""
LAST_PART = {
    Role.COORDINATOR: "noticed_s",
    Role.NODE: "joined_s",
    Role.STORE: "ready_s",
    Role.TRAINER: "ready_s",
}
"""Event that must precede the next step; steps reported before the kill may be logged later."""
READY = (ev.TrainerReady, ev.DataLoaded, ev.RelayReady, ev.ReplicaReady)


class Kill(NamedTuple):
    """A kill -9 of one process."""

    role: str
    name: str  #: name of the process
    pid: int
    at_ns: int  #: unix time


class Passed(NamedTuple):
    """Result of a run with kills."""

    kills: list[Kill]
    log: Log
    summary: dict[str, Any]


def kill_one(training: Run, role: str, chance: random.Random) -> Kill:
    """Kill a process of this role with SIGKILL, a random time after the next step."""
    training.until_step(training.step() + 1)
    time.sleep(chance.uniform(0, APART_S))
    training.until(lambda: bool(_processes(training, role)), f"there is a {role}")
    name, process = chance.choice(_processes(training, role))
    kill = Kill(role, name, process.pid, time.time_ns())
    process.send_signal(signal.SIGKILL)
    if role != REWARD_WORKER:
        training.until(
            lambda: _pids(training).get(name, 0) not in (0, process.pid), f"{name} is back"
        )
    training.until_step(training.step() + 1)
    return kill


def _processes(training: Run, role: str) -> list[tuple[str, psutil.Process]]:
    """Return the live processes of a role by their names in the log; none during a restart."""
    place = Role.ROLLOUT if role == REWARD_WORKER else role
    found = []
    for name, pid in sorted(_pids(training).items()):
        if name.partition("-")[0] == place and psutil.pid_exists(pid):
            process = psutil.Process(pid)
            found += [(name, p) for p in (process.children() if role != place else [process])]
    if role == REWARD_WORKER:
        return [(name, p) for name, p in found if "rewards.worker" in " ".join(p.cmdline())]
    return found


def _pids(training: Run) -> dict[str, int]:
    return {holder.name: holder.pid for holder in holders(training.run_dir)}


def run(
    run_dir: Path,
    config: str,
    settings: Sequence[str],
    roles: Sequence[str],
    seed: int,
    *,
    drained: bool = False,
) -> Passed:
    """Make a run in which a process of each role is killed in turn; raise BadRun if it fails.

    drained: whether to stop it when the last killed process is back, even if steps remain.
    """
    chance = random.Random(seed)
    training = Run(run_dir, config, settings)
    try:
        training.until_step(1)
        kills = [kill_one(training, role, chance) for role in roles]
        if drained:
            training.drain()
        if code := training.end():
            raise BadRun(f"exit code {code}: {training.said()}")
    finally:
        training.close()
    check(run_dir)
    return Passed(kills, read_log(run_dir), read_json(run_dir / "summary.json"))


def times(kill: Kill, events: Sequence[Told]) -> dict[str, float]:
    """Return the seconds from a kill to each stage of the recovery."""
    found: dict[str, float] = {}
    for at_ns, _, peer, event in events:
        passed = round((at_ns - kill.at_ns) / 1e9, 3)
        if passed < 0:
            continue
        if isinstance(event, ev.StepCompleted) and LAST_PART.get(kill.role, "") in ("", *found):
            return found | {"next_step_s": passed}
        if _tells_of(event, kill.name):
            found.setdefault("noticed_s", passed)
        if isinstance(event, ev.ActorJoined) and event.name == kill.name:
            found.setdefault("joined_s", passed)
        elif isinstance(event, READY) and peer == kill.name:
            found.setdefault("ready_s", passed)
        elif isinstance(event, ev.StepRepeated) and peer == kill.name:
            found["redone_s"] = passed
    return found


def _tells_of(event: Event, name: str) -> bool:
    if isinstance(event, ev.CoordinatorStarted):
        return name == COORDINATOR
    return tells_of_loss(event, name)
