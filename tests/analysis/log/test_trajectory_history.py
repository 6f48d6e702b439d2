"""Lives and idle times agree with the machine's state after every event of random runs."""

from __future__ import annotations

import pytest

from laminar.analysis.log import trajectory_history
from laminar.analysis.why.idle_spells import DOWN, FREE, NO_WEIGHTS, PULLING, IdleTracker
from laminar.core.machine import StateMachine
from laminar.core.state.members import Replica
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.core.state.work import Trajectory
from tests.analysis.told_bench import ToldBench
from tools.kit.random_worlds import failing_world, random_world


@pytest.mark.parametrize("seed", range(20))
def test_lives_say_what_the_state_says(seed: int) -> None:
    for world in (random_world(seed), failing_world(seed)):
        machine, lives, idleness, moments = (
            StateMachine(),
            trajectory_history.HistoryTracker(),
            IdleTracker(),
            trajectory_history.EventClock(),
        )
        for stamped, _ in world.run().log:
            commands = machine.handle_event(stamped)
            now = moments.locate_event(stamped)
            lives.record_event(now, stamped.event, commands, machine.state)
            idleness.record_event(now, stamped, machine.state)
            assert lives.open.keys() == machine.state.work.trajectories.keys()
            for name, trajectory in machine.state.work.trajectories.items():
                check(lives.open[name], trajectory)
            check_idle(idleness, machine.state)


def check(life: trajectory_history.TrajectoryHistory, trajectory: Trajectory) -> None:
    """Status by status; an end on its way to the store has a higher placement number."""
    last = life.placement
    if trajectory.status in (
        TrajectoryStatus.DISPATCHED,
        TrajectoryStatus.RUNNING,
        TrajectoryStatus.RELEASING,
        TrajectoryStatus.LOST,
    ):
        assert (last.number, last.attempt) == (trajectory.placement, trajectory.attempt)
        assert life.finished is life.rewarded is life.ending is None
        assert (last.left is not None) == (trajectory.status == TrajectoryStatus.LOST)
        assert trajectory.status == TrajectoryStatus.LOST or last.replica == trajectory.replica
        assert trajectory.status != TrajectoryStatus.RUNNING or last.started is not None
    elif trajectory.status in (TrajectoryStatus.GENERATED, TrajectoryStatus.REWARDED):
        assert life.finished == last.left is not None
        assert life.num_tokens == trajectory.num_tokens
        assert (life.rewarded is not None) == (trajectory.status == TrajectoryStatus.REWARDED)
        assert (life.reward is None) == (trajectory.reward_bits < 0)
    else:
        assert life.ending is not None and life.end
        assert last.left is not None


def check_idle(idleness: IdleTracker, state: State) -> None:
    """Open exactly for the known replicas that run nothing, with a reason that holds."""
    running = {r.name for r in state.members.replicas.values() if r.running}
    assert idleness.open.keys() == idleness.known.keys() - running
    for name, idle in idleness.open.items():
        replica = state.members.replicas.get(name)
        holds = {
            DOWN: replica is None or not state.members.is_actor_alive(name),
            PULLING: replica is not None and replica.loading,
            NO_WEIGHTS: replica is not None and replica.version < 0 and not replica.loading,
        }
        reason = idle.spells[-1].reason
        assert holds.get(reason, _serves(replica)), (name, reason)
        assert reason != "staleness-bound" or "groups fit by step" in idle.spells[-1].detail


def _serves(replica: Replica | None) -> bool:
    return replica is not None and replica.version >= 0


def test_a_replica_that_was_forgotten_is_free() -> None:
    """The planner leaves nobody idle whom nothing refuses; if it did, this is what would show."""
    bench = ToldBench(replicas=1, max_staleness=2)
    bench.start()
    bench.replica().running.clear()
    idleness = IdleTracker()
    idleness.record_event(trajectory_history.Moment(bench.seq, 0), bench.log[-1][0], bench.state)
    spell = idleness.open["rollout-0"].spells[-1]
    assert (spell.reason, spell.detail) == (FREE, "nothing prevents new work")


def test_moments_count_from_the_first_event() -> None:
    world = random_world(1).run()
    moments = trajectory_history.EventClock()
    first, second = (stamped for stamped, _ in world.log[:2])
    begin = moments.locate_event(first)
    assert moments.seconds_since_start(begin) == 0.0
    later = moments.locate_event(second)
    assert moments.seconds_since_start(later) == (second.time_ns - first.time_ns) / 1e9
    assert (
        moments.format_time(trajectory_history.Moment(7, begin.unix_ns + 1_500_000_000))
        == "1.500 s (#7)"
    )
