"""Windows of the log: a run of two replicas told event by event, at chosen times."""

from __future__ import annotations

from pathlib import Path

from laminar.analysis.facts.collector import FactCollector
from laminar.analysis.facts.reader import load_facts
from laminar.analysis.log.event_clock import WallClock
from laminar.analysis.log.run_log import replay_log
from laminar.analysis.report.figures import Conditions
from laminar.core.machine import StateMachine
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped
from tools.kit.world_parts import coordinator_started, settings, step_completed

CLOCK_NS = 10**9
LOG_NS = 500  #: what the log's own clock shows at time 0


class Told:
    """A machine that is told what happened, with the facts beside it."""

    def __init__(self) -> None:
        self.machine, self.rows = StateMachine(), list[tuple]()
        self.facts = FactCollector(lambda name, row: self.rows.append((name, row)))
        self.seq = 0
        self.incarnations: dict[str, int] = {}

    def say(self, time_ns: int, peer: str, event: Event) -> list[Command]:
        self.seq += 1
        stamped = Stamped(
            seq=self.seq,
            time_ns=LOG_NS + time_ns,
            peer=peer,
            incarnation=self.incarnations.get(peer, 0),
            peer_seq=0,
            event=event,
        )
        commands = self.machine.handle_event(stamped)
        self.facts(stamped, commands, self.machine.state)
        for command in commands:
            if isinstance(command, cmd.AcceptActor):
                self.incarnations[command.to] = command.incarnation
        return commands

    def join(self, time_ns: int, name: str, ready: Event) -> None:
        role = name.rpartition("-")[0]
        self.say(
            time_ns,
            name,
            ev.ActorJoined(name=name, role=role, boot_id=f"{name}/0", node="node-0", pid=1),
        )
        self.say(time_ns, name, ready)


def published(version: int) -> ev.WeightsPublished:
    return ev.WeightsPublished(
        version=version, step=version, digest="d", num_bytes=1, held=(version,)
    )


def loaded(version: int) -> ev.WeightsLoaded:
    return ev.WeightsLoaded(
        version=version, step=version, digest="d", probe_diff=0.0, seconds=0.0, reloaded=True
    )


def finished(trajectory: str) -> ev.TrajectoryFinished:
    return ev.TrajectoryFinished(
        trajectory_id=trajectory, placement=1, num_tokens=1, finish_reason="stop"
    )


def rewarded(trajectory: str) -> ev.TrajectoryRewarded:
    return ev.TrajectoryRewarded(
        trajectory_id=trajectory,
        placement=1,
        reward_bits=0,
        correct=False,
        reason="ok",
        num_tokens=1,
    )


def step(number: int) -> ev.StepCompleted:
    return step_completed(number, number + 1)


def on_policy_run(capacity: int = 4, *, second: bool = False) -> Told:
    """Staleness 0, one group of two siblings a step, one replica; times are small numbers."""
    told = Told()
    config = settings(
        groups_per_step=1,
        group_size=2,
        max_staleness=0,
        groups_per_version=2,
        total_steps=2,
        val_before_train=False,
    )
    told.say(0, COORDINATOR, coordinator_started(config, clock_ns=CLOCK_NS))
    told.join(1, "store-0", ev.DataLoaded(num_train=9, num_eval=0, overlap=0, digest=""))
    told.join(2, "relay-0", ev.RelayReady(address="", chain_address=""))
    told.join(3, "trainer-0", ev.TrainerReady(num_parameters=1, weights_bytes=4))
    told.join(4, "rollout-0", ev.ReplicaReady(max_num_seqs=capacity, kv_capacity_tokens=9))
    told.say(5, "relay-0", published(0))
    told.say(10, "rollout-0", loaded(0))
    told.say(18, "rollout-0", finished("0.0.0"))
    told.say(20, "rollout-0", finished("0.0.1"))
    told.say(21, "rollout-0", rewarded("0.0.0"))
    told.say(22, "rollout-0", rewarded("0.0.1"))
    if second:
        told.join(24, "rollout-1", ev.ReplicaReady(max_num_seqs=4, kv_capacity_tokens=9))
        told.say(26, "rollout-1", loaded(0))
    told.say(30, "trainer-0", step(0))
    told.say(31, "relay-0", published(1))
    told.say(35, "rollout-0", loaded(1))
    told.say(40, "rollout-0", finished("0.1.0"))
    return told


