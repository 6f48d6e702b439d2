"""When everybody is looked at, who was touched by name is looked at first, and once."""

from __future__ import annotations

import pytest

from laminar.core import loading, planner
from laminar.core.context import Context
from laminar.core.state.indexes import indexes_of
from laminar.core.state.replica_index import ReplicaIndex
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Stamped
from tools.kit.bench import Bench

NAMES = ["rollout-0", "rollout-1", "rollout-2"]


@pytest.fixture
def ctx() -> Context:
    bench = Bench(replicas=3)
    bench.start()
    tick = Stamped(
        seq=bench.seq + 1,
        time_ns=bench.state.time_ns,
        peer=COORDINATOR,
        incarnation=0,
        peer_seq=0,
        event=ev.TimerFired(timer="none"),
    )
    return Context(bench.state, tick)


def looked_at(ctx: Context, monkeypatch: pytest.MonkeyPatch, *touched: str) -> list[str]:
    """By both walks over the others, if all of them come into question."""
    seen: list[str] = []
    numbers = dict.fromkeys(indexes_of(ctx.state).replicas.replicas)
    monkeypatch.setattr(ReplicaIndex, "empty", lambda index, kinds: numbers)
    monkeypatch.setattr(planner, "_for_reserved", lambda state: numbers)
    monkeypatch.setattr(planner, "_plan_reserved", lambda ctx, replica: seen.append(replica.name))
    monkeypatch.setattr(loading, "plan_pull", lambda ctx, replica: seen.append(replica.name))
    planner._plan_reserved_for_others(ctx, touched)
    planner._plan_pulls_of_others(ctx, touched)
    return seen


def test_others_are_looked_at_in_their_order(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(ctx, monkeypatch) == NAMES + NAMES


def test_who_was_looked_at_is_passed_over(ctx: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(ctx, monkeypatch, "rollout-1") == ["rollout-0", "rollout-2"] * 2
