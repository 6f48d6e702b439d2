"""Every kind of fault, alone: it happens, and no promise is broken by it."""

from __future__ import annotations

import random

import pytest

from laminar.core.state.failures import FailureKind
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events.base import Command
from laminar.names import exit_codes
from tools.kit.sim_worlds import calm, config
from tools.simulator.faults import cuts
from tools.simulator.faults.cuts import CUTS
from tools.simulator.faults.faults import (
    KINDS,
    ONCE,
    OWN_RATES,
    RATES,
    REWARD_ERRORS,
    WEATHER,
    WEDGES,
)
from tools.simulator.faults.random_faults import (
    EXITS,
    HOSTS,
    RECURRING,
    RUN,
    SILENCES,
    STORE,
    TRAINER,
)
from tools.simulator.faults.targeted_faults import TARGETED
from tools.simulator.run import Outcome, make_world, run_seed
from tools.simulator.scheduler import SECOND

SMALL = {
    "replicas": 4, "train_batch_size": 4, "group_size": 2, "total_training_steps": 3,
    "num_train": 30, "seconds": 20.0,
}  # fmt: skip


def run(kind: str, seed: int = 3) -> Outcome:
    return run_seed(config(kind, **SMALL), seed)


@pytest.mark.parametrize(
    "kind",
    [
        *RECURRING,
        *SILENCES,
        *CUTS,
        *EXITS,
        *STORE,
        *RATES,
        *OWN_RATES,
        *WEDGES,
        "drain",
        "machine-lost",
    ],
)
def test_fault_strikes_and_breaks_nothing(kind: str) -> None:
    for seed in (3, 4, 5):  # until it has struck
        outcome = run(kind, seed)
        assert not outcome.invariant, outcome.details
        assert outcome.faults in ((kind,), ())
        if outcome.coverage.get(f"fault:{kind}"):
            return
    raise AssertionError("it never struck")


@pytest.mark.parametrize(
    ("kind", "how"), [("run-dies", "unasked"), ("run-pauses", "asked"), ("drain", "asked")]
)
def test_all_processes_end_and_the_run_completes(kind: str, how: str) -> None:
    """The user starts it again, also where he had stopped it at once."""
    for seed in range(20):
        swarm = config(kind, **SMALL | {"save_freq": 2, "total_training_steps": 6})
        outcome = run_seed(swarm, seed)
        assert not outcome.invariant, outcome.details
        if outcome.coverage.get(f"coordinator:resumes-{how}") and not outcome.failure:
            return
    raise AssertionError("it was never resumed, or has never completed")


def test_a_node_is_not_lost_before_it_has_started_its_processes_again() -> None:
    """It would leave a run that cannot go on, as one that is lost too early could not start."""
    with make_world(calm(**SMALL), 3) as world:
        world.begin()
        node, children = world.processes["node-0"], world.children_of("node-0")
        while not all(child.boot for child in children):
            world.scheduler.step()
        world.begin_again()
        while not node.alive:
            world.scheduler.step()
        world.faults.lose_node(node)
        assert node.alive
        while not all(child.alive for child in children):
            world.scheduler.step()
        world.faults.lose_node(node)
        assert not node.alive
        world.begin_again()  # the user starts it on nodes that there are
        while not all(child.alive for child in children):
            world.scheduler.step()
        assert node.alive


@pytest.mark.parametrize("kind", TRAINER)
def test_the_trainer_is_lost_and_the_run_completes(kind: str) -> None:
    """It goes on from a checkpoint, and does again what that does not have."""
    for seed in (3, 4, 5, 6):
        swarm = config(kind, **SMALL | {"save_freq": 2, "total_training_steps": 6})
        outcome = run_seed(swarm, seed)
        assert not outcome.invariant, outcome.details
        if outcome.coverage.get("event:TrainerReady", 0) > 1 and not outcome.failure:
            return
    raise AssertionError("it was never lost, or the run has never completed")


@pytest.mark.parametrize(
    ("ignored", "timer"),
    [
        (cmd.PullWeights, "command:pull"),
        (cmd.ForwardWeights, "command:forward"),
        (cmd.ScoreTrajectories, "command:score"),
    ],
)
def test_what_is_never_done_has_a_deadline(ignored: type[Command], timer: str) -> None:
    """Every replica or relay lives and does nothing: somebody acts in time, and the run
    completes."""
    patient = {"batch_timeout_s": 600.0, "train_s": 3.0, "total_training_steps": 0, "num_train": 48}
    with make_world(config("command-ignored", nodes=2, **{**SMALL, **patient}), 1) as world:
        world.faults.ignored, world.faults.rates["command-ignored"] = ignored, 1.0
        world.run()
        state = world.coordinator.state
        assert state is not None and state.run.failed is None
        assert world.coverage.counts[f"timer:{timer}"] > 0


@pytest.mark.parametrize("kind", WEATHER)
def test_weather_breaks_nothing(kind: str) -> None:
    with make_world(config(kind, **SMALL), 3) as world:
        world.begin()
        assert not world.network.weather.fair
    outcome = run(kind)
    assert not outcome.invariant, outcome.details
    assert not outcome.failure


@pytest.mark.parametrize(("rate", "fails"), [(0.1, False), (1.0, True)])
def test_rewards_that_fail_too_often_end_the_run(rate: float, fails: bool) -> None:
    with make_world(config(REWARD_ERRORS, **SMALL), 3) as world:
        world.faults.rates[REWARD_ERRORS] = rate
        world.run()
        state = world.coordinator.state
        assert state is not None and world.coverage.counts[f"fault:{REWARD_ERRORS}"] > 0
        kind = state.run.failed.kind if state.run.failed is not None else None
        assert kind == (FailureKind.REWARD_FAILS if fails else None)


