"""What would notice a mistake in a change: mutants of its lines, and the checks that kill them.

Usage: python -m tools.mutants BASE [--count 40] [--seed 0] [--jobs 2] [--files PART ...]
                               [--seeds 20] [--least 0]
Reads   what differs in laminar/ since the git revision BASE
Prints  a line per mutant: which check kills it, or that it lives, with what was changed; at last
        the share of each check. Exits 1 if fewer than --least percent are killed.

A mutant lives in a copy of the repository (tools/patches.py). The checks, the quicker first: the
tests that use the file, those nearest by imports; random worlds; seeds of the simulator. A check
that has no end in its time counts as one that fails. Tests that fail without a mutant are named and
left out.
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

from tools import patches
from tools.imports import Imports
from tools.mutate import Mutation, mutations

ROOT = patches.ROOT
TESTS_MAX = 12  #: files, the nearest ones
TIMEOUT_S = 300  #: of one check of one mutant
WORLDS = """
from tests.kit.random_worlds import check_end, random_world
for seed in range(40):
    check_end(random_world(seed).run(5_000))
"""
NO_TESTS = 5  #: pytest found none that may run here
PYTEST = (
    "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout=120", "-m",
    "not process and not long and not vllm",
)  # fmt: skip


class Mutant(NamedTuple):
    """One change of one file."""

    path: str
    mutation: Mutation

    def text(self) -> str:
        return self.mutation.applied((ROOT / self.path).read_text())

    def __str__(self) -> str:
        texts = (ROOT / self.path).read_text(), self.text()
        changed = difflib.unified_diff(*(text.splitlines() for text in texts), n=0)
        shown = [f"    {line}" for line in changed if line[:2] not in ("--", "++", "@@")]
        return "\n".join([f"{self.path}:{self.mutation.line}  {self.mutation.what}", *shown[:6]])


class Check(NamedTuple):
    """A command of Python that fails where something is wrong."""

    name: str
    arguments: tuple[str, ...]


class Checks:
    """Which checks look at which file."""

    def __init__(self, seeds: int) -> None:
        self._imports = Imports()
        self._seeds = seeds
        self.broken: set[str] = set()  #: tests that fail without a mutant

    def tests(self, path: str) -> tuple[str, ...]:
        """The nearest files of tests; of equals those of the same folder or name."""
        folder, stem = Path(path).parent.name, Path(path).stem
        found = {
            user: (distance, folder not in user.split("/"), stem.strip("_") not in user)
            for user, distance in self._imports.distances(path).items()
            if Path(user).name.startswith("test_") and user not in self.broken
        }
        return tuple(sorted(found, key=lambda user: (found[user], user))[:TESTS_MAX])

    def of(self, path: str) -> Iterator[Check]:
        users = self._imports.distances(path)
        if tests := self.tests(path):
            yield Check("tests", (*PYTEST, *tests))
        if "tests/kit/random_worlds.py" in users:
            yield Check("random worlds", ("-c", WORLDS))
        if "laminar/sim/run.py" in users:
            yield Check("seeds", ("-m", "tools.rows.seeds", "1", str(self._seeds)))


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
    checks = Checks(arguments.seeds)
    _leave_out_broken(checks, {mutant.path for mutant in mutants})
    killed = Counter[str]()
    lives: list[Mutant] = []
    with ThreadPool(arguments.jobs) as pool:
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
    parser.add_argument("base", help="git revision; what differs from it is mutated")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--files", nargs="*", default=[], help="only paths that have this in them")
    parser.add_argument("--seeds", type=int, default=20, help="of the simulator")
    parser.add_argument("--least", type=float, default=0.0, help="percent that must be killed")
    return parser.parse_args()


def _changed_lines(base: str) -> dict[str, set[int]]:
    """Lines of the files as they are, by path; what git does not know yet is left out."""
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
    """First a line, then what becomes of it: a line of many parts is not drawn more often."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path, lines in sorted(wanted.items()):
        for mutation in mutations((ROOT / path).read_text(), lines):
            by_line.setdefault((path, mutation.line), []).append(Mutant(path, mutation))
    places = sorted(by_line)
    chance.shuffle(places)
    return [chance.choice(by_line[place]) for place in places[:count]]


def _leave_out_broken(checks: Checks, paths: set[str]) -> None:
    """One run of all tests that will be asked, without a mutant."""
    tests = sorted({test for path in paths for test in checks.tests(path)})
    if not tests:
        return
    with patches.copy({}, patches.WHOLE) as folder:
        arguments = [argument for argument in PYTEST if argument != "-x"]
        done = _python(folder, (*arguments, "-rfE", *tests), 3 * TIMEOUT_S)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            checks.broken.add(line.split()[1].split("::")[0])
    if checks.broken:
        print(f"left out, for they fail without a mutant: {', '.join(sorted(checks.broken))}")


def _try(checks: Checks, mutant: Mutant) -> tuple[Mutant, str, str]:
    """The mutant, what kills it (empty: nothing does), and how."""
    with patches.copy({mutant.path: mutant.text()}, patches.WHOLE) as folder:
        for check in checks.of(mutant.path):
            try:
                done = _python(folder, check.arguments, TIMEOUT_S)
            except subprocess.TimeoutExpired:
                return mutant, check.name, f"{mutant.path}:{mutant.mutation.line}  no end"
            broke = re.search(r'"broke": "([^"]+)"', done.stdout)
            if broke or done.returncode not in (0, NO_TESTS):
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                by = broke[1] if broke else failed[1] if failed else done.stderr.strip()[-200:]
                where = f"{mutant.path}:{mutant.mutation.line}"
                return mutant, check.name, f"{where}  {mutant.mutation.what}: {by}"
    return mutant, "", ""


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
