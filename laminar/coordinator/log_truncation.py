"""Detection of a log that is behind its processes' data, as on a disk that lost its end.

Reads   the state at the end of the log; store.sqlite, trainer_book.jsonl and checkpoints/ of the
        run directory
Gives   check_log: raises ConfigError with the data ahead of the log, and the fix

An order is in the log, synced, before it is sent. So whatever has crashed, the work of a process
may be unreported, but it was ordered: a stored trajectory was issued under that placement, an ended
one was to end, a trained step was chosen under that version. Otherwise the log has lost its end,
and a run that continues from it would issue the same names and numbers a second time.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from laminar.analysis.audit.trainer_book import read_book
from laminar.config import ConfigError
from laminar.core.state.state import State
from laminar.core.state.statuses import TrajectoryStatus
from laminar.names.ids import GroupId, TrajectoryId
from laminar.run.directory import (
    CHECKPOINTS_DIR,
    EVENTS_DIR,
    RESUME_FILE,
    STORE_FILE,
    TRAINER_BOOK_FILE,
)
from laminar.storage import books
from laminar.training.trainer_state import CheckpointError, decode

_EVAL_GROUP = re.compile(r"e(\d+)\.(\d+)(?:-(\d+))?")


def check_log(run_dir: Path, state: State) -> None:
    """Raise ConfigError if the store, the trainer or a checkpoint has unordered data."""
    ahead = [
        *_find_ahead_in_store(run_dir, state),
        *_find_ahead_in_book(run_dir, state),
        *_find_ahead_checkpoints(run_dir, state),
    ]
    if not ahead:
        return
    events = run_dir / EVENTS_DIR
    raise ConfigError(
        f"the event log {events} has lost its end: it has {state.steps.completed} completed steps, "
        f"but {'; '.join(ahead)}; restore the newest copy of {events}, or start another run with "
        f"model.name={_newest_model(run_dir)} to continue from the trained weights"
    )


def _newest_model(run_dir: Path) -> Path:
    """Return the newest readable checkpoint, which another run can begin with."""
    steps = {resume_step: path for path, resume_step, _ in _iter_checkpoints(run_dir)}
    return steps[max(steps)] if steps else run_dir / CHECKPOINTS_DIR / "step_N"


def _find_ahead_in_store(run_dir: Path, state: State) -> Iterator[str]:
    """Yield what the store is ahead by; an unreadable store reports itself when it starts."""
    unknown, moved, ended = [], [], []
    try:
        with books.open_tables(run_dir / STORE_FILE) as tables:
            for name, placement, end in tables.iter_placements():
                trajectory = state.work.trajectories.get(TrajectoryId(name))
                if trajectory is None:
                    if not _was_issued(state, name):
                        unknown.append(name)
                elif placement > trajectory.placement:
                    moved.append(name)
                elif end is not None and trajectory.status != TrajectoryStatus.ENDING:
                    ended.append(name)
    except (ConfigError, sqlite3.Error):
        return
    for names, what in (
        (unknown, "that the log never began"),
        (moved, "under a later placement than the log gave"),
        (ended, "with an end that the log did not decide"),
    ):
        if names:
            count = f"{len(names)} {'trajectory' if len(names) == 1 else 'trajectories'}"
            yield f"{STORE_FILE} has {count} {what} ({names[0]})"


def _was_issued(state: State, name: str) -> bool:
    """Return whether the log has issued this name to a trajectory that has ended since."""
    data = state.data
    group = GroupId(name.rpartition(".")[0])
    held_out = _EVAL_GROUP.fullmatch(group)
    if held_out is None:
        pass_index, _, position = group.partition(".")
        number = int(pass_index) * data.num_train + int(position)
        return data.num_train > 0 and number < data.cursor and group not in data.unfinished_prompts
    index, place, attempt = int(held_out[1]), int(held_out[2]), int(held_out[3] or 1)
    running = state.evaluations.running
    if running is not None and running.index == index:
        return attempt <= running.attempts.get(place, 0)
    return index < state.evaluations.next_index


def _find_ahead_in_book(run_dir: Path, state: State) -> Iterator[str]:
    for line in read_book(run_dir)[0]:
        if line.step >= state.steps.chosen or line.version >= state.versions.next:
            yield (
                f"{TRAINER_BOOK_FILE} has step {line.step + 1}, of version {line.version}, which "
                "the log never ordered"
            )
            return


def _find_ahead_checkpoints(run_dir: Path, state: State) -> Iterator[str]:
    for path, step, version in _iter_checkpoints(run_dir):
        if step > state.steps.chosen or version >= state.versions.next:
            yield (
                f"{path.relative_to(run_dir)} was made by step {step}, of version {version}, "
                "which the log never ordered"
            )
            return


def _iter_checkpoints(run_dir: Path) -> Iterator[tuple[Path, int, int]]:
    """Yield (directory, step, version) of readable checkpoints, by name."""
    for path in sorted((run_dir / CHECKPOINTS_DIR).glob(f"step_*/{RESUME_FILE}")):
        try:
            resume = decode(path.read_bytes())
        except (OSError, CheckpointError):
            continue  # damage is handled elsewhere
        yield path.parent, resume.step, resume.version
