"""Is a call of a tool made twice? kill -9 around calls, of each process that has to do with them.

Usage: python -m tools.bench.call_kills [--effects once pure] [--victims replica,worker,...]
           [--places rollout-noted,...] [--seed 0] [--keep DIR] [key=value ...]
Prints one JSON line per run; exits 1 when a run is the worse for its kills.

A real run of the calculator's model, with a learning rate of 0: what a trajectory samples then
depends on nothing but its name, and a run without kills says what it is to be. The tool appends
each of its calls to a file. A run has one victim, which is killed at each place in turn: the
process that reaches the place is stopped there, the victim killed, the process let go on.

places    fail points (laminar/names/failpoint_names.py), and two in the tool itself: tool-begun,
before it
          appends, and tool-done, after that
victims   replica; worker, the process from which a replica forks its sessions; session, one of
          these; store; coordinator; all, every process of the run, which is then resumed
kills     that were made; `missed`: places at which there was no victim
noted     calls that the store knows; `made`: lines of the file; `lost`: whose end nobody knows
dropped   trajectories that ended as env-lost or env-failed; `smaller`: groups trained without one
compared  trajectories that were scored in both runs; `differ`: in tokens, contexts or score
advantage largest difference of a step's smallest, mean and largest advantage, as the trainer had
          them, from those worked out here over the rows that it trained

A run is the worse when a call was made twice (by its arguments: as many times as the store knows,
at most, and where no end of them is lost exactly as often), a trajectory differs, one that was
dropped has a score, `pure` has dropped any, an advantage differs by more than 1e-6, its books do
not agree or its log does not replay.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from laminar.names.failpoint_names import POINTS
from laminar.names.roles import Role
from laminar.run.fail_points import STOP_VARIABLE
from laminar.run.lock import holders
from tools.bench.kills import POLL_S, WAIT_S, BadRun, Run, check

CONFIG = "configs/calculator.toml"
SMALL = (
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.save_freq=2",
    "data.train_batch_size=4",
    "data.val_size=0",
    "optim.lr=0.0",
    "recovery.max_restarts=100",
    "recovery.restart_window_s=1",  # no restart waits
    "recovery.coordinator_restart_ms=10",
)
STEPS_MAX = 400
REFERENCE_STEPS = 60
"""More than a run with kills takes: those end two steps after the last kill."""
BACK_S = 20.0  #: for a victim that is being started after the kill before
TOOL = ("tool-begun", "tool-done")
PLACES = (
    "rollout-finished",
    "rollout-score",
    "rollout-noted",
    *TOOL,
    "rollout-called",
    "store-commit",
    "store-committed",
    "rollout-rewarded",
    "coordinator-durable",
)
ONLY_ONCE = "rollout-noted"  #: calls that may be repeated are not noted before
TIMES = {"store": (30, 120), "coordinator": (40, 160), "rollout": (3, 20), "tool": (5, 60)}
"""The how manieth time a place is reached, from and to, by the beginning of its name."""
VICTIMS = ("replica", "worker", "session", "store", "coordinator", "all")
CONTEXTS = "SELECT trajectory_id, tokens FROM contexts ORDER BY trajectory_id, turn"
CHUNKS = (
    "SELECT trajectory_id, chunks.tokens FROM chunks JOIN trajectories ON id = trajectory_id AND "
    'trajectories.attempt = chunks.attempt ORDER BY trajectory_id, segment, "offset"'
)
LOST = ("env-lost", "env-failed")
CLOSE = 1e-6
CLASS = '''
import json
import os
import signal
from pathlib import Path

HERE = Path(__file__).parent
STOPS = {stops!r}


def reached(place):
    """Stand still here, in the call that it is to be."""
    log = HERE / "calls"
    calls = len(log.read_text().splitlines()) if log.exists() else 0
    if calls >= STOPS.get(place, calls + 1):
        try:
            with (HERE / place).open("x") as mark:
                mark.write(str(os.getpid()))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGSTOP)


class Counting:
    def reset(self, **row):
        pass

    def add(self, a: int, b: int) -> int:
        """Add two whole numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        reached("tool-begun")
        with (HERE / "calls").open("a") as log:
            log.write(json.dumps([a, b]) + "\\n")
        reached("tool-done")
        return a + b
