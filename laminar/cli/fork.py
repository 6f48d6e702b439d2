"""laminar fork RUN --at-step N: start a new run from a checkpoint of another one.

Reads   config.toml, checkpoints and the event log of RUN, active or ended; the settings given
Writes  a new run directory, as laminar train does, with the checkpoint in origin/
Starts  the processes of the run

The files of the checkpoint are linked if the file system supports it, else copied: RUN may be
removed once the fork has begun.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from laminar.analysis.log.run_log import replay_log
from laminar.cli.train import add_ways, take_train_settings
from laminar.config import Config, ConfigError, flatten_config, load_config
from laminar.config.algorithm_rules import list_user_functions
from laminar.core.state.forks import order_of
from laminar.core.state.state import State
from laminar.core.state.statuses import GroupStatus
from laminar.core.state.steps import StepRecord
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.events.of_coordinator import ForkOrigin
from laminar.launch.train import StartFiles, place_of, run_training
from laminar.names.ids import GroupId, Purpose
from laminar.run.directory import (
    CONFIG_FILE,
    OBJECTS_DIR,
    ORIGIN_DIR,
    ORIGIN_FILE,
    RESUME_FILE,
    run_config,
)
from laminar.run.permissions import check_private
from laminar.run.user_code import take_objects
from laminar.run.user_file import file_digests
from laminar.training.checkpoints.file_digests import check_digests
from laminar.training.trainer_state import CheckpointError, decode, iter_checkpoints


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("fork")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--at-step", type=int, metavar="N", required=True)
    add_ways(parser)
    take_train_settings(parser)
    parser.set_defaults(function=run_fork, resume=None)


def run_fork(arguments: argparse.Namespace) -> int:
    """Train as `laminar train` does, from RUN's state after that step; return the exit code."""
    run, step, overrides = arguments.run, arguments.at_step, arguments.overrides
    before = run_config(run)
    check_private(run, foreign=True)
    directory = _find_checkpoint(run, step)
    config = load_config(
        [], [*_default_overrides(run, step, overrides), *overrides], resolved=run / CONFIG_FILE
    )
    _check_fork(before, config, run, step)
    run_dir = place_of(config, arguments.move_old, dry_run=arguments.dry_run)
    origin = _read_origin(before, run, directory)
    lines = [
        f"starts     from step {step} of {run}, version {origin.version}",
        f"data       continues: {len(origin.unfinished)} unfinished prompts are sampled again",
        *(f"changed    {change}" for change in _list_changes(before, config)),
        *(f"changed    {change}" for change in _changed_files(directory, config)),
    ]

    def copy_files(to: Path) -> None:
        _copy_checkpoint(directory, origin, to)
        take_objects(run.resolve() / OBJECTS_DIR, to)

    files = StartFiles(f"the checkpoint of step {step}", lines, copy_files)
    return run_training(config, run_dir, arguments, files).code


def _find_checkpoint(run: Path, step: int) -> Path:
    there = dict(sorted((resume.step, directory) for directory, resume in iter_checkpoints(run)))
    if step in there:
        return there[step]
    steps = ", ".join(map(str, there))
    which = f"it has those of step {steps}" if steps else "it has none to fork from"
    raise ConfigError(f"{run} has no checkpoint of step {step}: {which}")


def _default_overrides(run: Path, step: int, overrides: list[str]) -> list[str]:
    """Return a name next to RUN, and automatic reward scope if the reward is overridden."""
    origin = run.absolute()
    found = [f"run.output_dir={origin.parent}", f"run.name={origin.name}-step-{step}"]
    if any(setting.startswith("reward.") for setting in overrides):
        found.append("reward.scope=auto")
    return found


def _check_fork(before: Config, config: Config, run: Path, step: int) -> None:
    """Raise ConfigError if the checkpoint cannot be used with this config."""
    if config.model.name != before.model.name or config.is_emulated != before.is_emulated:
        key = "model.name" if config.model.name != before.model.name else "rollout.engine"
        old, new = flatten_config(before)[key], flatten_config(config)[key]
        raise ConfigError(
            f"{key} = {new!r} differs from {old!r} of {run}, and a fork keeps the model; to start "
            "with another model, use laminar train"
        )
    _check_adapters(before, config, run)
    if config.run_dir.absolute() == run.absolute():
        raise ConfigError(
            f"run.name = {config.run.name!r} is the name of the forked run; give another"
        )
    total = config.trainer.total_training_steps
    if 0 < total <= step:
        raise ConfigError(
            f"trainer.total_training_steps = {total} leaves a fork at step {step} nothing to do; "
            "give a larger number"
        )


