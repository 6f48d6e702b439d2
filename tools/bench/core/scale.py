"""Cost of the coordinator at scale: every kind of event, losses, and background work.

Usage: python -m tools.bench.core.scale [--replicas 10000] [--trajectories 160000]
Prints one JSON line per figure with its limit; exits 1 if a limit is exceeded.

event_ms_KIND[_SITUATION]   CPU time of one turn of the real tick with one such event: decided,
                            logged, sent
quarter_of_WHAT_lost_s      CPU time of the turn in which a quarter of the replicas, or of the
                            machines, is lost: all their work is placed again, logged and sent

blocked_ms_WHAT             CPU time for which a state hash, a snapshot or the status keeps the
                            coordinator from its socket: its own work, or a fork
event_us_steady             CPU time per event while trajectories end and are rewarded; 64 events
                            per turn

`drain-requested` ends all work at once. It has the limit of a loss because it costs as much:
160,000 ends are decided, logged and sent.

Situations: replicas run as much as the staleness bound allows and have room for lost work (no
suffix); work is lost and no replica has room for it (lost); most replicas are idle and an
evaluation is due (evaluation).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import NamedTuple

from laminar.coordinator.background import ChildBackground
from laminar.coordinator.system import RealDisk
from laminar.core.state.state import hash_state
from laminar.core.state.work import Trajectory
from laminar.eventlog.record import Takeover
from laminar.eventlog.snapshot import write_snapshot
from laminar.events import events as ev
from laminar.events.base import Stamped
from laminar.observe.logs import get_logger
from laminar.observe.status import StatusWriter
from laminar.observe.telemetry import Telemetry
from laminar.weights.arena.arena import SHARED_MEMORY
from tools.bench.core.cluster import GROUP_SIZE, Cluster
from tools.bench.core.stories import STORIES, Story, newer_version

STEPS_UNDER_WAY = 80  #: batches among the running trajectories: each holds 2,000 of 160,000
TIMES = 5  #: measurements, of which the median counts
EVENT_MS = 50.0
LOSS_S = 2.0
BLOCKED_MS = 20.0
STEADY_US = 250.0
ENDS_ALL = "drain-requested"


class Figure(NamedTuple):
    """A measured value and its upper limit."""

    name: str
    value: float
    unit: str
    limit: float


def in_child(measure: Callable[[], list[float]]) -> list[float]:
    """Return the result of `measure` in a forked process, which leaves the state unchanged."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, json.dumps(measure()).encode())
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    if os.waitpid(child, 0)[1]:
        sys.exit("the measurement in the child process failed")
    found: list[float] = json.loads(text)
    return found


def turns(cluster: Cluster, story: Callable[[Cluster], Story]) -> list[float]:
    """Return the CPU milliseconds of the turn of each event."""
    found = []
    for name, event in story(cluster):
        if isinstance(event, ev.ActorJoined):
            cluster.turn(cluster.joined(name))
        elif name:
            cluster.turn(cluster.frames(name, event))
        else:
            cluster.turn(own=[event])
        found.append(1e3 * cluster.turn_s)
    return found


def events(cluster: Cluster, situation: str) -> Iterator[Figure]:
    """Measure every kind of event in a situation; skip those that cannot happen in it."""
    for name, story in STORIES.items():
        found: list[float] = []
        while len(found) < TIMES and (more := in_child(partial(turns, cluster, story))):
            found += more
        if found:
            limit = 1e3 * LOSS_S if name == ENDS_ALL else EVENT_MS
            yield Figure(f"event_ms_{name}{situation}", median(found[:TIMES]), "ms", limit)


