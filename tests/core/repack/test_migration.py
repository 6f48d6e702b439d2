"""Repack: stragglers go from one replica to another that has room, and nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

from laminar.core.repack import migration
from laminar.core.repack.stragglers import standing_of
from laminar.core.scheduling.admission import find_not_admitted_reason
from laminar.core.state.indexes import set_length
from laminar.core.state.migrations import RepackState
from laminar.core.state.statuses import TrajectoryStatus
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.names.ids import TrajectoryId
from tools.kit.bench import Bench, only

RELEASE_MS, INTERVAL_MS = 2_000, 5_000
SOURCE, DESTINATION, OTHER = "rollout-0", "rollout-1", "rollout-2"
MOVED = "0.0.1"


class Tail(Bench):
    """Of version 0, rollout-0 runs 0.0.1, rollout-1 runs 0.2.1 and 0.3.1, rollout-2 runs 0.4.1;
    everything else is done, and version 1 is made and not yet published."""

    def __init__(self, **changes: Any) -> None:
        values: dict[str, Any] = {
            "replicas": 3,
            "capacity": 4,
            "max_staleness": 2,
            "groups_per_step": 2,
            "groups_per_version": 2,
            "repack_policy": "gain",
            "repack_interval_ms": INTERVAL_MS,
            "repack_release_timeout_ms": RELEASE_MS,
            "repack_prefill_tokens": 500,
        }
        super().__init__(**(values | changes))
        self.start()
        for trajectory in list(self.state.work.trajectories):
            self.say(self.trajectory(trajectory).replica, self.begun(trajectory))
        self.complete("0.1", "0.5")
        for group in ("0.0", "0.2", "0.3", "0.4"):
            self.finish(f"{group}.0")
            self.reward(f"{group}.0")
        self.train(publish=False)
        self.tell()

    def tell(self, **changes: Any) -> None:
        """Every replica tells of its engine."""
        for name in self.names:
            self.gauge(name, **changes)

    def gauge(self, name: str, **changes: Any) -> list[Command]:
        running = self.replica(name).running
        values: dict[str, Any] = {
            "tokens_total": 100,
            "kv_used_tokens": 10 * len(running),
            "running": len(running),
            "waiting": 0,
            "kv_capacity_tokens": 100,
            "max_batch": 4,
            "as_of": self.packing(name).last_command_id,
            "lengths": {TrajectoryId(t): 10 + number for number, t in enumerate(running)},
        }
        return self.say(name, ev.TokenProgress(**(values | changes)))

    def packing(self, name: str) -> RepackState:
        packing = self.replica(name).repack
        return packing if packing is not None else RepackState()

    def released(self, name: str = SOURCE) -> ev.TrajectoriesReleased:
        outstanding = self.state.orders.commands[f"release:{name}"]
        return ev.TrajectoriesReleased(command_id=outstanding.command_id)


def releases(commands: list[Command]) -> list[tuple[str, list[str]]]:
    found = only(cmd.ReleaseTrajectories, commands)
    return [(c.to, [item.trajectory_id for item in c.items]) for c in found]


def moving(**changes: Any) -> Tail:
    """rollout-0 is to give 0.0.1 away, and rollout-1 keeps room for it."""
    bench = Tail(**changes)
    assert releases(bench.publish(1, 1)) == [(SOURCE, [MOVED])]
    assert list(bench.replica(DESTINATION).incoming) == [MOVED]
    return bench


def test_what_is_released_goes_on_at_its_destination_and_the_source_pulls() -> None:
    bench = moving()
    generated = only(cmd.GenerateTrajectory, bench.say(SOURCE, bench.released()))
    assert [(c.to, c.trajectory_id, c.placement, c.attempt) for c in generated] == [
        (DESTINATION, MOVED, 2, 1)
    ]
    assert not bench.replica(DESTINATION).incoming
    assert bench.pull_of(SOURCE) is None  # not before it has started elsewhere
    pulls = only(cmd.PullWeights, bench.say(DESTINATION, bench.begun(MOVED)))
    assert [(c.to, c.version) for c in pulls] == [(SOURCE, 1)]
    assert bench.state.repack.progress[TrajectoryId(MOVED)].migrations == 1
    bench.load(SOURCE)
    assert {t[:3] for t in bench.replica(SOURCE).running} == {"0.6", "0.7"}


def test_room_that_is_kept_is_taken() -> None:
    """Two run at the destination and one comes: of the four there is room for one more."""
    bench = moving()
    lost = only(cmd.GenerateTrajectory, bench.kill(OTHER))
    assert [c.to for c in lost] == [DESTINATION]
    assert bench.replica(DESTINATION).capacity == 4
    assert not bench.state.work.lost


def test_lost_work_does_not_go_to_a_replica_that_is_emptied() -> None:
    """It runs only one, and the other runs three."""
    bench = moving()
    generated = only(cmd.GenerateTrajectory, bench.kill(DESTINATION))
    assert [(c.to, c.trajectory_id) for c in generated] == [(OTHER, "0.2.1"), (OTHER, "0.3.1")]


def test_source_is_not_restarted_when_it_does_not_answer() -> None:
    """What it has not handed over is sampled again; its late answer changes nothing."""
    bench = moving()
    late = bench.released()
    commands = bench.wait(RELEASE_MS)
    assert [(c.to, c.placement) for c in only(cmd.GenerateTrajectory, commands)] == [
        (DESTINATION, 2)
    ]
    assert [c.to for c in only(cmd.AbortTrajectories, commands)] == [SOURCE]
    assert not only(cmd.RestartActor, commands)
    assert not bench.say(SOURCE, late)
    assert bench.state.run.ignored["TrajectoriesReleased: late"] == 1


def test_one_that_ends_at_the_source_stays_there() -> None:
    bench = moving()
    bench.finish(MOVED)
    assert not bench.replica(DESTINATION).incoming and not bench.replica(SOURCE).outgoing
    assert bench.pull_of(SOURCE) is not None
    assert f"release:{SOURCE}" not in bench.state.orders.commands


def test_what_is_dropped_on_its_way_is_waited_for_no_longer() -> None:
    bench = moving()
    bench.say(SOURCE, bench.released())
    bench.fail(MOVED)
    assert bench.pull_of(SOURCE) is not None


def test_destination_that_is_gone_makes_lost_work() -> None:
    """It was released, so it goes on from its tokens where its version is: nothing else is waited
    for, so that may be where it came from."""
    bench = moving()
    bench.kill(DESTINATION)
    assert bench.trajectory(MOVED).status == TrajectoryStatus.RELEASING
    generated = only(cmd.GenerateTrajectory, bench.say(SOURCE, bench.released()))
    assert [(c.to, c.trajectory_id, c.placement) for c in generated] == [(SOURCE, MOVED, 2)]
    assert not bench.replica(SOURCE).outgoing


def test_destination_that_dies_with_what_it_was_given() -> None:
    bench = moving()
    bench.say(SOURCE, bench.released())
    generated = only(cmd.GenerateTrajectory, bench.kill(DESTINATION))
    assert (MOVED, 3) in [(c.trajectory_id, c.placement) for c in generated]
    assert not bench.replica(SOURCE).outgoing
    assert bench.trajectory(MOVED).deaths == 1


def test_source_that_dies_makes_lost_work() -> None:
    bench = moving()
    generated = only(cmd.GenerateTrajectory, bench.kill(SOURCE))
    assert [(c.trajectory_id, c.placement) for c in generated] == [(MOVED, 2)]
    assert not bench.replica(DESTINATION).incoming
    assert not any(p.source for p in bench.state.repack.progress.values())


def test_report_of_the_start_that_crosses_the_order_changes_nothing() -> None:
    bench = moving()
    bench.say(SOURCE, bench.begun(MOVED))
    assert bench.trajectory(MOVED).status == TrajectoryStatus.RELEASING
    assert list(bench.replica(SOURCE).outgoing) == [MOVED]


def test_nothing_moves_to_where_the_cache_is_too_small() -> None:
    """Two replicas hold 40 tokens each and are expected to sample 20 more, of which an eighth
    counts."""
    for capacity, fits in ((83, False), (84, True)):
        bench = Tail()
        for name in bench.names:
            lengths = dict.fromkeys(bench.replica(name).running, 40)
            bench.gauge(name, kv_capacity_tokens=capacity, lengths=lengths)
        assert bool(releases(bench.publish(1, 1))) is fits


def test_nothing_moves_beyond_the_batch_that_is_quick_enough() -> None:
    bench = Tail(repack_policy="best-fit")
    bench.tell(max_batch=2)
    moved = releases(bench.publish(1, 1))
    assert all(
        len(bench.replica(n).running) + len(bench.replica(n).incoming) <= 2 for n in bench.names
    )
    assert moved == [(SOURCE, [MOVED])]  # to rollout-2, which runs one


def test_nothing_moves_against_a_binding_bound() -> None:
    """The version that the source would load admits two groups: its part of a bound of two steps,
    and less than that of three steps."""
    assert releases(Tail(groups_per_version=4).publish(1, 1))
    assert not releases(Tail(groups_per_version=3, max_staleness=3).publish(1, 1))


def test_policy_that_is_off_keeps_nothing() -> None:
    bench = Tail(
        repack_policy="", repack_interval_ms=0, repack_release_timeout_ms=0, repack_prefill_tokens=0
    )
    assert not releases(bench.publish(1, 1)) and "repack" not in bench.state.orders.timers
    assert bench.replica(SOURCE).repack is None
    assert not bench.state.repack.progress and not bench.state.repack.finished


def two_moving() -> Tail:
    """rollout-1 is to give 0.2.1 and 0.3.1 away to rollout-2; a batch has waited for the others."""
    bench = Tail(repack_policy="best-fit")
    bench.trajectory("0.0.1").batch_timeouts = bench.trajectory("0.4.1").batch_timeouts = 1
    assert releases(bench.publish(1, 1)) == [("rollout-1", ["0.2.1", "0.3.1"])]
    return bench


def test_source_waits_for_all_that_it_gave_away() -> None:
    bench = two_moving()
    bench.say("rollout-1", bench.released("rollout-1"))
    assert find_not_admitted_reason(bench.state, bench.replica("rollout-1")) == "repacked"
    bench.say("rollout-2", bench.begun("0.2.1"))
    assert bench.pull_of("rollout-1") is None
    bench.say("rollout-2", bench.begun("0.3.1"))
    assert bench.pull_of("rollout-1") is not None


@pytest.mark.parametrize("forgotten", [False, True])
def test_what_ends_while_it_is_released_is_not_handed_over(forgotten: bool) -> None:
    bench = two_moving()
    if forgotten:
        bench.fail("0.2.1")
        bench.write_ends()
    else:
        bench.finish("0.2.1")
    assert (TrajectoryId("0.2.1") in bench.state.work.trajectories) is not forgotten
    generated = only(cmd.GenerateTrajectory, bench.say("rollout-1", bench.released("rollout-1")))
    assert [c.trajectory_id for c in generated] == ["0.3.1"]


def test_source_that_is_gone_is_waited_for_by_nobody() -> None:
    """Also when another process has its name by then."""
    for back in (False, True):
        bench = moving()
        bench.say(SOURCE, bench.released())
        bench.kill(SOURCE)
        if back:
            bench.come_back(SOURCE)
        bench.say(DESTINATION, bench.begun(MOVED))
        assert bench.trajectory(MOVED).status == TrajectoryStatus.RUNNING
        assert not bench.state.repack.progress[TrajectoryId(MOVED)].source


def test_without_a_finished_sibling_the_mean_of_all_is_expected() -> None:
    bench = Tail()
    state, source = bench.state, bench.replica(SOURCE)
    assert list(source.running) == [MOVED]
    set_length(state, bench.trajectory("0.0.0"), 0)
    state.repack.finished, state.repack.finished_tokens = 4, 400
    state.repack.progress[TrajectoryId(MOVED)].sampled = 30
    assert standing_of(state, source)[0].longest == 70
    state.repack.progress[TrajectoryId(MOVED)].sampled = 300
    assert standing_of(state, source)[0].longest == 150


def test_a_look_empties_a_number_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(releases(Tail(repack_policy="best-fit").publish(1, 1))) > 1
    monkeypatch.setattr(migration, "EMPTIED_MAX", 1)
    assert len(releases(Tail(repack_policy="best-fit").publish(1, 1))) == 1


def test_no_look_is_taken_when_the_run_drains() -> None:
    bench = moving()
    assert "repack" in bench.state.orders.timers
    bench.own(ev.DrainRequested(reason="SIGINT"))
    bench.wait(INTERVAL_MS)
    assert "repack" not in bench.state.orders.timers
