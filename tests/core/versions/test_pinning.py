"""Relays are told which versions have unfinished work, so that they evict those last."""

from __future__ import annotations

import pytest

from laminar.core.versions import pinning
from laminar.events import commands as cmd
from laminar.events.base import Command
from tools.kit.bench import Bench, only, start_bench
from tools.kit.world import World
from tools.kit.world_parts import Faults, settings


def told(commands: list[Command]) -> list[tuple[str, int, tuple[int, ...]]]:
    return [(c.to, c.version, c.unfinished) for c in only(cmd.PinVersion, commands)]


def behind(**changes: object) -> Bench:
    """rollout-0 still runs a group of version 0 when version 1 is published."""
    bench = start_bench(replicas=2, capacity=2, groups_per_step=1, max_staleness=1, **changes)
    bench.complete("0.1")
    bench.train(publish=False)
    return bench


def test_relays_are_told_when_a_version_is_published_and_when_the_last_work_is_over() -> None:
    bench = behind()
    assert told(bench.publish(1, 1)) == [("relay-0", -1, (0,))]
    assert bench.state.versions.unfinished == [0]
    assert told(bench.load("rollout-1")) == []
    bench.complete("0.0")
    assert told(bench.load("rollout-0")) == [("relay-0", -1, ())]
    assert bench.state.versions.unfinished == []


def test_a_relay_that_joins_later_is_told_too() -> None:
    bench = behind(nodes=1)
    bench.publish(1, 1)
    bench.kill("relay-0")
    bench.join("relay-0", "b")
    assert told(bench.ready("relay-0")) == [("relay-0", -1, (0,))]


def test_lost_work_is_unfinished() -> None:
    bench = behind()
    for name in bench.names:
        bench.kill(name)
    assert bench.state.work.lost
    assert told(bench.publish(1, 1)) == [("relay-0", -1, (0,))]


def test_the_pin_of_an_evaluation_stays_while_it_is_told() -> None:
    bench = behind(num_eval=2, test_freq=1)
    bench.publish(1, 1)
    pins = told(bench.load("rollout-1"))
    assert pins == [("relay-0", 1, (0,))]


def test_less_work_starts_over_when_its_version_is_still_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of runs whose replicas die: tokens that were thrown away because their version was gone."""
    kept = restarted()
    monkeypatch.setattr(pinning, "send_pins", lambda ctx: None)
    assert kept < restarted()


def restarted() -> int:
    tokens = 0
    for seed in (0, 8, 11):
        faults = Faults(lose_every_s=4, skip_publish=0.2, fail_sibling=0.1, repeat_event=0.1)
        decided = settings(total_steps=3, resume_timeout_ms=10)
        world = World(decided, faults=faults, seed=seed).run()
        tokens += world.state.work.ledger.tokens.dropped.get("restarted", 0)
    return tokens
