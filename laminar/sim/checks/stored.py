"""What is reported to the coordinator is in the store by then, and stays there.

Reads   events as they are handled, the store's rows
Raises  Violation
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.core.scores import bits_of
from laminar.events import events as ev
from laminar.events.base import Event
from laminar.sim.runtime.violation import Violation
from laminar.storage import rules
from laminar.storage.rules import Row


def reported_is_stored(event: Event, rows: Mapping[str, Row]) -> None:
    """A response that is reported is whole there, a reward is that one, an end is final."""
    if isinstance(event, ev.TrajectoryFinished):
        row = rows.get(event.trajectory_id)
        if row is None or row.status == "open" or row.num_tokens != event.num_tokens:
            _differs(event, event.trajectory_id, row)
    elif isinstance(event, ev.TrajectoryRewarded):
        row = rows.get(event.trajectory_id)
        if row is None or row.reward_bits is None or row.reward_reason != event.reason:
            return _differs(event, event.trajectory_id, row)
        if bits_of(rules.score_of(row.reward_bits) or 0.0) != event.score_bits:
            _differs(event, event.trajectory_id, row)
    elif isinstance(event, ev.TrajectoriesEnded):
        for ended in event.ended:
            row = rows.get(ended.trajectory_id)
            if row is None or row.end is None or row.num_tokens != ended.num_tokens:
                _differs(event, ended.trajectory_id, row)


def _differs(event: Event, trajectory_id: str, row: Row | None) -> None:
    raise Violation("reported_is_stored", f"{event}, but the store has {row}", trajectory_id)
