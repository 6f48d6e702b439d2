"""laminar log: replay, dump, story, why, trace of a run's event log, and SQL over its facts.

Exit codes: 0 done, 1 a replay differs from the log, 2 the named log cannot be read, 141 the reader
of the output went away.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from laminar.analysis.log import run_log
from laminar.analysis.log.event_clock import WallClock
from laminar.analysis.log.process_logs import cut_logs
from laminar.analysis.log.story import dump_log, read_story
from laminar.analysis.log.timeline import cut_timelines
from laminar.config import ConfigError
from laminar.eventlog.record import DecisionRecord, EventRecord, SegmentHeader
from laminar.eventlog.replay import Difference, Replay
from laminar.events.base import get_tag
from laminar.launch.emulated_note import list_notes
from laminar.run.command_line import shell_command

TRACE_FILE = "trace.json"
FORMATS = ("table", "csv", "json", "parquet")
PROGRESS_S = 5.0
"""Seconds between lines about facts that are being built."""


def add_parser(subparsers: Any) -> None:
    log = subparsers.add_parser("log")
    commands = log.add_subparsers(required=True, metavar="COMMAND")

    _add_records(commands)
    _add_questions(commands)
    _add_exports(commands)


def _add_records(commands: Any) -> None:
    """Add the commands that show the log itself, record by record."""
    replay = _add_command(commands, "replay", "repeat all decisions and compare them", run_replay)
    replay.add_argument("--from-snapshot", action="store_true", help="start at the newest snapshot")
    replay.add_argument("--until", type=parse_positive, metavar="SEQ", help="stop after this event")
    replay.add_argument("--state", action="store_true", help="print the state at the end as JSON")
    replay.add_argument("--diff", action="store_true", help="show only what differs")

    dumped = _add_command(commands, "dump", "one line per record", run_dump)
    dumped.add_argument("-n", type=parse_positive, metavar="N", help="only the last N records")
    form = dumped.add_mutually_exclusive_group()
    form.add_argument("--raw", action="store_true", help="all records as JSON, of any schema")
    form.add_argument("--stats", action="store_true", help="counts by type, bytes, time span")


def _add_questions(commands: Any) -> None:
    """Add the commands that tell the story of one thing, and its causes."""
    told = "all events of one trajectory, group, version or actor"
    subject = "trajectory 0.17.3, group 0.17, version v12, actor"
    parser = _add_command(commands, "story", told, run_story, subject)
    parser.add_argument(
        "--logs", action="store_true", help="include what processes logged about it"
    )

    subject = "trajectory 0.17.3, replica rollout-0, step-57"
    asked = _add_command(commands, "why", "why it migrated, was idle, or waited", run_why, subject)
    when = "of a replica: seconds since the run's first event, or an event as '#1234'"
    asked.add_argument("--at", default="", metavar="T", help=when)


def _add_exports(commands: Any) -> None:
    """Add the commands that give the run to other programs, and to queries."""
    traced = _add_command(commands, "trace", "a trace for ui.perfetto.dev", run_trace)
    where = "trace file (RUN/trace.json)"
    traced.add_argument("-o", "--output", type=Path, metavar="FILE", help=where)

    text = "query the facts of runs; without a query: their tables and columns"
    asked = commands.add_parser("sql", help=text, description=text)
    asked.add_argument("words", nargs="+", metavar="RUN", help="run directories; last, one SELECT")
    asked.add_argument("--format", choices=FORMATS, default="table", help="(table)")
    asked.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the result there")
    asked.set_defaults(function=run_sql)


def _add_command(
    commands: Any, name: str, text: str, function: Any, subject: str = ""
) -> argparse.ArgumentParser:
    """Add a command about a run, or about the given kinds of subject in it."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    if subject:
        parser.add_argument("id", metavar="ID", help=subject)
    parser.set_defaults(function=function)
    return parser


def parse_positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")
    return int(text)


