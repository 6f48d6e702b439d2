"""A run that begins with a checkpoint of another one: its numbers, its prompts, its trainer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from laminar.core.machine import StateMachine
from laminar.core.scheduling.dispatch import permute_rows
from laminar.core.state import state as states
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Command
from laminar.events.codec import decode_event, encode
from laminar.names import ids
from laminar.names.ids import GroupId
from tools.kit.bench import Bench, only

STEP, VERSION = 4, 6
UNFINISHED = {GroupId("0.3"): 11, GroupId("0.1"): 7}
ORIGIN = ev.ForkOrigin(
    run="runs/other",
    step=STEP,
    version=VERSION,
    digest="chain",
    data="d",
    num_train=40,
    cursor=30,
    seed=99,
    shuffle=True,
    unfinished=tuple(
        ev.UnfinishedPrompt(group=group, row_index=row) for group, row in UNFINISHED.items()
    ),
)


def fork(*, started: bool = True, of: dict[str, Any] | None = None, **changes: Any) -> Bench:
    origin = msgspec.structs.replace(ORIGIN, **of or {})
    values = {"max_staleness": 1, "groups_per_step": 1, "save_freq": 1, "total_steps": 0}
    bench = Bench(capacity=4, origin=origin, **values | changes)
    if started:
        bench.start()
    return bench


def dispatched(bench: Bench) -> dict[str, int]:
    """Row by group, in order."""
    orders = only(cmd.GenerateTrajectory, bench.commands)
    return {order.group: order.row_index for order in orders if order.purpose == "train"}


def train(bench: Bench) -> list[Command]:
    bench.complete(bench.open_groups()[0])
    commands = bench.train()
    bench.write_ends()
    bench.load_all()
    return commands


def train_all(bench: Bench) -> None:
    while bench.open_groups():
        train(bench)


def test_it_loads_its_checkpoint_before_it_publishes_under_the_same_numbers() -> None:
    bench = fork(started=False)
    for name in ("node-0", "store-0", "relay-0", "trainer-0", "rollout-0"):
        bench.join(name)
    for name in ("store-0", "relay-0"):
        bench.ready(name)
    (load,) = bench.ready("trainer-0")
    assert isinstance(load, cmd.LoadCheckpoint)
    assert (load.version, load.step, load.path, load.kept) == (VERSION, STEP, "origin", (VERSION,))
    (publish,) = bench.say("trainer-0", ev.CheckpointLoaded(version=VERSION, step=STEP))
    assert isinstance(publish, cmd.PublishWeights)
    assert (publish.version, publish.step) == (VERSION, STEP)
    bench.ready("rollout-0")
    bench.publish(VERSION, STEP)
    assert bench.state.run.phase == "running"
    bench.load("rollout-0")
    train(bench)
    (order,) = only(cmd.TrainStep, bench.commands)
    assert (order.step_index, order.version) == (STEP, VERSION + 1)
    assert (bench.state.steps.completed, bench.state.versions.newest_step) == (STEP + 1, STEP + 1)


def test_prompts_without_an_end_go_first_and_those_with_one_are_not_sampled_again() -> None:
    bench = fork(total_epochs=2)
    train_all(bench)
    found = dispatched(bench)
    assert list(found)[:3] == ["0.3", "0.1", "0.30"]
    assert len(found) == 2 + 10 + 40
    first_pass = {g: row for g, row in found.items() if g.startswith("0.")}
    order = permute_rows(99, 0, 40)
    rest = {str(ids.train_group(0, at)): order[at] for at in range(30, 40)}
    assert first_pass == {str(g): row for g, row in UNFINISHED.items()} | rest
    own = permute_rows(bench.settings.seed, 1, 40)
    assert [found[f"1.{at}"] for at in range(40)] == list(own)


def test_the_pass_that_it_is_in_keeps_its_order_where_that_is_not_shuffled() -> None:
    bench = fork(of={"shuffle": False, "unfinished": ()}, total_epochs=1)
    train_all(bench)
    assert dispatched(bench) == {f"0.{at}": at for at in range(30, 40)}
    assert bench.state.run.phase == "exporting"


@pytest.mark.parametrize("other", [{"data": "e"}, {"num_train": 41}])
def test_other_data_are_begun_with_their_first_pass(other: dict[str, Any]) -> None:
    bench = fork(of=other, total_epochs=1)
    assert bench.state.data.origin is not None and not bench.state.data.origin.data
    train_all(bench)
    found = dispatched(bench)
    assert sorted(found.values()) == list(range(40))
    assert found["0.0"] == permute_rows(bench.settings.seed, 0, 40)[0]


def test_steps_count_on_up_to_the_total() -> None:
    bench = fork(total_steps=STEP + 2)
    train_all(bench)
    assert bench.state.steps.completed == STEP + 2 and bench.state.run.phase == "exporting"


@pytest.mark.parametrize(
    ("before", "expected"), [(True, [VERSION, VERSION + 2]), (False, [VERSION + 2])]
)
def test_it_is_evaluated_at_its_beginning_when_that_is_asked_for(
    before: bool, expected: list[int]
) -> None:
    """And not because the other run had passed a step at which one is due."""
    bench = fork(val_before_train=before, test_freq=3, num_eval=1)
    for _ in range(2):
        for name in [g for g in bench.state.work.groups if g.startswith("e")]:
            bench.complete(name)
            bench.write_ends()
        train(bench)
    assert [e.version for e in bench.state.evaluations.results] + (
        [bench.state.evaluations.running.version] if bench.state.evaluations.running else []
    ) == expected


def come_back(bench: Bench, *checkpoints: ev.Checkpoint, boot: str = "b") -> list[Command]:
    bench.kill("trainer-0")
    bench.join("trainer-0", boot)
    return bench.say("trainer-0", bench.trainer_ready(*checkpoints))


def test_a_trainer_that_comes_back_begins_with_the_checkpoint_of_the_fork() -> None:
    bench = fork()
    train(bench)
    (load,) = only(cmd.LoadCheckpoint, come_back(bench))
    assert (load.version, load.step, load.path) == (VERSION, STEP, "origin")
    (repeat,) = bench.say("trainer-0", ev.CheckpointLoaded(version=VERSION, step=STEP))
    assert isinstance(repeat, cmd.RepeatStep)
    assert (repeat.step_index, repeat.version, repeat.digest) == (STEP, VERSION + 1, f"d{STEP + 1}")


def test_its_own_checkpoints_are_confirmed_by_all_batches_of_both_runs() -> None:
    bench = fork()
    train(bench)
    (order,) = only(cmd.TrainStep, bench.commands)[:1]
    chain = ids.extend_chain_digest("chain", order.trajectories)
    values = {"version": VERSION + 1, "step": STEP + 1, "path": f"checkpoints/step_{STEP + 1}"}
    (load,) = only(
        cmd.LoadCheckpoint,
        come_back(
            bench,
            ev.Checkpoint(**values, digest=chain),
            ev.Checkpoint(**{**values, "path": "elsewhere"}, digest="another"),
        ),
    )
    assert load.path == values["path"] and load.kept == (VERSION, VERSION + 1)


@pytest.mark.parametrize("step", [1, STEP])
@pytest.mark.parametrize("save_freq", [0, 1])
def test_without_its_checkpoint_it_does_not_begin_with_the_model(step: int, save_freq: int) -> None:
    bench = fork(started=False, of={"step": step}, save_freq=save_freq)
    bench.join("trainer-0")
    bench.say("trainer-0", ev.TrainerReady(num_parameters=1, weights_bytes=4))
    assert "no checkpoint that the log confirms" in bench.state.run.failure


def test_without_checkpoints_of_its_own_it_begins_and_ends_with_its_trainer() -> None:
    bench = fork(save_freq=0)
    train(bench)
    bench.kill("trainer-0")
    assert "trainer-0 is lost" in bench.state.run.failure


def test_a_trainer_that_is_lost_while_it_loads_is_told_again() -> None:
    bench = fork(started=False)
    for name in ("node-0", "store-0", "relay-0", "trainer-0"):
        bench.join(name)
    for name in ("store-0", "relay-0", "trainer-0"):
        bench.ready(name)
    (load,) = only(cmd.LoadCheckpoint, come_back(bench))
    assert load.path == "origin"
    commands = bench.say("trainer-0", ev.CheckpointLoaded(version=VERSION, step=STEP))
    assert only(cmd.PublishWeights, commands)


def test_versions_that_are_steps_need_no_table() -> None:
    bench = fork(of={"version": STEP})
    train(bench)
    assert bench.state.versions.first_steps == {} and bench.state.versions.newest == STEP + 1


def test_the_state_of_a_fork_goes_through_a_snapshot() -> None:
    bench = fork()
    decoded = states.decode(states.encode(bench.state))
    assert decoded == bench.state and StateMachine(decoded).state.data.first_step == STEP


def test_prompts_that_begin_anew_keep_their_order_in_the_log() -> None:
    started = fork(started=False).started()
    assert decode_event(encode(started)) == started
    assert isinstance(started.origin, ev.ForkOrigin)
    assert [prompt.group for prompt in started.origin.unfinished] == list(UNFINISHED)