def relative(told: Told, condition: str, actor: str = "") -> list[list[int]]:
    """The intervals of a condition, in ns since the first event."""
    found = []
    for name, row in [*told.rows, *told.facts.list_open()]:
        if name == "conditions" and row[:2] == (actor, condition):
            began, ended = row[2], 40e-9 if row[4] is None else row[4]
            found.append([round(began * 1e9), round(ended * 1e9)])
    return [interval for interval in sorted(found) if interval[0] < interval[1]]


def test_times_of_day_come_from_the_coordinators_clock() -> None:
    clock = on_policy_run().facts.clock
    assert (clock.first_ns, clock.now.unix_ns) == (CLOCK_NS, CLOCK_NS + 40)


def test_a_new_coordinator_sets_the_clock_but_never_back() -> None:
    """It starts at the log's time of the last one, whatever the time of day is by then."""
    clock = WallClock()
    seen = []
    for seq, (time_ns, clock_ns) in enumerate([(0, 100), (10, None), (20, 500), (30, None)], 1):
        event: Event = ev.TimerFired(timer="t")
        if clock_ns is not None:
            event = started(clock_ns)
        seen.append(clock.unix_ns(stamped_at(seq, time_ns, event)))
    assert seen == [100, 110, 500, 510]
    assert clock.unix_ns(stamped_at(5, 40, started(300))) == 520
    assert clock.unix_ns(stamped_at(6, 70, ev.TimerFired(timer="t"))) == 550


def stamped_at(seq: int, time_ns: int, event: Event) -> Stamped:
    return Stamped(
        seq=seq, time_ns=time_ns, peer=COORDINATOR, incarnation=0, peer_seq=0, event=event
    )


def started(clock_ns: int) -> ev.CoordinatorStarted:
    return coordinator_started(settings(), clock_ns=clock_ns)


def test_what_a_replica_did_by_the_log() -> None:
    told = on_policy_run()
    assert relative(told, "loading", "rollout-0") == [[5, 10], [31, 35]]
    assert relative(told, "running", "rollout-0") == [[10, 20], [35, 40]]
    assert relative(told, "live", "rollout-0") == [[4, 40]]
    assert relative(told, "live", "trainer-0") == [[3, 40]]


def test_the_bound_holds_back_from_the_last_token_to_the_new_weights() -> None:
    """One group is all that staleness 0 allows; while it runs, the replica is refused, too."""
    told = on_policy_run()
    assert relative(told, "bound", "rollout-0") == [[10, 31]]
    assert relative(told, "bound") == [[20, 31]]


def test_the_bound_of_all_needs_every_replica_idle() -> None:
    """A second replica loads from 24 to 26, and is then refused like the first."""
    told = on_policy_run(second=True)
    assert relative(told, "loading", "rollout-1")[0] == [24, 26]
    assert relative(told, "bound") == [[20, 24], [26, 31]]


def test_a_life_ends_with_the_order_to_stop(made: Path) -> None:
    facts, stops = load_facts(made), {}
    clock = WallClock()

    def note(stamped: Stamped, commands: list[Command], state: State) -> None:
        now = clock.unix_ns(stamped)
        stops.update({c.to: now for c in commands if isinstance(c, cmd.StopActor)})

    replay_log(made, note)
    held = Conditions(facts).get_intervals
    for name in ("trainer-0", "rollout-0", "rollout-1"):
        assert held("live", name)[-1, 1] == stops[name] < facts.header.last_ns


def test_the_trainer_is_free_between_its_commands() -> None:
    told = on_policy_run()
    assert relative(told, "trainer-free") == [[0, 3], [5, 22], [30, 40]]
    assert relative(told, "phase-starting") == [[0, 5]]
    assert relative(told, "phase-running") == [[5, 40]]


def test_a_refused_replica_is_spare_unless_it_is_full() -> None:
    told = on_policy_run(capacity=2)
    assert relative(told, "spare", "rollout-0") == [[4, 10], [18, 35]]
