"""Sessions start on hosts, request turns, and survive the replicas that sample them."""

from __future__ import annotations

import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names.ids import TrajectoryId
from tools.kit.bench import Bench, only, start_bench


def begun(**changes: object) -> Bench:
    """One group of two siblings, whose sessions start; two replicas on two machines."""
    given = {"max_sessions": 2, "nodes": 2, "max_staleness": 0, "groups_per_step": 1}
    return start_bench(given | changes)


def with_newer_weights() -> Bench:
    """In flight, rollout-0 has version 1, and the other replica version 0."""
    bench = begun(in_flight=True, groups_per_version=0, max_staleness=2, max_sessions=9)
    for name in ("0.0.0", "0.0.1"):
        bench.request_turn(name)
    bench.complete("0.0")
    bench.train()
    bench.load("rollout-0")
    return bench


def placed(commands: list[Command]) -> list[tuple[str, str, int]]:
    found = only(cmd.GenerateTrajectory, commands)
    return [(c.trajectory_id, c.to, c.placement) for c in found]


def started(commands: list[Command]) -> list[tuple[str, str, int, int]]:
    found = only(cmd.StartSession, commands)
    return [(c.trajectory_id, c.to, c.placement, c.attempt) for c in found]


def test_a_group_takes_sessions_of_the_emptiest_hosts_and_no_slot() -> None:
    bench = begun(groups_per_step=2)
    assert started(bench.commands) == [
        ("0.0.0", "agent-0", 1, 1), ("0.0.1", "agent-1", 1, 1),
        ("0.1.0", "agent-0", 1, 1), ("0.1.1", "agent-1", 1, 1),
    ]  # fmt: skip
    assert not placed(bench.commands)


def test_a_turn_goes_to_the_replica_that_sampled_the_last_one() -> None:
    """And the turn that it samples to the host with the session."""
    bench = begun()
    (first,) = placed(bench.request_turn("0.0.1"))
    (order,) = only(cmd.ScoreTrajectories, bench.finish("0.0.1"))
    assert order.to == "agent-1" and bench.trajectory("0.0.1").status == "waiting"
    (second,) = placed(bench.request_turn("0.0.1", 1))
    assert (first[1:], second[1:]) == (("rollout-0", 2), ("rollout-0", 3))


def test_a_first_turn_takes_newer_weights_than_those_that_admitted_it() -> None:
    bench = with_newer_weights()
    bench.kill("rollout-1.0")
    assert bench.trajectory("0.1.0").is_unsampled and bench.trajectory("0.1.0").version == 0
    (order,) = only(cmd.GenerateTrajectory, bench.request_turn("0.1.0"))
    assert (order.version, order.version_step, order.attempt) == (1, 1, 1)
    assert bench.trajectory("0.1.0").step == 1


def test_a_replica_that_dies_in_mid_turn_leaves_the_session_alone() -> None:
    bench = begun()
    bench.request_turn("0.0.0")
    commands = bench.kill("rollout-0")
    assert placed(commands) == [("0.0.0", "rollout-1.0", 3)]
    assert not started(commands) and bench.state.work.sessions[TrajectoryId("0.0.0")] == "agent-0"
    bench.finish("0.0.0")
    assert bench.reward("0.0.0") == []
    assert TrajectoryId("0.0.0") not in bench.state.work.sessions


def test_sessions_of_a_lost_host_begin_again_unless_they_had_a_turn() -> None:
    """The new host of one that had is given the turn, and repeats what came before it."""
    bench = begun(group_size=3, max_sessions=9)
    bench.request_turn("0.0.2")
    bench.finish("0.0.2")
    commands = bench.kill("agent-0")
    assert started(commands) == [("0.0.0", "agent-1", 2, 2)]
    (order,) = only(cmd.ScoreTrajectories, commands)
    assert (order.to, order.items[0].trajectory_id) == ("agent-1", "0.0.2")


def test_an_agent_that_runs_once_is_not_run_again() -> None:
    bench = begun(group_size=4, max_sessions=9, runs_agents_once=True)
    commands = bench.kill("agent-0")
    ends = [e for c in only(cmd.EndTrajectories, commands) for e in c.endings]
    assert [(e.trajectory_id, e.reason) for e in ends] == [
        ("0.0.0", "env-lost"), ("0.0.2", "env-lost"),
    ]  # fmt: skip
    assert not started(commands)


