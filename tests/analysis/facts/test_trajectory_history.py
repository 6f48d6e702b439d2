"""Lives and idle times agree with the machine's state after every event of random runs."""

from __future__ import annotations

import pytest

from laminar.analysis.facts import trajectory_history
from laminar.analysis.facts.happening import Happening
from laminar.analysis.facts.idle_reasons import DOWN, FREE, NO_WEIGHTS, PULLING
from laminar.analysis.facts.replica_facts import BUSY, ReplicaFacts
from laminar.analysis.log import event_clock
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
            trajectory_history.HistoryTracker(lambda name, row: None),
            ReplicaFacts(lambda name, row: None),
            event_clock.EventClock(),
        )
        for stamped, _ in world.run().log:
            commands = machine.handle_event(stamped)
            now = moments.locate_event(stamped)
            changes = lives.record_event(now, stamped, commands, machine.state)
            idleness.record(Happening(now, stamped, commands, machine.state, changes))
            assert lives.open.keys() == machine.state.work.trajectories.keys()
            for name, trajectory in machine.state.work.trajectories.items():
                check(lives.open[name], trajectory)
            check_idle(idleness, machine.state)


def check(life: trajectory_history.TrajectoryHistory, trajectory: Trajectory) -> None:
    """Status by status; an end on its way to the store has a higher placement number."""
    last = life.stay
    if trajectory.status in (
        TrajectoryStatus.DISPATCHED,
        TrajectoryStatus.RUNNING,
        TrajectoryStatus.RELEASING,
        TrajectoryStatus.LOST,
    ):
        assert (last.placement, last.attempt) == (trajectory.placement, trajectory.attempt)
        assert life.finished is life.rewarded is life.ending is None
        assert (last.left_at is not None) == (trajectory.status == TrajectoryStatus.LOST)
        assert trajectory.status == TrajectoryStatus.LOST or last.replica == trajectory.replica
        assert trajectory.status != TrajectoryStatus.RUNNING or last.started is not None
    elif trajectory.status in (TrajectoryStatus.GENERATED, TrajectoryStatus.REWARDED):
        assert life.finished == last.left_at is not None
        assert life.tokens == trajectory.num_tokens
        assert (life.rewarded is not None) == (trajectory.status == TrajectoryStatus.REWARDED)
        assert (life.reward is None) == (trajectory.reward_bits < 0)
    else:
        assert life.ending is not None and life.outcome
        assert last.left_at is not None


def states_of(idleness: ReplicaFacts) -> dict[str, tuple[str, str]]:
    """The state of each replica that was ever ready, with its figures."""
    rows = [row for table, row in idleness.list_open() if table == "replica_states"]
    return {row.replica: (row.state, row.detail or "") for row in rows}


def check_idle(idleness: ReplicaFacts, state: State) -> None:
    """Idle are exactly the known replicas that run nothing, with a reason that holds."""
    running = {r.name for r in state.members.replicas.values() if r.running}
    found = states_of(idleness)
    assert state.members.replicas.keys() <= found.keys()
    assert {name for name, (what, _) in found.items() if what == BUSY} == running
    for name, (reason, detail) in found.items():
        if reason == BUSY:
            continue
        replica = state.members.replicas.get(name)
        holds = {
            DOWN: replica is None or not state.members.is_actor_alive(name),
            PULLING: replica is not None and replica.loading,
            NO_WEIGHTS: replica is not None and replica.version < 0 and not replica.loading,
        }
        assert holds.get(reason, _serves(replica)), (name, reason)
        assert reason != "staleness-bound" or "groups fit by step" in detail


def _serves(replica: Replica | None) -> bool:
    return replica is not None and replica.version >= 0


def test_a_replica_that_was_forgotten_is_free() -> None:
    """The planner leaves nobody idle whom nothing refuses; if it did, this is what would show."""
    bench = ToldBench(replicas=1, max_staleness=2)
    bench.start()
    bench.replica().running.clear()
    idleness, clock = ReplicaFacts(lambda name, row: None), event_clock.EventClock()
    now = clock.locate_event(bench.log[-1][0])
    idleness.record(Happening(now, bench.log[-1][0], [], bench.state, []))
    assert states_of(idleness)["rollout-0"] == (FREE, "nothing prevents new work")


def test_moments_count_from_the_first_event() -> None:
    world = random_world(1).run()
    moments = event_clock.EventClock()
    first, second = (stamped for stamped, _ in world.log[:2])
    assert moments.locate_event(first).seconds == 0.0
    seconds = (second.time_ns - first.time_ns) / 1e9
    assert moments.locate_event(second).seconds == seconds
    assert event_clock.format_moment(seconds=1.5, event=7) == "1.500 s (#7)"