def run_replay(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 1 at the first difference, shown from both sides."""
    found, lines = _replay_run(arguments)
    lines = [*list_notes(arguments.run), *lines]
    lines += [f"{found.events} events, {found.decisions} decisions, {found.hashes} state hashes"]
    if found.difference is None:
        lines.append("identical")
    else:
        shown = _field_diff(found.difference) if arguments.diff else str(found.difference)
        lines.append(f"DIFFERENT: {shown}")
    if arguments.state and found.machine.started:
        state = msgspec.json.encode(found.machine.state)
        lines.append(msgspec.json.format(state).decode())
    _print_lines(lines)
    return 1 if found.difference is not None else 0


def _replay_run(arguments: argparse.Namespace) -> tuple[Replay, list[str]]:
    """Replay the log; also return a line about its starting point if that is a snapshot."""
    run, until, newest = arguments.run, arguments.until, arguments.from_snapshot
    gone = run_log.segments_gone(run)
    if not (gone or newest):
        return run_log.replay_log(run, until=until, must_be_identical=False), []
    found, snapshot = run_log.replay_part(run, until=until, newest=newest)
    why = f" (the first {gone} segments are gone)" if gone else ""
    return found, [f"started at {snapshot.name}, after event {snapshot.seq}{why}"]


def _note_emulated(run: Path) -> None:
    """Note on stderr that the run is emulated, so that programs reading stdout are unaffected."""
    for note in list_notes(run):
        print(f"laminar: {note}", file=sys.stderr)


def _note_run(run: Path) -> None:
    """Note on stderr which part of the log is gone, and whether the run is emulated."""
    _note_emulated(run)
    if gone := run_log.segments_gone(run):
        print(f"laminar: the first {gone} segments of the log are gone", file=sys.stderr)


def _note_cut(what: str, names: list[str]) -> None:
    """Note on stderr which files have lost their beginning, because they grew large."""
    if names:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        print(
            f"laminar: the oldest entries of {len(names)} {what} are gone: {shown}", file=sys.stderr
        )


def _field_diff(difference: Difference) -> str:
    """Return the parts that differ: `-` logged, `+` replayed."""
    position = difference.position
    logged, replayed = difference.logged.split(", "), difference.replayed.split(", ")
    parts = [line for line in difflib.ndiff(logged, replayed) if line[0] in "+-"]
    where = f"segment {position.segment}, offset {position.offset}, event {difference.seq}"
    return "\n  ".join([f"{where} (- logged, + replayed):", *parts])


def run_dump(arguments: argparse.Namespace) -> int:
    _note_run(arguments.run)
    if arguments.stats:
        lines: Iterable[str] = _count_records(arguments.run)
    else:
        lines = _raw_lines(arguments.run) if arguments.raw else dump_log(arguments.run)
    _print_lines(deque(lines, maxlen=arguments.n) if arguments.n else lines)
    return 0


def _raw_lines(run: Path) -> Iterator[str]:
    for segment, offset, body in run_log.raw_records(run):
        line = {"segment": segment, "offset": offset, **body}
        yield json.dumps(line, default=repr)


def _check_order(arguments: argparse.Namespace, name: str) -> None:
    """Raise ConfigError if ID comes before RUN, as it formerly did."""
    run, subject = arguments.run, arguments.id
    if Path(subject).is_dir() and not run.is_dir():
        raise ConfigError(f"RUN comes before ID: {shell_command('log', name, subject, run)}")


def run_story(arguments: argparse.Namespace) -> int:
    _check_order(arguments, "story")
    _note_run(arguments.run)
    if arguments.logs:
        _note_cut("logs", cut_logs(arguments.run))
    _print_lines(read_story(arguments.run, arguments.id, logs=arguments.logs))
    return 0


def run_why(arguments: argparse.Namespace) -> int:
    _check_order(arguments, "why")
    from laminar.analysis.facts.reader import load_facts
    from laminar.analysis.why.why import explain_subject

    _note_emulated(arguments.run)
    facts = load_facts(arguments.run, show_progress(arguments.run))
    _print_lines(explain_subject(facts, arguments.id, arguments.at))
    return 0


def run_trace(arguments: argparse.Namespace) -> int:
    """Write the trace; print its path and how to open it."""
    from laminar.analysis.export.perfetto import write_trace
    from laminar.analysis.facts.reader import load_facts

    path = arguments.output or arguments.run / TRACE_FILE
    _note_emulated(arguments.run)
    _note_cut("timelines", cut_timelines(arguments.run))
    count = write_trace(load_facts(arguments.run, show_progress(arguments.run)), path)
    _print_lines([f"{count} trace events in {path}: open it at https://ui.perfetto.dev"])
    return 0


def run_sql(arguments: argparse.Namespace) -> int:
    """Print the result of a query, or write it to a file; without a query, list the tables."""
    from laminar.analysis.export.query_result import write_result
    from laminar.analysis.facts.reader import load_facts
    from laminar.analysis.facts.sql import query_facts
    from laminar.analysis.facts.tables import describe_tables

    runs, query = _split_query(arguments.words)
    if arguments.format == "parquet" and arguments.output is None:
        raise ConfigError("--format parquet needs a file: add -o FILE")
    for run in runs:
        _note_run(run)
    if not query:
        _print_lines(describe_tables())
        return 0
    facts = [load_facts(run, show_progress(run)) for run in dict.fromkeys(runs)]
    write_result(query_facts(facts, query), arguments.format, arguments.output, sys.stdout)
    return 0


def _split_query(words: list[str]) -> tuple[list[Path], str]:
    """Split the words into runs and the query, which has a space and names no directory."""
    query = "" if " " not in words[-1].strip() or Path(words[-1]).is_dir() else words[-1]
    runs = [Path(word) for word in (words[:-1] if query else words)]
    if not runs:
        raise ConfigError(f"name a run directory before the query {query!r}")
    return runs, query


def show_progress(run: Path) -> Callable[[int, float], None]:
    """Return a function that prints how much of the log was read, every few seconds."""
    shown = time.monotonic()

    def report(events: int, share: float) -> None:
        nonlocal shown
        if time.monotonic() - shown >= PROGRESS_S:
            shown = time.monotonic()
            print(f"laminar: {run}: {events:,} events read, {share:.0%}", file=sys.stderr)

    return report


def _count_records(run: Path) -> list[str]:
    """Return lines with the number of events and decisions of each type."""
    events, decisions = Counter[str](), Counter[str]()
    clock, times = WallClock(), []
    segments = set[int]()
    for record in run_log.read_records(run):
        if isinstance(record, SegmentHeader):
            segments.add(record.segment)
        elif isinstance(record, EventRecord):
            event = run_log.parse_event(record)
            events[get_tag(event.event)] += 1
            times.append(clock.unix_ns(event))
        elif isinstance(record, DecisionRecord):
            decisions[get_tag(run_log.parse_command(record))] += 1
    size, tail = run_log.log_size(run)
    seconds = (times[-1] - times[0]) / 1e9 if times else 0.0
    return [
        f"{size} bytes in {len(segments)} segments, torn tail {tail.torn_bytes} bytes, "
        f"{seconds:.3f} s from the first event to the last",
        *_format_counts("events", events),
        *_format_counts("decisions", decisions),
    ]


def _format_counts(title: str, counts: Counter[str]) -> list[str]:
    lines = [f"{count:>9}  {tag}" for tag, count in counts.most_common()]
    return [f"{counts.total():>9}  {title}", *(f"  {line}" for line in lines)]


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)
