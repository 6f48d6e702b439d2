"""laminar retrain RUN: train again what the log says was trained, and compare the weights.

Reads   the event log, the store and the configuration of a run, active or ended; the model that it
        began with, or a checkpoint: the one that a fork began with, or a later one
Writes  standard output: a line for each step, and the verdict; nothing in the run directory

What was trained depends on nothing but the model, the batches in their order and the settings, so
the weights of every step must come out as they were published, to the last bit. They do on the same
kind of CPU with the same threads and torch; elsewhere rounding may differ, and so may a GPU. Where
tokens were removed from the store (store.payload_gb), it begins with the oldest checkpoint after
which all are there.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from laminar.analysis.log.trained_steps import Step, Trained, trained
from laminar.config import Config, ConfigError
from laminar.core.steps.step_replay import other_function
from laminar.names import exit_codes, ids
from laminar.run.directory import CHECKPOINTS_DIR, ORIGIN_DIR, RESUME_FILE, STORE_FILE, run_config
from laminar.storage import messages as m
from laminar.storage.books import open_tables
from laminar.storage.handlers import Handlers
from laminar.training.trainer_state import CheckpointError, Resume, decode

if TYPE_CHECKING:
    from laminar.training.steps import TrainSample
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
        begin = beginning(arguments.run, found, tables.removed_payloads())
        steps = found.steps[begin.step - found.first_step :]
        again = partial(_Again, config, Handlers(tables), arguments.run, found.functions)
        return asyncio.run(_retrain(again, steps, begin))


class RetrainStart(NamedTuple):
    """Weights to train from."""

    step: int  #: completed
    version: int
    digest: str  #: as published; empty: they were not
    what: str
    directory: Path | None = None  #: of the checkpoint; None: model.name


async def _retrain(
    build: Callable[[], _Again], steps: tuple[Step, ...], begin: RetrainStart
) -> int:
    from laminar.training.rank_processes import RankError

    again = build()
    try:
        return await _compare(again, steps, begin)
    except RankError as error:
        print(f"laminar retrain: {error}", file=sys.stderr)
        return exit_codes.FAILED
    finally:
        await again.close()


async def _compare(again: _Again, steps: tuple[Step, ...], begin: RetrainStart) -> int:
    await again.load()
    if begin.directory is not None:
        await again.restore(begin.directory)
    if not _same(begin.what, await again.digest(begin.version, begin.step), begin.digest):
        where = begin.directory or "model.name"
        print(f"NOT identical: {where} has other weights than {begin.what}")
        return exit_codes.FAILED
    compared, last = 0, begin.step + len(steps)
    for step in steps:
        await again.train(step)
        name = f"step {step.step_index + 1} of {last}, version {step.version}"
        digest = await again.digest(step.version, step.step_index + 1)
        if not _same(name, digest, step.digest):
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


def beginning(run_dir: Path, found: Trained, removed: Set[str]) -> RetrainStart:
    """The first weights after which the store has the tokens of every step; ConfigError."""
    lacking = (s.step_index for s in found.steps if not removed.isdisjoint(s.trajectories))
    last = max(lacking, default=-1)
    if last < 0:
        begun = found.first_step, found.first_version, found.first_digest
        if not found.first_step:
            return RetrainStart(*begun, "the model that the run began with")
        what = f"step {found.first_step}, with which the fork began"
        return RetrainStart(*begun, what, run_dir / ORIGIN_DIR)
    later = {}
    for path in (run_dir / CHECKPOINTS_DIR).glob(f"[!.]*/{RESUME_FILE}"):
        with suppress(CheckpointError, OSError):
            resume = decode(path.read_bytes())
            if resume.step > last and (step := _made_by(resume, found)) is not None:
                what = f"step {resume.step}, of a checkpoint"
                later[resume.step] = RetrainStart(
                    resume.step, step.version, step.digest, what, path.parent
                )
    if not later:
        raise ConfigError(
            f"tokens that step {last + 1} trained were removed from the store (store.payload_gb), "
            f"and {run_dir / CHECKPOINTS_DIR} has no checkpoint of a later step of this log"
        )
    return later[min(later)]


def _made_by(resume: Resume, found: Trained) -> Step | None:
    """The step of the log that made this checkpoint, of the same trajectories; None: there is
    none."""
    steps = found.steps[: resume.step - found.first_step]
    chain = ids.chained(found.first_chain, *(step.trajectories for step in steps))
    if not steps or (steps[-1].step_index + 1, steps[-1].version, chain) != (
        resume.step,
        resume.version,
        resume.digest,
    ):
        return None
    return steps[-1]


class _Again:
    """A learner, and the trajectories that it is to train on."""

    specs: tuple[TensorSpec, ...]

    def __init__(
        self, config: Config, store: Handlers, run_dir: Path, functions: dict[str, str]
    ) -> None:
        """Within an event loop. `functions`: of the user, as the log has their digests."""
        from laminar.actors.system.learners import is_ranked, parts_of
        from laminar.actors.system.rank_process import program
        from laminar.training.rank_processes import Gang

        self._config, self._store, self._functions = config, store, functions
        self._gang = None
        if is_ranked(config):
            self._gang = Gang(config, program(run_dir), lock=None, lost=_nothing, say=_nothing)
        self._parts = parts_of(config, self._gang)

    async def load(self) -> None:
        """The model that the run began with; ConfigError."""
        from laminar.weights.version import manifest

        layout = await self._parts.learner.load()
        if other := other_function(self._functions, self._parts.learner.facts().functions):
            raise ConfigError(other)
        dtype = self._config.weights.dtype
        self.specs = manifest.layout(
            layout.shapes, layout.engine_dtype if dtype == "auto" else dtype
        )

    async def close(self) -> None:
        if self._gang is not None:
            await self._gang.close()

    async def restore(self, directory: Path) -> None:
        """Weights and optimizer of a checkpoint; ConfigError."""
        try:
            await self._parts.learner.restore(directory)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    async def train(self, step: Step) -> None:
        samples = list(self._samples(step.trajectories))
        await self._parts.learner.train_step(samples, step.step_index)

    async def digest(self, version: int, step: int) -> str:
        """The digest of the weights as they are, in the type in which they are published."""
        from laminar.actors.trainer import NO_PROBE

        files = self._parts.files
        copied = await files.copy()
        described = await files.describe(
            copied, version=version, step=step, specs=self.specs, probe=NO_PROBE
        )
        return described.digest

    def _samples(self, names: tuple[str, ...]) -> Iterator[TrainSample]:
        from laminar.actors.batch_fetch import sample_of

        for wanted in names:
            reply = self._store.answer(m.Fetch(ids=(wanted,), with_prompt=False))
            if not isinstance(reply, m.FetchReply) or not reply.trajectories:
                raise ConfigError(
                    f"the store does not have {wanted}, which the log says was trained"
                )
            yield sample_of(reply.trajectories[0])


def _nothing(text: str) -> None:
    """Who asks the ranks for something is told."""
