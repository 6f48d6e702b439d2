"""Who belongs to the run: incarnations, fences, processes that were replaced, coordinators."""

from __future__ import annotations

import msgspec
import pytest

from laminar.core.machine import StateMachine
from laminar.core.rules import LOGIC_VERSION, LogicError
from laminar.core.state.indexes import take_left
from laminar.core.state.statuses import Phase
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Stamped
from tools.kit.bench import Bench, only, start_bench
from tools.kit.world_parts import coordinator_started


def test_new_process_of_a_name_fences_the_old_one() -> None:
    """A requeued job starts rollout-0 anew while the old one, cut off by the network, lives on: the
    old one's work is lost to it, and its words are counted and change nothing."""
    bench = start_bench(replicas=2, capacity=4, max_staleness=0)
    old = bench.state.members.actors["rollout-0"].incarnation
    moved = bench.join("rollout-0", "b")
    assert {c.to for c in only(cmd.GenerateTrajectory, moved)} == {"rollout-1"}
    trajectory = bench.trajectory("0.0.0")
    for placement in (1, trajectory.placement):
        finished = ev.TrajectoryFinished(
            trajectory_id=trajectory.id, placement=placement, num_tokens=9, finish_reason="stop"
        )
        assert bench.hear("rollout-0", old, finished) == []
    assert bench.trajectory("0.0.0").status == "dispatched"
    assert bench.state.run.ignored == {"TrajectoryFinished: fenced": 2}


def test_silent_actor_is_fenced_and_its_node_makes_sure_that_it_is_gone() -> None:
    """It comes back to life a second later: it is fenced all the same."""
    bench = start_bench(replicas=2, capacity=4, max_staleness=0)
    incarnation = bench.state.members.actors["rollout-0"].incarnation
    lost = ev.HeartbeatLost(actor="rollout-0", actor_incarnation=incarnation, silent_ms=3_000)
    commands = bench.own(lost)
    assert [(c.to, c.actor) for c in only(cmd.RestartActor, commands)] == [("node-0", "rollout-0")]
    gauge = ev.TokenProgress(tokens_total=5, kv_used_tokens=0, running=0, waiting=0)
    assert bench.hear("rollout-0", incarnation, gauge) == []
    assert bench.own(lost) == []
    assert bench.state.run.ignored == {
        "TokenProgress: fenced": 1, "HeartbeatLost: old-incarnation": 1
    }  # fmt: skip


def test_exit_of_an_old_process_does_not_touch_its_successor() -> None:
    """The news of a death arrive after the successor has joined, and once more when this is to be
    restarted: the command stays outstanding, so that a reconnected node is told again."""
    bench = start_bench(replicas=1, capacity=4, max_staleness=0, stall_ms=1_000)
    old = bench.state.members.actors["rollout-0"].boot_id
    bench.join("rollout-0", "b")
    bench.ready("rollout-0")
    commands = bench.load_all()
    assert only(cmd.GenerateTrajectory, commands)
    exited = ev.ProcessExited(actor="rollout-0", boot_id=old, code=-9, restarting=True)
    assert bench.say("node-0", exited) == []
    assert bench.state.members.is_actor_alive("rollout-0") and bench.replica().running
    assert only(cmd.RestartActor, bench.wait(1_000))
    bench.say("node-0", exited)
    assert "restart:rollout-0" in bench.state.orders.commands


def exit_before_joining(bench: Bench, name: str, *, restarting: bool) -> list[Command]:
    """A process that was started again ended before it had joined."""
    exited = ev.ProcessExited(actor=name, boot_id=f"{name}/b", code=1, restarting=restarting)
    return bench.say("node-0", exited)


def test_restarted_process_that_ends_for_good_before_it_joins_is_not_waited_for() -> None:
    bench = start_bench(replicas=2)
    bench.kill("rollout-0")
    exit_before_joining(bench, "rollout-0", restarting=True)
    assert "rejoin:rollout-0" in bench.state.orders.timers
    exit_before_joining(bench, "rollout-0", restarting=False)
    assert "rejoin:rollout-0" not in bench.state.orders.timers
    assert bench.state.run.phase == "running" and not bench.state.run.failure
    exit_before_joining(bench, "rollout-0", restarting=False)
    assert bench.state.run.ignored["ProcessExited: old-process"] == 2


def test_run_ends_when_the_restarted_relay_of_its_trainer_ends_for_good_before_it_joins() -> None:
    bench = Bench(replicas=2)
    run = bench.state.run
    bench.start()
    bench.kill("relay-0")
    exit_before_joining(bench, "relay-0", restarting=False)
    assert (run.failed.kind, run.failed.subject) == ("relay-lost", "relay-0")


