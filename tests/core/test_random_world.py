"""Random runs: they end, their books agree, they depend on nothing but their log, and handlers lead
to what they list, no less and no more."""

from __future__ import annotations

import builtins
import os
import random
import time
from collections import Counter

import pytest

from laminar.core.context import Context
from laminar.core.machine import StateMachine, run_planner
from laminar.core.state.state import hash_state
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Event, Stamped
from laminar.events.codec import encode
from tests.hash_seeds import printed_under
from tools.kit.random_worlds import (
    check_end,
    check_failed,
    check_paused,
    environment_world,
    failing_world,
    in_flight_world,
    random_world,
)
from tools.kit.world import World


def log_of(world: World) -> list[bytes]:
    """Every event and every decision, as bytes."""
    return [encode(item) for s, commands in world.log for item in (s.event, *commands)]


def test_runs_end_with_three_books_that_agree(good_runs: list[World]) -> None:
    """Trainer, store and ledger know nothing of each other. (That every invariant held after every
    event is checked while a world runs.)"""
    for world in good_runs:
        check_end(world)


def test_failed_runs_end_with_a_reason_and_closed_books(failing_runs: list[World]) -> None:
    failed = [world for world in failing_runs if world.state.run.failure]
    assert len(failed) > len(failing_runs) // 2
    for world in failed:
        check_failed(world)


def test_paused_runs_have_saved_what_is_complete(pausing_runs: list[World]) -> None:
    assert sum(world.state.run.paused for world in pausing_runs) > len(pausing_runs) // 2
    for world in pausing_runs:
        check_paused(world)


def test_random_runs_meet_what_they_are_for(good_runs: list[World]) -> None:
    """A world without losses, drops, restarts, skips or fences would prove little."""
    ledgers = [world.state.work.ledger for world in good_runs]
    reasons = {reason for ledger in ledgers for reason in ledger.trajectories.dropped}
    assert reasons >= {
        "batch-timeout", "end-of-data", "mismatch", "no-variance", "quarantined", "replica-lost",
        "run-ended", "store-refused", "too-few-scored", "unscored",
    }  # fmt: skip
    assert sum(ledger.tokens.dropped.get("restarted", 0) for ledger in ledgers) > 0
    ignored = {
        reason.partition(": ")[2] for world in good_runs for reason in world.state.run.ignored
    }
    assert {
        bool(world.state.run.failure) for world in good_runs if world.state.signals.rewards
    } == {False, True}
    assert ignored >= {"fenced", "old-placement", "old-process", "repeat", "not-pulling"}


def test_on_policy_runs_train_only_what_began_with_the_newest_weights(
    good_runs: list[World],
) -> None:
    """With max_staleness=0 no group that is trained was begun between a batch's choice and the next
    load, and every trained answer was begun with the weights of the step before."""
    on_policy = [world for world in good_runs if world.settings.max_staleness == 0]
    assert len(on_policy) > 50
    for world in on_policy:
        assert world.state.steps.staleness_max == 0
        too_early: set[str] = set()
        chosen, ordered = False, set[int]()
        for stamped, commands in world.log:
            chosen = chosen and not isinstance(stamped.event, ev.WeightsLoaded)
            for command in commands:
                if isinstance(command, cmd.TrainStep) and command.step_index not in ordered:
                    ordered.add(command.step_index)  # again, after a loss: it was chosen then
                    chosen = True
                if isinstance(command, cmd.GenerateTrajectory) and command.placement == 1:
                    too_early |= {command.trajectory_id} if chosen else set()
        assert not too_early & set(world.trained)


def test_every_command_is_decided(
    good_runs: list[World], failing_runs: list[World], pausing_runs: list[World]
) -> None:
    """A command that no event leads to would be dead."""
    runs = (*good_runs, *failing_runs, *pausing_runs, environment_world(0).run())
    decided = {type(c) for world in runs for _, commands in world.log for c in commands}
    assert decided == set(cmd.ALL_COMMANDS)


def test_every_sender_of_the_world_is_listed(good_runs: list[World]) -> None:
    """The world's processes were written from the roles of real ones."""
    for world in good_runs:
        for stamped, _ in world.log:
            role = stamped.peer.rpartition("-")[0] or stamped.peer
            assert role in ev.REPORTED_BY[type(stamped.event)], stamped


def test_runs_with_weights_in_flight_end_with_three_books_that_agree() -> None:
    """Replicas load while they run, prove wrong, die meanwhile; nothing begins again for that."""
    seen, lost = Counter[str](), 0
    for seed in range(60):
        world = in_flight_world(seed).run()
        check_end(world)
        decisions = [(stamped.event, command) for stamped, cs in world.log for command in cs]
        seen.update(str(c.purpose) for _, c in decisions if isinstance(c, cmd.PullWeights))
        lost += sum(
            isinstance(event, ev.WeightsRejected) and isinstance(c, cmd.AbortTrajectories)
            for event, c in decisions
        )
    assert seen["in-flight"] > 100 and not seen["resume"] and lost, (seen, lost)


