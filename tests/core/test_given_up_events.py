"""An event on which too many coordinators crashed: what the core does instead of handling it."""

from __future__ import annotations

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from tools.kit.bench import Bench, only


def small() -> Bench:
    """Steps of one group, on-policy."""
    return Bench(groups_per_step=1, max_staleness=0, capacity=4, total_steps=2)


def give_up(bench: Bench) -> list[Command]:
    """Three coordinators have crashed on a message of the trainer."""
    return bench.own(
        ev.EventGivenUp(
            what="trainer-ready, message 1 of trainer-0 (incarnation 3)",
            crashes=3,
            error="KeyError: '0.3'",
            actor="trainer-0",
            actor_incarnation=bench.state.actors["trainer-0"].incarnation,
            peer_seq=bench.state.actors["trainer-0"].last_peer_seq + 1,
            timer="",
        )
    )


def test_event_that_is_given_up_ends_the_run_by_its_name() -> None:
    """What is open ends, and the message counts as received."""
    bench = small()
    bench.start()
    number = bench.state.actors["trainer-0"].last_peer_seq + 1
    assert only(cmd.EndTrajectories, give_up(bench))
    assert bench.state.failure == (
        "the coordinator crashed 3 times on trainer-ready, message 1 of trainer-0 (incarnation 3): "
        "KeyError: '0.3'"
    )
    assert bench.state.exit_code == 1
    assert bench.state.actors["trainer-0"].last_peer_seq == number


def test_answer_of_the_store_that_is_given_up_is_not_waited_for() -> None:
    """The run ends for another event when the coordinators crash on what the store says about the
    ends: it will not say it again. The first reason is kept, and the books stay open."""
    bench = small()
    bench.start()
    give_up(bench)
    (key,) = [key for key in bench.state.commands if key.startswith("end:")]
    failure, store = bench.state.failure, bench.state.actors["store-0"]
    event = ev.EventGivenUp(
        what="trajectories-ended, message 2 of store-0 (incarnation 2)",
        crashes=3,
        error="KeyError: '0.1.1'",
        actor="store-0",
        actor_incarnation=store.incarnation,
        peer_seq=store.last_peer_seq + 1,
        timer="",
        ended_by=int(key.removeprefix("end:")),
    )
    commands = bench.own(event)
    assert len(only(cmd.StopActor, commands)) == len(bench.state.actors)
    assert key not in bench.state.commands and f"command:{key}" not in bench.state.timers
    assert bench.state.failure == failure and bench.state.ledger.trajectories.live > 0


def test_event_that_is_given_up_before_anything_began_stops_everybody() -> None:
    bench = small()
    for name in ("node-0", "store-0", "relay-0", "trainer-0"):
        bench.join(name)
    assert len(only(cmd.StopActor, give_up(bench))) == 4


def test_event_that_is_given_up_again_changes_nothing() -> None:
    """The message has its number already, and the run has failed for it; so also one of a process
    that is no member any more, or never was."""
    bench = small()
    bench.start()
    give_up(bench)
    failure, last = bench.state.failure, bench.state.actors["trainer-0"].last_peer_seq
    present = bench.state.actors["trainer-0"].incarnation
    for actor, incarnation in (("trainer-0", present), ("trainer-0", 1), ("nobody-0", 1)):
        event = ev.EventGivenUp(
            what="it",
            crashes=3,
            error="",
            actor=actor,
            actor_incarnation=incarnation,
            peer_seq=last,
            timer="",
        )
        assert bench.own(event) == []
    assert bench.state.ignored == {"EventGivenUp: run-ending": 3}
    assert (bench.state.failure, bench.state.actors["trainer-0"].last_peer_seq) == (failure, last)