def test_without_a_host_sessions_wait_for_one() -> None:
    bench = begun(nodes=1)
    bench.kill("agent-0")
    assert len(bench.state.work.unscored) == 2
    assert "rejoin:agent-0" in bench.state.orders.timers
    bench.join("agent-0", "b")
    assert not started(bench.commands[-1:])
    assert len(started(bench.ready("agent-0"))) == 2


def test_a_host_that_does_not_come_up_is_started_again() -> None:
    bench = begun(engine_start_ms=7_000)
    bench.kill("agent-0")
    bench.join("agent-0", "b")
    (restart,) = only(cmd.RestartActor, bench.wait(7_000))
    assert restart.actor == "agent-0" and restart.reason.startswith("it was not ready 7 s")


@pytest.mark.parametrize("once", [False, True])
def test_tokens_of_weights_that_are_gone_end_their_session(once: bool) -> None:
    """The agent has seen them: it begins again from its row, or is dropped."""
    bench = begun(nodes=1, max_staleness=1, max_sessions=9, min_scored=1, runs_agents_once=once)
    for name in ("0.0.0", "0.0.1", "0.1.0"):
        bench.request_turn(name)
    bench.finish("0.1.0")
    bench.complete("0.0")
    bench.train(publish=False)
    bench.publish(1, 1, held=(1,))
    bench.kill("rollout-0")
    bench.join("rollout-0", "b")
    bench.ready("rollout-0")
    bench.load("rollout-0")
    commands = bench.request_turn("0.1.0", 1)
    commands += bench.wait(bench.settings.resume_timeout_ms + 1)
    again = [attempt for name, _, _, attempt in started(commands) if name == "0.1.0"]
    assert again == ([] if once else [2])
    assert bench.trajectory("0.1.0").status == ("ending" if once else "waiting")


def test_a_session_cannot_end_before_its_first_turn() -> None:
    bench = begun()
    assert bench.say("agent-0", bench.rewarded("0.0.0")) == []
    assert bench.trajectory("0.0.0").status == "waiting"
    assert bench.state.run.ignored["TrajectoryRewarded: old-placement"] == 1


def test_a_held_out_sample_waits_for_its_own_version() -> None:
    bench = begun(in_flight=True, groups_per_version=0, max_staleness=9, max_sessions=99,
                  num_eval=1, val_before_train=True)  # fmt: skip
    bench.request_turns()
    bench.complete("0.0")
    bench.train()
    held = bench.trajectory("e0.0.0")
    bench.finish("e0.0.0")
    assert bench.pull_of(held.replica) is None  # it keeps the weights of the sample
    (order,) = only(cmd.GenerateTrajectory, bench.request_turn("e0.0.0", 1))
    assert (order.to, order.version) == (held.replica, 0)


def test_requests_of_others_are_refused() -> None:
    bench = begun()
    t = bench.trajectory("0.0.0")
    asked = ev.TurnRequested(trajectory_id=t.id, placement=t.placement, turn=0)
    assert not placed(bench.say("rollout-0", asked))
    stale = ev.TurnRequested(trajectory_id=t.id, placement=t.placement - 1, turn=0)
    assert not placed(bench.say("agent-0", stale))


def test_a_first_turn_never_takes_older_weights() -> None:
    """The replica that admitted it is lost, and the other one has older weights."""
    bench = with_newer_weights()
    newest = [t.id for t in bench.state.work.trajectories.values() if t.version == 1]
    assert newest and all(bench.trajectory(name).is_unsampled for name in newest)
    bench.kill("rollout-0")
    assert bench.replica("rollout-1.0").version == 0
    assert not placed(bench.request_turn(newest[0]))


def test_the_session_of_a_dropped_trajectory_ends() -> None:
    bench = begun(group_size=3, max_sessions=9)
    (ended,) = only(cmd.AbortTrajectories, bench.fail("0.0.1"))
    assert (ended.to, [item.trajectory_id for item in ended.items]) == ("agent-1", ["0.0.1"])
    assert TrajectoryId("0.0.1") not in bench.state.work.sessions