def test_runs_with_turns_end_with_three_books_that_agree() -> None:
    """Sessions answer, late, twice, or are lost; no held-out answer changes its weights."""
    turns, seen = 0, Counter[str]()
    for seed in range(8):
        world = environment_world(seed).run()
        check_end(world)
        turns += sum(row.turns for row in world.rows.values())
        for stamped, commands in world.log:
            seen.update(type(command).__name__ for command in commands)
            if isinstance(stamped.event, ev.TrajectoryFailed):
                seen[stamped.event.reason] += 1
    assert turns > 300 and seen["env-lost"], (turns, seen)


@pytest.mark.parametrize("seed", range(4))
def test_same_seed_same_log_same_state(seed: int) -> None:
    one, two = random_world(seed).run(), random_world(seed).run()
    assert log_of(one) == log_of(two)
    assert hash_state(one.state) == hash_state(two.state)


@pytest.mark.parametrize("seed", range(4))
def test_state_is_the_fold_of_the_log(seed: int, good_runs: list[World]) -> None:
    """The same events alone, without any world, lead to the same decisions and the same state."""
    world, machine = good_runs[seed], StateMachine()
    for stamped, commands in world.log:
        assert machine.handle_event(stamped) == commands
    assert hash_state(machine.state) == hash_state(world.state)


class PureMachine(StateMachine):
    """While it handles an event, asking for time, chance or a file raises."""

    FORBIDDEN = (
        (time, "time"), (time, "time_ns"), (time, "monotonic"), (time, "monotonic_ns"),
        (random, "random"), (random, "getrandbits"), (os, "urandom"), (os, "getpid"),
        (builtins, "open"), (builtins, "id"), (builtins, "hash"),
    )  # fmt: skip

    def handle_event(self, stamped: Stamped) -> list[Command]:
        def impure(*_: object, **__: object) -> None:
            raise AssertionError("the machine asked for something that is not in the log")

        kept = [(module, name, getattr(module, name)) for module, name in self.FORBIDDEN]
        try:
            for module, name, _ in kept:
                setattr(module, name, impure)
            return super().handle_event(stamped)
        finally:
            for module, name, function in kept:
                setattr(module, name, function)


@pytest.mark.parametrize("seed", range(6))
def test_handling_is_pure(seed: int) -> None:
    """No clock, no chance, no file, no address of an object: only the event and the state."""
    world = random_world(seed)
    world.machine = PureMachine()
    check_end(world.run())


def test_other_hash_seeds_give_the_same_state() -> None:
    """Python's string hashes differ between processes; nothing may depend on them."""
    program = (
        "from tools.kit.random_worlds import random_world\n"
        "from laminar.core.state.state import hash_state\n"
        "print([hash_state(random_world(seed).run().state) for seed in range(8)])\n"
    )
    answers = printed_under(("0", "1", "2"), program)
    assert answers == {str([hash_state(random_world(s).run().state) for s in range(8)]) + "\n"}


class TwiceWorld(World):
    """Every event is reported a second time (the same message twice is the session's business)."""

    def deliver(self, peer: str, incarnation: int, peer_seq: int, event: Event) -> list[Command]:
        commands = super().deliver(peer, incarnation, peer_seq, event)
        if self._is_news(event):
            return commands
        before = self._essence()
        again = super().deliver(peer, incarnation, peer_seq, event)
        assert not again, (event, again)
        assert self._essence() == before, event
        return commands

    def _is_news(self, event: Event) -> bool:
        """Two starts are two coordinators; a timer that was set anew has not fired twice; a process
        that is refused is refused as often as it asks; a replica that was told to pull again may
        answer again."""
        if isinstance(event, ev.WeightsLoaded | ev.WeightsRejected | ev.VersionMissing):
            return any(key.startswith("pull:") for key in self.state.orders.commands)
        if isinstance(event, ev.TimerFired):
            return event.timer in self.state.orders.timers
        if isinstance(event, ev.ActorJoined):
            return self.state.members.actors[event.name].boot_id != event.boot_id
        return isinstance(event, ev.CoordinatorStarted)

    def _essence(self) -> str:
        """The state without its event counter and its count of ignored events."""
        state = self.state
        seq, ignored = state.seq, state.run.ignored
        state.seq, state.run.ignored = 0, {}
        found = hash_state(state)
        state.seq, state.run.ignored = seq, ignored
        return found


@pytest.mark.parametrize(
    "seeds", [range(0, 20), pytest.param(range(20, 40), marks=pytest.mark.long)]
)
def test_repeated_events_change_nothing(seeds: range) -> None:
    for seed in seeds:
        check_end(random_world(seed, TwiceWorld).run())


def test_failing_runs_survive_repeats() -> None:
    """The same while a run fails."""
    for seed in range(10):
        world = failing_world(seed)
        world.faults.repeat_event = 1.0
        world.run()
        assert world.state.run.phase == "ended"


@pytest.mark.parametrize("seed", range(8))
def test_after_every_event_nothing_is_left_to_decide(seed: int) -> None:
    """So the planner need not look again after what no decision depends on (UNPLANNED)."""
    world, machine = random_world(seed).run(), StateMachine()
    for stamped, _ in world.log:
        machine.handle_event(stamped)
        before = hash_state(machine.state)
        again = Context(machine.state, stamped)
        run_planner(again)
        assert not again.commands and not again.endings, stamped
        assert hash_state(machine.state) == before, stamped
