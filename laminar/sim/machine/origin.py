"""What a fork begins with, in virtual time: a checkpoint of a run that is not simulated.

Reads   the origin of the scenario
Writes  its directory, on the shared disk
Gives   lay_origin
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laminar.run.directory import ORIGIN_DIR, RESUME_FILE, VERSION_FILE
from laminar.sim.machine.model_files import ModelDirectory
from laminar.sim.machine.versions import manifest_for, weights_of
from laminar.sim.runtime.boot import RUN_DIR
from laminar.training.resume import LearnerFacts, Resume, encode
from laminar.weights.version.manifest import encode as encode_manifest

if TYPE_CHECKING:
    from laminar.sim.world import World

NAME = "of another run"
"""Of the weights, and of the moment of the optimizer."""


def lay_origin(world: World) -> None:
    """Nothing, where this is no fork."""
    origin = world.scenario.origin
    if origin is None:
        return
    weights = weights_of(NAME)
    facts = LearnerFacts(torch="none", threads=1, micro_batch_tokens=1, reference="", moved={})
    resume = Resume(
        version=origin.version, step=origin.step, before=origin.digest, batches=(), learner=facts
    )
    manifest = manifest_for(weights, origin.version, origin.step)
    extra = {RESUME_FILE: encode(resume), VERSION_FILE: encode_manifest(manifest)}
    world.models[str(RUN_DIR / ORIGIN_DIR)] = ModelDirectory(weights, NAME, extra)
    world.names[weights.tobytes()] = NAME
    world.coverage.hit("fork:begun")
