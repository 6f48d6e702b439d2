"""What planning repack costs the coordinator at size: all replicas are in their tail.

Usage: python tools/bench/repack_plan.py [--replicas 10000]
Prints one JSON line per figure; exits 1 when one is over its limit.

plan_ms_POLICY    CPU time of one look: who is in its tail, what it holds, who is emptied to where;
                  since the last look a quarter of the replicas have said how far they are, which
                  is what 500 reports a second are
first_ms_POLICY   the same when nothing is known from a look before
event_ms_POLICY   CPU time of the event that looks: the same, what is ordered because of it, and
                  what the planner does after it
moves_POLICY      replicas that are emptied by it
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # run as a file, from anywhere

from laminar.core.repack import packing  # noqa: E402
from laminar.core.repack.migration import EMPTIED_MAX  # noqa: E402
from laminar.core.repack.stragglers import released_max, tails  # noqa: E402
from laminar.core.state import keys  # noqa: E402
from laminar.events import events as ev  # noqa: E402
from tools.bench.cluster import GROUP_SIZE, Cluster  # noqa: E402
from tools.bench.stories import newer_version  # noqa: E402

TIMES = 5  #: measured, of which the median counts
LIMIT_MS = 50.0
BATCH, CACHE = 16, 400_000
CAPACITY = 2 * GROUP_SIZE
STRAGGLERS_MAX = 6  #: of one replica
PREFILL_TOKENS = 500
STEPS_UNDER_WAY = 4
HEARD = 25  #: of every hundred replicas, between two looks


class Figure(NamedTuple):
    """One line; `limit` is the most that it may be, 0 for none."""

    name: str
    value: float
    limit: float


def in_tails(replicas: int, policy: str) -> Cluster:
    """Every replica runs its last trajectories, has newer weights at its relay, and has said how
    far it is."""
    groups_per_step = max(replicas // STEPS_UNDER_WAY, 1)
    cluster = Cluster(
        replicas=replicas,
        trajectories=replicas * CAPACITY,
        capacity=CAPACITY,
        groups_per_step=groups_per_step,
        repack_policy=policy,
        repack_interval_ms=5_000,
        repack_release_ms=2_000,
        repack_prefill_tokens=PREFILL_TOKENS,
    )
    cluster.spread(newer_version(cluster))
    for number, name in enumerate(cluster.names):
        running = list(cluster.state.replicas[name].running)
        for trajectory in running[1 + number % STRAGGLERS_MAX :]:
            cluster.finish(trajectory)
        tell(cluster, name, number)
    return cluster


def tell(cluster: Cluster, name: str, number: int) -> None:
    """How far it is."""
    running = cluster.state.replicas[name].running
    lengths = {t: 200 + 37 * (number + place) % 4_000 for place, t in enumerate(running)}
    gauge = ev.TokenProgress(
        tokens_total=1,
        kv_used_tokens=sum(lengths.values()),
        running=len(running),
        waiting=0,
        kv_capacity_tokens=CACHE,
        max_batch=BATCH,
        as_of=cluster.state.seq << 20,
        lengths=lengths,
    )
    cluster.say(name, gauge)


def look_ms(cluster: Cluster, policy: str, heard: int) -> float:
    """After so many of every hundred replicas have said how far they are."""
    state, found = cluster.state, []
    for _ in range(TIMES):
        for number, name in enumerate(cluster.names):
            if number % 100 < heard:
                tell(cluster, name, number)
        begun = time.process_time()
        most = released_max(state) if policy == "gain" else EMPTIED_MAX
        for standing in tails(state).values() if most else ():
            packing.plan(standing, most, PREFILL_TOKENS if policy == "gain" else 0)
        found.append(1e3 * (time.process_time() - begun))
    return median(found)


def measure(replicas: int) -> Iterator[Figure]:
    for policy in ("gain", "best-fit"):
        cluster = in_tails(replicas, policy)
        gc.collect()
        gc.freeze()
        yield Figure(f"first_ms_{policy}", look_ms(cluster, policy, 100), 0)
        yield Figure(f"plan_ms_{policy}", look_ms(cluster, policy, HEARD), LIMIT_MS)
        begun = time.process_time()
        cluster.own(ev.TimerFired(timer=keys.REPACK))
        yield Figure(f"event_ms_{policy}", 1e3 * (time.process_time() - begun), 0)
        emptied = sum(bool(replica.given) for replica in cluster.state.replicas.values())
        yield Figure(f"moves_{policy}", emptied, 0)
        gc.unfreeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=10_000)
    missed = 0
    for figure in measure(parser.parse_args().replicas):
        print(json.dumps(figure._asdict() | {"value": round(figure.value, 3)}), flush=True)
        missed += bool(figure.limit) and figure.value > figure.limit
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
