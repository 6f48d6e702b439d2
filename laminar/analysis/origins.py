"""What a fork needs to know of the run that it begins in: a checkpoint, and the data up to there.

Reads   RUN/events/
Gives   origin_of: what the fork's log will begin with
Raises  ConfigError for a checkpoint that the log does not have

What counts is the state when the step of the checkpoint was completed: a prompt that had no end
then begins anew in the fork, whatever has become of it since.
"""

from __future__ import annotations

from pathlib import Path

from laminar.analysis.history import replay_log
from laminar.config import ConfigError
from laminar.core.forks import order_of
from laminar.core.state import State, Trained
from laminar.core.statuses import GroupStatus
from laminar.events import events as ev
from laminar.events.base import Command, Stamped
from laminar.names.ids import GroupId, Purpose


def origin_of(run_dir: Path, step: int, version: int, digest: str) -> ev.Origin:
    """The log has this checkpoint, and says which prompts had ended by then."""
    reader = _Reader(step)
    replay_log(run_dir, reader)
    trained = reader.trained
    if trained is None or (trained.version, trained.chain) != (version, digest):
        raise ConfigError(
            f"the log of {run_dir} has no step {step} of these trajectories: the checkpoint "
            "is ahead of it, or of another run; fork at an earlier step"
        )
    return ev.Origin(
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
            ev.Unfinished(group=group, row_index=row) for group, row in reader.unfinished.items()
        ),
    )


class _Reader:
    """The state when this step was completed, and the data was there."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.data = ""
        self.trained: Trained | None = None
        self.num_train = self.cursor = 0
        self.order = (0, False)
        self.unfinished: dict[GroupId, int] = {}

    def __call__(self, stamped: Stamped, commands: list[Command], state: State) -> None:
        if isinstance(stamped.event, ev.DataLoaded):
            self.data = self.data or stamped.event.digest
        known = state.num_train >= 0 and bool(state.trained)
        if self.trained is not None or not known or state.completed != self._step:
            return
        self.trained = state.trained[-1]
        self.num_train, self.cursor = state.num_train, state.cursor
        self.order = order_of(state, state.cursor // state.num_train)
        self.unfinished = _unfinished(state)


def _unfinished(state: State) -> dict[GroupId, int]:
    """Handed out without an end, and those of an origin that were not handed out again."""
    groups = state.groups.values()
    training = [g for g in groups if g.purpose == Purpose.TRAIN and g.status != GroupStatus.ENDING]
    found = {g.id: g.row_index for g in sorted(training, key=lambda g: g.order)}
    return found | state.again
