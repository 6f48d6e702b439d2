"""Run simulator seeds until one breaks a promise, to find a bug in a changed package.

Usage: python -m tools.check.rows.seeds FIRST LAST [FAULT ...] [KEY=VALUE ...]
Prints one JSON object: the seed and the promise that it broke (seed 0 if none did), and the package
that ran. With FAULT, only these faults occur, but often, in worlds with the settings KEY=VALUE; the
key "policy" chooses worlds in which work migrates often. Otherwise all of configs/sim_small.toml.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import laminar
from tools.kit.sim_worlds import PACKED, config
from tools.simulator.config import Choices, load
from tools.simulator.faults.faults import KINDS
from tools.simulator.run import run_seed

PACKAGE = Path(laminar.__file__).parent
EVENTS_MAX = 8_000  #: several times as many as a run with few kinds of faults needs


def main() -> None:
    first, last, *words = sys.argv[1:]
    swarm = _swarm(words) if words else load(PACKAGE / "configs" / "sim_small.toml", KINDS)
    gc.freeze()
    found = {"seed": 0, "broke": "", "package": str(PACKAGE)}
    for seed in range(int(first), int(last) + 1):
        outcome = run_seed(swarm, seed)
        if outcome.invariant:
            found |= {"seed": seed, "broke": outcome.invariant}
            break
    print(json.dumps(found))


def _swarm(words: list[str]) -> Choices:
    pairs = [word.partition("=") for word in words]
    faults = [name for name, equals, _ in pairs if not equals]
    changes = {key: int(v) if v.isdigit() else v for key, equals, v in pairs if equals}
    often = PACKED if "policy" in changes else {}
    return config(*faults, **{"events_max": EVENTS_MAX, **often, **changes})


if __name__ == "__main__":
    main()
