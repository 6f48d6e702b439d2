"""laminar train --resume RUN: whether that run can be taken up again, and with which settings.

Reads   the event log, the configuration and the locks of a run
Gives   resumed_config, or ConfigError with one sentence; take_up: this process's share of the run
Writes  (take_up only) the configuration, the directory of the new logs

Nothing is written before all has been looked at. What decides is the log: it says how far the run
was, whether it has ended, and which checkpoints it confirms.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from laminar.cli.arguments import run_config
from laminar.config import Config, ConfigError, dumps, load
from laminar.coordinator.system import RealDisk
from laminar.coordinator.taking_up import check_resumable
from laminar.core.state import State
from laminar.eventlog.record import LogCorrupt
from laminar.eventlog.restore import restore
from laminar.observe.logs import new_attempt
from laminar.run_lock import RunLock, holders, in_use
from laminar.rundir import CONFIG_FILE, EVENTS_DIR, FIRST_LOOK_FILE

CHANGEABLE = {
    "rollout.replicas": "replicas",
    "trainer.total_training_steps": "steps",
    "trainer.test_freq": "the frequency of evaluations",
    "trainer.save_freq": "the frequency of checkpoints",
}
"""Settings that may be others for the rest of a run."""
_PLACE = ("run.name", "run.output_dir")
"""The run is where RUN says, whatever it was called when it began."""


def resumed_config(run_dir: Path, files: Sequence[str], overrides: Sequence[str]) -> Config:
    """The settings with which the run goes on: its own, with what may be changed."""
    own = run_config(run_dir)
    if holders(run_dir):
        raise ConfigError(in_use(run_dir))
    check_resumable(run_dir, state_of(run_dir))
    given = [*files] if files else [run_dir / CONFIG_FILE]
    place = [f"{key}={getattr(own.run, key.partition('.')[2])}" for key in _PLACE]
    return load(given, [*overrides, *place])


def state_of(run_dir: Path) -> State:
    """What the log of a run leads to; ConfigError where there is none, or it is damaged."""
    events = run_dir / EVENTS_DIR
    if not events.is_dir():
        raise ConfigError(f"{run_dir} has no event log ({events}), so it cannot be resumed")
    try:
        restored = restore(RealDisk(events))
    except LogCorrupt as error:
        raise ConfigError(f"{run_dir} cannot be resumed: {error}") from None
    machine = restored.replay.machine
    if restored.replay.difference is not None:
        raise ConfigError(f"{run_dir} cannot be resumed: {restored.replay.difference}")
    if not machine.started:
        raise ConfigError(f"{run_dir} has an empty event log: nothing of it can be resumed")
    return machine.state


def check_unchanged(own: Config, now: Config) -> None:
    """ConfigError for the first setting that is not what the run began with and may not change."""
    before, after = _flat(msgspec.to_builtins(own)), _flat(msgspec.to_builtins(now))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key) and key not in (*CHANGEABLE, *_PLACE):
            raise ConfigError(
                f"{key} = {after.get(key)!r}, but the run began with {before.get(key)!r}: when a "
                f"run is resumed, only {', '.join(CHANGEABLE)} may be changed"
            )
    if not now.trainer.save_freq:
        raise ConfigError(
            "trainer.save_freq = 0 cannot be set when a run is resumed: give a number above 0"
        )


def _flat(tree: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {key: tree}
    parts = [_flat(value, f"{key}.{name}" if key else name) for name, value in tree.items()]
    return {name: value for part in parts for name, value in part.items()}


def take_up(config: Config, run_dir: Path, warnings: dict[str, str]) -> RunLock:
    """Our share of the directory, which no other process has; the settings as they are now."""
    lock = RunLock.alone(run_dir, "train")
    try:
        written = run_dir / f"{CONFIG_FILE}.new"
        written.write_text(dumps(config))
        written.replace(run_dir / CONFIG_FILE)
        (run_dir / FIRST_LOOK_FILE).write_text(json.dumps(warnings))
        new_attempt(run_dir)
    except OSError as error:
        lock.close()
        raise ConfigError(f"run directory {run_dir} cannot be written: {error}") from None
    return lock
