"""A replica on a machine whose relay has nothing yet begins with what this is getting."""

from __future__ import annotations

import pytest

from laminar.core.loading import PULL_TIMEOUT_MS
from laminar.core.repack.stragglers import find_engine_reason
from laminar.core.state import keys
from laminar.core.state.migrations import RepackState
from laminar.core.versions.broadcast import RECEIVE_TIMEOUT_MS
from laminar.events import commands as cmd
from laminar.events import events as ev
from tools.kit.bench import Bench, only

OWN, JOINER, RELAY = "rollout-0", "rollout-1.0", "relay-1"


def joined(**changes: object) -> Bench:
    """Version 0 is out, the trainer's machine works with it; another one joins then."""
    values: dict[str, object] = {"stream": True, "max_staleness": 4, "capacity": 4}
    bench = Bench(nodes=2, **(values | changes))
    late = ("node-1", RELAY, *(n for n in bench.names if n != bench.names[0]))
    early = ["node-0", "store-0", "relay-0", "trainer-0", bench.names[0]]
    for name in early:
        bench.join(name)
    for name in early[1:]:
        bench.ready(name)
    bench.link_all()
    bench.publish(0, 0)
    bench.load_all()
    for name in late:
        bench.join(name)
    for name in late[1:]:
        bench.ready(name)
    bench.link_all()
    return bench


def joiner(bench: Bench) -> str:
    return bench.names[-1]


def test_it_is_given_new_groups_at_once() -> None:
    bench = joined()
    name = joiner(bench)
    pull = bench.pull_of(name)
    assert pull is not None
    assert (pull.version, pull.exact, pull.purpose) == (0, True, "stream")
    begun = [c for c in only(cmd.GenerateTrajectory, bench.commands) if c.to == name]
    assert begun and {(c.version, c.version_step) for c in begun} == {(0, 0)}
    took = bench.replica(name).groups_taken
    bench.receive(RELAY, 0)
    bench.say(name, bench.loaded(0))
    assert bench.pull_of(name) is None and bench.replica(name).groups_taken == took
    assert bench.state.versions.ps_per_byte.keys() <= {"load", RELAY}, "it says nothing about loads"


def test_weights_that_prove_wrong_are_loaded_whole_and_what_was_placed_goes_elsewhere() -> None:
    bench = joined()
    name = joiner(bench)
    placed = list(bench.replica(name).running)
    bench.say(name, ev.WeightsRejected(version=0, reason="digest"))
    assert not bench.replica(name).running and bench.pull_of(name) is None
    assert {bench.trajectory(t).replica for t in placed} <= {OWN, bench.names[0], name}
    pulls = only(cmd.PullWeights, bench.receive(RELAY, 0))
    assert [(p.to, p.purpose) for p in pulls] == [(name, "start")]


def test_held_out_answers_of_weights_that_nobody_serves_any_more_are_asked_for_again() -> None:
    """Their version is not moved on from; they must not keep other lost work from its place."""
    bench = joined(num_eval=9, val_before_train=True, capacity=2, group_size=2)
    name = joiner(bench)
    held_out = [t for t in bench.replica(name).running if t.startswith("e")]
    assert held_out
    bench.kill(bench.names[0], restarting=False)
    bench.say(name, ev.WeightsRejected(version=0, reason="digest"))
    assert set(held_out) <= set(bench.state.work.lost)
    bench.wait(bench.state.settings.resume_timeout_ms)
    assert not set(held_out) & set(bench.state.work.lost)
    bench.receive(RELAY, 0)
    again = only(cmd.GenerateTrajectory, bench.load(name))
    assert {c.purpose for c in again} == {"eval"}


def test_a_copy_that_was_given_up_is_not_streamed_again_before_its_relay_is_heard_of() -> None:
    bench = joined()
    name = joiner(bench)
    bench.say(name, ev.VersionMissing(version=0, held=()))
    assert bench.replica(name).version == -1 and not bench.replica(name).running
    assert bench.pull_of(name) is None
    assert only(cmd.PullWeights, bench.receive(RELAY, 0))


def test_its_time_runs_anew_while_bytes_come() -> None:
    bench = joined()
    name = joiner(bench)
    bench.wait(PULL_TIMEOUT_MS - 1_000)
    bench.say(
        RELAY,
        ev.TransferProblem(
            kind="slow",
            relay="relay-0",
            version=0,
            detail="half",
            num_bytes=10,
            duration_ms=60_000,
            left_bytes=10,
        ),
    )
    due = bench.state.orders.timers[keys.deadline_timer(keys.pull_key(name))]
    assert due == (bench.now_ms + RECEIVE_TIMEOUT_MS) * 1_000_000


@pytest.mark.parametrize("lost", [RELAY, "relay-0"])
def test_a_lost_relay_does_not_end_the_run(lost: str) -> None:
    bench = joined()
    bench.kill(lost)
    bench.say(joiner(bench), ev.VersionMissing(version=0, held=()))
    bench.come_back(lost)
    assert bench.state.run.failure == ""


def test_it_is_in_no_tail_and_loads_nothing_in_flight() -> None:
    bench = joined(in_flight=True, groups_per_version=0, groups_per_step=1)
    bench.complete("0.0")
    bench.train()
    bench.receive(RELAY, 1, held=(1,))
    replica = bench.replica(joiner(bench))
    pull = bench.pull_of(replica.name)
    assert pull is not None and (pull.version, pull.purpose) == (0, "stream")
    replica.repack = RepackState()
    assert find_engine_reason(bench.state, replica) == "streaming"
