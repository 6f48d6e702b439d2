"""A replica dies: its work goes on elsewhere, from the store's tokens if possible."""

from __future__ import annotations

import msgspec

from laminar.core.context import RESTART_TIMEOUT_MS
from laminar.core.scheduling.admission import find_not_admitted_reason
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import Bench, only, start_bench


def pair(**changes: object) -> Bench:
    """Two replicas on version 0, each with one group of two siblings and room for another."""
    return start_bench(changes, replicas=2, capacity=4, max_staleness=0, groups_per_step=2)


def test_lost_work_resumes_on_the_same_version() -> None:
    """rollout-0 dies with both groups; rollout-1 has the same version and room: the four answers
    go on there at once, as the same attempt (same seed), under a new placement."""
    bench = pair()
    assert len(bench.replica("rollout-0").running) == 4
    before = {c.trajectory_id: c for c in only(cmd.GenerateTrajectory, bench.commands)}
    again = only(cmd.GenerateTrajectory, bench.kill("rollout-0"))
    assert {c.to for c in again} == {"rollout-1"} and len(again) == 4
    for command in again:
        first = before[command.trajectory_id]
        assert (command.placement, command.attempt) == (2, 1)
        assert (command.seed, command.version) == (first.seed, first.version)


def test_reserved_pull_fetches_the_version_of_lost_work() -> None:
    """The survivor runs version 1, the lost answer began with version 0, which the relay still
    holds: when the survivor empties it fetches version 0 back, finishes the lost answer, and
    only then takes new groups."""
    bench = start_bench(groups_per_step=1, max_staleness=1, capacity=2, replicas=2)
    bench.complete("0.1")
    bench.train()
    bench.load("rollout-1")
    assert not only(cmd.GenerateTrajectory, bench.kill("rollout-0"))
    pulls = only(cmd.PullWeights, bench.complete("0.2"))
    assert [(p.version, p.exact, p.purpose) for p in pulls] == [(0, True, "resume")]
    resumed = only(cmd.GenerateTrajectory, bench.load("rollout-1"))
    assert {(c.group, c.attempt, c.version) for c in resumed} == {("0.0", 1, 0)}


def test_lost_work_starts_over_when_nobody_turns_up() -> None:
    """No replica of version 0 has room for resume_timeout_ms: then the two siblings begin again on
    version 1 with other random numbers, and the group keeps its oldest deadline."""
    bench = start_bench(
        groups_per_step=1, max_staleness=1, capacity=4, replicas=2, resume_timeout_ms=3000
    )
    bench.complete("0.1")
    bench.train()
    assert bench.pull_of("rollout-1") is not None
    first = {c.trajectory_id: c.seed for c in only(cmd.GenerateTrajectory, bench.commands)}
    bench.load("rollout-1")
    assert not only(cmd.GenerateTrajectory, bench.kill("rollout-0"))
    assert not only(cmd.GenerateTrajectory, bench.wait(2999))
    again = only(cmd.GenerateTrajectory, bench.wait(1))
    assert {(c.group, c.attempt, c.version) for c in again} == {("0.0", 2, 1)}
    assert all(c.seed != first[c.trajectory_id] for c in again)
    assert bench.group("0.0").deadline == 1 and bench.group("0.0").mixed


def test_lost_work_is_placed_on_a_replica_that_drains() -> None:
    """The survivor took its share and something newer waits: it admits no new group. Lost work is
    exempt from that; were it not, the trainer could wait for it for ever."""
    bench = start_bench(
        replicas=2, capacity=4, groups_per_step=1, max_staleness=2, groups_per_version=1
    )
    bench.complete("0.1")
    bench.train()
    assert find_not_admitted_reason(bench.state, bench.replica("rollout-1")) == "draining"
    again = only(cmd.GenerateTrajectory, bench.kill("rollout-0"))
    assert {(c.to, c.group, c.attempt) for c in again} == {("rollout-1", "0.0", 1)}


def test_evicted_version_means_start_over_at_once() -> None:
    """The relay holds version 0 no longer: waiting for it would be waiting for nothing."""
    bench = start_bench(groups_per_step=1, max_staleness=1, capacity=4, replicas=2)
    bench.complete("0.1")
    bench.train(publish=False)
    bench.publish(1, 1, held=(1,))
    bench.load("rollout-1")
    again = only(cmd.GenerateTrajectory, bench.kill("rollout-0"))
    assert {(c.group, c.attempt, c.version) for c in again} == {("0.0", 2, 1)}


def test_version_missing_during_a_reserved_pull() -> None:
    """The version was evicted between the command and the load: the relay says so, and the lost
    answer starts over on what there is."""
    bench = start_bench(groups_per_step=1, max_staleness=1, capacity=2, replicas=2)
    bench.complete("0.1")
    bench.train()
    bench.load("rollout-1")
    bench.kill("rollout-0")
    bench.complete("0.2")
    pull = bench.pull_of("rollout-1")
    assert pull is not None and pull.exact
    again = bench.say("rollout-1", ev.VersionMissing(version=0, held=(1,)))
    assert {(c.group, c.attempt, c.version) for c in only(cmd.GenerateTrajectory, again)} == {
        ("0.0", 2, 1)
    }


