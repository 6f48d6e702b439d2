"""The log as lines for people: every record, or the story of one trajectory, group, actor, version.

Reads   the event log of a run directory
Gives   lines of text, in the order of the log, with the seconds since the run's first event

An event line begins with its number, a decision line with the number of the event that caused it
and an arrow to its receiver. Long lists and texts are shortened; the raw dump has everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from laminar.analysis.history import WallClock, records, typed_command, typed_event
from laminar.config import ConfigError
from laminar.eventlog.record import DecisionRecord, EventRecord, Header, Record
from laminar.events.base import Command, Event, Stamped

LIST_MAX, TEXT_MAX = 4, 100  #: items and characters that are shown

#: kind of subject -> the form of its name
FORMS = {
    "version": r"v?(\d+)",
    "trajectory": r"(e?\d+\.\d+(?:-\d+)?\.\d+)",
    "group": r"(e?\d+\.\d+(?:-\d+)?)",
    "actor": r"([a-z]+(?:-\d+)?)",
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
    """What a story is about."""

    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> Subject:
        """`0.17.3` a trajectory, `0.17` a group, `v12` or `12` a version, `rollout-0` an actor."""
        for kind, form in FORMS.items():
            if match := re.fullmatch(form, text):
                return cls(kind, match[1])
        raise ConfigError(
            f"{text!r} names nothing: give a trajectory (0.17.3), a group (0.17), "
            "a weight version (v12) or an actor (rollout-0)"
        )

    def named_by(self, value: Any, field: str = "") -> bool:
        """Whether a plain value (of an event or command) names the subject."""
        if isinstance(value, dict):
            return any(self.named_by(item, key) for key, item in value.items())
        if isinstance(value, list | tuple):
            return any(self.named_by(item, field) for item in value)
        if field not in FIELDS[self.kind]:
            return False
        return str(value) == self.name or str(value).startswith(f"{self.name}.")


def story(run_dir: Path, name: str) -> Iterator[str]:
    """Every event and decision that names the subject; ConfigError when there is none."""
    subject = Subject.parse(name)
    found = False
    for line in _lines(run_dir, subject):
        found = True
        yield line
    if not found:
        raise ConfigError(f"no event and no decision in the log of {run_dir} names {name!r}")


def dump(run_dir: Path) -> Iterator[str]:
    """One line per record."""
    return _lines(run_dir, None)


def _lines(run_dir: Path, subject: Subject | None) -> Iterator[str]:
    clock, start = WallClock(), None
    seconds = 0.0
    for record in records(run_dir):
        if isinstance(record, EventRecord):
            event = typed_event(record)
            now = clock.unix_ns(event)
            start = now if start is None else start
            seconds = (now - start) / 1e9
            line = _event_line(event, seconds, subject)
        elif isinstance(record, DecisionRecord):
            line = _decision_line(record, seconds, subject)
        else:
            line = "" if subject else _other_line(record)
        if line:
            yield line


def _event_line(stamped: Stamped, seconds: float, subject: Subject | None) -> str:
    """Empty when the event does not name the subject."""
    sender = subject is not None and subject.kind == "actor" and subject.name == stamped.peer
    text = describe(stamped.event, None if sender else subject)
    return f"{stamped.seq:>8} {seconds:>10.3f}  {stamped.peer:<11} {text}" if text else ""


def _decision_line(record: DecisionRecord, seconds: float, subject: Subject | None) -> str:
    command = typed_command(record)
    receiver = subject is not None and subject.kind == "actor" and subject.name == command.to
    text = describe(command, None if receiver else subject)
    return f"{record.cause:>8} {seconds:>10.3f}    -> {command.to:<11} {text}" if text else ""


def _other_line(record: Record) -> str:
    tag = "header" if isinstance(record, Header) else "state-hash"
    return f"{'':>8} {'':>10}  {tag:<11} {_fields(msgspec.structs.asdict(record), None)}"


def describe(message: Event | Command, subject: Subject | None = None) -> str:
    """`tag field=value ...` on one line; empty when it does not name the given subject."""
    fields: dict[str, Any] = msgspec.to_builtins(message)
    if subject is not None and not subject.named_by(fields):
        return ""
    tag = fields.pop("type")
    fields.pop("to", None)
    return f"{tag} {_fields(fields, subject)}".rstrip()


def _fields(fields: dict[str, Any], subject: Subject | None) -> str:
    return " ".join(f"{key}={_shown(value, key, subject)}" for key, value in fields.items())


def _shown(value: Any, field: str, subject: Subject | None) -> str:
    """One value; of a list only what names the subject, of a long one only its beginning."""
    if isinstance(value, str):
        text = value if len(value) <= TEXT_MAX else value[: TEXT_MAX - 3] + "..."
        return text if re.fullmatch(r"[^\s=\[\](){}\"]+", text) else repr(text)
    if isinstance(value, dict):
        if len(value) > TEXT_MAX // 5:
            return f"{{{len(value)} figures}}"
        return f"({_fields(value, subject)})"
    if isinstance(value, list | tuple):
        return _shown_list(list(value), field, subject)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _shown_list(items: list[Any], field: str, subject: Subject | None) -> str:
    named = [i for i in items if subject is not None and subject.named_by(i, field)]
    chosen = (named or items)[:LIST_MAX]
    more = len(items) - len(chosen)
    parts = [_shown(item, field, subject) for item in chosen] + ([f"+{more}"] if more else [])
    return f"[{', '.join(parts)}]"
