"""Kill processes around calls of a tool, and compare the run with one that nobody disturbed.

Gives   Kills: a run in which one kind of process is killed at each place in turn; Stored;
        problems_of a run with kills

The runs are of the calculator's model, with a learning rate of 0: what a trajectory samples then
depends on its name only, so a run without kills says what it is to be. The tool appends each of its
calls to a file. The process that reaches a place is stopped there, the victim is killed, and the
stopped process continues.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from laminar.names.failpoint_names import POINTS
from laminar.run.fail_points import STOP_VARIABLE
from laminar.run.lock import holders
from tools.kit.real_run import POLL_S, WAIT_S, BadRun, Run, check

CONFIG = "configs/recipes/calculator/run.toml"
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
REFERENCE_STEPS, STEPS_MAX = 60, 400
"""A run with kills ends two steps after the last kill, before the reference does."""
BACK_S = 20.0  #: for a victim that is being started after the kill before
TOOL = ("tool-done",)
PLACES = (
    "rollout-finished",
    "rollout-score",
    "rollout-noted",
    *TOOL,
    "rollout-called",
    "rollout-rewarded",
    "store-commit",
    "coordinator-durable",
)
"""Fail points (laminar/names/failpoint_names.py), and one in the tool itself."""
TIMES = {"store": (30, 120), "coordinator": (40, 160), "rollout": (3, 20), "tool": (5, 60)}
"""The how manieth time a place is reached, from and to, by the beginning of its name."""
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
        with (HERE / "calls").open("a") as log:
            log.write(json.dumps([a, b]) + "\\n")
        reached("tool-done")
        return a + b
'''


class Kills:
    """The kills of one run."""

    def __init__(self, home: Path, effects: str, victim: str = "") -> None:
        """`home`: of the tool's file, its calls and marks, and the run's directory.

        `victim`: the role of the processes that are killed; empty: nothing is killed.
        """
        self.home, self.victim, self.chance = home, victim, random.Random(0)
        places = PLACES if victim else ()
        self.times = {p: self.chance.randint(*TIMES[p.partition("-")[0]]) for p in places}
        self.kills, self.missed = 0, list[str]()
        home.mkdir(parents=True, exist_ok=True)
        tool = home / "counting.py"
        tool.write_text(CLASS.format(stops={p: n for p, n in self.times.items() if p in TOOL}))
        steps = STEPS_MAX if victim else REFERENCE_STEPS
        self.settings = (
            *SMALL, f"env.path={tool}", "env.name=Counting", f"env.call_semantics={effects}",
            f"trainer.total_training_steps={steps}",
        )  # fmt: skip

    def run(self) -> Path:
        """The run's directory, once it has ended; BadRun."""
        armed = [f"{place}:{n}" for place, n in self.times.items() if place not in TOOL]
        os.environ[STOP_VARIABLE] = ",".join(armed)
        try:
            training = Run(self.home / "run", CONFIG, self.settings)
        finally:
            del os.environ[STOP_VARIABLE]
        try:
            self._until_all_are_met(training)
            if self.victim:
                training.drain()
            if code := training.end():
                raise BadRun(f"exit code {code}: {training.said()}")
        finally:
            training.close()
        check(training.run_dir, weights=False)
        return training.run_dir

    def _until_all_are_met(self, training: Run) -> None:
        wanted, deadline = set(self.times), time.monotonic() + WAIT_S
        while wanted:
            met = {place: pid for place in wanted if (pid := self._stopped_at(place))}
            for place, pid in met.items():
                wanted.remove(place)
                deadline = time.monotonic() + WAIT_S
                self._kill(training, place, pid)
            if time.monotonic() > deadline:
                raise BadRun(f"{sorted(wanted)} not reached in {WAIT_S:.0f} s: {training.said()}")
            if training.train.poll() is not None:
                raise BadRun(f"the run ended before {sorted(wanted)}: {training.said()}")
            time.sleep(POLL_S)

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
        while not (victims := self._victims(training, stopped)):
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        with _may_be_gone():
            if victims:
                os.kill(self.chance.choice(victims), signal.SIGKILL)
        with _may_be_gone():
            os.kill(stopped, signal.SIGCONT)
        if victims:
            self.kills += 1
        else:
            self.missed.append(place)

    def _victims(self, training: Run, stopped: int) -> list[int]:
        """Process ids; none where there is no such process now."""
        held = holders(training.run_dir)
        pids = [h.pid for h in held if h.name.partition("-")[0] == self.victim]
        return [pid for pid in pids if pid in (stopped, *_ancestors(stopped))] or pids


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

    @property
    def lost(self) -> int:
        """Calls whose end nobody knows."""
        return sum(status == "lost" for _, status in self.calls)

    @property
    def smaller(self) -> int:
        """Groups that were trained without one of their trajectories."""
        sizes = [len(rows) for of_step in self.groups().values() for rows in of_step.values()]
        return sum(size < max(sizes) for size in sizes)

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


def miscounted(made: Iterable[str], calls: Sequence[tuple[str, str]]) -> list[str]:
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


def problems_of(kills: Kills, stored: Stored, reference: Stored) -> list[str]:
    """What is wrong with a run with kills whose calls are to be made once.

    A call was made twice (by its arguments: as many times as the store knows, at most, and where no
    end of them is lost exactly as often), a trajectory that was scored in both runs differs in
    tokens, contexts or score, one that was dropped has a score, or the smallest, mean or largest
    advantage of a step is another than that of the rows that it trained.
    """
    should, made = reference.scored, (kills.home / "calls").read_text().splitlines()
    both = {key: value for key, value in stored.scored.items() if key in should}
    differ = sorted(name for name, value in both.items() if value != should[name])
    problems = [f"{name} differs from the run without kills" for name in differ[:5]]
    could = min(len(stored.scored), len(should))  # the longer run has trajectories of its own
    if len(both) < could // 8:  # sessions of a killed host begin again, with other numbers
        problems.append(f"{len(both)} of {could} trajectories could be compared")
    scored = [name for name, reward in stored.dropped if reward is not None]
    problems += [f"{name} was dropped and has a score" for name in scored]
    wrong = miscounted(made, stored.calls)
    problems += [f"calls of {key} were not made as often as the store says" for key in wrong[:5]]
    if stored.advantages() > CLOSE:
        problems.append("advantages differ")
    return problems


assert set(PLACES) <= {*POINTS, *TOOL}
