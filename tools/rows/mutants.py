"""Row 5: the simulator finds planted bugs, each within a number of seeds.

Reads   configs/sim_small.toml
Gives   ROWS; `seeds_until_found` for one bug: python -m tools.rows.mutants [NAME ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path

from laminar.sim.config import load
from laminar.sim.faults.faults import KINDS
from laminar.sim.run import run_seed
from tools.rows.base import Figure, Gate, Row
from tools.rows.planted import PLANTED, Planter
from tools.rows.planted_forks import FORK_BUGS
from tools.rows.planted_handover import HANDOVER_BUGS
from tools.rows.planted_node import NODE_BUGS
from tools.rows.planted_redo import REDO_BUGS
from tools.rows.planted_relays import RELAY_BUGS
from tools.rows.planted_store import STORE_BUGS
from tools.rows.planted_trainer import TRAINER_BUGS

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "sim_small.toml"
SEEDS = 300
JOBS = 2
BUGS: dict[str, Callable[[Planter], None]] = {
    plant.__name__: plant
    for plant in (
        *PLANTED,
        *NODE_BUGS,
        *STORE_BUGS,
        *TRAINER_BUGS,
        *RELAY_BUGS,
        *HANDOVER_BUGS,
        *REDO_BUGS,
        *FORK_BUGS,
    )
}
#: One from each part of the product, quickly found.
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


def seeds_until_found(name: str) -> tuple[str, int, str]:
    """(bug, seeds until a run broke, the promise that it broke); 0 seeds: not found."""
    config = load(CONFIG, KINDS)
    with Planter() as planter:
        BUGS[name](planter)
        for seed in range(1, SEEDS + 1):
            outcome = run_seed(config, seed)
            if outcome.invariant:
                return name, seed, outcome.invariant
    return name, 0, ""


def hunt(names: tuple[str, ...]) -> Iterator[tuple[str, int, str]]:
    """One bug to a process: nothing of it is left behind."""
    with get_context("spawn").Pool(JOBS, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(seeds_until_found, names)


def planted_bugs(gate: Gate) -> Figure:
    names = QUICK if gate == "pr" else tuple(BUGS)
    found: dict[str, tuple[int, str]] = {}
    for name, seeds, invariant in hunt(names):
        found[name] = seeds, invariant
        print(f"  {name}: {_told(seeds, invariant)}", file=sys.stderr, flush=True)
    caught = [seeds for seeds, _ in found.values() if seeds]
    reached = f"{len(caught)} of {len(names)} found, the last after {max(caught, default=0)} seeds"
    missed = [name for name, (seeds, _) in found.items() if not seeds]
    return Figure(reached, not missed, "\n".join(f"not found: {name}" for name in missed))


def _told(seeds: int, invariant: str) -> str:
    return f"seed {seeds}, {invariant}" if seeds else f"NOT FOUND in {SEEDS} seeds"


ROWS = (
    Row(
        5,
        "the simulator finds planted bugs",
        "10, each within 300 seeds",
        "all (30 or more), each within 300 seeds",
        planted_bugs,
    ),
)

if __name__ == "__main__":
    for bug, seeds, invariant in hunt(tuple(sys.argv[1:]) or tuple(BUGS)):
        print(f"{bug}: {_told(seeds, invariant)}", flush=True)
