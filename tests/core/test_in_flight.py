"""Weights in flight: replicas load newer weights while they run, under the same staleness bound."""

from __future__ import annotations

import pytest

from laminar.core.context import Context
from laminar.core.scheduling import evaluation
from laminar.core.scheduling.admission import find_not_admitted_reason
from laminar.core.state.indexes import load_changed
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Stamped
from tools.kit.bench import Bench, only, start_bench


def flying(**changes: object) -> Bench:
    """Two replicas on version 0, each with one group of two siblings and room for another."""
    return start_bench(
        changes,
        in_flight=True,
        groups_per_version=0,
        replicas=2,
        capacity=4,
        max_staleness=1,
        groups_per_step=1,
    )


def trained(**changes: object) -> Bench:
    """Version 1 is out, and both replicas are told to load it while they run."""
    bench = flying(**{"max_staleness": 4, "capacity": 8, **changes})
    bench.complete("0.0")
    bench.train()
    assert all(bench.replica(name).running for name in bench.names)
    return bench


def test_a_replica_loads_as_soon_as_its_relay_has_newer_weights_whatever_it_runs() -> None:
    bench = trained()
    for name in bench.names:
        pull = bench.pull_of(name)
        assert pull is not None
        assert (pull.version, pull.exact, pull.purpose) == (1, True, "in-flight")


def test_what_runs_goes_on_with_the_new_version_and_keeps_its_oldest_step() -> None:
    """Its deadline is that of its oldest token, so it is trained as early as without the load."""
    bench = trained()
    running = dict(bench.replica("rollout-1").running)
    commands = bench.load("rollout-1")
    assert bench.replica("rollout-1").running.items() >= running.items()
    assert not only(cmd.AbortTrajectories, commands)
    for name in running:
        trajectory = bench.trajectory(name)
        group = bench.group(trajectory.group)
        assert (trajectory.version, trajectory.step, group.step, group.deadline) == (1, 0, 0, 4)
    begun = only(cmd.GenerateTrajectory, commands)
    assert begun and {(c.version, bench.group(c.group).deadline) for c in begun} == {(1, 5)}


def test_nothing_drains_only_the_bound_and_slots_refuse() -> None:
    bench = flying(max_staleness=4, capacity=2, groups_per_step=2)
    for _ in range(3):
        bench.complete(*bench.open_groups())
    assert bench.replica("rollout-0").groups_taken > 1
    bench.train()
    assert all(bench.pull_of(name) is not None for name in bench.names)
    bench.load_all()
    assert not any(find_not_admitted_reason(bench.state, bench.replica(n)) for n in bench.names)
    bound = flying(max_staleness=0)
    left = {find_not_admitted_reason(bound.state, bound.replica(n)) for n in bound.names}
    assert left == {"staleness-bound"}


def test_the_staleness_of_a_sample_is_that_of_its_oldest_weights() -> None:
    """What the last tokens were sampled with does not make it younger."""
    bench = trained()
    bench.load_all()
    assert bench.trajectory("0.4.0").version == 1
    bench.complete("0.4")
    bench.train()
    assert bench.state.steps.staleness_max == 1


def test_held_out_answers_keep_their_version() -> None:
    """The replica that answers them loads when the last is done; the other one at once."""
    bench = flying(num_eval=1, capacity=6, val_before_train=True, max_staleness=4)
    answering = [n for n in bench.names if any(t[0] == "e" for t in bench.replica(n).running)]
    (name,) = answering
    bench.complete("0.0")
    bench.train()
    assert bench.pull_of(name) is None
    (other,) = set(bench.names) - {name}
    assert bench.pull_of(other) is not None
    bench.finish("e0.0.0")
    pull = bench.pull_of(name)
    assert pull is not None and pull.purpose == "in-flight"


def test_an_evaluation_binds_where_it_has_a_slot() -> None:
    """A full replica would go on to newer weights before it could answer anything."""
    bench = flying(num_eval=1, test_freq=1, capacity=2, max_staleness=4, total_steps=9)
    bench.complete("0.0")
    bench.train()
    bench.load_all()
    assert bench.state.evaluations.running is None and bench.state.evaluations.due == 1
    first = next(iter(bench.replica("rollout-1").running))
    begun = only(cmd.GenerateTrajectory, bench.finish(first))
    assert [(c.purpose, c.version) for c in begun] == [("eval", 1)]


