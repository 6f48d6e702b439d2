"""Text lines of the log: every record, or the story of one trajectory, group, actor or version.

Reads   the event log of a run directory; for a story with logs, the log lines of its processes
Gives   lines of text, in the order of the log, with the seconds since the run's first event

An event line begins with its number, a decision line with the number of the event that caused it
and an arrow to its receiver, a line of a process's log with the number of its event (if it has one)
and a `|`. Long lists and texts are shortened; the raw dump is complete.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from laminar.analysis.log.display import display_fields
from laminar.analysis.log.event_clock import EventClock
from laminar.analysis.log.process_logs import LogLine, log_lines
from laminar.analysis.log.run_log import parse_command, parse_event, read_records
from laminar.config import ConfigError
from laminar.eventlog.record import DecisionRecord, EventRecord, SegmentHeader
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import COORDINATOR, Command, Event, Stamped
from laminar.events.reasons import PullPurpose

LIST_MAX, TEXT_MAX = 4, 100  #: most items and characters shown
WARNINGS = ("warning", "error", "critical")

#: kind of subject -> the form of its name
FORMS = {
    "version": r"v?(\d+)",
    "trajectory": r"(e?\d+\.\d+(?:-\d+)?\.\d+)",
    "group": r"(e?\d+\.\d+(?:-\d+)?)",
    "actor": r"([a-z]+(?:-\d+(?:\.\d+)?)?)",
}
#: kind of subject -> fields of events and commands that can name it
FIELDS = {
    "version": ("version",),
    "trajectory": ("trajectory", "trajectories"),
    "group": ("group", "groups", "trajectory", "trajectories"),
    "actor": ("to", "actor", "name", "node"),
}


@dataclass(frozen=True)
class Subject:
    """Subject of a story."""

    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Subject:
        """Parse `0.17.3` (trajectory), `0.17` (group), `v12`, `12` (version), `node-0` (actor)."""
        for kind, form in FORMS.items():
            if match := re.fullmatch(form, text):
                return cls(kind, match[1])
        raise ConfigError(
            f"{text!r} is not an id: give a trajectory (0.17.3), a group (0.17), a weight "
            "version (v12) or an actor (rollout-0)"
        )

    def named_by(self, value: Any, field: str = "") -> bool:
        """Return whether a plain value (of an event or command) names the subject."""
        if isinstance(value, dict):
            return any(self.named_by(item, key) for key, item in value.items())
        if isinstance(value, list | tuple):
            return any(self.named_by(item, field) for item in value)
        if field not in FIELDS[self.kind]:
            return False
        inside = self.kind == "group" and str(value).startswith(f"{self.name}.")
        return str(value) == self.name or inside


class _StoryLine(NamedTuple):
    """Line of a story, with its position."""

    unix_ns: int
    seq: int
    process: str  #: sender or receiver
    text: str


def read_story(run_dir: Path, name: str, *, logs: bool = False) -> Iterator[str]:
    """Yield every event and decision that names the subject; raise ConfigError if there is none.

    With `logs`, also the lines that the processes logged about it, and their warnings meanwhile.
    """
    subject, moments = Subject.parse(name), EventClock()
    told = _format_records(run_dir, subject, moments)
    first = next(told, None)
    if first is None:
        raise ConfigError(f"no event or decision in the log of {run_dir} names {name!r}")
    lines: Iterator[_StoryLine] = chain([first], told)
    if logs:
        lines = _merge_logs(run_dir, subject, moments, list(lines))
    return (line.text for line in lines)


def last_lines(run_dir: Path, stamped: Stamped, count: int) -> list[str]:
    """Return the newest lines about an event's subject; the event need not be in the log."""
    fields = ("trajectory_id", "actor", "name")
    named = next((n for f in fields if (n := getattr(stamped.event, f, ""))), stamped.peer)
    subject = None if named == COORDINATOR else Subject.parse(named)
    told = _format_records(run_dir, subject, EventClock(), recent=True)
    return [line.text for line in deque(told, maxlen=count)]


def dump_log(run_dir: Path) -> Iterator[str]:
    """Yield one line per record."""
    return (line.text for line in _format_records(run_dir, None, EventClock()))


def _format_records(
    run_dir: Path, subject: Subject | None, moments: EventClock, *, recent: bool = False
) -> Iterator[_StoryLine]:
    loads = _Loads(subject)
    for record in read_records(run_dir, recent=recent):
        if isinstance(record, EventRecord):
            event = parse_event(record)
            process, seconds = event.peer, moments.locate_event(event).seconds
            is_about = loads.match_event(event) or subject == Subject("actor", process)
            text = describe_message(event.event, None if is_about else subject)
            head = f"{event.seq:>8} {seconds:>10.3f}  {process:<11}"
        elif isinstance(record, DecisionRecord):
            command = parse_command(record)
            process, seconds = command.to, moments.now.seconds
            is_about = loads.match_command(command) or subject == Subject("actor", process)
            text = describe_message(command, None if is_about else subject)
            head = f"{record.cause:>8} {seconds:>10.3f}    -> {process:<11}"
        else:
            process, tag = "", "header" if isinstance(record, SegmentHeader) else "state-hash"
            text = "" if subject else _format_fields(msgspec.structs.asdict(record), None)
            head = f"{'':>8} {'':>10}  {tag:<11}"
        if text:
            yield _StoryLine(moments.now.unix_ns, moments.now.seq, process, f"{head} {text}")


