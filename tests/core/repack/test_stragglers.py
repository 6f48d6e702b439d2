"""Why a replica is not in its tail, and why one that is stays as it is: a reason each."""

from __future__ import annotations

from laminar.core.repack.packing import find_not_packed_reason
from laminar.core.repack.stragglers import (
    MIGRATIONS_MAX,
    find_not_emptied_reason,
    find_not_straggler_reason,
    find_stragglers,
)
from laminar.core.state.evaluations import Evaluation
from laminar.core.state.migrations import NotStragglerReason, StayReason
from laminar.names.ids import Purpose, TrajectoryId
from tests.core.repack.test_migration import (
    DESTINATION,
    MOVED,
    OTHER,
    SOURCE,
    Tail,
    moving,
    releases,
)
from tests.core.repack.test_packing import CAPACITY, standing


def work(bench: Tail, name: str = SOURCE) -> NotStragglerReason | None:
    return find_not_straggler_reason(bench.state, bench.replica(name))


def stay(bench: Tail, name: str = SOURCE) -> StayReason | None:
    return find_not_emptied_reason(bench.state, bench.replica(name))


def test_what_keeps_a_replica_out_of_its_tail() -> None:
    bench = Tail()
    assert not work(bench)  # by the staleness bound
    bound, bench.state.work.deadlines = bench.state.work.deadlines, {}
    assert work(bench) == "admits"
    bench.state.work.deadlines = bound
    bench.publish(1, 1)
    replica = bench.replica(OTHER)
    assert not work(bench, OTHER)
    bench.gauge(OTHER, waiting=1)
    assert work(bench, OTHER) == "waiting"
    bench.gauge(OTHER, max_batch=1)
    assert work(bench, OTHER) == "full"
    bench.gauge(OTHER)
    assert replica.repack is not None
    replica.repack.last_command_id += 1
    assert work(bench, OTHER) == "no-gauges"
    replica.repack.last_command_id -= 1
    running, replica.running = replica.running, {}
    assert work(bench, OTHER) == "empty"
    replica.running = running
    replica.repack = None
    assert work(bench, OTHER) == "no-gauges"


def test_what_keeps_its_work_on_a_replica() -> None:
    bench = moving()
    assert stay(bench, DESTINATION) == "receives"
    state, other = bench.state, bench.replica(OTHER)
    assert not stay(bench, OTHER)
    trajectory = state.work.trajectories[next(iter(other.running))]
    trajectory.batch_timeouts = 1
    assert stay(bench, OTHER) == "batch-waits"
    trajectory.batch_timeouts, trajectory.deaths = 0, 1
    assert stay(bench, OTHER) == "caused-losses"
    trajectory.deaths, state.repack.progress[trajectory.id].migrations = 0, MIGRATIONS_MAX
    assert stay(bench, OTHER) == "migrated-often"
    state.members.relays[other.relay].newest = 0
    assert stay(bench, OTHER) == "weights-not-here"
    state.versions.newest = 0
    assert stay(bench, OTHER) == "no-newer-weights"


def test_what_has_not_begun_where_it_was_handed_to_stays() -> None:
    """The replica has taken the order, and the store has not opened the trajectory yet; the one
    that gave it away waits for it."""
    bench = moving()
    bench.say(SOURCE, bench.released())
    bench.tell()
    assert bench.trajectory(MOVED).replica == DESTINATION
    assert stay(bench, DESTINATION) == "receives"
    bench.say(DESTINATION, bench.begun(MOVED))
    assert stay(bench, DESTINATION) is None


def test_held_out_answers_stay_and_an_evaluation_goes_first() -> None:
    bench = moving()
    state = bench.state
    trajectory = state.work.trajectories[next(iter(bench.replica(OTHER).running))]
    state.work.groups[trajectory.group].purpose = Purpose.EVAL
    assert stay(bench, OTHER) == "evaluation-sample"
    state.evaluations.running = Evaluation(
        index=0, version=0, step=0, final=False, queue=[0], total=1
    )
    assert stay(bench, OTHER) == "evaluation"


def test_what_a_plan_leaves_where_it_is() -> None:
    source = standing("s", 100, 2)
    assert find_not_packed_reason(source, [], 0) == "alone"
    full = standing("f", CAPACITY, 2)
    assert find_not_packed_reason(source, [full], 0) == "no-room"
    half = standing("h", 100, 60)
    assert not find_not_packed_reason(source, [full, half], 0)
    assert find_not_packed_reason(source._replace(longest=1), [half], 1) == "no-gain"


def test_the_reasons_are_those_of_the_plan() -> None:
    """Whoever has none may be emptied, and is."""
    bench = Tail(repack_policy="best-fit")
    emptied = {name for name, _ in releases(bench.publish(1, 1))}
    assert emptied == {SOURCE, OTHER} or emptied == {SOURCE}
    assert TrajectoryId(MOVED) in bench.replica(SOURCE).outgoing
    left = [s.name for found in find_stragglers(bench.state).values() for s in found if s.movable]
    assert not left
