"""Row 15: machines of a run are cut off, in network namespaces; each cut costs its share.

Reads   nothing
Gives   ROWS; so many rounds of cuts: python -m tools.check.rows.cuts ROUNDS

What a cut may cost, and what is held against the log: tools/bench/cuts.py. As root, on Linux.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tools.bench import cuts
from tools.bench.kills import BadRun
from tools.check.rows.base import Figure, Gate, Row

ROUNDS: dict[Gate, int] = {"pr": 1, "release": 5}


def run(gate: Gate) -> Figure:
    return cut(ROUNDS[gate])


def cut(rounds: int) -> Figure:
    with tempfile.TemporaryDirectory() as directory:
        try:
            *found, _ = cuts.run(Path(directory) / "run", (), rounds)
        except BadRun as error:
            return Figure(f"not {rounds} rounds", False, str(error))
    started = sum(sum(one["started"].values()) for one in found)
    return Figure(
        f"{len(found)} cuts; {started} processes of machines that were cut off started again, each "
        "once, 0 others; 0 answers quarantined, 0 restarts counted; books agree, log replays",
        True,
    )


ROWS = (
    Row(
        15,
        "a machine that is cut off costs its share",
        "6: each machine, one way, flapping",
        "30, 0 lost, 0 double",
        run,
    ),
)

if __name__ == "__main__":
    figure = cut(int(sys.argv[1]))
    print(figure.reached, figure.detail, sep="\n")
    sys.exit(not figure.passed)
