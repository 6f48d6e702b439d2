"""The store dies, hangs or is replaced: its orders wait for its next process, and nobody else pays.

With the rule off, as in older logs, its loss ends the run.
"""

from __future__ import annotations

import pytest

from laminar.core.context import RESTART_TIMEOUT_MS
from laminar.core.state.statuses import Phase
from laminar.core.store_orders import END_TIMEOUT_MS
from laminar.events import commands as cmd
from laminar.events import events as ev
from tests.core.members.test_silent_nodes import fall_silent, speak_again
from tools.kit.bench import Bench, only, start_bench

START_MS = 120_000


def trained(**changes: object) -> Bench:
    """One group was trained; the store has not said yet that it has written its ends."""
    bench = start_bench(
        changes,
        groups_per_step=1,
        max_staleness=1,
        capacity=4,
        batch_timeout_ms=10**9,
        start_timeout_ms=START_MS,
    )
    bench.complete("0.0")
    bench.train()
    return bench


def orders(bench: Bench) -> list[tuple[str, int]]:
    """Outstanding ends: key, and the incarnation that they are addressed to."""
    found = bench.state.orders.commands.items()
    return [(k, o.incarnation) for k, o in found if isinstance(o.command, cmd.EndTrajectories)]


def deadlines(bench: Bench) -> list[str]:
    return [name for name in bench.state.orders.timers if name.startswith("command:end:")]


def test_its_orders_go_to_its_next_process_and_the_run_goes_on() -> None:
    bench = trained()
    ((key, first),) = orders(bench)
    bench.kill("store-0")
    assert not bench.state.run.failure and "rejoin:store-0" in bench.state.orders.timers
    assert orders(bench) == [(key, first)] and deadlines(bench) == []
    bench.join("store-0", "b")
    second = bench.state.members.actors["store-0"].incarnation
    assert orders(bench) == [(key, second)] and second > first
    assert "rejoin:store-0" in bench.state.orders.timers, "it has joined, and is not ready"
    bench.ready("store-0")
    assert "rejoin:store-0" not in bench.state.orders.timers and deadlines(bench) == [
        f"command:{key}"
    ]
    bench.write_ends()
    assert orders(bench) == [] and bench.state.work.ledger.trajectories.trained == 2
    assert bench.state.data.num_train == bench.num_train


def test_what_ends_while_it_is_away_is_ordered_too_and_has_its_time_from_its_return() -> None:
    bench = trained()
    bench.write_ends()
    bench.kill("store-0")
    bench.complete("0.1")
    bench.train()
    assert len(orders(bench)) == 1 and deadlines(bench) == []
    bench.wait(START_MS - 1)
    bench.come_back("store-0")
    bench.wait(END_TIMEOUT_MS - 1)
    assert not only(cmd.RestartActor, bench.wait(0))
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.trained == 4


def test_its_answer_from_before_its_death_is_refused() -> None:
    """It was fenced; its successor answers the same order."""
    bench = trained()
    (outstanding,) = (o for o in bench.state.orders.commands.values() if o.command.to == "store-0")
    written, old = bench.written(outstanding), bench.state.members.actors["store-0"].incarnation
    bench.kill("store-0")
    bench.come_back("store-0")
    bench.hear("store-0", old, written)
    assert bench.state.work.ledger.trajectories.trained == 0
    bench.say("store-0", written)
    assert bench.state.work.ledger.trajectories.trained == 2


def test_it_dies_again_before_it_is_ready() -> None:
    bench = trained()
    bench.kill("store-0")
    bench.join("store-0", "b")
    bench.kill("store-0")
    assert not bench.state.run.failure and "rejoin:store-0" in bench.state.orders.timers
    bench.come_back("store-0", "c")
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.trained == 2


@pytest.mark.parametrize("joins", [False, True])
def test_it_does_not_come_back_in_time(joins: bool) -> None:
    bench = trained()
    bench.kill("store-0")
    if joins:
        bench.join("store-0", "b")
    bench.wait(START_MS)
    assert bench.state.run.failure.startswith("the store is lost: store-0 was restarted and never")
    assert bench.state.run.phase == (Phase.ENDING if joins else Phase.STOPPING)


