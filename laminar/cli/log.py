"""laminar log: replay, dump, tail, stats and story of a run's event log.

Exit codes: 0 done, 1 a replay differs from the log, 2 what was named cannot be read.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from laminar.analysis.history import (
    WallClock,
    log_size,
    raw_records,
    records,
    replay_log,
    typed_command,
    typed_event,
)
from laminar.analysis.story import dump, story
from laminar.eventlog.record import DecisionRecord, EventRecord, Header
from laminar.eventlog.replay import Difference


def add_parser(subparsers: Any) -> None:
    log = subparsers.add_parser("log", help="replay and read the event log of a run")
    commands = log.add_subparsers(required=True, metavar="COMMAND")

    replay = _command(commands, "replay", "decide everything again and compare", run_replay)
    replay.add_argument("run", type=Path, metavar="RUN", help="run directory")
    replay.add_argument("--until", type=_positive, metavar="SEQ", help="stop after this event")
    replay.add_argument("--state", action="store_true", help="print the state at the end as JSON")
    replay.add_argument("--diff", action="store_true", help="show only what differs")

    dumped = _command(commands, "dump", "one line per record", run_dump)
    dumped.add_argument("run", type=Path, metavar="RUN", help="run directory")
    dumped.add_argument("--raw", action="store_true", help="as JSON, of any schema, all of it")

    tail = _command(commands, "tail", "the last records", run_tail)
    tail.add_argument("run", type=Path, metavar="RUN", help="run directory")
    tail.add_argument("-n", type=_positive, default=20, metavar="N", help="how many (20)")

    stats = _command(commands, "stats", "counts by type, bytes, time span", run_stats)
    stats.add_argument("run", type=Path, metavar="RUN", help="run directory")

    told = _command(commands, "story", "everything about one thing, in order", run_story)
    told.add_argument("id", metavar="ID", help="trajectory 0.17.3, group 0.17, version v12, actor")
    told.add_argument("run", type=Path, metavar="RUN", help="run directory")


def _command(commands: Any, name: str, text: str, function: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(function=function)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


def run_replay(arguments: argparse.Namespace) -> int:
    """Prints what was compared; 1 at the first difference, with both sides."""
    found = replay_log(arguments.run, until=arguments.until, must_be_identical=False)
    lines = [f"{found.events} events, {found.decisions} decisions, {found.hashes} state hashes"]
    if found.difference is None:
        lines.append("identical")
    else:
        shown = _field_diff(found.difference) if arguments.diff else str(found.difference)
        lines.append(f"DIFFERENT: {shown}")
    if arguments.state and found.machine.started:
        state = msgspec.json.encode(found.machine.state)
        lines.append(msgspec.json.format(state).decode())
    _print(lines)
    return 1 if found.difference is not None else 0


def _field_diff(difference: Difference) -> str:
    """The parts of both sides that are not the same: `-` logged, `+` replayed."""
    position = difference.position
    logged, replayed = difference.logged.split(", "), difference.replayed.split(", ")
    parts = [line for line in difflib.ndiff(logged, replayed) if line[0] in "+-"]
    where = f"segment {position.segment}, offset {position.offset}, event {difference.seq}"
    return "\n  ".join([f"{where} (- logged, + replayed):", *parts])


def run_dump(arguments: argparse.Namespace) -> int:
    _print(_raw_lines(arguments.run) if arguments.raw else dump(arguments.run))
    return 0


def _raw_lines(run: Path) -> Iterator[str]:
    for segment, offset, body in raw_records(run):
        line = {"segment": segment, "offset": offset, **body}
        yield json.dumps(line, default=repr)


def run_tail(arguments: argparse.Namespace) -> int:
    _print(deque(dump(arguments.run), maxlen=arguments.n))
    return 0


def run_story(arguments: argparse.Namespace) -> int:
    _print(story(arguments.run, arguments.id))
    return 0


def run_stats(arguments: argparse.Namespace) -> int:
    events, decisions = Counter[str](), Counter[str]()
    clock, times = WallClock(), []
    segments = set[int]()
    for record in records(arguments.run):
        if isinstance(record, Header):
            segments.add(record.segment)
        elif isinstance(record, EventRecord):
            event = typed_event(record)
            events[_tag(event.event)] += 1
            times.append(clock.unix_ns(event))
        elif isinstance(record, DecisionRecord):
            decisions[_tag(typed_command(record))] += 1
    size, tail = log_size(arguments.run)
    seconds = (times[-1] - times[0]) / 1e9 if times else 0.0
    _print(
        [
            f"{size} bytes in {len(segments)} segments, torn tail {tail.torn_bytes} bytes, "
            f"{seconds:.3f} s from the first event to the last",
            *_counts("events", events),
            *_counts("decisions", decisions),
        ]
    )
    return 0


def _tag(message: msgspec.Struct) -> str:
    return str(message.__struct_config__.tag)


def _counts(title: str, counts: Counter[str]) -> list[str]:
    lines = [f"{count:>9}  {tag}" for tag, count in counts.most_common()]
    return [f"{counts.total():>9}  {title}", *(f"  {line}" for line in lines)]


def _print(lines: Iterable[str]) -> None:
    """Line by line; a reader that has seen enough (`| head`) is no error."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
