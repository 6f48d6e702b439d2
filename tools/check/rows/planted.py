"""Row 5: the simulator finds planted bugs, each within a number of seeds.

Reads   tools/check/rows/planted.txt
Gives   ROWS; to hunt for single bugs: python -m tools.check.rows.planted [NAME ...]

Bugs in code that the simulator does not model, such as tokenizers, name the tests that find them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

from tools.check import patches
from tools.check.rows.base import Figure, Gate, Row

TABLE = Path(__file__).with_name("planted.txt")
SEEDS = 300
TIMEOUT_S = 900  #: time limit of all seeds of one bug
JOBS = 2
PYTEST = ("-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider")
TEST_FAILED = 1  #: exit code of pytest if a test failed
#: Bugs from every part of the product that are found quickly.
QUICK = (
    "lost_work_only_to_admitting_replicas",
    "closed_for_good_after_groups_per_version",
    "owed_publish_is_not_paid",
    "dropped_group_keeps_its_place",
    "nobody_acts_when_a_batch_waits",
    "commands_leave_before_the_sync",
    "server_takes_a_number_twice",
    "actor_forgets_its_commands",
    "outstanding_commands_are_not_repeated",
    "retry_goes_on_with_old_tokens",
)


class Found(NamedTuple):
    """Result of the hunt for one bug."""

    name: str
    seed: int  #: first seed that broke a promise; 0 if none did; 1 if a test found the bug
    broke: str  #: the broken promise or the tests; if not found, the reason

    def __str__(self) -> str:
        return f"{self.name}: " + (
            f"seed {self.seed}, {self.broke}" if self.seed else f"NOT FOUND: {self.broke}"
        )


def hunt(names: tuple[str, ...]) -> Iterator[Found]:
    """Hunt for each bug in separate processes and yield the results as they come."""
    known = patches.read(TABLE)
    with ThreadPool(JOBS) as pool:
        yield from pool.imap_unordered(_hunt_one, [known[name] for name in names])


def _hunt_one(patch: patches.Patch) -> Found:
    try:
        texts = patches.patched(patch)
    except patches.PatchError as error:
        return Found(patch.name, 0, str(error))
    if tests := [word for word in patch.words if word.startswith("tests/")]:
        return _by_tests(patch.name, texts, tests)
    with patches.copy(texts) as folder:
        seeds = [sys.executable, "-m", "tools.check.rows.seeds", "1", str(SEEDS), *patch.words]
        try:
            done = subprocess.run(
                seeds,
                cwd=folder,
                env=patches.environment(folder),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return Found(patch.name, 0, f"timed out after {TIMEOUT_S} s")
        if done.returncode:
            return Found(patch.name, 0, f"the seeds did not run: {done.stderr[-2_000:]}")
        found = json.loads(done.stdout)
        if Path(found["package"]).parent != folder:
            return Found(patch.name, 0, f"{found['package']} ran, not the copy with the bug")
    return Found(patch.name, found["seed"], found["broke"] or f"no broken promise in {SEEDS} seeds")


def _by_tests(name: str, texts: dict[str, str], tests: list[str]) -> Found:
    """Check that each named test fails with the bug; a missing test counts as not found."""
    with patches.copy(texts, patches.WHOLE) as folder:
        for test in tests:
            done = subprocess.run(
                [sys.executable, *PYTEST, test],
                cwd=folder,
                env=patches.environment(folder),
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            if done.returncode != TEST_FAILED:
                return Found(name, 0, f"{test}: {done.stdout[-500:]}")
    return Found(name, 1, " ".join(tests))


def planted_bugs(gate: Gate) -> Figure:
    names = QUICK if gate == "pr" else tuple(patches.read(TABLE))
    hunted = []
    for found in hunt(names):
        hunted.append(found)
        print(f"  {found}", file=sys.stderr, flush=True)
    caught = [found.seed for found in hunted if found.seed]
    reached = f"{len(caught)} of {len(names)} found, the last after {max(caught, default=0)} seeds"
    missed = [str(found) for found in hunted if not found.seed]
    return Figure(reached, not missed, "\n".join(missed))


ROWS = (
    Row(
        5,
        "the simulator finds planted bugs",
        "10, each within 300 seeds; of the change's mutants 85 % (tools/check/mutants.py)",
        "all (30 or more), each within 300 seeds",
        planted_bugs,
    ),
)

if __name__ == "__main__":
    for one in hunt(tuple(sys.argv[1:]) or tuple(patches.read(TABLE))):
        print(one, flush=True)