def test_its_node_gives_it_up() -> None:
    bench = trained()
    bench.kill("store-0", restarting=False)
    assert (
        bench.state.run.failure == "the store is lost: store-0: its process ended with exit code -9"
    )
    bench.stop()
    assert (bench.state.run.phase, bench.state.run.exit_code) == (Phase.ENDED, 1)
    assert bench.state.work.ledger.trajectories.live, "nothing may claim that the ends were written"


def test_it_says_that_it_cannot_go_on() -> None:
    """Another process would meet the same: the run ends with the reason."""
    bench = trained()
    bench.say("store-0", ev.ActorFailed(reason="disk full", user_error=False))
    assert bench.state.run.failure == "store-0: disk full"


def test_silence_has_it_restarted() -> None:
    bench = trained()
    (order,) = only(cmd.RestartActor, bench.silent("store-0"))
    assert (order.to, order.actor) == ("node-0", "store-0") and not bench.state.run.failure
    bench.come_back("store-0")
    bench.write_ends()
    assert bench.state.work.ledger.trajectories.trained == 2


def test_two_minutes_for_one_transaction_have_it_restarted_and_then_given_up() -> None:
    """It answers heartbeats and writes nothing; its node does not do as it is told, either."""
    bench = trained()
    (order,) = only(cmd.RestartActor, bench.wait(END_TIMEOUT_MS))
    assert order.actor == "store-0" and "EndTrajectories" in order.reason
    bench.wait(RESTART_TIMEOUT_MS)
    assert not bench.state.members.is_actor_alive("store-0") and not bench.state.run.failure
    bench.wait(START_MS)
    assert bench.state.run.failure.startswith("the store is lost")


@pytest.mark.parametrize("node_first", [True, False])
def test_a_store_that_is_silent_with_its_node_is_waited_for(node_first: bool) -> None:
    """Both were stopped together, and go on: the node starts another one then. It is waited for as
    long as for a start."""
    bench = trained()
    run = bench.state.run
    if node_first:
        fall_silent(bench)
    bench.silent("store-0")
    if not node_first:
        fall_silent(bench)
    assert not run.failure
    speak_again(bench)
    bench.come_back("store-0")
    bench.silent("store-0")
    fall_silent(bench)
    bench.wait(bench.settings.start_timeout_ms)
    assert (run.failed.kind, run.failed.subject) == ("store-lost", "store-0")


def test_no_replica_stalls_meanwhile() -> None:
    """What waits for the store samples nothing; it has its whole time again afterwards."""
    bench = trained(stall_ms=30_000)
    bench.kill("store-0")
    assert not only(cmd.RestartActor, bench.wait(60_000))
    bench.come_back("store-0")
    assert not only(cmd.RestartActor, bench.wait(29_000))
    assert only(cmd.RestartActor, bench.wait(31_000))


def test_no_batch_gives_up_what_it_waits_for_meanwhile() -> None:
    bench = trained(batch_timeout_ms=20_000)
    bench.write_ends()
    bench.kill("store-0")
    before = [t.batch_timeouts for t in bench.state.work.trajectories.values()]
    assert bench.wait(60_000) == []
    assert [t.batch_timeouts for t in bench.state.work.trajectories.values()] == before
    bench.come_back("store-0")
    bench.wait(20_000)
    assert any(t.batch_timeouts for t in bench.state.work.trajectories.values())


@pytest.mark.parametrize("comes_back", [False, True])
def test_the_end_of_the_run_waits_for_it(comes_back: bool) -> None:
    """The last ends are not written yet: the books close, or it is given up in its time."""
    bench = trained()
    bench.own(ev.DrainRequested(reason="SIGINT", at_once=True))
    assert bench.state.run.phase == Phase.ENDING
    bench.kill("store-0")
    assert bench.state.run.phase == Phase.ENDING
    if comes_back:
        bench.come_back("store-0")
        bench.write_ends()
        assert bench.state.work.ledger.trajectories.live == 0
    else:
        bench.wait(START_MS)
    assert bench.state.run.phase == Phase.STOPPING


def test_silence_while_the_run_ends_has_it_restarted_and_others_not() -> None:
    bench = trained()
    bench.own(ev.DrainRequested(reason="SIGINT", at_once=True))
    assert [c.actor for c in only(cmd.RestartActor, bench.silent("store-0"))] == ["store-0"]
    assert only(cmd.RestartActor, bench.silent("rollout-0")) == []
    (refused,) = only(cmd.RefuseActor, bench.join("rollout-0", "b"))
    assert refused.reason == "the run is ending"
