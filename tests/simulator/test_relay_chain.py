"""The chain of relays in virtual time: what each machine gets, and what faults do to it."""

from __future__ import annotations

from laminar.core.state.state import State
from laminar.core.versions.broadcast import RECEIVE_TIMEOUT_MS
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from tools.kit.sim_worlds import calm, config
from tools.simulator.run import run_seed
from tools.simulator.world import World

MACHINES = {"nodes": 4, "replicas": 8, "total_steps": 6, "num_train": 60}
CUT = {**MACHINES, "seconds": 30.0, "transfer_s": 3.0}


def test_every_machine_gets_the_weights_from_the_one_before() -> None:
    """Whole versions in the order of the chain, and with cut-through: a hop adds less than a
    transfer takes."""
    received: list[ev.WeightsReceived] = []

    def observe(stamped: Stamped, commands: list[Command], state: State) -> None:
        if isinstance(stamped.event, ev.WeightsReceived):
            received.append(stamped.event)

    world = World(calm(**MACHINES, transfer_s=3.0, train_s=3.0), 3, observe)
    world.run()
    state = world.coordinator.state
    assert state is not None and not state.failure
    assert len({e.version for e in received}) > 3
    assert world.coverage.counts["relay:cut-through"] > 0
    assert not any(relay.lags for relay in state.relays.values())


def test_version_that_takes_longer_than_the_least_time_for_one_arrives() -> None:
    """400 s at the rate of this network; its relay is not told to begin again."""
    arrived: list[tuple[int, int]] = []
    restarted: list[Command] = []

    def observe(stamped: Stamped, commands: list[Command], state: State) -> None:
        restarted.extend(c for c in commands if isinstance(c, cmd.RestartActor))
        if isinstance(stamped.event, ev.WeightsReceived):
            arrived.append((stamped.event.version, stamped.event.duration_ms))

    work = {"replicas": 2, "nodes": 2, "slots": 4, "total_steps": 4, "num_train": 20, "num_eval": 0}
    slow = {"transfer_s": 400.0, "train_s": 130.0, "progress_ms": 10_000, "heartbeat_ms": 4_000}
    World(calm(**work, **slow, max_staleness=0), 3, observe).run()
    assert arrived
    assert [version for version, ms in arrived if ms > RECEIVE_TIMEOUT_MS] == [0]
    assert not restarted


def test_relay_serves_nobody_before_it_has_said_that_it_is_ready() -> None:
    with World(calm(nodes=1, replicas=4, start_s=3.0), 3) as world:
        world.begin()
        relay = world.processes["relay-0"]
        while not relay.welcomed:
            world.scheduler.step()
        assert "relay-0" not in world.servers
        while "relay-0" not in world.servers:
            assert not world.arenas  # the trainer asks for one as soon as it has loaded
            world.scheduler.step()
        while not world.arenas:
            world.scheduler.step()


def test_successor_goes_on_with_what_it_has() -> None:
    """Relays die in the middle of transfers; who feeds next sends only what is lacking."""
    marks: dict[str, int] = {}
    for seed in range(4):
        outcome = run_seed(config("relay-dies", "chunk-damaged", **CUT), seed)
        assert not outcome.invariant, outcome.details
        assert not outcome.failure
        for name in ("relay:resumed", "event:TransferTrouble", "RelayReady -> ForwardWeights"):
            marks[name] = marks.get(name, 0) + outcome.coverage.get(name, 0)
    assert all(marks.values()), marks


def test_predecessor_of_before_is_refused() -> None:
    """A relay that does not hear that it was given up goes on feeding; its successor has another
    predecessor."""
    for seed in range(3, 9):  # until one was refused
        outcome = run_seed(config("relay-cut-off", **CUT), seed)
        assert not outcome.invariant, outcome.details
        if outcome.coverage.get("relay:stale-predecessor"):
            return
    raise AssertionError("none was refused")


def test_lost_machine_is_done_without() -> None:
    for seed in range(4):  # until one was lost
        outcome = run_seed(config("machine-lost", **CUT), seed)
        assert not outcome.invariant, outcome.details
        assert not outcome.failure
        if outcome.coverage.get("fault:machine-lost"):
            return
    raise AssertionError("none was lost")
