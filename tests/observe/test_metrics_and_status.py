"""metrics.jsonl and status.json, from a run of the random world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.core.machine import StateMachine
from laminar.core.state.state import State
from laminar.core.state.statuses import Phase
from laminar.eventlog.replay import Observer
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped
from laminar.observe.metrics import MetricsWriter
from laminar.observe.status import StatusFigures, StatusWriter
from laminar.observe.telemetry import Telemetry
from tools.kit.bench import Bench, start_bench
from tools.kit.world import World
from tools.kit.world_parts import Faults, settings

TELEMETRY = Telemetry()
MARK = "training/weights_unchanged"


def small_world() -> World:
    return World(settings(test_freq=2), num_eval=4, seed=3).run()


def failing_reward() -> World:
    """A tenth of the answers fails; the run goes on."""
    faults = Faults(fail_reward=0.1)
    return World(settings(max_error_permille=500), num_eval=4, faults=faults, seed=3).run()


def feed(observer: Observer, world: World, until: int | None = None) -> None:
    machine = StateMachine()
    for stamped, _ in world.log[:until]:
        observer(stamped, machine.handle_event(stamped), machine.state)
    assert TELEMETRY.wait_drained(60)


def lines(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_a_coordinator_that_comes_back_writes_each_figure_once(tmp_path: Path) -> None:
    """It replays its log through a new writer; what is in the file stays, the rest follows."""
    world = small_world()
    once, twice = tmp_path / "once", tmp_path / "twice"
    for directory in (once, twice):
        directory.mkdir()
    feed(MetricsWriter(once, TELEMETRY), world)
    feed(MetricsWriter(twice, TELEMETRY), world, until=len(world.log) // 2)
    assert 0 < len(lines(twice)) < len(lines(once))
    with open(twice / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "ev')  # the crash cut a line short
    feed(MetricsWriter(twice, TELEMETRY), world)
    whole = [line for line in (twice / "metrics.jsonl").read_text().splitlines() if "}" in line]
    events = [json.loads(line)["event"] for line in whole]
    assert events == [line["event"] for line in lines(once)]


@pytest.mark.parametrize("later", [0, 1])
def test_a_replay_that_starts_at_a_snapshot_goes_on_with_the_same_figures(
    tmp_path: Path, later: int
) -> None:
    """It begins with the last step in the file; the lines are those of a writer that saw it all.
    One event later, the next step lacks what reaches back to the step before."""
    world = small_world()
    once, twice = tmp_path / "once", tmp_path / "twice"
    for directory in (once, twice):
        directory.mkdir()
    feed(MetricsWriter(once, TELEMETRY), world)
    feed(MetricsWriter(twice, TELEMETRY), world, until=len(world.log) * 2 // 3)
    writer = MetricsWriter(twice, TELEMETRY)
    first = writer.replay_from + later

    def from_snapshot(stamped: Stamped, commands: list[Command], state: State) -> None:
        if stamped.seq >= first:
            writer(stamped, commands, state)

    feed(from_snapshot, world)
    assert 0 < first < len(world.log)
    assert [line["event"] for line in lines(twice)] == [line["event"] for line in lines(once)]
    assert (lines(twice) == lines(once)) is (later == 0)


def test_a_file_without_a_step_needs_the_whole_replay(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": 9, "val/version": 0}\n[]\n{"step": 1}\n')
    assert MetricsWriter(tmp_path, TELEMETRY).replay_from == 0


def test_a_step_that_left_the_weights_as_they_were_is_marked(tmp_path: Path) -> None:
    world = small_world()
    world.log = [(_unchanged(stamped), commands) for stamped, commands in world.log]
    feed(MetricsWriter(tmp_path, TELEMETRY), world)
    marks = [line["training/weights_unchanged"] for line in lines(tmp_path) if MARK in line]
    assert marks == [0, 0, 1, 0, 0, 0]


def _unchanged(stamped: Stamped) -> Stamped:
    """Step 2, counted from 0, had no signal."""
    event = stamped.event
    if isinstance(event, ev.StepCompleted) and event.step_index == 2:
        event = msgspec.structs.replace(event, changed=False, reason="no-signal")
    return msgspec.structs.replace(stamped, event=event)


def test_groups_with_siblings_of_several_versions_are_counted(tmp_path: Path) -> None:
    """Replicas die, and their work starts over on newer weights: the state knows which groups."""
    faults = Faults(lose_every_s=6, slow_tail=0.5)
    world = World(settings(max_staleness=4, resume_timeout_ms=100), faults=faults, seed=3).run()
    machine, expected = StateMachine(), []
    for stamped, _ in world.log:
        batch = machine.state.steps.batch if machine.started else None
        mixed = sum(machine.state.work.groups[g].mixed for g in batch.groups) if batch else 0
        completed = machine.state.steps.completed if machine.started else 0
        machine.handle_event(stamped)
        expected += [mixed] if machine.state.steps.completed > completed else []
    feed(MetricsWriter(tmp_path, TELEMETRY), world)
    counts = [line["groups/mixed_versions"] for line in lines(tmp_path) if MARK in line]
    assert counts == expected and sum(counts) > 0


def test_an_evaluation_has_its_score_its_error_and_its_lengths(tmp_path: Path) -> None:
    """In the metrics, in the status; of several answers to a prompt also whether one is right."""
    world = World(settings(test_freq=2, eval_answers=3), num_eval=4, seed=3).run()
    feed(MetricsWriter(tmp_path, TELEMETRY), world)
    feed(StatusWriter(tmp_path, TELEMETRY, clock=iter(range(10**9)).__next__), world)
    first, *_, last = [line for line in lines(tmp_path) if "val/version" in line]
    names = {name.removeprefix("val-core/policy/") for name in first if name.startswith("val-")}
    assert names == {
        "acc/mean@3", "acc/se", "acc/pass@3", "score/mean@3", "score/se", "response_length/mean",
        "response_length/clip_ratio", "missing",
    }  # fmt: skip
    assert last["val-core/export/response_length/mean"] == 10.0
    told = json.loads((tmp_path / "status.json").read_text())["evaluations"]
    assert (told[0]["total"], told[0]["share"]) == (12, first["val-core/policy/acc/mean@3"])


def test_a_quiet_coordinator_refreshes_its_status_with_the_time_that_passed(tmp_path: Path) -> None:
    now = [0.0]
    bench = start_bench()
    writer = StatusWriter(tmp_path, TELEMETRY, lambda: now[0])
    writer.refresh()  # nothing to write yet
    stamped = Stamped(
        seq=bench.seq, time_ns=0, peer="coordinator", incarnation=0, peer_seq=0,
        event=ev.TimerFired(timer="repack"),
    )  # fmt: skip
    now[0] = 10.0
    writer(stamped, [], bench.state)
    now[0] = 40.0
    writer.refresh()
    TELEMETRY.wait_drained(10)
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["seconds"] == 30.0 and told["waits_total"] == len(told["waits"]) > 0
    assert told["waits"][0]["owner"] and told["waits"][0]["since"] == 0.0


def test_what_runs_and_what_waits_for_a_slot_are_told_apart() -> None:
    """A replica takes one group more than its engine runs."""
    running = set()

    def look(stamped: Stamped, commands: list[Command], state: State) -> None:
        for name, shown in figures._describe_replicas(state).items():
            replica = state.members.replicas[name]
            assert shown["running"] + shown["waiting"] == len(replica.running)
            assert shown["running"] <= replica.capacity - state.settings.group_size
            running.add((shown["running"], shown["waiting"]))

    figures = StatusFigures()
    feed(look, small_world())
    assert any(waiting for _, waiting in running)


def test_what_repack_does_is_counted_in_each_step_and_in_the_status(tmp_path: Path) -> None:
    packed = {
        "repack_policy": "best-fit",
        "repack_interval_ms": 200,
        "repack_release_timeout_ms": 2_000,
    }
    world = World(
        settings(total_steps=4, max_staleness=4, **packed),
        replicas=4,
        num_train=60,
        faults=Faults(slow_tail=0.3),
        seed=0,
    )
    world.max_batch, world.kv_capacity = world.capacity, 1_000
    world.run()
    feed(MetricsWriter(tmp_path, TELEMETRY), world)
    feed(StatusWriter(tmp_path, TELEMETRY, clock=iter(range(10**9)).__next__), world)
    steps = [line for line in lines(tmp_path) if "staleness/mean" in line]
    told = json.loads((tmp_path / "status.json").read_text())["repack"]
    ordered = [c for _, cs in world.log for c in cs if isinstance(c, cmd.ReleaseTrajectories)]
    assert told["emptied"] == len(ordered) > 0
    assert 0 < told["moves"] <= sum(len(c.items) for c in ordered)
    assert sum(line["repack/moves"] for line in steps) <= told["moves"]
    (tmp_path / "off").mkdir()
    feed(MetricsWriter(tmp_path / "off", TELEMETRY), small_world())
    assert not any("repack/moves" in line for line in lines(tmp_path / "off"))


def test_failed_rewards_are_counted_by_reason(tmp_path: Path) -> None:
    """In the metrics of each step and in the status, with the first of them."""
    world = failing_reward()
    feed(MetricsWriter(tmp_path, TELEMETRY), world)
    feed(StatusWriter(tmp_path, TELEMETRY, clock=iter(range(10**9)).__next__), world)
    steps = [line for line in lines(tmp_path) if "staleness/mean" in line]
    counts = [line["reward/errors/total"] for line in steps]
    assert counts == sorted(counts) and counts[-1] > 0
    assert steps[-1]["reward/errors/error"] == counts[-1]
    status = json.loads((tmp_path / "status.json").read_text())
    told, counted = status["reward_errors"], world.state.signals.rewards
    assert counted is not None and told["by_reason"] == counted.errors
    assert told["first"] == "KeyError: 'x' (reward.py:4)"
    assert counts[-1] <= told["by_reason"]["error"] < told["answers"]


def test_rows_that_were_left_out_are_named_with_replica_and_version(tmp_path: Path) -> None:
    world = World(settings(total_steps=3), faults=Faults(leave_out=0.4), seed=3).run()
    feed(StatusWriter(tmp_path, TELEMETRY, clock=iter(range(10**9)).__next__), world)
    told = json.loads((tmp_path / "status.json").read_text())["left_out"]
    assert len(told) == 3
    assert all("of rollout-0 with version 0 were left out" in line for line in told)
    assert all("differ from the trainer's by 0.5 per token, above the 0.1" in line for line in told)


def test_a_replica_of_a_run_that_has_not_begun_is_not_shown_as_one_that_ends(
    tmp_path: Path,
) -> None:
    bench = start_bench()
    bench.state.run.phase = Phase.STARTING
    assert shown(tmp_path, bench)["replicas"]["rollout-0"]["doing"] == "starting"


def test_a_replica_that_streams_is_shown_as_one(tmp_path: Path) -> None:
    bench = start_bench(nodes=2, stream=True, max_staleness=4)
    bench.kill("relay-1")
    bench.kill("rollout-1.0")
    bench.come_back("relay-1")
    bench.come_back("rollout-1.0")
    replicas = shown(tmp_path, bench)["replicas"]
    assert (replicas["rollout-0"]["doing"], replicas["rollout-1.0"]["doing"]) == (
        "admitting",
        "streaming",
    )


@pytest.mark.parametrize(
    ("settings", "doing"),
    [
        ({"max_sessions": 4, "capacity": 20}, "sessions-full"),
        ({"max_sessions": 40, "capacity": 20, "max_staleness": 0}, "staleness-bound"),
        ({"capacity": 4}, "admitting"),
    ],
)
def test_with_an_environment_it_is_shown_what_binds(
    tmp_path: Path, settings: dict[str, Any], doing: str
) -> None:
    bench = start_bench(settings, max_staleness=20, num_train=400, total_steps=100)
    if "max_sessions" in settings:
        bench.request_turn("0.0.0")
    status = shown(tmp_path, bench)
    replica = status["replicas"]["rollout-0"]
    assert replica["doing"] == doing
    assert replica["running"] + replica["waiting"] == len(bench.replica().running)
    for host in status["hosts"].values():
        assert host == {"sessions": len(bench.state.work.trajectories), "sampled": 1}


def test_who_is_lost_and_what_a_trainer_that_came_back_does_is_shown(tmp_path: Path) -> None:
    bench = start_bench(save_freq=1)
    assert shown(tmp_path, bench)["awaited"] == []
    bench.kill("store-0")
    bench.kill("trainer-0")
    found = shown(tmp_path, bench)
    assert (found["trainer"], found["awaited"]) == ("away", ["store-0", "trainer-0"])
    bench.join("trainer-0", "b")
    bench.state.steps.repeated, bench.state.steps.completed = 1, 3
    found = shown(tmp_path, bench)
    assert (found["trainer"], found["awaited"]) == ("repeating step 2 of 3", ["store-0"])
    bench.state.steps.repeated = -1
    assert shown(tmp_path, bench)["trainer"] == "waiting"
    bench.kill("trainer-0", restarting=False)  # as when the run stops: nobody waits for it
    assert shown(tmp_path, bench)["trainer"] == "waiting"


TIMER = ev.TimerFired(timer="start")


def shown(directory: Path, bench: Bench, event: Event = TIMER) -> dict[str, Any]:
    """status.json as of now; this event was the last."""
    stamped = Stamped(
        seq=bench.seq, time_ns=0, peer=COORDINATOR, incarnation=0, peer_seq=0, event=event
    )
    StatusWriter(directory, TELEMETRY, lambda: 1e9)(stamped, [], bench.state)
    assert TELEMETRY.wait_drained(60)
    found: dict[str, Any] = json.loads((directory / "status.json").read_text())
    return found