def test_lost_work_goes_on_at_once_on_a_newer_replica() -> None:
    """No wait, no exact load, no new attempt; and never on an older one."""
    bench = trained(num_train=5, total_epochs=1, total_steps=0)
    bench.load("rollout-1")
    lost = {t: bench.trajectory(t).placement for t in bench.replica("rollout-0").running}
    commands = bench.kill("rollout-0")
    again = [c for c in only(cmd.GenerateTrajectory, commands) if c.trajectory_id in lost]
    assert {(c.trajectory_id, c.placement) for c in again} == {(t, p + 1) for t, p in lost.items()}
    assert {(c.to, c.version, c.attempt) for c in again} == {("rollout-1", 1, 1)}
    assert {bench.trajectory(t).step for t in lost} == {0}
    assert not any(t.startswith("resume:") for t in bench.state.orders.timers)


def test_what_ran_while_weights_were_loaded_goes_on_with_no_older_ones() -> None:
    """The store may have tokens of version 1, which the dead replica could not report any more.
    The other replica, on version 0, does not take them before it has loaded version 1, too."""
    bench = trained()
    lost = set(bench.replica("rollout-1").running)
    assert not only(cmd.GenerateTrajectory, bench.kill("rollout-1"))
    assert not only(
        cmd.GenerateTrajectory, bench.say("rollout-0", ev.VersionMissing(version=1, held=(1,)))
    )
    assert {bench.trajectory(t).version for t in lost} == {1} and set(bench.state.work.lost) == lost
    again = only(cmd.GenerateTrajectory, bench.load("rollout-0"))
    assert {c.trajectory_id for c in again} >= lost and {c.attempt for c in again} == {1}


def test_work_that_ran_with_weights_that_prove_wrong_goes_on_elsewhere() -> None:
    """What was sampled with them was dropped: any replica that has the version before will do."""
    bench = trained()
    lost = set(bench.replica("rollout-1").running)
    commands = bench.say("rollout-1", ev.WeightsRejected(version=1, reason="probe"))
    assert only(cmd.AbortTrajectories, commands) and set(bench.state.work.lost) == lost
    assert {bench.trajectory(t).version for t in lost} == {0}
    assert bench.pull_of("rollout-1").purpose == "start"  # type: ignore[union-attr]
    again = only(cmd.GenerateTrajectory, bench.load("rollout-0"))
    assert {(c.to, c.version, c.attempt) for c in again[: len(lost)]} == {("rollout-0", 1, 1)}
    assert {c.trajectory_id for c in again[: len(lost)]} == lost


def test_relays_keep_no_version_for_unfinished_work() -> None:
    bench = trained(max_staleness=4)
    bench.load_all()
    assert bench.state.versions.unfinished == [] and bench.replica("rollout-1").running


def test_an_evaluation_that_nobody_can_answer_any_more_is_one_of_the_newest() -> None:
    """Replicas are busy with newer weights, and none will be empty for the older ones soon."""
    bench = flying(num_eval=3, test_freq=1, capacity=4, max_staleness=8, total_steps=9)
    bench.complete("0.0")
    bench.train()
    bench.load("rollout-0")
    bench.finish("0.1.0")
    evaluation = bench.state.evaluations.running
    assert evaluation is not None and (evaluation.version, len(evaluation.queue)) == (1, 2)
    bench.complete("0.2")
    bench.train()
    bench.say("rollout-1", ev.VersionMissing(version=1, held=(2,)))
    bench.load("rollout-1")
    assert bench.replica("rollout-1").version == 2 and bench.replica("rollout-0").version == 1
    bench.kill("rollout-0")
    evaluation = bench.state.evaluations.running
    assert evaluation is None or evaluation.version == 2


def test_a_long_load_is_no_standstill_of_the_engine() -> None:
    """An engine samples nothing while it loads: the deadline of the load decides."""
    bench = trained(stall_ms=1_000)
    assert not only(cmd.RestartActor, bench.wait(5_000))
    bench.load_all()
    assert only(cmd.RestartActor, bench.wait(5_000))


@pytest.mark.parametrize("empty", ["rollout-0", "rollout-1"])
def test_an_evaluation_stays_while_a_replica_is_empty_whichever_it_is(empty: str) -> None:
    """The empty one can load its version. Replicas have other numbers after a recovery, the first
    of them 0, on which nothing may depend."""
    bench = flying(num_eval=3, test_freq=1, max_staleness=8, total_steps=9)
    bench.complete("0.0")
    bench.train()
    bench.load("rollout-0")
    bench.finish("0.1.0")
    running = bench.state.evaluations.running
    assert running is not None and running.queue
    bench.complete("0.2")
    bench.train()
    running.version = 7  # which no replica serves
    replica = bench.replica(empty)
    replica.running.clear()
    load_changed(bench.state, replica)
    tick = Stamped(
        seq=0,
        time_ns=0,
        peer="coordinator",
        incarnation=0,
        peer_seq=0,
        event=ev.TimerFired(timer="none"),
    )
    evaluation.plan_unserved(Context(bench.state, tick))
    assert bench.state.evaluations.running is running
