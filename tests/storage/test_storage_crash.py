"""kill -9 in the middle of batches: what was acknowledged is there, and nothing is half there."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from laminar.storage import books
from tools.kit.store_samples import append, filled, finish, one, open_, trajectory_rows

ROOT = Path(__file__).parents[2]
SIBLINGS = 4
ROUNDS = 4


def write_for_ever(path: Path, placement: int) -> None:
    """Extend trajectories, some by a large chunk; print each count once it is acknowledged."""
    database = filled(path)
    names = [f"0.0.{sibling}" for sibling in range(SIBLINGS)]
    counts = {name: one(database, open_(name, placement)).num_tokens for name in names}
    turn = 0
    while True:
        turn += 1
        size = 9_000 if turn % 10 == 0 else 8
        tokens = tuple(range(size))
        batch = [append(name, tokens, counts[name], placement=placement) for name in names]
        replies = database.handle_batch(batch)
        for name, reply in zip(names, replies, strict=True):
            if reply.results[0].answer != "ok":
                raise SystemExit(reply.results[0].reason)
            counts[name] += size
        print(*(f"{name} {count}" for name, count in counts.items()), flush=True)


def _killed_run(path: Path, placement: int, lines: int) -> dict[str, int]:
    """The counts in the last whole line that a writer printed before it was killed."""
    command = [sys.executable, "-m", "tests.storage.test_storage_crash", str(path), str(placement)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        printed = "".join(process.stdout.readline() for _ in range(lines))
        process.kill()
        printed += process.stdout.read()
    assert process.returncode == -9
    whole = printed[: printed.rfind("\n")].splitlines()
    assert len(whole) >= lines
    return _counts(whole[-1])


def _counts(line: str) -> dict[str, int]:
    words = line.split()
    return {name: int(count) for name, count in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.process
def test_nothing_acknowledged_is_lost(tmp_path):
    path = tmp_path / "store.sqlite"
    chance = random.Random(7)
    for placement in range(1, ROUNDS + 1):
        acknowledged = _killed_run(path, placement, lines=chance.randint(3, 25))
        assert books.check_integrity(path) == []
        stored = {row.id: row.num_tokens for row in trajectory_rows(path)}
        assert len(acknowledged) == SIBLINGS
        assert all(stored[name] >= count for name, count in acknowledged.items())
        assert len(set(stored.values())) == 1, "a batch is half there"
    database = filled(path)
    for name, count in stored.items():
        one(database, open_(name, ROUNDS + 1))
        assert one(database, finish(name, count, placement=ROUNDS + 1)).answer == "ok"


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
