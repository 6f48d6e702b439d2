"""laminar train --resume RUN: check that the run can be resumed, and with which settings.

Reads   the event log, the configuration and the locks of a run
Gives   resumed_config; claim_run_directory: this process's share of the run
Raises  ConfigError with one sentence
Writes  (claim_run_directory only) the configuration, a secret if there is none, the directory of
        the new logs; removes the status of processes that are gone

Nothing is written before all checks have passed. The log is authoritative: it has the run's
progress, its end, and the checkpoints that it confirms.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from laminar.config import Config, ConfigError, flatten_config, load_config
from laminar.config.algorithm_rules import list_user_functions
from laminar.coordinator.log_truncation import check_log
from laminar.coordinator.system import RealDisk
from laminar.coordinator.takeover import check_resumable
from laminar.core.state.state import State
from laminar.core.steps.step_replay import find_other_function_reason
from laminar.eventlog.reader import read_log
from laminar.eventlog.record import EventRecord, LogRefused
from laminar.eventlog.restore import restore_log
from laminar.events import events as ev
from laminar.events.codec import decode_event
from laminar.observe.logs import create_attempt
from laminar.run.directory import (
    CHECKPOINTS_DIR,
    CONFIG_FILE,
    COORDINATOR_FILE,
    EVENTS_DIR,
    FIRST_LOOK_FILE,
    ORIGIN_DIR,
    RESUME_FILE,
    SECRET_FILE,
    STATUS_FILE,
    run_config,
)
from laminar.run.lock import RunLock, holders, in_use
from laminar.run.permissions import check_private
from laminar.run.secret import make_missing_secret, read_secret
from laminar.run.user_code import write_config
from laminar.run.user_file import file_digests, run_file_digests
from laminar.training.trainer_state import CheckpointError, decode

CHANGEABLE = (
    "coordinator.host",
    "run.nodes",
    "rollout.replicas",
    "rollout.replicas_on_trainer_node",
    "trainer.total_training_steps",
    "trainer.test_freq",
    "trainer.save_freq",
    "trainer.save_minutes",
    "store.payload_gb",
    "reward.trial",
)
"""Settings that may change for the rest of a run, in addition to all of [slurm]."""
CHOSEN = ("rollout.replicas", "rollout.max_num_seqs", "repack.policy", "trainer.shard")
"""Settings whose defaults depend on the machine or on others: those of the start are kept."""
HEADER_MAX = 100 << 20  #: largest header of a safetensors file in bytes, as limited by its readers
_PLACE = ("run.name", "run.output_dir")
_RESTART_HINT = "so there is nothing to resume: start it again, with --move-old or another run.name"


def resumed_config(run_dir: Path, files: Sequence[str | Path], overrides: Sequence[str]) -> Config:
    """Return the settings of the resumed run: its own, with the permitted changes."""
    own = run_config(run_dir)
    check_private(run_dir)
    if holders(run_dir):
        raise ConfigError(in_use(run_dir))
    if (run_dir / SECRET_FILE).exists():
        read_secret(run_dir)
    state = state_of(run_dir)
    check_log(run_dir, state)
    check_resumable(run_dir, state)
    place = _place_of(run_dir, own)
    if files:  # compared once "auto" settings are resolved
        chosen = {key: flatten_config(own)[key] for key in CHOSEN}
        config = load_config(files, [*overrides, *place], defaults=chosen)
    else:
        config = load_config([], [*overrides, *place], resolved=run_dir / CONFIG_FILE)
        check_unchanged(own, config)
    steps = config.trainer.total_training_steps
    if steps and steps < state.steps.completed:
        raise ConfigError(
            f"trainer.total_training_steps = {steps}, but {run_dir} has completed "
            f"{state.steps.completed} steps already: give as many at least"
        )
    check_checkpoints(run_dir, state)
    now = file_digests(list_user_functions(own.algorithm))
    reason = find_other_function_reason(state.steps.function_digests, now)
    if reason and state.versions.newest >= 0:
        raise ConfigError(f"{run_dir} cannot be resumed: {reason}")
    return config


def _place_of(run_dir: Path, own: Config) -> list[str]:
    """Return overrides for the run's present place, which may differ from the original one."""
    there, known = run_dir.resolve(), own.run
    if own.run_dir.resolve() != there:
        known = msgspec.structs.replace(known, name=there.name, output_dir=str(there.parent))
    return [f"{key}={getattr(known, key.partition('.')[2])}" for key in _PLACE]