def test_an_event_that_is_not_its_senders_to_report_is_refused() -> None:
    """The trainer reports what only a node can know; every other pair is in the table of events."""
    bench = start_bench(max_staleness=0)
    event = ev.ProcessExited(actor="rollout-0", boot_id="rollout-0/a", code=0, restarting=False)
    assert bench.say("trainer-0", event) == []
    assert bench.state.run.ignored == {"ProcessExited: wrong-sender": 1}
    assert bench.state.members.is_actor_alive("rollout-0")


@pytest.mark.parametrize(("name", "role"), [("x-0", "king"), (COORDINATOR, "rollout")])
def test_process_without_a_place_in_a_run_is_refused(name: str, role: str) -> None:
    """An unknown role, and the coordinator's own name."""
    bench = Bench()
    joined = ev.ActorJoined(name=name, role=role, boot_id="b", node="node-0", pid=1)
    refused = only(cmd.RefuseActor, bench.hear(name, 0, joined))
    assert len(refused) == 1 and role in refused[0].reason
    assert name not in bench.state.members.actors


def test_coordinator_that_comes_back_changes_nothing_but_its_number() -> None:
    """Its start is an event; no command is repeated by the machine (the links do that), nobody is
    lost, and the start timer is not set again."""
    bench = start_bench(max_staleness=0)
    bench.now_ms += 5_000
    assert bench.own(bench.started(2)) == []
    assert bench.state.members.coordinator_incarnation == 2
    assert "start" not in bench.state.orders.timers
    assert bench.replica().progress_ns == 5_000_000_000


def test_log_of_another_logic_is_refused() -> None:
    bench = Bench()
    other = coordinator_started(bench.settings, 2, logic=LOGIC_VERSION + 1)
    with pytest.raises(LogicError, match=f"logic version {LOGIC_VERSION + 1}"):
        bench.own(other)


def test_log_must_begin_with_a_coordinator() -> None:
    first = Stamped(
        seq=1, time_ns=0, peer="x", incarnation=0, peer_seq=0, event=ev.TimerFired(timer="start")
    )
    machine = StateMachine()
    assert not machine.started
    with pytest.raises(LogicError, match="coordinator-started"):
        machine.handle_event(first)
    with pytest.raises(LogicError, match="coordinator-started"):
        _ = machine.state


def test_who_has_left_or_was_replaced_is_told_once() -> None:
    bench = start_bench()
    take_left(bench.state)
    bench.join("rollout-0", "b")
    bench.say("trainer-0", ev.ActorLeft())
    assert set(take_left(bench.state)) == {"rollout-0/a", "trainer-0/a"}
    assert take_left(bench.state) == []


def test_a_warning_is_remembered_and_decides_nothing() -> None:
    bench = start_bench()
    warning = ev.TrainingWarning(kind="no-signal", step=3, text="of all groups")
    assert bench.own(warning) == []
    assert bench.state.signals.warnings == {"no-signal": "of all groups"}


def test_a_name_keeps_its_role() -> None:
    """A process that comes under a name of the run with another role is sent away."""
    bench = Bench()
    bench.join("store-0")
    other = msgspec.structs.replace(bench.joining("store-0", "b"), role="trainer")
    (refused,) = only(cmd.RefuseActor, bench.hear("store-0", 0, other))
    assert refused.reason == "'store-0' is a store of this run, and no trainer"
    assert bench.state.members.actors["store-0"].boot_id == "store-0/a"


# --- an engine that fails at its start ------------------------------------------------------------

BROKEN = ev.ActorFailed(reason="head_dim=20 is not supported", user_error=False, engine=True)


def started_without_weights(replicas: int) -> Bench:
    """All have joined and are ready; no version is loaded."""
    bench = Bench(replicas=replicas)
    for name in ("node-0", "store-0", "trainer-0", "relay-0", *bench.names):
        bench.join(name)
    for name in bench.names:
        bench.ready(name)
    return bench


def fails_at_a_start(bench: Bench, name: str, failed: ev.ActorFailed = BROKEN) -> None:
    """Its process says why, ends, and is started again."""
    boot_id = bench.state.members.actors[name].boot_id
    bench.say(name, failed)
    if bench.state.run.failure:
        return
    bench.say("node-0", ev.ProcessExited(actor=name, boot_id=boot_id, code=1, restarting=True))
    bench.join(name, f"{len(bench.commands)}")
    bench.ready(name)


def test_an_engine_that_fails_in_the_same_way_at_two_starts_ends_the_run() -> None:
    """Nothing is different at the next start: the reason is the run's at once."""
    bench = started_without_weights(replicas=2)
    fails_at_a_start(bench, "rollout-0")
    fails_at_a_start(bench, "rollout-1")
    assert bench.state.run.phase == "starting" and not bench.state.run.failure
    fails_at_a_start(bench, "rollout-1")
    assert (bench.state.run.failed.kind, bench.state.run.failed.subject) == (
        "engine-fails",
        "rollout-1",
    )


