"""What engines say about themselves reaches status.json and metrics.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from laminar.core.machine import StateMachine
from laminar.core.state.state import State
from laminar.eventlog.replay import Observer
from laminar.events import events as ev
from laminar.events.base import Event, Stamped
from laminar.observe.engine_gauges import StepGauges
from laminar.observe.metrics import MetricsWriter
from laminar.observe.status import StatusWriter
from laminar.observe.telemetry import Telemetry
from tools.kit.world import World
from tools.kit.world_parts import settings

TELEMETRY = Telemetry()
CAPACITY = 1_000


@pytest.fixture(scope="module")
def state() -> State:
    """Of a run with the replicas rollout-0 and rollout-1, in the middle of its work."""
    machine = StateMachine()
    for stamped, _ in World(settings(), seed=3).run().log:
        machine.handle_event(stamped)
        if machine.state.steps.completed == 3:
            break
    assert sorted(machine.state.members.replicas) == ["rollout-0", "rollout-1"]
    return machine.state


def gauge(used: int, **facts: Any) -> ev.TokenProgress:
    facts = {"running": 3, "waiting": 1, "kv_capacity_tokens": CAPACITY} | facts
    return ev.TokenProgress(tokens_total=9, kv_used_tokens=used, **facts)


def tell(observer: Observer, state: State, said: Iterable[tuple[str, Event]], **facts: Any) -> None:
    for seq, (peer, event) in enumerate(said, start=1):
        stamped = stamp(state, peer, event, seq, **facts)
        observer(stamped, [], state)


def stamp(state: State, peer: str, event: Event, seq: int = 1, former: bool = False) -> Stamped:
    incarnation = state.members.actors[peer].incarnation - former
    return Stamped(
        seq=seq, time_ns=seq, peer=peer, incarnation=incarnation, peer_seq=0, event=event
    )


def engines(directory: Path) -> dict[str, Any]:
    assert TELEMETRY.wait_drained(60)
    replicas = json.loads((directory / "status.json").read_text())["replicas"]
    return {name: shown["engine"] for name, shown in replicas.items()}


def test_status_has_the_last_report_of_each_replica(tmp_path: Path, state: State) -> None:
    """That of this life: nothing, until a replica that was started again has reported."""
    status = StatusWriter(tmp_path, TELEMETRY, clock=iter(range(10**9)).__next__)
    last = gauge(700, preempted=4, prefix_cache_queries=90, prefix_cache_hits=30)
    tell(status, state, [("rollout-0", gauge(100)), ("rollout-0", last)])
    assert engines(tmp_path) == {
        "rollout-0": {
            "kv_used_tokens": 700,
            "kv_capacity_tokens": CAPACITY,
            "running": 3,
            "waiting": 1,
            "preempted": 4,
            "prefix_cache_queries": 90,
            "prefix_cache_hits": 30,
        },
        "rollout-1": None,
    }
    tell(status, state, [("rollout-1", gauge(100))], former=True)
    assert engines(tmp_path)["rollout-1"] is None
    ready = ev.ReplicaReady(max_num_seqs=8, kv_capacity_tokens=CAPACITY)
    tell(status, state, [("rollout-0", ready)])
    assert engines(tmp_path) == {"rollout-0": None, "rollout-1": None}


def test_each_report_of_the_default_interval_is_in_the_status(tmp_path: Path, state: State) -> None:
    """Twice a second, of a replica that is the only one to say anything."""
    now = [0.0]
    status = StatusWriter(tmp_path, TELEMETRY, clock=lambda: now[0])
    for used in (100, 200, 300):
        now[0] += 0.5
        tell(status, state, [("rollout-0", gauge(used))])
        assert engines(tmp_path)["rollout-0"]["kv_used_tokens"] == used
        now[0] -= 0.01  # a report may come a little early


def test_a_step_has_the_means_over_its_reports_and_the_growth_of_the_sums(state: State) -> None:
    """Of each life from its first to its last report, so that a restart is no loss."""
    gauges = StepGauges()

    def take(peer: str, event: Event, former: bool = False) -> None:
        gauges.record_event(stamp(state, peer, event, former=former), state)

    take("rollout-0", gauge(200, preempted=3, prefix_cache_queries=1_000, prefix_cache_hits=900))
    take("rollout-1", gauge(400, running=1, waiting=7, preempted=1))
    take("rollout-1", gauge(990, running=1, waiting=7, preempted=9), former=True)
    last = {"preempted": 5, "prefix_cache_queries": 1_400, "prefix_cache_hits": 1_000}
    take("rollout-0", gauge(600, **last))
    assert gauges.drain_figures() == {
        "rollout/running/mean": pytest.approx(7 / 3),
        "rollout/waiting/mean": 3.0,
        "rollout/preempted": 2,
        "rollout/kv_used_share/mean": pytest.approx(0.4),
        "rollout/kv_used_share/max": 0.6,
        "rollout/prefix_cache_hit_share": 0.25,
    }
    assert gauges.drain_figures() == {}


def test_the_line_of_a_step_has_them(tmp_path: Path) -> None:
    world = World(settings(), seed=3).run()
    writer = MetricsWriter(tmp_path, TELEMETRY)
    steps = [s for s, _ in world.log if isinstance(s.event, ev.StepCompleted)]
    tell(writer, world.state, [("rollout-0", gauge(250))])
    writer(steps[0], [], world.state)
    writer(steps[1], [], world.state)
    assert TELEMETRY.wait_drained(60)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    shares = [n["rollout/kv_used_share/mean"] for n in lines if "rollout/kv_used_share/mean" in n]
    assert shares == [0.25]