def quarter_lost(cluster: Cluster, nodes: bool) -> list[float]:
    """Return the seconds of the turn that loses a quarter of the replicas or machines."""
    names = cluster.nodes if nodes else cluster.names
    lost = [cluster.silence(name) for name in names[len(names) // 2 :][: len(names) // 4]]
    cluster.turn(own=lost)
    return [cluster.turn_s]


def losses(cluster: Cluster, situation: str) -> Iterator[Figure]:
    for nodes, what in ((False, "replicas"), (True, "nodes")):
        found = [t for _ in range(TIMES) for t in in_child(partial(quarter_lost, cluster, nodes))]
        yield Figure(f"quarter_of_{what}_lost_s{situation}", median(found), "s", LOSS_S)


def blocked(cluster: Cluster, directory: Path) -> Iterator[Figure]:
    """Measure background work: state hash, snapshot and status."""
    state, background = cluster.state, ChildBackground(get_logger())
    disk = RealDisk(directory)
    work = {
        "state-hash": lambda: hash_state(state).encode(),
        "snapshot": lambda: write_snapshot(disk, state, Takeover(1, 0, 0)) or b"",
    }
    for what, do in work.items():
        found, answers = [], []
        for number in range(TIMES):
            state.seq += 1  # a snapshot is named after its event
            begun = time.process_time()
            background.run(what, len(state.work.trajectories), do, answers.append)
            found.append(1e3 * (time.process_time() - begun))
            while len(answers) <= number:
                time.sleep(0.01)
                background.collect_results()
        if None in answers:
            sys.exit(f"{what} failed: {dict(background.failed)}")
        yield Figure(f"blocked_ms_{what}", median(found), "ms", BLOCKED_MS)
    yield Figure("blocked_ms_status", median(status_ms(cluster, directory)), "ms", BLOCKED_MS)


def status_ms(cluster: Cluster, directory: Path) -> list[float]:
    """Measure the status: collected in a turn, encoded by a thread that holds the interpreter."""
    telemetry = Telemetry()
    found = []
    for _ in range(TIMES):
        writer = StatusWriter(directory, telemetry)
        stamped = Stamped(
            seq=1, time_ns=0, peer="", incarnation=0, peer_seq=0, event=ev.ActorLeft()
        )
        begun = time.process_time()
        writer(stamped, [], cluster.state)
        telemetry.wait_drained(60.0)
        found.append(1e3 * (time.process_time() - begun))
    return found


def steady_us(cluster: Cluster) -> list[float]:
    """Return the microseconds per event while trajectories finish and are rewarded."""
    found = []
    for _ in range(TIMES):
        some = min(len(cluster.state.work.trajectories) // 16, 2_048)
        members = list(islice(each_running(cluster), some))
        begun, seq = 0.0, cluster.state.seq
        for make in (cluster.finished, cluster.rewarded):
            for first in range(0, len(members), 64):
                part = members[first : first + 64]
                frames = [f for t in part for f in cluster.frames(t.replica, make(t.id))]
                cluster.turn(frames)
                begun += cluster.turn_s
        found.append(1e6 * begun / (cluster.state.seq - seq))
    return found


def each_running(cluster: Cluster) -> Iterator[Trajectory]:
    return (t for t in cluster.state.work.trajectories.values() if t.status == "running")


# --- situations -----------------------------------------------------------------------------------


def busy(args: argparse.Namespace, spare: int = GROUP_SIZE) -> Cluster:
    """Build a cluster in which every replica runs its share and has room for `spare` more."""
    return Cluster(
        replicas=args.replicas,
        trajectories=args.trajectories,
        capacity=args.trajectories // args.replicas + spare,
        groups_per_step=args.groups_per_step,
    )


def with_lost_work(args: argparse.Namespace) -> Cluster:
    """Build a full cluster in which one replica in a hundred is lost."""
    cluster = busy(args, spare=0)
    for name in cluster.names[:: -(args.replicas // 100 or 1)][1:100]:
        cluster.silent(name)
    return cluster


def with_evaluation_due(args: argparse.Namespace) -> Cluster:
    """Build a cluster with a quarter of the work, whose idle replicas lack the new version."""
    cluster = Cluster(
        replicas=args.replicas,
        trajectories=args.trajectories // 4,
        capacity=args.trajectories // args.replicas,
        groups_per_step=args.groups_per_step,
    )
    version = newer_version(cluster)
    cluster.say(cluster.relays[0], cluster.weights(cluster.relays[0], version))
    return cluster


SITUATIONS = {"": busy, "_lost": with_lost_work, "_evaluation": with_evaluation_due}


def measure(args: argparse.Namespace) -> Iterator[Figure]:
    for situation, make in SITUATIONS.items():
        if args.situations is not None and situation not in args.situations:
            continue
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as directory:
            cluster = make(args)
            cluster.open(RealDisk(Path(directory)))
            gc.collect()
            gc.freeze()
            yield from events(cluster, situation)
            yield from losses(cluster, situation)
            if not situation:
                yield from blocked(cluster, Path(directory))
                steady = in_child(partial(steady_us, cluster))
                yield Figure("event_us_steady", median(steady), "us", STEADY_US)
            gc.unfreeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--trajectories", type=int, default=160_000)
    parser.add_argument("--situations", nargs="*")
    args = parser.parse_args()
    args.groups_per_step = max(args.trajectories // GROUP_SIZE // STEPS_UNDER_WAY, 1)
    missed = 0
    for figure in measure(args):
        line = figure._asdict() | {"value": round(figure.value, 3)}
        print(json.dumps(line), flush=True)
        missed += figure.value > figure.limit
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