@pytest.mark.parametrize(
    "second",
    [
        ev.ActorFailed(reason="out of memory", user_error=False, engine=True),
        ev.ActorFailed(reason=BROKEN.reason, user_error=False),
    ],
    ids=["another reason", "not its engine"],
)
def test_two_starts_that_fail_in_other_ways_are_left_to_the_node(second: ev.ActorFailed) -> None:
    bench = started_without_weights(replicas=1)
    fails_at_a_start(bench, "rollout-0")
    fails_at_a_start(bench, "rollout-0", second)
    assert not bench.state.run.failure


def test_a_run_that_has_a_replica_at_work_goes_on_without_the_broken_one() -> None:
    bench = start_bench(replicas=2)
    for _ in range(3):
        fails_at_a_start(bench, "rollout-1")
    assert bench.state.run.phase == "running" and not bench.state.run.failure


def test_a_replica_that_had_weights_has_not_failed_at_its_start() -> None:
    bench = start_bench(replicas=1)
    fails_at_a_start(bench, "rollout-0")
    fails_at_a_start(bench, "rollout-0")
    assert not bench.state.run.failure
    fails_at_a_start(bench, "rollout-0")
    assert "at two starts" in bench.state.run.failure


def test_the_last_word_of_an_engine_is_why_no_replica_is_left() -> None:
    """Its exit code says nothing."""
    bench = started_without_weights(replicas=1)
    boot_id = bench.state.members.actors["rollout-0"].boot_id
    bench.say("rollout-0", BROKEN)
    gone = ev.ProcessExited(
        actor="rollout-0", boot_id=boot_id, code=1, restarting=False, reason="it was the last time"
    )
    bench.say("node-0", gone)
    assert (bench.state.run.failed.kind, bench.state.run.failed.subject) == (
        "replicas-lost",
        "rollout-0",
    )


def started(bench: Bench, restarts: int, job: str = "71") -> list[Command]:
    """A node of a job that was started so often before."""
    join = bench.joining("node-1", boot=f"{job}.{restarts}")
    return bench.hear("node-1", 0, msgspec.structs.replace(join, job=job, job_restarts=restarts))


def test_of_two_nodes_of_one_job_that_of_its_last_start_counts() -> None:
    """Also when the other one joins later: Slurm may take a machine for lost whose node goes on."""
    bench = start_bench()
    assert only(cmd.AcceptActor, started(bench, 1))
    (refused,) = only(cmd.RefuseActor, started(bench, 0))
    assert "job 71 was started again" in refused.reason
    assert bench.state.members.is_actor_alive("node-1")
    assert only(cmd.AcceptActor, started(bench, 2))
    bench.silent("node-1")
    assert only(cmd.RefuseActor, started(bench, 1))
    assert only(cmd.AcceptActor, started(bench, 0, job="72"))


def test_a_machine_that_leaves_may_come_back_though_it_had_the_last_replica() -> None:
    bench = start_bench(replicas=1, save_freq=1)
    for name in ("rollout-0", "relay-0", "trainer-0", "store-0", "node-0"):
        bench.say(name, ev.ActorLeft())
    assert bench.state.run.phase == Phase.RUNNING
    bench.wait(bench.settings.start_timeout_ms)
    assert "is lost with its machine node-0" in bench.state.run.failure


def test_late_hello_of_who_was_accepted_and_never_heard_of_it_pushes_out_nobody() -> None:
    """The network was cut one way: the process says hello for the first time, again and again."""
    bench = start_bench(nodes=2)
    bench.silent("rollout-0")
    bench.join("rollout-0", "b")
    bench.join("rollout-0", "c")
    for boot in ("a", "b"):
        (refused,) = bench.join("rollout-0", boot)
        assert isinstance(refused, cmd.RefuseActor)
    assert bench.state.members.actors["rollout-0"].boot_id.endswith("c")
    assert bench.state.members.is_actor_alive("rollout-0")


def test_a_late_hello_of_what_its_node_has_started_before_pushes_out_nobody() -> None:
    """Also of one that never joined, and when many have since; a new process of the node counts
    anew."""
    bench = start_bench(nodes=2)

    def joins(start: int, node: str = "a") -> bool:
        hello = bench.joining("rollout-1.0", f"{node}.{start}", f"node-1/{node}")
        commands = bench.hear("rollout-1.0", 0, msgspec.structs.replace(hello, start=start))
        return bool(only(cmd.AcceptActor, commands))

    assert all(map(joins, (1, 3, 4, 5, 6, 7, 8)))
    assert not any(map(joins, (1, 2, 6)))
    assert bench.state.members.actors["rollout-1.0"].boot_id.endswith("a.8")
    bench.join("node-1", "b")
    assert joins(1, "b")