class _Loads:
    """Tracker of in-flight weight loads of the subject trajectory, which do not name it."""

    def __init__(self, subject: Subject | None) -> None:
        self._name = subject.name if subject and subject.kind == "trajectory" else ""
        self._holder = ""  #: replica of its latest placement
        self._loading = False

    def match_command(self, command: Command) -> bool:
        """Return whether this command orders the replica that runs it to load weights."""
        if isinstance(command, cmd.GenerateTrajectory) and command.trajectory_id == self._name:
            self._holder, self._loading = command.to, False
        in_flight = (
            isinstance(command, cmd.PullWeights) and command.purpose == PullPurpose.IN_FLIGHT
        )
        if in_flight and self._holder == command.to:
            self._loading = True
            return True
        return False

    def match_event(self, stamped: Stamped) -> bool:
        """Return whether this event is the outcome of such an order."""
        event = stamped.event
        over = isinstance(event, ev.TrajectoryFinished) and event.trajectory_id == self._name
        gone = isinstance(event, ev.ReplicaReady) and stamped.peer == self._holder
        if over or gone:
            self._holder = ""
        loaded = isinstance(event, ev.WeightsLoaded | ev.WeightsRejected | ev.VersionMissing)
        ends = self._loading and loaded and stamped.peer == self._holder
        if ends:
            self._loading = False
        return ends


# --- lines of the processes' own logs -----------------------------------------------------------


def _merge_logs(
    run_dir: Path, subject: Subject, moments: EventClock, told: list[_StoryLine]
) -> Iterator[_StoryLine]:
    """Merge log lines into the story; a line never precedes its event, whatever its clock says."""
    times = {line.seq: line.unix_ns for line in told}
    orders = {(line.seq, line.process) for line in told}
    processes = {line.process for line in told}
    logged = []
    for line in log_lines(run_dir):
        meanwhile = told[0].unix_ns <= line.unix_ns <= told[-1].unix_ns
        warned = line.level in WARNINGS and meanwhile and line.process in processes
        if warned or _is_about(line, subject, orders):
            when = max(line.unix_ns, times.get(line.event_seq, 0))
            text = _log_line(line, (line.unix_ns - moments.first_ns) / 1e9, subject)
            logged.append(_StoryLine(when, line.event_seq, line.process, text))
    logged.sort(key=lambda line: line.unix_ns)
    return merge(told, logged, key=lambda line: line.unix_ns)


def _is_about(line: LogLine, subject: Subject, orders: set[tuple[int, str]]) -> bool:
    """Return whether a line names the subject, or results from an order in the story."""
    if subject.kind == "actor" and line.process == subject.name:
        return True
    if any(field in line.fields for field in FIELDS[subject.kind]):
        return subject.named_by(line.fields)
    return (line.event_seq, line.process) in orders


def _log_line(line: LogLine, seconds: float, subject: Subject) -> str:
    seq = line.event_seq or ""
    level = "" if line.level == "info" else f"{line.level}: "
    text = f"{level}{line.name} {_format_fields(line.fields, subject)}".rstrip()
    return f"{seq:>8} {seconds:>10.3f}  | {line.process:<11} {text}"


# --- messages on one line -----------------------------------------------------------------------


def describe_message(message: Event | Command, subject: Subject | None = None) -> str:
    """Return `tag field=value ...` on one line; empty if it does not name the given subject."""
    fields = display_fields(message)
    if subject is not None and not subject.named_by(fields):
        return ""
    tag = fields.pop("type")
    fields.pop("to", None)
    return f"{tag} {_format_fields(fields, subject)}".rstrip()


def _format_fields(fields: dict[str, Any], subject: Subject | None) -> str:
    return " ".join(f"{key}={_format_value(value, key, subject)}" for key, value in fields.items())


def _format_value(value: Any, field: str, subject: Subject | None) -> str:
    """Format a value; shorten lists to the items naming the subject, else to their first items."""
    if isinstance(value, str):
        text = value if len(value) <= TEXT_MAX else value[: TEXT_MAX - 3] + "..."
        return text if re.fullmatch(r"[^\s=\[\](){}\"]+", text) else repr(text)
    if isinstance(value, dict):
        if len(value) > TEXT_MAX // 5:
            return f"{{{len(value)} figures}}"
        return f"({_format_fields(value, subject)})"
    if isinstance(value, list | tuple):
        return _format_list(list(value), field, subject)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _format_list(items: list[Any], field: str, subject: Subject | None) -> str:
    named = [i for i in items if subject is not None and subject.named_by(i, field)]
    chosen = (named or items)[:LIST_MAX]
    more = len(items) - len(chosen)
    parts = [_format_value(item, field, subject) for item in chosen] + (
        [f"+{more}"] if more else []
    )
    return f"[{', '.join(parts)}]"
