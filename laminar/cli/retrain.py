"""laminar retrain RUN: repeat the training recorded in the log, and compare the weights.

Reads   the event log, the store and the configuration of a run, active or ended; the model that it
        began with, or a checkpoint: the origin of a fork, or a later one
Writes  standard output: a line for each step, and the verdict; nothing in the run directory

Training depends only on the model, the batches in their order and the settings, so the weights of
every step must equal the published ones bit for bit. They do on the same kind of CPU with the same
number of threads and torch release; elsewhere, and on a GPU, rounding may differ. If tokens were
removed from the store (store.payload_gb), it starts from the oldest checkpoint after which all
tokens are present.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from laminar.analysis.facts.trained_steps import TrainedStep, TrainedSteps, read_trained_steps
from laminar.config import Config, ConfigError
from laminar.core.steps.step_replay import find_other_function_reason
from laminar.names import exit_codes, ids
from laminar.run.directory import CHECKPOINTS_DIR, ORIGIN_DIR, STORE_FILE, run_config
from laminar.run.permissions import check_private
from laminar.storage import messages as m
from laminar.storage.books import open_tables
from laminar.storage.handlers import Handlers
from laminar.training.trainer_state import CheckpointError, ResumeState, iter_checkpoints

if TYPE_CHECKING:
    from laminar.training.ranks import RankLayout
    from laminar.training.steps import TrainSample
    from laminar.weights.version.manifest import TensorSpec


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("retrain")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.set_defaults(function=run_retrain)


def run_retrain(arguments: argparse.Namespace) -> int:
    """Return 0 if every published version was reproduced, 1 at the first that was not."""
    config = run_config(arguments.run)
    check_private(arguments.run, foreign=True)
    if config.is_emulated:
        raise ConfigError(f"{arguments.run} is emulated: it has no model to train")
    found = read_trained_steps(arguments.run)
    if not found.steps:
        raise ConfigError(f"{arguments.run} has not completed a step to repeat")
    with open_tables(arguments.run / STORE_FILE) as tables:
        begin = find_start(arguments.run, found, tables.removed_payloads())
        check_layout(config, arguments.run, found, begin.step)
        steps = found.steps[begin.step - found.first_step :]
        again = partial(_Retraining, config, Handlers(tables), arguments.run, found.functions)
        return asyncio.run(_retrain_steps(again, steps, begin))


class RetrainStart(NamedTuple):
    """Weights to start training from."""

    step: int  #: completed steps
    version: int
    digest: str  #: as published; empty if not published
    what: str
    directory: Path | None = None  #: of the checkpoint; None for model.name


async def _retrain_steps(
    build: Callable[[], _Retraining], steps: tuple[TrainedStep, ...], begin: RetrainStart
) -> int:
    from laminar.training.rank_processes import RankError

    again = build()
    try:
        return await _compare_steps(again, steps, begin)
    except RankError as error:
        print(f"laminar retrain: {error}", file=sys.stderr)
        return exit_codes.FAILED
    finally:
        await again.close()


async def _compare_steps(
    again: _Retraining, steps: tuple[TrainedStep, ...], begin: RetrainStart
) -> int:
    await again.load()
    if begin.directory is not None:
        await again.restore_checkpoint(begin.directory)
    if not _report_match(
        begin.what, await again.compute_digest(begin.version, begin.step), begin.digest
    ):
        where = begin.directory or "model.name"
        print(f"NOT identical: the weights of {where} differ from {begin.what}")
        return exit_codes.FAILED
    compared, last = 0, begin.step + len(steps)
    for step in steps:
        await again.train_step(step)
        name = f"step {step.step_index + 1} of {last}, version {step.version}"
        digest = await again.compute_digest(step.version, step.step_index + 1)
        if not _report_match(name, digest, step.digest):
            print(f"NOT identical: {name} is the first to differ")
            return exit_codes.FAILED
        compared += bool(step.digest)
    print(f"identical: {len(steps)} steps repeated, {compared} published versions compared")
    return exit_codes.COMPLETE


def _report_match(name: str, digest: str, published: str) -> bool:
    """Print the digest; return whether it equals the published one, if that is known."""
    if not published:
        print(f"{name}: {digest}, not published", flush=True)
    elif digest == published:
        print(f"{name}: {digest}, as published", flush=True)
    else:
        print(f"{name}: {digest}, but published as {published}", flush=True)
    return published in ("", digest)


def find_start(run_dir: Path, found: TrainedSteps, removed: Set[str]) -> RetrainStart:
    """Return the first weights after which the store has all tokens; raise ConfigError if none."""
    lacking = (s.step_index for s in found.steps if not removed.isdisjoint(s.trajectories))
    last = max(lacking, default=-1)
    if last < 0:
        begun = found.first_step, found.first_version, found.first_digest
        if not found.first_step:
            return RetrainStart(*begun, "the initial model of the run")
        what = f"step {found.first_step}, the start of the fork"
        return RetrainStart(*begun, what, run_dir / ORIGIN_DIR)
    later = {}
    for directory, resume, step in _iter_checkpoints(run_dir, found):
        if resume.step > last:
            what = f"step {resume.step}, a checkpoint"
            later[resume.step] = RetrainStart(
                resume.step, step.version, step.digest, what, directory
            )
    if not later:
        raise ConfigError(
            f"tokens of step {last + 1} were removed from the store (store.payload_gb), and "
            f"{run_dir / CHECKPOINTS_DIR} has no later checkpoint of this log"
        )
    return later[min(later)]


def check_layout(config: Config, run_dir: Path, found: TrainedSteps, begin: int) -> None:
    """Raise ConfigError if checkpoints after step `begin` were trained in another layout of ranks.

    A fork, or a resumed run, may have another one than before; sums then round differently."""
    from laminar.training.ranks import RankLayout

    present = RankLayout.from_config(config)
    for directory, resume, _ in _iter_checkpoints(run_dir, found):
        facts = resume.learner
        before = RankLayout(facts.nodes, facts.ranks, facts.shard)
        if resume.step > begin and before != present:
            raise ConfigError(
                f"{directory} was trained by {_describe_layout(before)}, but {run_dir} now has "
                f"{_describe_layout(present)}, whose sums round differently; repeat the steps "
                "with a copy of the run whose config.toml has the former layout"
            )


def _describe_layout(layout: RankLayout) -> str:
    names = zip(layout._fields, layout, strict=True)
    return ", ".join(f"trainer.{name} = {value}" for name, value in names)


def _iter_checkpoints(
    run_dir: Path, found: TrainedSteps
) -> Iterator[tuple[Path, ResumeState, TrainedStep]]:
    """Yield the readable checkpoints of this log: directory, state and last step."""
    for directory, resume in iter_checkpoints(run_dir):
        if (step := _find_maker(resume, found)) is not None:
            yield directory, resume, step


def _find_maker(resume: ResumeState, found: TrainedSteps) -> TrainedStep | None:
    """Return the step that made this checkpoint from the same trajectories, or None."""
    steps = found.steps[: resume.step - found.first_step]
    chain = ids.extend_chain_digest(found.first_chain, *(step.trajectories for step in steps))
    if not steps or (steps[-1].step_index + 1, steps[-1].version, chain) != (
        resume.step,
        resume.version,
        resume.digest,
    ):
        return None
    return steps[-1]


class _Retraining:
    """Learner with the trajectories to train on."""

    specs: tuple[TensorSpec, ...]

    def __init__(
        self, config: Config, store: Handlers, run_dir: Path, functions: dict[str, str]
    ) -> None:
        """Initialize within an event loop; `functions`: logged digests of user functions."""
        from laminar.actors.system.learners import is_ranked, parts_of
        from laminar.actors.system.rank_process import build_rank_command
        from laminar.training.rank_processes import RankProcesses

        self._config, self._store, self._functions = config, store, functions
        self._gang = None
        if is_ranked(config):
            self._gang = RankProcesses(
                config, build_rank_command(run_dir), lock=None, lost=_ignore_text, say=_ignore_text
            )
        self._parts = parts_of(config, self._gang)

    async def load(self) -> None:
        """Load the initial model of the run; raise ConfigError for changed functions."""
        from laminar.weights.version import manifest

        layout = await self._parts.learner.load()
        present = self._parts.learner.collect_facts().functions
        if reason := find_other_function_reason(self._functions, present):
            raise ConfigError(reason)
        dtype = self._config.weights.dtype
        self.specs = manifest.make_layout(
            layout.shapes, layout.engine_dtype if dtype == "auto" else dtype
        )

    async def close(self) -> None:
        if self._gang is not None:
            await self._gang.close()

    async def restore_checkpoint(self, directory: Path) -> None:
        """Restore weights and optimizer of a checkpoint; raise ConfigError on failure."""
        try:
            await self._parts.learner.restore_checkpoint(directory)
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    async def train_step(self, step: TrainedStep) -> None:
        samples = list(self._read_samples(step.trajectories))
        await self._parts.learner.train_step(samples, step.step_index)

    async def compute_digest(self, version: int, step: int) -> str:
        """Return the digest of the present weights, in the data type of published weights."""
        from laminar.actors.trainer import NO_PROBE

        files = self._parts.files
        copied = await files.copy()
        described = await files.build_manifest(
            copied, version=version, step=step, specs=self.specs, probe=NO_PROBE
        )
        return described.digest

    def _read_samples(self, names: tuple[str, ...]) -> Iterator[TrainSample]:
        from laminar.actors.batch_fetch import sample_of

        for wanted in names:
            reply = self._store.answer_request(m.Fetch(ids=(wanted,), with_prompt=False))
            if not isinstance(reply, m.FetchReply) or not reply.trajectories:
                raise ConfigError(
                    f"the store does not have {wanted}, which the log says was trained"
                )
            yield sample_of(reply.trajectories[0])


def _ignore_text(text: str) -> None:
    """Ignore a message of the ranks."""
