"""Orders: outstanding commands and timers, with their keys, made and parsed only here.

Reads   nothing
Gives   Orders; CommandKey and TimerName, with a function or constant for each; parse_timer

Both are texts, because the state has them as keys and the log names the timer that fired:
"generate:0.17.3" is the order to generate a trajectory, "resume:0.17.3" the time that lost work
waits for its version, "command:generate:0.17.3" the deadline of the order.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, NewType

import msgspec

from laminar.events.commands import AnyCommand

CommandKey = NewType("CommandKey", str)
TimerName = NewType("TimerName", str)

# --- commands that are outstanding at most once -------------------------------------------------

PUBLISH = CommandKey("publish")
EXPORT = CommandKey("export")
TRAIN = CommandKey("train")
PROPOSE = CommandKey("propose")
LOAD = CommandKey("load")
SAVE = CommandKey("save")
REPEAT = CommandKey("repeat")

# --- commands about one thing -------------------------------------------------------------------


def generate_key(trajectory_id: str) -> CommandKey:
    return CommandKey(f"generate:{trajectory_id}")


def score_key(scored: str) -> CommandKey:
    """Return the key of scoring a trajectory, or a whole group."""
    return CommandKey(f"score:{scored}")


def end_key(command_id: int) -> CommandKey:
    """Return the key of ends; the store answers with the number of the command."""
    return CommandKey(f"end:{command_id}")


def pull_key(replica: str) -> CommandKey:
    return CommandKey(f"pull:{replica}")


def forward_key(relay: str) -> CommandKey:
    return CommandKey(f"forward:{relay}")


def release_key(replica: str) -> CommandKey:
    return CommandKey(f"release:{replica}")


def restart_key(actor: str) -> CommandKey:
    return CommandKey(f"restart:{actor}")


def stop_key(actor: str) -> CommandKey:
    return CommandKey(f"stop:{actor}")


# --- timers -------------------------------------------------------------------------------------


class TimerKind(StrEnum):
    """The kind of a timer."""

    START = "start"  #: all actors and the first weights
    WEIGHTS = "weights"  #: publication of the trainer's latest weights
    BATCH_TIMEOUT = "batch-timeout"  #: the group that the next batch needs most
    REPACK = "repack"  #: the next search for replicas with only stragglers
    RESUME = "resume"  #: a replica with the version of lost work
    PROGRESS = "progress"  #: a replica's progress
    PAUSE = "pause"  #: responses to finish before a pause
    REJOIN = "rejoin"  #: a restarted actor
    RECEIVE = "receive"  #: the newest version at a relay
    COMMAND = "command"  #: the event that ends an outstanding command


class ParsedTimer(NamedTuple):
    """The parts of a timer's name."""

    kind: TimerKind
    subject: str  #: id, actor name or CommandKey; empty for a kind with one timer


def _make_timer_name(kind: TimerKind, subject: str) -> TimerName:
    return TimerName(kind + ":" + subject)


START = TimerName(TimerKind.START)
WEIGHTS = TimerName(TimerKind.WEIGHTS)
BATCH_TIMEOUT = TimerName(TimerKind.BATCH_TIMEOUT)
REPACK = TimerName(TimerKind.REPACK)
PAUSE = TimerName(TimerKind.PAUSE)


def resume_timer(trajectory_id: str) -> TimerName:
    return _make_timer_name(TimerKind.RESUME, trajectory_id)


def progress_timer(replica: str) -> TimerName:
    return _make_timer_name(TimerKind.PROGRESS, replica)


def rejoin_timer(actor: str) -> TimerName:
    return _make_timer_name(TimerKind.REJOIN, actor)


def receive_timer(relay: str) -> TimerName:
    return _make_timer_name(TimerKind.RECEIVE, relay)


def deadline_timer(key: CommandKey) -> TimerName:
    """Return the name of the deadline of an outstanding command."""
    return _make_timer_name(TimerKind.COMMAND, key)


def parse_timer(name: str) -> ParsedTimer:
    """Parse a timer's name; raise ValueError if it is not one."""
    kind, _, subject = name.partition(":")
    return ParsedTimer(TimerKind(kind), subject)


# --- the record -------------------------------------------------------------------------------


class OutstandingCommand(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A command that waits for its ending event."""

    command_id: int
    cause: int
    incarnation: int  #: incarnation of the addressed actor
    command: AnyCommand
    since_ns: int = 0  #: time of the event that caused it


class Orders(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The commands that wait for their ending events, and the timers."""

    #: outstanding commands by key, e.g. "generate:0.17.3", in the order of issue
    commands: dict[CommandKey, OutstandingCommand] = {}
    timers: dict[TimerName, int] = {}  #: due time in ns by name
