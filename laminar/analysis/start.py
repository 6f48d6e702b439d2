"""What the time from the command to the first step went into.

Reads   the event log, from the command on
Gives   start_parts: named parts in the order in which they end, with their seconds
"""

from __future__ import annotations

from pathlib import Path

from laminar.analysis.history import WallClock, records, typed_event
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev

_PARTS: dict[type, str] = {
    ev.CoordinatorStarted: "checks",
    ev.ActorJoined: "processes",
    ev.TrainerReady: "data and models",
    ev.ReplicaReady: "data and models",
    ev.DataLoaded: "data and models",
    ev.WeightsLoaded: "weights",
    ev.StepCompleted: "answers and training",
}
"""Each part ends with the last of these events before the next part begins."""


def start_parts(run_dir: Path, begun_ns: int) -> list[tuple[str, float]]:
    """Empty as long as no step is completed. `begun_ns`: of the command, unix time; what a resumed
    run has in its log from before that does not count."""
    ends: dict[str, int] = {}
    clock = WallClock()
    for record in records(run_dir):
        if not isinstance(record, EventRecord):
            continue
        stamped = typed_event(record)
        at_ns, part = clock.unix_ns(stamped), _PARTS.get(type(stamped.event))
        if at_ns < begun_ns:
            continue
        if part is not None:
            ends[part] = at_ns
        if isinstance(stamped.event, ev.StepCompleted):
            return _lengths(ends, begun_ns)
    return []


def _lengths(ends: dict[str, int], begun_ns: int) -> list[tuple[str, float]]:
    """In the order of the parts; what had ended before the part before it took no time."""
    lengths = []
    for name in dict.fromkeys(_PARTS.values()):
        end_ns = max(ends.get(name, begun_ns), begun_ns)
        lengths.append((name, (end_ns - begun_ns) / 1e9))
        begun_ns = end_ns
    return lengths
