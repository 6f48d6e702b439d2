"""Mutation testing of a change: mutate its lines and report which checks kill the mutants.

Usage: python -m tools.check.mutants BASE [--count 40] [--seed 0] [--jobs 2] [--files PART ...]
                               [--seeds 20] [--least 0]
Reads   the differences in laminar/ since the git revision BASE
Prints  a line per mutant: the check that kills it, or that it survives, with the mutated lines;
        finally the share of each check. Exits 1 if fewer than --least percent are killed.

Each mutant runs in a copy of the repository (tools/check/patches.py). The checks, fastest first:
the tests nearest to the file by imports; random worlds; seeds of the simulator; real runs, for
code that only whole processes execute. A check that times out counts as a failure. A test that
also fails without the mutant is reported and skipped.
"""

from __future__ import annotations

import argparse
import difflib
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

from tools.check import patches
from tools.check.imports import Imports
from tools.check.mutate import Mutation, mutations

ROOT = patches.ROOT
TESTS_MAX = 12  #: test files per mutant, nearest first
TIMEOUT_S = 300  #: time limit of one check of one mutant
WORLDS = """
from tools.kit.random_worlds import check_end, random_world
for seed in range(40):
    check_end(random_world(seed).run(5_000))
"""
NO_TESTS = 5  #: exit code of pytest if it collected no tests
PYTEST = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=120", "-m")
PURE = (*PYTEST, "not process and not long and not vllm")
RUNS = (
    *PYTEST, "not long and not vllm", "tests/run/test_finished_run.py",
    "tests/run/test_emulated_run.py",
)  # fmt: skip


class Mutant(NamedTuple):
    """A file with one mutation."""

    path: str
    source: str
    mutation: Mutation

    def text(self) -> str:
        return self.mutation.applied(self.source)

    def __str__(self) -> str:
        changed = difflib.unified_diff(self.source.splitlines(), self.text().splitlines(), n=0)
        shown = [f"    {line}" for line in changed if line[:2] not in ("--", "++", "@@")]
        return "\n".join([f"{self.path}:{self.mutation.line}  {self.mutation.what}", *shown[:6]])


class Check(NamedTuple):
    """Arguments of a Python command that exits with an error if it finds a fault."""

    name: str
    arguments: tuple[str, ...]


class Checks:
    """Selection of the checks for each file."""

    def __init__(self, root: Path, seeds: int) -> None:
        """Read the imports of `root`, a copy, so that the repository may change meanwhile."""
        self.root, self._seeds = root, seeds
        self._imports = Imports(root)
        self.broken: set[str] = set()  #: test files that fail without a mutant
        self._sound: set[str] = set()  #: tests that pass without a mutant

    def tests(self, path: str) -> tuple[str, ...]:
        """Return the nearest test files; at equal distance, prefer the same folder or name."""
        folder, stem = Path(path).parent.name, Path(path).stem
        found = {
            user: (distance, folder not in user.split("/"), stem.strip("_") not in user)
            for user, distance in self._imports.distances(path).items()
            if Path(user).name.startswith("test_") and user not in self.broken
        }
        return tuple(sorted(found, key=lambda user: (found[user], user))[:TESTS_MAX])

    def fails_anyway(self, test: str) -> bool:
        """Return whether a test fails without the mutant too; exclude its file if it does."""
        file = test.partition("::")[0]
        if not file.startswith("tests/") or test in self._sound:
            return False
        with patches.copy({}, patches.WHOLE, self.root) as folder:
            if not _failure(folder, Check("tests", (*PURE, test))):
                self._sound.add(test)
                return False
        if file not in self.broken:
            self.broken.add(file)
            print(f"skipped, because it fails without a mutant: {test}", flush=True)
        return True

    def of(self, path: str) -> Iterator[Check]:
        users = self._imports.distances(path)
        if tests := self.tests(path):
            yield Check("tests", (*PURE, *tests))
        if "tools/kit/random_worlds.py" in users:
            yield Check("random worlds", ("-c", WORLDS))
        if "tools/simulator/run.py" in users:
            yield Check("seeds", ("-m", "tools.check.rows.seeds", "1", str(self._seeds)))
        yield Check("real runs", RUNS)


