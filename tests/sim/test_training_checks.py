"""What is trained, saved and loaded is held against books of its own: each check can fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.rundir import VERSION_FILE
from laminar.sim.models.learner import LAYOUT, ModelDirectory
from laminar.sim.models.versions import weights_of
from laminar.sim.runtime.boot import RUN_DIR
from laminar.sim.runtime.violation import Violation
from laminar.sim.world import World
from laminar.testing.sim_worlds import calm
from laminar.testing.world_parts import step_completed
from laminar.weights.version import manifest as mf
from laminar.weights.version.hashes import manifest_of

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
    manifest = manifest_of(weights, version=3, step=2, tensors=mf.layout(*LAYOUT), probe=PROBE)
    made.models[PATH] = ModelDirectory(weights, {VERSION_FILE: mf.encode(manifest)})
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
    training.booked({"step": 0, "ids": ["0.0.0", "0.0.1"], "left_out": ["0.0.1"]})
    reported(world, done)
    assert training.book == {"0.0.0": 0}
    training.booked({"step": 1, "ids": ["0.0.1"], "left_out": []})
    again = {"step": 2, "ids": ["0.0.0"], "left_out": []}
    assert broken(training.booked, again) == "at_most_one_trained"


def test_a_checkpoint_gives_its_version_back(world: World) -> None:
    reported(world, SAVED)
    world.models[PATH].synced = False
    assert broken(reported, world, SAVED) == "saved_is_whole"
    world.models[PATH] = ModelDirectory(weights_of("w3"), world.models[PATH].extra)
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