def check_checkpoints(run_dir: Path, state: State) -> None:
    """Raise ConfigError if a checkpoint is damaged or another run's, or if there is none."""
    chains = {trained.step_index + 1: trained.chain for trained in state.steps.trained}
    found = []
    there = set((run_dir / CHECKPOINTS_DIR).glob("step_*"))
    if state.data.origin is not None and (run_dir / ORIGIN_DIR).is_dir():
        there.add(run_dir / ORIGIN_DIR)
    for directory in sorted(there):
        try:
            resume = decode((directory / RESUME_FILE).read_bytes())
            sizes = (safetensors_size(path) for path in directory.glob("*.safetensors"))
            short = [path for path, size in sizes if path.stat().st_size != size]
        except (OSError, CheckpointError, ValueError) as error:
            raise ConfigError(_format_unusable(directory, f"is damaged ({error})")) from None
        if short:
            raise ConfigError(
                _format_unusable(directory, f"is damaged ({short[0].name} is cut off)")
            )
        if chains.get(resume.step, resume.digest) != resume.digest:
            what = "belongs to another run: the log has other trajectories in its steps"
            raise ConfigError(_format_unusable(directory, what))
        found.append(resume.step)
    first = state.steps.trained[0].step_index if state.steps.trained else 0
    if first and not any(step in chains for step in found):
        origin = f", nor {run_dir / ORIGIN_DIR}" if state.data.origin is not None else ""
        raise ConfigError(
            f"no checkpoint of step {first + 1} or later is in "
            f"{run_dir / CHECKPOINTS_DIR}{origin}, and the run cannot resume from earlier ones: "
            "restore those that were there"
        )


def _format_unusable(directory: Path, why: str) -> str:
    return f"checkpoint {directory} {why}; restore it, or move it away"


def safetensors_size(path: Path) -> tuple[Path, int]:
    """Return the file's required size by its header; raise ValueError if that is unreadable."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8))
        header = json.loads(file.read(min(length, HEADER_MAX)))
    ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
    return path, 8 + length + max(ends, default=0)


def find_data_digest(run_dir: Path) -> str:
    """Return the digest of the data with which the run began; empty if the log has none."""
    for _, record in read_log(RealDisk(run_dir / EVENTS_DIR)):
        event = decode_event(record.event) if isinstance(record, EventRecord) else None
        if isinstance(event, ev.DataLoaded):
            return event.digest
    return ""


def check_data(run_dir: Path, known: str, digest: str) -> None:
    """Raise ConfigError for data other than those with which the run began."""
    if known and digest and known != digest:
        raise ConfigError(
            f"the data have digest {digest}, but the run {run_dir} began with data of "
            f"digest {known}: put back the files that data.* names"
        )


def find_changed_files(run_dir: Path, config: Config) -> dict[str, str]:
    """Return a warning, by kind, for each file of the user's that has changed since the start."""
    for _, record in read_log(RealDisk(run_dir / EVENTS_DIR)):
        event = decode_event(record.event) if isinstance(record, EventRecord) else None
        if isinstance(event, ev.CoordinatorStarted):
            then, now = event.files, run_file_digests(config)
            changed = [path for path in then.keys() & now.keys() if then[path] != now[path]]
            return {
                f"file-changed/{now[path][:8]}": f"{path} has digest {now[path]}, but had "
                f"{then[path]} when the run began, so earlier steps used another reward, "
                "environment or strategy: restore the file, unless the change is intended"
                for path in sorted(changed)
            }
    return {}


def state_of(run_dir: Path) -> State:
    """Return the state restored from the log; raise ConfigError if it is missing or damaged."""
    events = run_dir / EVENTS_DIR
    if not events.is_dir():
        raise ConfigError(f"{run_dir} has no event log ({events}), {_RESTART_HINT}")
    try:
        restored = restore_log(RealDisk(events))
    except LogRefused as error:
        raise ConfigError(f"{run_dir} cannot be resumed: {error}") from None
    machine = restored.replay.machine
    if restored.replay.difference is not None:
        raise ConfigError(f"{run_dir} cannot be resumed: {restored.replay.difference}")
    if not machine.started:
        raise ConfigError(f"{run_dir} has an empty event log, {_RESTART_HINT}")
    return machine.state


def check_unchanged(own: Config, now: Config) -> None:
    """Raise ConfigError for the first setting that differs and may not change."""
    before, after = flatten_config(own), flatten_config(now)
    for key in sorted(before.keys() | after.keys()):
        may = key in (*CHANGEABLE, *_PLACE) or key.startswith("slurm.")
        if before.get(key) != after.get(key) and not may:
            raise ConfigError(
                f"{key} = {after.get(key)!r}, but the run began with {before.get(key)!r}: when a "
                f"run is resumed, only {', '.join(CHANGEABLE)} and slurm may be changed"
            )
    if not now.trainer.save_freq:
        raise ConfigError(
            "trainer.save_freq = 0 cannot be set when a run is resumed: give a number above 0"
        )


def claim_run_directory(config: Config, run_dir: Path, warnings: dict[str, str]) -> RunLock:
    """Claim the idle directory for this process, and write the present settings."""
    lock = RunLock.join_idle_run(run_dir, "train")
    try:
        make_missing_secret(run_dir)
        write_config(config, run_dir)
        (run_dir / FIRST_LOOK_FILE).write_text(json.dumps(warnings))
        for name in (COORDINATOR_FILE, STATUS_FILE):  # about processes that are gone
            (run_dir / name).unlink(missing_ok=True)
        create_attempt(run_dir)
    except OSError as error:
        lock.close()
        raise ConfigError(f"run directory {run_dir} cannot be written: {error}") from None
    return lock
