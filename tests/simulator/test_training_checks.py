"""What is trained, saved and loaded is held against books of its own: each check can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import xxhash

from laminar.core.state import keys
from laminar.core.state.state import State
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Stamped
from laminar.names import exit_codes
from laminar.names.ids import TrajectoryId
from laminar.run.directory import VERSION_FILE
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import manifest_of
from tools.kit.sim_worlds import calm
from tools.kit.world_parts import settings, step_completed
from tools.simulator.checks import final_checks
from tools.simulator.machine.model_files import ModelDirectory
from tools.simulator.machine.versions import weights_of
from tools.simulator.models.learner import LAYOUT
from tools.simulator.runtime.boot import RUN_DIR
from tools.simulator.runtime.violation import Violation
from tools.simulator.world import World

PATH = str(RUN_DIR / "checkpoints/step_2")
PROBE = mf.Probe(sequences=((1, 2),), logprobs=((-0.5,),), tolerance=0.1, mean_tolerance=0.1)
SAVED = ev.CheckpointSaved(version=3, step=2, path="checkpoints/step_2", kept=(3,))
PULL = cmd.PullWeights(to="rollout-0", version=3, exact=True, purpose="evaluation")


@pytest.fixture
def world() -> Iterator[World]:
    """Version 3 has seen two steps, and is saved."""
    made = World(calm(), 1)
    made.begin()
    made.processes["trainer-0"].start()
    training, weights = made.checks.training, weights_of("w2")
    training.decided(cmd.TrainStep(to="trainer-0", step_index=1, version=3, trajectories=()))
    training.made(2, weights)
    manifest = manifest_of(
        weights,
        version=3,
        step=2,
        tensors=mf.layout(LAYOUT.shapes, LAYOUT.engine_dtype),
        probe=PROBE,
    )
    made.models[PATH] = ModelDirectory(weights, "m", {VERSION_FILE: mf.encode(manifest)})
    yield made
    made.close()


def reported(world: World, event: Any) -> None:
    world.checks.training.reported(world.processes["trainer-0"], event)


def broken(check: Any, *facts: Any) -> str:
    with pytest.raises(Violation) as found:
        check(*facts)
    return found.value.invariant


def test_a_step_is_in_the_book_before_it_is_reported(world: World) -> None:
    training = world.checks.training
    done = step_completed(0, 1)
    assert broken(reported, world, done) == "booked_before_reported"
    line = {"step": 0, "version": 1, "ids": ["0.0.0", "0.0.1"], "left_out": ["0.0.1"]}
    training.booked(line)
    reported(world, done)
    assert not training.book
    accept(world, 0, 1)
    assert training.book == {"0.0.0"}
    assert broken(training.booked, line) == "at_most_one_trained"
    training.booked({"step": 1, "version": 2, "ids": ["0.0.1"], "left_out": []})
    again = {"step": 2, "version": 3, "ids": ["0.0.0"], "left_out": []}
    assert broken(training.booked, again) == "at_most_one_trained"


def accept(world: World, step_index: int, version: int, *rows: str) -> None:
    """The log has this step."""
    training, state = world.checks.training, State(settings=settings(), logic=1)
    training.decided(train(step_index, version, *rows))
    state.completed = step_index + 1
    stamped = Stamped(
        seq=9, time_ns=0, peer="trainer-0", incarnation=1, peer_seq=1,
        event=step_completed(step_index, version),
    )  # fmt: skip
    training.observe(stamped, state)


def train(step_index: int, version: int, *rows: str) -> cmd.TrainStep:
    names = tuple(map(TrajectoryId, rows))
    return cmd.TrainStep(to="t", step_index=step_index, version=version, trajectories=names)


def test_a_line_of_a_trainer_that_was_lost_does_not_count(world: World) -> None:
    training = world.checks.training
    for version in (1, 2):
        training.booked({"step": 0, "version": version, "ids": ["0.0.0"], "left_out": []})
    accept(world, 0, 2, "0.0.0")
    assert training.book == {"0.0.0"}
    training.take_back(8)
    assert not training.book


def redo(*rows: str, version: int = 1) -> cmd.RedoStep:
    names = tuple(map(TrajectoryId, rows))
    return cmd.RedoStep(to="t", step_index=0, version=version, trajectories=names, digest="d")


@pytest.mark.parametrize(
    ("told", "fetched", "invariant"),
    [
        (redo("0.0.0", "0.0.1"), ("0.0.0",), "trained_as_ordered"),
        (redo("0.0.0", "0.0.1"), ("0.0.1", "0.0.0"), "trained_as_ordered"),
        (redo("0.0.0"), ("0.0.0",), "redone_as_logged"),
        (redo("0.0.0", "0.0.1", version=2), ("0.0.0", "0.0.1"), "redone_as_logged"),
    ],
)
def test_a_step_is_redone_as_it_was_logged(
    world: World, told: cmd.RedoStep, fetched: tuple[str, ...], invariant: str
) -> None:
    training, trainer = world.checks.training, world.processes["trainer-0"]
    accept(world, 0, 1, "0.0.0", "0.0.1")
    training.told(trainer, redo("0.0.0", "0.0.1"))
    training.batch_fetched(0, [SimpleNamespace(sample_id=s) for s in ("0.0.0", "0.0.1")])
    training.told(trainer, told)
    samples = [SimpleNamespace(sample_id=name) for name in fetched]
    assert broken(training.batch_fetched, 0, samples) == invariant


def test_a_redo_goes_to_nobody_and_comes_to_the_same(world: World) -> None:
    training, trainer = world.checks.training, world.processes["trainer-0"]
    training.told(trainer, redo("0.0.0"))
    assert broken(training.handed_over, trainer.boot_id) == "redo_is_not_published"
    other = ev.StepRedone(step_index=0, version=1, digest="e", published="d")
    assert broken(reported, world, other) == "redone_is_the_same"
    reported(world, msgspec.structs.replace(other, published=""))
    training.handed_over(trainer.boot_id)


def test_a_redo_may_differ_from_what_a_fault_published_in_its_place(world: World) -> None:
    training, other = world.checks.training, weights_of("other")
    digest = xxhash.xxh3_128_hexdigest(other.data)
    redone = ev.StepRedone(step_index=0, version=1, digest="e", published=digest)
    training.made_other(2, other)
    assert broken(reported, world, redone) == "redone_is_the_same"
    training.made_other(1, other)
    reported(world, redone)


def test_all_trainers_come_to_the_same_weights(world: World) -> None:
    training = world.checks.training
    training.made(2, weights_of("w2"))
    assert broken(training.made, 2, weights_of("other")) == "one_lineage"


def test_a_checkpoint_gives_its_version_back(world: World) -> None:
    reported(world, SAVED)
    world.models[PATH].synced = False
    assert broken(reported, world, SAVED) == "saved_is_whole"
    world.models[PATH] = ModelDirectory(weights_of("w3"), "m", world.models[PATH].extra)
    assert broken(reported, world, SAVED) == "saved_is_whole"
    del world.models[PATH]
    assert broken(reported, world, SAVED) == "saved_is_whole"
    world.checks.training.lost.add(PATH)
    assert broken(reported, world, SAVED) == "saved_is_whole"


def test_what_is_kept_is_there_unless_somebody_else_removed_it(world: World) -> None:
    training = world.checks.training
    reported(world, SAVED)
    world.models["run/checkpoints/step_4"] = world.models[PATH]
    world.lose_checkpoints()
    assert not world.models and PATH in training.lost
    training.lost.clear()
    later = ev.CheckpointSaved(version=3, step=4, path="checkpoints/step_4", kept=(2, 3))
    assert broken(reported, world, later) == "saved_is_whole"


def test_a_replica_has_the_weights_of_its_version(world: World) -> None:
    digest = mf.decode(world.models[PATH].extra[VERSION_FILE]).digest
    training, replica = world.checks.training, world.processes["rollout-0"]
    right = ev.WeightsLoaded(
        version=3, step=2, digest=digest, probe_diff=0.0, seconds=1.0, reloaded=True
    )
    assert broken(training.reported, replica, right) == "loaded_is_trained"
    training.told(replica, PULL)
    training.reported(replica, right)
    for change in ({"version": 4}, {"digest": "0" * 32}):
        wrong = msgspec.structs.replace(right, **change)
        assert broken(training.reported, replica, wrong) == "loaded_is_trained"


def test_a_trainer_whose_checkpoint_was_removed_fails_the_run_with_that_reason() -> None:
    """It was there when the trainer listed it; the one that is started after that finds none."""
    with World(calm(save_freq=1, total_steps=6, max_ckpt_to_keep=1, payload_gb=0.0), 1) as made:
        made.begin()
        trainer = made.processes["trainer-0"]
        step_until(made, lambda state: bool(state.trained and state.trained[0].step_index))
        made.faults.harm("trainer-0")
        trainer.die(exit_codes.KILLED)
        step_until(made, lambda state: keys.LOAD in state.commands)
        made.lose_checkpoints()
        step_until(made, lambda state: bool(state.failure))
        state = made.coordinator.state
        assert state is not None and "no checkpoint that the log confirms" in state.failure
        while not made.finished:
            made.scheduler.step()
        assert final_checks.judge(made)


def step_until(world: World, condition: Callable[[State], bool]) -> None:
    while not (world.coordinator.state is not None and condition(world.coordinator.state)):
        assert not world.finished, "the run ended before"
        world.scheduler.step()
