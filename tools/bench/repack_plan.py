"""What planning repack costs the coordinator at size: all replicas are in their tail.

Usage: python tools/bench/repack_plan.py [--replicas 10000]
Prints one JSON line per figure; exits 1 when one is over its limit.

plan_ms_POLICY    CPU time of one look: who is in its tail, what it holds, who is emptied to where
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

from laminar.core import keys, repack  # noqa: E402
from laminar.core.tails import released_max, tails  # noqa: E402
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
        lengths = {t: 200 + 37 * (number + place) % 4_000 for place, t in enumerate(running)}
        cluster.say(
            name,
            ev.TokenProgress(
                tokens_total=1,
                kv_used_tokens=sum(lengths.values()),
                running=1 + number % STRAGGLERS_MAX,
                waiting=0,
                kv_capacity_tokens=CACHE,
                max_batch=BATCH,
                as_of=cluster.state.seq << 20,
                lengths=lengths,
            ),
        )
    return cluster


def plan_ms(cluster: Cluster, policy: str) -> float:
    state, found = cluster.state, []
    for _ in range(TIMES):
        begun = time.process_time()
        most = released_max(state) if policy == "gain" else len(state.replicas)
        for standing in tails(state).values() if most else ():
            repack.plan(standing, most, PREFILL_TOKENS if policy == "gain" else 0)
        found.append(1e3 * (time.process_time() - begun))
    return median(found)


def measure(replicas: int) -> Iterator[Figure]:
    for policy in ("gain", "best-fit"):
        cluster = in_tails(replicas, policy)
        gc.collect()
        gc.freeze()
        yield Figure(f"plan_ms_{policy}", plan_ms(cluster, policy), LIMIT_MS)
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