def test_poison_prompt_is_quarantined_after_three_deaths() -> None:
    """A prompt kills whatever runs it. After the third death it is given up and its group ends, so
    that the run goes on with the others."""
    bench = start_bench(max_staleness=0, groups_per_step=1, capacity=2, total_steps=2)
    for death in range(1, 4):
        bench.kill()
        bench.come_back(boot=f"b{death}")
        bench.load_all()
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.dropped == {"quarantined": 2}
    assert bench.state.work.ledger.groups.dropped == {"too-few-scored": 1}
    assert bench.open_groups() == ["0.1"]


def test_silence_of_a_whole_machine_blames_no_work() -> None:
    """A cut of the network has ended nobody: what ran there is not a prompt that kills."""
    bench = start_bench(max_staleness=0, groups_per_step=1, capacity=2, total_steps=2)
    for death in range(1, 4):
        bench.own(msgspec.structs.replace(bench.silence("rollout-0"), cut_off=True))
        bench.come_back(boot=f"b{death}")
        bench.load_all()
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.dropped == {}
    assert bench.open_groups() == ["0.0"]


def test_rewards_wait_for_a_replica_and_are_scored_when_one_comes() -> None:
    """The only replica dies while it scores: the reward is unscored until it is back."""
    bench = start_bench(max_staleness=0)
    bench.finish("0.0.0")
    assert not only(cmd.ScoreTrajectories, bench.kill())
    assert list(bench.state.work.unscored) == ["0.0.0"]
    assert only(cmd.ScoreTrajectories, bench.come_back())
    assert not bench.state.work.unscored


def starting(**changes: object) -> Bench:
    """One replica has weights, the process of the other has joined and its engine starts."""
    bench = pair(**changes)
    bench.kill("rollout-0")
    bench.join("rollout-0", "b")
    return bench


def test_engine_that_does_not_come_up_is_started_again() -> None:
    bench = starting(engine_start_ms=7_000)
    assert not only(cmd.RestartActor, bench.wait(6_999))
    (restart,) = only(cmd.RestartActor, bench.wait(1))
    assert (restart.to, restart.actor) == ("node-0", "rollout-0")
    assert restart.reason.startswith("it was not ready 7 s after it had joined")
    bench.kill("rollout-0")
    assert "progress:rollout-0" not in bench.state.orders.timers
    bench.join("rollout-0", "c")
    assert not only(cmd.RestartActor, bench.wait(6_999))
    bench.ready("rollout-0")
    assert not only(cmd.RestartActor, bench.wait(7_000)) and not bench.state.run.failure


def test_engine_that_starts_while_the_run_ends_is_left_alone() -> None:
    bench = starting(engine_start_ms=7_000)
    bench.own(ev.DrainRequested(reason="SIGQUIT", at_once=True))
    assert bench.state.run.phase == "ending"
    assert not only(cmd.RestartActor, bench.wait(7_000))


def test_replica_that_is_never_restarted_is_fenced() -> None:
    """Its node does not do as it is told, and it goes on talking: its work moves all the same, and
    it has the time of any start to come back."""
    bench = pair(stall_ms=1_000)
    assert only(cmd.RestartActor, bench.wait(1_000))
    its_work = set(bench.replica("rollout-0").running)
    moved = only(cmd.GenerateTrajectory, bench.wait(RESTART_TIMEOUT_MS))
    assert its_work == {c.trajectory_id for c in moved} and {c.to for c in moved} == {"rollout-1"}
    assert not bench.state.members.is_actor_alive("rollout-0")
    assert "restart:rollout-0" not in bench.state.orders.commands
    assert "rejoin:rollout-0" in bench.state.orders.timers
    bench.join("rollout-0", "b")
    assert bench.state.members.is_actor_alive("rollout-0")


def test_restart_of_a_replica_that_is_lost_already_is_not_waited_for() -> None:
    bench = pair()
    assert only(cmd.RestartActor, bench.silent("rollout-0"))
    assert bench.own(ev.TimerFired(timer="command:restart:rollout-0")) == []
    assert "restart:rollout-0" not in bench.state.orders.commands
    assert "rejoin:rollout-0" in bench.state.orders.timers


def test_replica_that_is_to_be_restarted_and_falls_silent_is_asked_for_again() -> None:
    """The first order may have been lost with the connection; the second takes its place."""
    bench = start_bench(stall_ms=1_000)
    assert only(cmd.RestartActor, bench.wait(1_500))
    assert only(cmd.RestartActor, bench.silent("rollout-0"))
    restarts = [key for key in bench.state.orders.commands if key.startswith("restart:")]
    assert restarts == ["restart:rollout-0"]
    bench.join("rollout-0", "b")
    assert "restart:rollout-0" not in bench.state.orders.commands


def test_lost_sibling_that_fails_leaves_the_other_to_be_resumed() -> None:
    """A late word from the replica that had them both: the second could not be trained anyway."""
    bench = start_bench(
        max_staleness=0, group_size=3, min_scored=1, capacity=3, resume_timeout_ms=10**6
    )
    bench.kill()
    bench.join("rollout-0", "b")
    bench.ready("rollout-0")
    assert list(bench.state.work.lost) == ["0.0.0", "0.0.1", "0.0.2"]
    bench.fail("0.0.1", "store-refused")
    assert list(bench.state.work.lost) == ["0.0.0", "0.0.2"]
    resumed = only(cmd.GenerateTrajectory, bench.load("rollout-0"))
    assert [c.trajectory_id for c in resumed] == ["0.0.0", "0.0.2"]