'''


class Kills:
    """The kills of one run: who is killed where."""

    def __init__(self, home: Path, effects: str, plan: Mapping[str, str], seed: int) -> None:
        """`home`: of the tool's file, its calls and marks, and the run's directory."""
        chance = random.Random(seed)
        self.home, self.plan, self.chance = home, dict(plan), chance
        self.times = {place: chance.randint(*TIMES[place.partition("-")[0]]) for place in plan}
        self.kills, self.missed = 0, list[str]()
        home.mkdir(parents=True, exist_ok=True)
        tool = home / "counting.py"
        tool.write_text(CLASS.format(stops={p: n for p, n in self.times.items() if p in TOOL}))
        self.settings = (*SMALL, f"env.path={tool}", "env.name=Counting", f"env.effects={effects}")

    def run(self, settings: Sequence[str] = ()) -> Path:
        """The run's directory, once it has ended; BadRun."""
        armed = [f"{place}:{n}" for place, n in self.times.items() if place not in TOOL]
        os.environ[STOP_VARIABLE] = ",".join(armed)
        words = (*self.settings, *settings)
        try:
            training = Run(self.home / "run", CONFIG, words)
        finally:
            del os.environ[STOP_VARIABLE]
        try:
            self._until_all_are_met(training, armed)
            if self.plan:
                training.drain()
            if code := training.end():
                raise BadRun(f"exit code {code}: {training.said()}")
        finally:
            training.close()
        check(training.run_dir, weights=False)
        return training.run_dir

    def _until_all_are_met(self, training: Run, armed: list[str]) -> None:
        wanted, deadline = set(self.plan), time.monotonic() + WAIT_S
        while wanted:
            met = {place: pid for place in wanted if (pid := self._stopped_at(place))}
            for place, pid in met.items():
                wanted.remove(place)
                deadline = time.monotonic() + WAIT_S
                self._kill(training, place, pid)
                if self.plan[place] == "all":
                    self._resume(training, armed)
                    break
            if time.monotonic() > deadline:
                raise BadRun(f"{sorted(wanted)} not reached in {WAIT_S:.0f} s: {training.said()}")
            if training.train.poll() is not None:
                raise BadRun(f"the run ended before {sorted(wanted)}: {training.said()}")
            time.sleep(POLL_S)

    def _resume(self, training: Run, armed: list[str]) -> None:
        os.environ[STOP_VARIABLE] = ",".join(armed)
        try:
            training.resume()
        finally:
            del os.environ[STOP_VARIABLE]

    def _stopped_at(self, place: str) -> int:
        """The process that stands still there; 0: none does."""
        if place in TOOL:
            mark = self.home / place
        else:
            mark = self.home / "run" / f"failed-{place}-{self.times[place]}"
        pid = int(mark.read_text() or 0) if mark.exists() else 0
        with _may_be_gone():
            if pid and psutil.Process(pid).status() != psutil.STATUS_STOPPED:
                return 0
        return pid

    def _kill(self, training: Run, place: str, stopped: int) -> None:
        deadline = time.monotonic() + BACK_S
        while not (victims := list(self._victims(training, self.plan[place], stopped))):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        for pid in victims:
            with _may_be_gone():
                os.kill(pid, signal.SIGKILL)
        if self.plan[place] == "all":
            training.train.wait()
        with _may_be_gone():
            os.kill(stopped, signal.SIGCONT)
        if victims:
            self.kills += 1
        else:
            self.missed.append(place)

    def _victims(self, training: Run, victim: str, stopped: int) -> Iterator[int]:
        """Process ids; none where there is no such process now."""
        if victim == "all":
            yield from _everything(training)
            return
        found = {holder.name: holder.pid for holder in holders(training.run_dir)}
        if victim in ("store", "coordinator"):
            yield from (pid for name, pid in found.items() if name.partition("-")[0] == victim)
            return
        replicas = [pid for name, pid in found.items() if name.partition("-")[0] == Role.ROLLOUT]
        near = [pid for pid in replicas if pid in (stopped, *_ancestors(stopped))] or replicas
        candidates = list[int]()
        for pid in near:
            warm = _warm(pid)
            sessions = [p for one in warm for p in _sessions(one)]
            own = [stopped] if stopped in sessions else sessions
            candidates += {"replica": [pid], "worker": warm, "session": own}[victim]
        if candidates:
            yield self.chance.choice(candidates)


def _everything(training: Run) -> list[int]:
    """The processes of a run; the one that would start others again is the first."""
    with _may_be_gone():
        tree = psutil.Process(training.train.pid).children(recursive=True)
        pids = [training.train.pid, *(process.pid for process in tree)]
        return list(dict.fromkeys([*pids, *(h.pid for h in holders(training.run_dir))]))
    return []


def _warm(replica: int) -> list[int]:
    with _may_be_gone():
        children = psutil.Process(replica).children()
        return [p.pid for p in children if "session_process" in " ".join(p.cmdline())]
    return []


def _sessions(warm: int) -> list[int]:
    """The oldest child is the guard."""
    with _may_be_gone():
        children = sorted(psutil.Process(warm).children(), key=lambda p: p.create_time())
        return [process.pid for process in children[1:]]
    return []


def _ancestors(pid: int) -> list[int]:
    with _may_be_gone():
        return [process.pid for process in psutil.Process(pid).parents()]
    return []


class _may_be_gone:
    """What is done to a process that has ended is done."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, psutil.Error | ProcessLookupError)


class Stored:
    """What the store of a run that has ended says."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        with sqlite3.connect(run_dir / "store.sqlite") as database:
            self.rows = database.execute(
                "SELECT id, attempt, reward, end, end_reason, end_step, group_id, num_tokens "
                "FROM trajectories WHERE purpose = 'train'"
            ).fetchall()
            self.read = _by_name(database, CONTEXTS)
            self.sampled = _by_name(database, CHUNKS)
            self.calls = database.execute("SELECT arguments, status FROM effects").fetchall()

    @property
    def scored(self) -> dict[tuple[str, int], tuple[bytes, bytes, float]]:
        """Tokens, contexts and reward by trajectory and attempt."""
        return {
            (name, attempt): (self.sampled[name], self.read.get(name, b""), reward)
            for name, attempt, reward, *_ in self.rows
            if reward is not None
        }

    @property
    def dropped(self) -> list[tuple[str, float | None]]:
        """Those that the environment has lost, with their rewards."""
        return [(row[0], row[2]) for row in self.rows if row[4] in LOST]

    def groups(self) -> dict[int, dict[str, list[tuple[float, int]]]]:
        """(reward, tokens) of the trained rows, by step and group."""
        steps: dict[int, dict[str, list[tuple[float, int]]]] = {}
        for _, _, reward, end, _, step, group, tokens in self.rows:
            if end == "trained":
                steps.setdefault(step, {}).setdefault(group, []).append((reward, tokens))
        return steps

    def advantages(self) -> float:
        """The largest difference of a step's figures from what its rows give."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        figures = [m for line in lines if "critic/advantages/mean" in (m := json.loads(line))]
        metrics = {m["training/global_step"]: m for m in figures}
        worst, names = 0.0, ("min", "mean", "max")
        for step, groups in self.groups().items():
            tokens = np.concatenate([_per_token(rows) for rows in groups.values()])
            seen = [metrics[step + 1][f"critic/advantages/{name}"] for name in names]
            own = (tokens.min(), tokens.mean(), tokens.max())
            worst = max(worst, float(np.abs(np.subtract(seen, own)).max()))
        return worst


def _by_name(database: sqlite3.Connection, sql: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name, tokens in database.execute(sql):
        found[name] = found.get(name, b"") + tokens
    return found


def _per_token(rows: list[tuple[float, int]]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """GRPO over the rows that there are: no row stands for one that was dropped."""
    rewards, tokens = np.array([r for r, _ in rows]), [n for _, n in rows]
    if len(rows) < 2 or np.ptp(rewards) <= CLOSE:
        return np.repeat(np.zeros(len(rows)), tokens)
    return np.repeat((rewards - rewards.mean()) / (rewards.std(ddof=1) + CLOSE), tokens)


def twice(made: Iterable[str], calls: Sequence[tuple[str, str]]) -> list[str]:
    """Arguments with which more calls were made than the store knows of, or fewer than it has."""
    times = Counter(_key(*json.loads(line)) for line in made)
    known, done, lost = Counter[str](), Counter[str](), Counter[str]()
    for arguments, status in calls:
        given = json.loads(arguments)
        key = _key(given.get("a"), given.get("b"))
        known[key] += 1
        done[key] += status == "done"
        lost[key] += status == "lost"
    keys = sorted({*times, *known})
    return [k for k in keys if not done[k] <= times[k] <= done[k] + lost[k]]


def _key(a: object, b: object) -> str:
    return f"{a}+{b}"


def judged(kills: Kills, run_dir: Path, effects: str, reference: Stored) -> dict[str, Any]:
    """The figures of a run with kills, and what is wrong with them."""
    stored, should = Stored(run_dir), reference.scored
    made = (kills.home / "calls").read_text().splitlines()
    both = {key: value for key, value in stored.scored.items() if key in should}
    differ = sorted(name for name, value in both.items() if value != should[name])
    groups = [rows for of_step in stored.groups().values() for rows in of_step.values()]
    size = max(map(len, groups))
    found: dict[str, Any] = {
        "kills": kills.kills,
        "missed": kills.missed,
        "noted": len(stored.calls),
        "made": len(made),
        "lost": sum(status == "lost" for _, status in stored.calls),
        "dropped": len(stored.dropped),
        "smaller": sum(len(rows) < size for rows in groups),
        "compared": len(both),
        "differ": len(differ),
        "advantage": stored.advantages(),
    }
    problems = [f"{name} differs from the run without kills" for name in differ[:5]]
    could = min(len(stored.scored), len(should))  # the longer run has trajectories of its own
    if len(both) < could // 2:
        problems.append(f"{len(both)} of {could} trajectories could be compared")
    scored = [name for name, reward in stored.dropped if reward is not None]
    problems += [f"{name} was dropped and has a score" for name in scored]
    if effects == "once":
        problems += [f"calls of {k}" for k in twice(made, stored.calls)[:5]]
    elif stored.dropped:
        problems.append(f"{len(stored.dropped)} trajectories were dropped")
    if found["advantage"] > CLOSE:
        problems.append("advantages differ")
    return found | {"problems": problems}


def places_of(effects: str, places: Sequence[str] = PLACES) -> tuple[str, ...]:
    return tuple(p for p in places if effects == "once" or p != ONLY_ONCE)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--effects", nargs="+", choices=("once", "pure"), default=("once", "pure"))
    parser.add_argument("--victims", type=_names_of(VICTIMS), default=VICTIMS)
    parser.add_argument("--places", type=_names_of(PLACES), default=PLACES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory of the runs, to be left there")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    worse, kills = False, 0
    with tempfile.TemporaryDirectory() as directory:
        parent = (args.keep or Path(directory)).absolute()
        undisturbed = Kills(parent / "undisturbed", "pure", {}, args.seed)
        steps = f"trainer.total_training_steps={REFERENCE_STEPS}"
        reference = Stored(undisturbed.run((*args.settings, steps)))
        steps = f"trainer.total_training_steps={STEPS_MAX}"
        for effects in args.effects:
            for victim in args.victims:
                plan = dict.fromkeys(places_of(effects, args.places), victim)
                one = Kills(parent / f"{effects}-{victim}", effects, plan, args.seed)
                try:
                    run_dir = one.run((*args.settings, steps))
                    found = judged(one, run_dir, effects, reference)
                except BadRun as error:
                    found = {"kills": one.kills, "problems": [str(error)]}
                print(json.dumps({"effects": effects, "victim": victim, **found}), flush=True)
                worse |= bool(found["problems"])
                kills += one.kills
    print(json.dumps({"kills": kills, "worse": worse}))
    return int(worse)


def _names_of(known: Sequence[str]) -> Any:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: known are {', '.join(known)}")
        return found

    return parse


assert set(PLACES) <= {*POINTS, *TOOL}

if __name__ == "__main__":
    sys.exit(main())
