"""What an event costs does not grow with the number of replicas, or at most in proportion to it.

Counted in calls of functions, not in time, in two clusters of which one is four times as large, in
three situations: work runs; work is lost that has no place; most replicas are idle and an
evaluation is due.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from laminar.core import invariants
from laminar.core.machine import StateMachine
from laminar.core.state.indexes import indexes_of
from laminar.core.state.state import decode, encode
from laminar.events import events as ev
from laminar.events.base import Event
from tools.bench.core.cluster import GROUP_SIZE, Cluster
from tools.bench.core.stories import STORIES, newer_version

SMALL, TIMES = 64, 4  #: replicas, and how much larger the other cluster is
SHARE = 2 * GROUP_SIZE  #: trajectories that a replica runs
GROUPS_PER_STEP = 8
#: One replica's affair, or one trajectory's: the same whatever the size of the cluster.
OWN_AFFAIR = {
    "heartbeat-lost", "timer-progress", "timer-resume", "timer-rejoin", "timer-score",
    "actor-joined", "actor-failed", "process-exited", "replica-ready", "weights-loaded",
    "weights-rejected", "trajectory-started", "token-progress", "trajectory-finished",
    "trajectory-failed", "trajectory-rewarded", "group-rewarded",
}  # fmt: skip
MORE = 1.3
"""A search among twice as many takes a step more."""


def busy(replicas: int, spare: int = GROUP_SIZE) -> Cluster:
    return Cluster(
        replicas=replicas,
        trajectories=replicas * SHARE,
        capacity=SHARE + spare,
        groups_per_step=GROUPS_PER_STEP,
    )


def work_lost(replicas: int) -> Cluster:
    cluster = busy(replicas, spare=0)
    for name in cluster.names[-3:-1]:
        cluster.silent(name)
    return cluster


def evaluation_due(replicas: int) -> Cluster:
    cluster = Cluster(
        replicas=replicas,
        trajectories=replicas * SHARE // 4,
        capacity=SHARE,
        groups_per_step=GROUPS_PER_STEP,
    )
    version = newer_version(cluster)
    cluster.say(cluster.relays[0], cluster.weights(cluster.relays[0], version))
    return cluster


@cache
def made(situation: Callable[[int], Cluster], replicas: int) -> tuple[Cluster, bytes]:
    cluster = situation(replicas)
    invariants.check_invariants(cluster.state)
    return cluster, encode(cluster.state)


def calls(situation: Callable[[int], Cluster], replicas: int, story: str) -> int:
    """Of functions, while the machine handles the event; 0 if it cannot happen here."""
    cluster, state = made(situation, replicas)
    cluster.machine = StateMachine(decode(state))
    assert indexes_of(cluster.state)
    for name, event in STORIES[story](cluster):
        found = counted(partial(tell, cluster, name, event))
        invariants.check_invariants(cluster.state)
        return found
    return 0


def tell(cluster: Cluster, name: str, event: Event) -> None:
    if not name:
        cluster.own(event)
    elif isinstance(event, ev.ActorJoined):
        cluster.hear(name, 0, event)
    else:
        cluster.say(name, event)


def counted(action: Callable[[], Any]) -> int:
    """Calls of functions in an action."""
    count = 0

    def profile(frame: Any, what: str, argument: Any) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("situation", [busy, work_lost, evaluation_due])
def test_an_event_costs_no_more_in_a_larger_cluster(situation: Callable[[int], Cluster]) -> None:
    grown = {}
    for story in STORIES:
        few, many = calls(situation, SMALL, story), calls(situation, SMALL * TIMES, story)
        limit = MORE if story in OWN_AFFAIR else MORE * TIMES
        if many > limit * few:
            grown[story] = few, many
    assert not grown


def test_what_is_lost_together_is_placed_in_proportion() -> None:
    """A quarter of the replicas at once: their number and what each of them ran count, no more."""
    cost = []
    for replicas in (SMALL, SMALL * TIMES):
        cluster = busy(replicas)
        lost = [cluster.silence(name) for name in cluster.names[replicas // 2 :][: replicas // 4]]
        cost.append(counted(partial(deque, map(cluster.own, lost), 0)))
        assert not cluster.state.work.lost
        invariants.check_invariants(cluster.state)
    assert cost[1] < MORE * TIMES * cost[0]
