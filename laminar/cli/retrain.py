"""laminar retrain RUN: train again what the log says was trained, and compare the weights.

Reads   the event log, the store and the configuration of a run, active or ended; the model that it
        began with, or the checkpoint that a fork began with
Writes  standard output: a line for each step, and the verdict; nothing in the run directory

What was trained depends on nothing but the model, the batches in their order and the settings, so
the weights of every step must come out as they were published, to the last bit. They do on the same
kind of CPU with the same threads and torch; elsewhere rounding may differ, and so may a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar import exit_codes
from laminar.analysis.trained_steps import Step, Trained, trained
from laminar.cli.arguments import run_config
from laminar.config import Config, ConfigError
from laminar.rundir import ORIGIN_DIR, STORE_FILE
from laminar.storage import messages as m
from laminar.storage.books import open_tables
from laminar.storage.handlers import Handlers

if TYPE_CHECKING:
    from laminar.training.steps import TrainSample
    from laminar.training.threaded import ThreadedLearner
    from laminar.weights.version.manifest import TensorSpec


def add_parser(subparsers: Any) -> None:
    text = "train again what the log says was trained, and compare the weights of every step"
    parser = subparsers.add_parser("retrain", help=text, description=text)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.set_defaults(function=run_retrain)


def run_retrain(arguments: argparse.Namespace) -> int:
    """0 when every published version came out again, 1 at the first that did not."""
    config = run_config(arguments.run)
    if config.is_emulated:
        raise ConfigError(f"{arguments.run} is emulated: it has no model that could be trained")
    found = trained(arguments.run)
    if not found.steps:
        raise ConfigError(f"{arguments.run} has completed no step that could be trained again")
    with open_tables(arguments.run / STORE_FILE) as tables:
        again = _Again(config, Handlers(tables))
        return asyncio.run(_compare(again, found, arguments.run / ORIGIN_DIR))


async def _compare(again: _Again, found: Trained, origin: Path) -> int:
    await again.load()
    what, where = "the model that the run began with", "model.name"
    if found.first_step:
        await again.restore(origin)
        what, where = f"step {found.first_step}, with which the fork began", str(origin)
    present = again.digest(found.first_version, found.first_step)
    if not _same(what, present, found.first_digest):
        print(f"NOT identical: {where} has other weights than the run began with")
        return exit_codes.FAILED
    compared, steps = 0, found.steps
    for step in steps:
        await again.train(step)
        last = steps[-1].step_index + 1
        name = f"step {step.step_index + 1} of {last}, version {step.version}"
        if not _same(name, again.digest(step.version, step.step_index + 1), step.digest):
            print(f"NOT identical: {name} is the first that differs")
            return exit_codes.FAILED
        compared += bool(step.digest)
    print(f"identical: {len(steps)} steps trained again, {compared} published versions compared")
    return exit_codes.COMPLETE


def _same(name: str, digest: str, published: str) -> bool:
    """Print what came out, and say whether it is what was published, if that is known."""
    if not published:
        print(f"{name}: {digest}, was not published", flush=True)
    elif digest == published:
        print(f"{name}: {digest}, as published", flush=True)
    else:
        print(f"{name}: {digest}, published was {published}", flush=True)
    return published in ("", digest)


class _Again:
    """A learner, and the trajectories that it is to train on."""

    learner: ThreadedLearner
    specs: tuple[TensorSpec, ...]

    def __init__(self, config: Config, store: Handlers) -> None:
        self._config, self._store = config, store

    async def load(self) -> None:
        """The model that the run began with; ConfigError."""
        from laminar.tasks.tokenizer import load_tokenizer, tokenizer_size
        from laminar.training.threaded import ThreadedLearner
        from laminar.weights.version import manifest

        name = self._config.model.name
        self.learner = ThreadedLearner(self._config, lambda: tokenizer_size(load_tokenizer(name)))
        layout = await self.learner.load()
        dtype = self._config.weights.dtype
        self.specs = manifest.layout(
            layout.shapes, layout.engine_dtype if dtype == "auto" else dtype
        )

    async def restore(self, directory: Path) -> None:
        """Weights and optimizer of a checkpoint; ConfigError."""
        from laminar.training.resume import CheckpointError

        try:
            await self.learner.restore(directory)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    async def train(self, step: Step) -> None:
        samples = list(self._samples(step.trajectories))
        await self.learner.train_step(samples, step.step_index)

    def digest(self, version: int, step: int) -> str:
        """Of the weights as they are, in the type in which they are published."""
        from laminar.actors.trainer import NO_PROBE
        from laminar.weights.version.checkpoint import describe

        describe_now = partial(describe, specs=self.specs, probe=NO_PROBE)
        return describe_now(version=version, step=step, tensors=self.learner.weights()).digest

    def _samples(self, ids: tuple[str, ...]) -> Iterator[TrainSample]:
        from laminar.actors.trainer import sample_of

        for wanted in ids:
            reply = self._store.answer(m.Fetch(ids=(wanted,), with_prompt=False))
            if not isinstance(reply, m.FetchReply) or not reply.trajectories:
                raise ConfigError(
                    f"the store does not have {wanted}, which the log says was trained"
                )
            yield sample_of(reply.trajectories[0])