@pytest.mark.parametrize(
    "kind",
    [
        "lost-in-load",
        "load-proves-wrong",
        "store-cut-in-load",
        "coordinator-killed-in-load",
        "evaluation-in-load",
    ],
)
def test_a_load_in_flight_is_struck_and_nothing_breaks(kind: str) -> None:
    flying = config(kind, **SMALL, weight_update="in-flight", val_size=4, test_freq=1)
    outcome = run_seed(flying, 2)
    assert not outcome.invariant, outcome.details
    assert outcome.coverage[f"fault:{kind}"] > 0 and not outcome.failure


def test_menu_is_complete() -> None:
    drawn = {*RECURRING, *SILENCES, *EXITS, *STORE, *TRAINER, *RATES, *OWN_RATES, *WEDGES}
    drawn |= {*WEATHER, *ONCE, *RUN, *CUTS, *HOSTS}
    assert set(KINDS) == {*drawn, *TARGETED}


def test_replicas_that_are_lost_are_replaced() -> None:
    outcome = run("replica-dies")
    processes = len(make_world(config("replica-dies", **SMALL), 3).processes)
    assert outcome.coverage["fault:replica-dies"] > 4
    assert outcome.coverage["event:ActorJoined"] > processes


def test_zombies_meet_the_fence() -> None:
    """A replica that nobody hears, or that was paused for longer than its lease, goes on writing
    under a placement that somebody else has raised: the store refuses it."""
    for seed in (0, 2, 6, 9):  # until one was fenced
        outcome = run_seed(config("replica-paused", "partition-one-way", **SMALL), seed)
        assert not outcome.invariant, outcome.details
        if outcome.coverage.get("store:append-fenced"):
            return
    raise AssertionError("no zombie met the fence")


@pytest.mark.parametrize(
    "kind", ["coordinator-killed", "coordinator-cut", "disk-error", "disk-full"]
)
def test_coordinator_comes_back(kind: str) -> None:
    outcome = run(kind)
    assert outcome.coordinators > 1 and not outcome.failure
    assert outcome.coverage["log:taken-over"] >= outcome.coordinators // 2


def test_poisonous_prompt_ends_quarantined() -> None:
    """It kills the replicas that run it, three times each sibling at most."""
    outcome = run_seed(config("poison-prompt", replicas=4, total_training_steps=0, num_train=20), 3)
    assert not outcome.invariant, outcome.details
    assert outcome.coverage.get("dropped:quarantined", 0) > 0


@pytest.mark.parametrize(("num_train", "poisoned"), [(1, False), (4, False), (5, True)])
def test_data_is_poisoned_only_beside_a_batch_of_other_prompts(
    num_train: int, poisoned: bool
) -> None:
    """A batch is four groups: with fewer others a step costs the deaths of several passes."""
    world = make_world(config("poison-prompt", **{**SMALL, "num_train": num_train}), 3)
    assert (bool(world.faults.poison), world.faults.may_poison) == (poisoned, poisoned)


@pytest.mark.parametrize("holds", [True, False])
def test_a_line_that_holds_through_flaps_may_be_silent_alone(
    holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it costs then is not held against the product as the cost of a cut of a machine."""
    monkeypatch.setattr(cuts, "HOLDS", float(holds))
    faults = make_world(config("machine-flaps", nodes=2, **SMALL), 3).faults
    cuts.CUTS["machine-flaps"](faults, random.Random(1))
    processes = [p for p in faults.world.processes.values() if p.name in faults.harmed]
    assert processes and all(faults.explains(process) for process in processes)
    assert any(faults.only_cut_off(process) for process in processes) == (not holds)


def test_node_storm_joins_together() -> None:
    stormy = make_world(config("node-storm", **SMALL), 3)
    assert stormy.faults.storm and not make_world(calm(), 3).faults.storm
    assert not run("node-storm").invariant


def test_relay_that_dies_while_the_last_ends_wait_for_room_fails_no_run() -> None:
    """Everything is done; whoever joins is refused, and its node tries again, and again."""
    with make_world(calm(max_restarts=2, nodes=1, val_size=0, **SMALL), 3) as world:
        world.begin()

        def until(phase: Phase) -> None:
            while world.coordinator.state is None or world.coordinator.state.run.phase != phase:
                world.scheduler.step()

        until(Phase.EXPORTING)
        world.database.full = True
        until(Phase.ENDING)
        world.faults.harm("relay-0")
        world.processes["relay-0"].die(exit_codes.KILLED)
        full_until_ns = world.scheduler.now + 10 * SECOND
        while world.scheduler.now < full_until_ns:
            world.scheduler.step()
        world.database.full = False
        until(Phase.ENDED)
        state = world.coordinator.state
        assert state is not None and not state.run.failure
        assert 4 <= world.processes["relay-0"].boot <= 6


def test_nothing_goes_wrong_after_the_faults() -> None:
    """What strikes, strikes before; the weather is fair, nobody is paused, slow or cut off."""
    with make_world(
        config("loss", "partition", "replica-paused", "replica-slow", **SMALL), 3
    ) as world:
        world.begin()
        while not world.faults.healed:
            world.scheduler.step()
        assert world.faults.healed
        assert world.network.weather.fair
        assert not any(process.paused or process.slow != 1.0 for process in world.rollouts)
        struck = sum(n for name, n in world.coverage.counts.items() if name.startswith("fault:"))
        while not world.finished:
            world.scheduler.step()
        counts = world.coverage.counts
        assert struck == sum(n for name, n in counts.items() if name.startswith("fault:")) > 0
