"""What is kept at hand about a state: it follows from the state alone, and leaves no trace in it.

That it is true after every event of every random world is one of the invariants."""

from __future__ import annotations

import msgspec
import pytest

from laminar.core import invariants
from laminar.core.state import indexes
from laminar.core.state.indexes import STALE_TIMERS_MAX, indexes_of
from laminar.core.state.keys import OutstandingCommand
from laminar.core.state.state import State, hash_state
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from tools.kit.bench import start_bench
from tools.kit.random_worlds import random_world
from tools.kit.world_parts import settings


def state_with_timers(**due_ns: int) -> State:
    state = State(settings=settings(), logic=1)
    for name, due in due_ns.items():
        indexes.set_timer(state, name, due)
    return state


def outstanding(to: str) -> OutstandingCommand:
    return OutstandingCommand(
        command_id=1, cause=0, incarnation=1, command=cmd.StopActor(to=to, reason="test")
    )


def test_timers_are_due_in_the_order_of_their_times_and_names() -> None:
    state = state_with_timers(later=7, b=5, a=5, never=100)
    assert indexes.get_next_timer_ns(state) == 5
    assert indexes.due_timers(state, 4) == []
    assert indexes.due_timers(state, 7) == ["a", "b", "later"]


def test_timer_stays_due_until_it_is_cleared() -> None:
    state = state_with_timers(a=5)
    assert indexes.due_timers(state, 5) == indexes.due_timers(state, 6) == ["a"]
    assert indexes.clear_timer(state, "a") and not indexes.clear_timer(state, "a")
    assert indexes.due_timers(state, 6) == [] and indexes.get_next_timer_ns(state) is None


def test_timer_that_was_set_again_is_due_once_at_its_last_time() -> None:
    state = state_with_timers(a=5)
    indexes.set_timer(state, "a", 9)
    indexes.clear_timer(state, "a")
    indexes.set_timer(state, "a", 9)
    assert indexes.due_timers(state, 8) == []
    assert indexes.due_timers(state, 9) == ["a"]


def test_cleared_timers_do_not_pile_up() -> None:
    state = state_with_timers(kept=1)
    for due_ns in range(10 * STALE_TIMERS_MAX):
        indexes.set_timer(state, "moved", due_ns)
        assert len(indexes_of(state).timers) <= 2 * len(state.orders.timers) + STALE_TIMERS_MAX
    assert indexes.due_timers(state, 10 * STALE_TIMERS_MAX) == ["kept", "moved"]


def test_command_under_the_key_of_another_replaces_it() -> None:
    state = State(settings=settings(), logic=1)
    indexes.add_command(state, "key", outstanding("a"))
    indexes.add_command(state, "key", outstanding("b"))
    assert not indexes_of(state).commands["a"] and list(indexes_of(state).commands["b"]) == ["key"]
    assert indexes.end_command(state, "key") == outstanding("b")
    assert indexes.end_command(state, "key") is None


@pytest.mark.parametrize("seed", range(4))
def test_lookup_is_no_part_of_the_state_and_can_be_made_again_at_any_time(seed: int) -> None:
    """As after a snapshot: what is decoded has none, and the next event must find a true one."""
    world = random_world(seed)
    world.begin()
    while world.state.run.phase != Phase.ENDED:
        world.step()
        restored = msgspec.msgpack.decode(msgspec.msgpack.encode(world.state), type=State)
        assert hash_state(restored) == hash_state(world.state)
        invariants.check_invariants(restored)
        world.state.__dict__.clear()  # it is made anew in the middle of the next event


def test_who_is_not_lost_has_no_wait_that_ends() -> None:
    bench = start_bench()
    before = hash_state(bench.state)
    indexes.end_version_wait(bench.state, next(iter(bench.state.work.trajectories)))
    assert hash_state(bench.state) == before
    invariants.check_invariants(bench.state)
