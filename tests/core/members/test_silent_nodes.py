"""A node that is silent alone: its processes go on; who of them is lost is waited for."""

from __future__ import annotations

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from tests.core.test_ways_to_lose import Way, complains, leaves, silent
from tools.kit.bench import Bench, only, start_bench


def fall_silent(bench: Bench, node: str = "node-0") -> list[Command]:
    incarnation = bench.state.members.actors[node].incarnation
    return bench.own(ev.NodeSilent(node=node, node_incarnation=incarnation, silent_ms=30_000))


def speak_again(bench: Bench, node: str = "node-0") -> list[Command]:
    incarnation = bench.state.members.actors[node].incarnation
    return bench.own(ev.NodeRecovered(node=node, node_incarnation=incarnation))


def test_silent_node_takes_nothing_with_it() -> None:
    """Store, trainer, relay and replica go on: a batch is trained and its version loaded."""
    bench = start_bench(max_staleness=0)
    assert fall_silent(bench) == []
    assert all(actor.alive for actor in bench.state.members.actors.values())
    bench.complete("0.0", "0.1")
    bench.train()
    bench.load_all()
    assert (bench.state.steps.completed, bench.replica().version, bench.state.run.failure) == (
        1,
        1,
        "",
    )


@pytest.mark.parametrize("way", [silent, complains, leaves])
def test_who_is_lost_while_its_node_is_silent_is_waited_for(way: Way) -> None:
    """Another machine has its work; the node may go on and start it again, which is its last
    replica's only hope, too."""
    bench = start_bench(nodes=2)
    fall_silent(bench, "node-1")
    way(bench, "rollout-1.0")
    bench.kill("rollout-0", restarting=False)
    assert "rejoin:rollout-1.0" in bench.state.orders.timers and not bench.state.run.failure
    speak_again(bench, "node-1")
    bench.come_back("rollout-1.0")
    bench.load_all()
    assert bench.replica("rollout-1.0").running


@pytest.mark.parametrize("way", [silent, complains, leaves])
def test_last_replica_whose_node_stays_silent_ends_the_run_when_a_start_would_be_over(
    way: Way,
) -> None:
    bench = Bench()
    run = bench.state.run
    bench.start()
    fall_silent(bench)
    way(bench, "rollout-0")
    bench.wait(bench.settings.start_timeout_ms - 1)
    assert not run.failure
    bench.wait(1)
    assert (run.failed.kind, run.failed.subject) == ("replicas-lost", "rollout-0")


@pytest.mark.parametrize("way", [silent, complains])
@pytest.mark.parametrize("node_first", [True, False])
def test_relay_of_the_trainer_whose_node_stays_silent_ends_the_run_when_a_start_would_be_over(
    way: Way, node_first: bool
) -> None:
    bench = start_bench(nodes=2)
    if node_first:
        fall_silent(bench)
    way(bench, "relay-0")
    if not node_first:
        fall_silent(bench)
    assert not bench.state.run.failure
    bench.wait(bench.settings.start_timeout_ms)
    assert bench.state.run.failure.startswith("the trainer's machine has no relay: relay-0 is lost")
    assert "node-0, which would restart it, is silent" in bench.state.run.failure


def test_node_that_is_heard_again_restarts_who_is_lost_then() -> None:
    bench = start_bench()
    fall_silent(bench)
    assert speak_again(bench) == []
    commands = silent(bench, "rollout-0")
    assert [c.actor for c in only(cmd.RestartActor, commands)] == ["rollout-0"]
    assert not bench.state.run.failure


def test_silence_of_another_incarnation_or_twice_changes_nothing() -> None:
    bench = start_bench()
    speak_again(bench)
    bench.own(ev.NodeSilent(node="node-0", node_incarnation=77, silent_ms=30_000))
    assert not bench.state.members.actors["node-0"].silent
    fall_silent(bench)
    fall_silent(bench)
    bench.own(ev.NodeRecovered(node="node-0", node_incarnation=77))
    assert bench.state.members.actors["node-0"].silent
    assert bench.state.run.ignored == {
        "NodeRecovered: repeat": 1, "NodeSilent: old-incarnation": 1, "NodeSilent: repeat": 1,
        "NodeRecovered: old-incarnation": 1,
    }  # fmt: skip


def only_node_1(bench: Bench) -> None:
    """The replica of the other machine is gone for good."""
    bench.start()
    bench.kill("rollout-0", restarting=False)
    assert not bench.state.run.failure


def test_new_process_of_a_node_takes_its_machine_over() -> None:
    """It starts relay and replica anew: the run waits for them, also when no other replica is
    left, and their work is done by the new ones."""
    bench = Bench(nodes=2, max_staleness=0)
    only_node_1(bench)
    fall_silent(bench, "node-1")
    bench.join("node-1", "b")
    assert not bench.state.run.failure and not bench.state.members.actors["node-1"].silent
    assert not bench.state.members.is_actor_alive(
        "rollout-1.0"
    ) and not bench.state.members.is_actor_alive("relay-1")
    for name in ("relay-1", "rollout-1.0"):
        bench.join(name, "b")
        bench.ready(name)
    bench.receive("relay-1", 0)
    bench.load_all()
    assert bench.replica("rollout-1.0").running


def test_machine_that_is_lost_in_parts_is_waited_for_no_longer_than_a_start_takes() -> None:
    """Its replica and relay fall silent first and might be restarted; when its node is lost, too,
    a new one of it may do that."""
    bench = Bench(nodes=2)
    only_node_1(bench)
    silent(bench, "rollout-1.0")
    silent(bench, "relay-1")
    assert not bench.state.run.failure
    silent(bench, "node-1")
    bench.wait(bench.settings.start_timeout_ms - 1)
    assert not bench.state.run.failure
    bench.wait(1)
    assert (bench.state.run.failed.kind, bench.state.run.failed.subject) == (
        "replicas-lost",
        "rollout-1.0",
    )