def _check_adapters(before: Config, config: Config, run: Path) -> None:
    for key in ("lora.rank", "lora.alpha", "lora.target_modules"):
        old, new = flatten_config(before)[key], flatten_config(config)[key]
        if old != new and (before.lora.rank or config.lora.rank):
            raise ConfigError(
                f"{key} = {new!r} differs from {old!r} of {run}, and a fork keeps the adapters: "
                "leave it out, or start with others by laminar train with model.name = "
                f"{run}/export"
            )


def _read_origin(before: Config, run: Path, directory: Path) -> ForkOrigin:
    """Read the checkpoint as an origin; check that it is complete and in the log."""
    try:
        if not before.is_emulated:  # checkpoints of emulated runs have no digests
            check_digests(directory)
        resume = decode((directory / RESUME_FILE).read_bytes())
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"checkpoint {directory} cannot be resumed: {error}; fork at another step"
        ) from error
    return build_origin(run, resume.step, resume.version, resume.digest)


def _list_changes(before: Config, config: Config) -> Iterator[str]:
    old, new = flatten_config(before), flatten_config(config)
    for key, value in new.items():
        if value != old.get(key) and key != "run.name":
            yield f"{key} = {value!r}, was {old.get(key)!r}"


def _changed_files(directory: Path, config: Config) -> Iterator[str]:
    """Yield the user's loss and estimator files that differ from those of the checkpoint."""
    then = decode((directory / RESUME_FILE).read_bytes()).learner.functions
    for setting, digest in file_digests(list_user_functions(config.algorithm)).items():
        if then.get(setting, digest) != digest:
            yield f"{setting}: its file has digest {digest}, was {then[setting]}"


def _copy_checkpoint(directory: Path, origin: ForkOrigin, run_dir: Path) -> None:
    """Copy the checkpoint into the new run directory; raise OSError on failure."""
    target = run_dir / ORIGIN_DIR
    shutil.copytree(directory, target, copy_function=_link_or_copy)
    (target / ORIGIN_FILE).unlink(missing_ok=True)  # present if that run is a fork itself
    (target / ORIGIN_FILE).write_bytes(msgspec.json.encode(origin))


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or no support for links
        shutil.copy2(source, target)


def build_origin(run_dir: Path, step: int, version: int, digest: str) -> ev.ForkOrigin:
    """Build the origin of the fork's log: a checkpoint in RUN's log, and the data up to it.

    It describes the state when the step of the checkpoint was completed: prompts without an end at
    that time start again in the fork, whatever happened to them later.
    """
    reader = _StateReader(step)
    replay_log(run_dir, reader)
    trained = reader.trained
    if trained is None or (trained.version, trained.chain) != (version, digest):
        raise ConfigError(
            f"the log of {run_dir} has no step {step} with these trajectories: the checkpoint is "
            "newer, or of another run; fork at an earlier step"
        )
    return ev.ForkOrigin(
        run=str(run_dir),
        step=step,
        version=version,
        digest=digest,
        data=reader.data,
        num_train=reader.num_train,
        cursor=reader.cursor,
        seed=reader.order[0],
        shuffle=reader.order[1],
        unfinished=tuple(
            ev.UnfinishedPrompt(group=group, row_index=row)
            for group, row in reader.unfinished.items()
        ),
    )


class _StateReader:
    """Replay observer that captures the state when a step was completed and data was loaded."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.data = ""
        self.trained: StepRecord | None = None
        self.num_train = self.cursor = 0
        self.order = (0, False)
        self.unfinished: dict[GroupId, int] = {}

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        if isinstance(stamped.event, ev.DataLoaded):
            self.data = self.data or stamped.event.digest
        known = state.data.num_train >= 0 and bool(state.steps.trained)
        if self.trained is not None or not known or state.steps.completed != self._step:
            return
        self.trained = state.steps.trained[-1]
        self.num_train, self.cursor = state.data.num_train, state.data.cursor
        self.order = order_of(state, state.data.cursor // state.data.num_train)
        self.unfinished = _find_unfinished(state)


def _find_unfinished(state: State) -> dict[GroupId, int]:
    """Return the prompts in progress, and those of an origin not handed out again yet."""
    groups = state.work.groups.values()
    training = [g for g in groups if g.purpose == Purpose.TRAIN and g.status != GroupStatus.ENDING]
    found = {g.id: g.row_index for g in sorted(training, key=lambda g: g.order)}
    return found | state.data.unfinished_prompts