def main() -> int:
    arguments = _arguments()
    changed = _changed_lines(arguments.base)
    wanted = {
        path: lines
        for path, lines in changed.items()
        if not arguments.files or any(part in path for part in arguments.files)
    }
    mutants = _drawn(wanted, arguments.count, random.Random(arguments.seed))
    print(f"{len(mutants)} mutants of {sum(map(len, wanted.values()))} lines", flush=True)
    killed = Counter[str]()
    lives: list[Mutant] = []
    with patches.copy({}, patches.WHOLE) as root, ThreadPool(arguments.jobs) as pool:
        checks = Checks(root, arguments.seeds)
        for mutant, killer, said in pool.imap_unordered(partial(_try, checks), mutants):
            print(f"{killer or 'LIVES':>13}  {said or mutant}", flush=True)
            killed[killer] += 1
            lives += [] if killer else [mutant]
    num_killed = len(mutants) - len(lives)
    share = 100 * num_killed / max(len(mutants), 1)
    by = ", ".join(f"{name} {count}" for name, count in killed.most_common() if name)
    print(f"\n{num_killed} of {len(mutants)} killed ({share:.0f} %): {by}")
    return 1 if share < arguments.least else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("base", help="git revision; changed lines are mutated")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="seed of the random choice of mutants")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--files", nargs="*", default=[], help="only paths with any of these parts")
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the simulator per mutant")
    parser.add_argument("--least", type=float, default=0.0, help="percentage that must be killed")
    return parser.parse_args()


def _changed_lines(base: str) -> dict[str, set[int]]:
    """Return the changed line numbers by path, in the working tree; skip untracked files."""
    diff = subprocess.check_output(
        ["git", "diff", "-U0", "-M", base, "--", "laminar"], cwd=ROOT, text=True
    )
    found: dict[str, set[int]] = {}
    path = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            if path.endswith(".py") and (ROOT / path).exists():
                found.setdefault(path, set()).update(range(first, first + count))
    return {path: lines for path, lines in found.items() if lines}


def _drawn(wanted: dict[str, set[int]], count: int, chance: random.Random) -> list[Mutant]:
    """Draw lines first, then a mutation of each, so that long lines are not drawn more often."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path, lines in sorted(wanted.items()):
        source = (ROOT / path).read_text()
        for mutation in mutations(source, lines):
            by_line.setdefault((path, mutation.line), []).append(Mutant(path, source, mutation))
    places = sorted(by_line)
    chance.shuffle(places)
    return [chance.choice(by_line[place]) for place in places[:count]]


def _try(checks: Checks, mutant: Mutant) -> tuple[Mutant, str, str]:
    """Return the mutant, the check that kills it (empty if it survives), and the failure."""
    where = f"{mutant.path}:{mutant.mutation.line}  {mutant.mutation.what}"
    with patches.copy({mutant.path: mutant.text()}, patches.WHOLE, checks.root) as folder:
        for check in checks.of(mutant.path):
            failure = _failure(folder, check)
            while failure and check.name == "tests" and checks.fails_anyway(failure):
                check = Check("tests", (*PURE, *checks.tests(mutant.path)))
                failure = _failure(folder, check)
            if failure:
                return mutant, check.name, f"{where}: {failure}"
    return mutant, "", ""


def _failure(folder: Path, check: Check) -> str:
    """Return how the check fails, or an empty string if it passes."""
    try:
        done = _python(folder, check.arguments, TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "timed out"
    broke = re.search(r'"broke": "([^"]+)"', done.stdout)
    if broke is not None:
        return broke[1]
    if done.returncode in (0, NO_TESTS):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else done.stderr.strip()[-200:] or "failed"


def _python(
    folder: Path, arguments: tuple[str, ...] | list[str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=patches.environment(folder),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main())
