"""Is a run worse for kill -9? Each role is killed while a run trains; how long until the next step?

Usage: python -m tools.bench.kills [-c configs/quickstart.toml] [--roles trainer,store,...]
           [--each 1] [--drained] [--seed 0] [--keep DIR] [key=value ...]
Prints one JSON line per kill, one for all killed replicas (tools/kit/lost_answers.py) and one for
the run, which --drained ends when the last of them is back, however many steps it still has; exits
1 when the run fails, a process does not come back, its books do not agree, its log does not replay
or its weights cannot be trained again from it.

The processes are those of a real run. Order, moment and which process of a role is hit are random.
The next one is hit when the one before is back, and a step is done.

noticed_s     from the kill until the coordinator heard of it, or was there again itself
joined_s      until the new process had joined
ready_s       until it could work: a trainer with its checkpoint loaded, a replica with an engine
redone_s      until a trainer had done again what lay after its checkpoint
next_step_s   until the next step was done, by a run that had all its parts again
sampled       tokens per second of all replicas from the kill until that step, as a share of those
              in the BEFORE_S seconds before the kill
lost, ...     of a killed replica: what became of its answers; tools/kit/lost_answers.py

Answers that are lost while weights change under them:

    python -m tools.bench.kills --roles rollout --each 50 --drained -c configs/emulated_4.toml \
        data.train_batch_size=4
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from laminar.analysis.log.timeline import EMPTY_STEPS, read_steps
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Event
from laminar.names.roles import Role
from laminar.run.directory import TIMELINE_DIR
from laminar.run.lock import holders
from tools.kit.lost_answers import (
    Log,
    Told,
    all_lost,
    lost_answers,
    read_log,
    tells_of_loss,
)
from tools.kit.real_run import BadRun, Run, check, read_json

REWARD_WORKER = "reward-worker"
ROLES = (*(str(role) for role in Role if role != Role.STRATEGY), REWARD_WORKER)
BEFORE_S = 20.0
APART_S = 1.5
"""A kill is at most so long after the step that it waits for: in another part of the next one."""
LAST_PART = {
    Role.COORDINATOR: "noticed_s",
    Role.NODE: "joined_s",
    Role.STORE: "ready_s",
    Role.TRAINER: "ready_s",
}
"""Of these the next step waits; what was reported before the kill may be in the log after it."""
READY = (ev.TrainerReady, ev.DataLoaded, ev.RelayReady, ev.ReplicaReady)


class Kill(NamedTuple):
    """One kill -9."""

    role: str
    name: str  #: of the process
    pid: int
    at_ns: int  #: unix time


class Passed(NamedTuple):
    """What a run with kills came to."""

    kills: list[Kill]
    log: Log
    summary: dict[str, Any]


def kill_one(training: Run, role: str, chance: random.Random) -> Kill:
    """SIGKILL for a process of this role, a random time after the next step."""
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
    """Those of the role that live, with what the log calls them: none while it is started."""
    place = Role.ROLLOUT if role == REWARD_WORKER else role
    found = []
    for name, pid in sorted(_pids(training).items()):
        if name.partition("-")[0] == place and psutil.pid_exists(pid):
            process = psutil.Process(pid)
            found += [(name, p) for p in (process.children() if role != place else [process])]
    if role == REWARD_WORKER:
        return [(name, p) for name, p in found if "reward_worker" in " ".join(p.cmdline())]
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
    """A run in which each of these is killed in turn; BadRun if anything is the worse for it.

    drained: it is ended when the last of them is back, however many steps it still has.
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
    """Seconds from the kill, by what happened then."""
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
        elif isinstance(event, ev.StepRedone) and peer == kill.name:
            found["redone_s"] = passed
    return found


def _tells_of(event: Event, name: str) -> bool:
    if isinstance(event, ev.CoordinatorStarted):
        return name == COORDINATOR
    return tells_of_loss(event, name)


def sampled(run_dir: Path, kill: Kill, seconds: float) -> float:
    """Tokens per second from the kill on, as a share of those before it; 0 if there were none."""
    names = {path.stem for path in (run_dir / TIMELINE_DIR).glob("*.steps")}
    steps = np.concatenate([EMPTY_STEPS, *(read_steps(run_dir, name) for name in sorted(names))])
    ends, tokens = steps[:, 1], steps[:, 3]

    def rate(begin_ns: int, end_ns: int) -> float:
        return float(tokens[(ends >= begin_ns) & (ends < end_ns)].sum()) / (end_ns - begin_ns)

    before = rate(kill.at_ns - round(BEFORE_S * 1e9), kill.at_ns)
    after = rate(kill.at_ns, kill.at_ns + round(seconds * 1e9))
    return round(after / before, 3) if before else 0.0


def figures(run_dir: Path, passed: Passed) -> Iterator[dict[str, Any]]:
    lost = []
    for kill in passed.kills:
        found: dict[str, Any] = dict(times(kill, passed.log.events))
        if until_s := found.get("next_step_s"):
            found["sampled"] = sampled(run_dir, kill, until_s)
        if kill.role == Role.ROLLOUT:
            lost.append(lost_answers(run_dir, passed.log, kill.name, kill.pid))
            found |= lost[-1]
        yield {"killed": kill.name, "role": kill.role, **found}
    if lost:
        yield {"name": "lost answers", **all_lost(passed.log, lost)}
    kept = ("steps", "eval_first", "eval_last", "trajectories_trained", "tokens_per_s")
    yield {"name": "run", **{key: passed.summary[key] for key in kept if key in passed.summary}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-c", "--config", default="configs/quickstart.toml")
    parser.add_argument("--roles", type=_roles, default=ROLES, metavar="ROLE,ROLE")
    parser.add_argument("--each", type=int, default=1, help="kills of each role")
    parser.add_argument("--drained", action="store_true", help="end with the last of them back")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="run directory to be left there")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    order = [role for role in args.roles for _ in range(args.each)]
    random.Random(args.seed).shuffle(order)
    with tempfile.TemporaryDirectory() as directory:
        run_dir = args.keep or Path(directory) / "kills"
        try:
            passed = run(
                run_dir.absolute(),
                args.config,
                args.settings,
                order,
                args.seed,
                drained=args.drained,
            )
        except BadRun as error:
            print(error, file=sys.stderr)
            return 1
        for line in figures(run_dir, passed):
            print(json.dumps(line), flush=True)
    return 0


def _roles(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    if not set(found) <= set(ROLES):
        raise argparse.ArgumentTypeError(f"{text!r}: roles are {', '.join(ROLES)}")
    return found


if __name__ == "__main__":
    sys.exit(main())
