"""Recovery of a run from faults: each role is hit during training and must come back.

Usage: python -m tools.bench.kills [-c configs/recipes/words/run.toml] [--roles trainer,store,...]
           [--kinds kill,stop,slow,cut,disk] [--each 1] [--rate 1] [--drained] [--seed 0]
           [--keep DIR] [key=value ...]
Prints one JSON line per fault, one for all killed replicas (lost_answers.py) and one for the run,
which --drained stops when the last hit process is back, even if steps remain; exits 1 if the run
fails, a process does not come back, the books do not agree, the log does not replay, the weights
cannot be retrained from it, or a process, a lock or shared memory is left.

The processes are those of a real run. The order, the moment and the process of a role are random;
--rate is the share of the steps that are hit. The next process is hit when the one before is back
and a step is done.

kill   SIGKILL
stop   SIGSTOP for 1.5 to 5 leases of the role, then SIGCONT
slow   a tenth of the speed, for three times coordinator.lease_ms
cut    a machine off the network, for 1.5 to 5 times coordinator.lease_ms: the run has three, in
       network namespaces (as root, Linux)
disk   a write or sync of the coordinator's process fails (EIO, ENOSPC) or is its last (strace)

lasted_s      length of the fault
noticed_s     from the fault until the coordinator learned of it, or had restarted itself
joined_s      until the new process had joined
ready_s       until it could work: a trainer with its checkpoint loaded, a replica with an engine
redone_s      until a trainer had repeated the steps after its checkpoint
next_step_s   until the next step was done by a run with all its processes
sampled       tokens per second of all replicas from the kill until that step, as a share of those
              in the BEFORE_S seconds before the kill
lost, ...     of a killed replica: the fate of its responses; lost_answers.py

To lose responses while weights change during generation:

    python -m tools.bench.kills --roles rollout --each 50 --drained -c configs/emulated_4.toml \
        data.train_batch_size=4
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from laminar.analysis.log.timeline import EMPTY_STEPS, read_steps
from laminar.names.roles import Role
from laminar.run.directory import TIMELINE_DIR
from tools.bench.kills.killed_run import KINDS, MACHINE, ROLES, Fault, Passed, run, times
from tools.bench.kills.lost_answers import all_lost, lost_answers
from tools.kit.real_run import print_lines

BEFORE_S = 20.0


def sampled(run_dir: Path, kill: Fault, seconds: float) -> float:
    """Return the tokens per second after a kill as a share of those before it, 0 if none."""
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
        if (kill.kind, kill.role) == ("kill", Role.ROLLOUT):
            lost.append(lost_answers(run_dir, passed.log, kill.name, kill.pid))
            found |= lost[-1]
        if kill.kind != "kill":
            found = {"kind": kill.kind, "lasted_s": kill.lasted_s, **found}
        at = datetime.fromtimestamp(kill.at_ns / 1e9, UTC).isoformat(timespec="milliseconds")
        yield {"hit": kill.name, "role": kill.role, "at": at, **found}
    if lost:
        yield {"name": "lost answers", **all_lost(passed.log, lost)}
    kept = ("steps", "eval_first", "eval_last", "trajectories_trained", "tokens_per_s")
    yield {"name": "run", **{key: passed.summary[key] for key in kept if key in passed.summary}}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-c", "--config", default="configs/recipes/words/run.toml")
    parser.add_argument("--roles", type=_choose(ROLES), default=ROLES, metavar="ROLE,ROLE")
    parser.add_argument("--kinds", type=_choose(KINDS), default=("kill",), metavar="KIND,KIND")
    parser.add_argument("--each", type=int, default=1, help="faults of each role and kind")
    parser.add_argument("--rate", type=float, default=1.0, help="share of the steps that are hit")
    parser.add_argument("--drained", action="store_true", help="stop when all processes are back")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="run directory to keep")
    parser.add_argument("settings", nargs="*", metavar="key=value")
    args = parser.parse_args()
    return print_lines(_hit_run, args)


def _hit_run(run_dir: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    order = [fault for fault in list_faults(args.kinds, args.roles) for _ in range(args.each)]
    random.Random(args.seed).shuffle(order)
    passed = run(
        run_dir, args.config, args.settings, order, args.seed, drained=args.drained, rate=args.rate
    )
    yield from figures(run_dir, passed)


def list_faults(kinds: Sequence[str], roles: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each possible (kind, role) once."""
    for kind in kinds:
        only = {"cut": (MACHINE,), "disk": (Role.COORDINATOR,)}.get(kind, roles)
        yield from ((kind, role) for role in only)


def _choose(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(text.split(","))
        if not set(found) <= set(known):
            raise argparse.ArgumentTypeError(f"{text!r}: choose from {', '.join(known)}")
        return found

    return parse


if __name__ == "__main__":
    sys.exit(main())
