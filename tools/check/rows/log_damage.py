"""Rows 8 to 10: event log cut at every byte, bit-flipped in every byte, crashed in every call.

Reads   the log of a real run
Gives   ROWS; `cut_at` and `flip_at` try one byte and return the problem, or an empty string

Each case has its own disk in memory and starts a coordinator on it. A failure names its case, so
that it can be repeated alone.
"""

from __future__ import annotations

import functools
import multiprocessing
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from laminar.eventlog.reader import read_log, scan_log
from laminar.eventlog.record import LogCorrupt, Record, SegmentHeader, StateHashRecord, segment_name
from laminar.eventlog.writer import LogTaken
from tools.check.rows.base import Figure, Gate, Row
from tools.check.rows.crash_points import Crash, Scenario, calls_of
from tools.kit.logs import begin_log, real_run, records_of
from tools.simulator.disk import CRASH_MODES, CrashMode, SimDisk

FIRST = segment_name(1)
SEGMENT_BYTES = 1 << 20  #: large enough for the whole log
MARK = StateHashRecord(seq=0, digest="the last record")
CHUNK_BYTES = 500
SHOWN = 5  #: problems that are described; the others are only counted


class Size(NamedTuple):
    """Size of the test at a gate."""

    records: int  #: rows 8 and 9: records of the log
    scenarios: tuple[Scenario, ...]  #: row 10: the power is cut in each call
    kills: tuple[Scenario, ...]  #: row 10: the process is killed in each call, then the power cut
    successor_calls: int  #: calls of the successor in which the power is cut after a kill
    draws: int  #: row 10: disks for each crash, in each random mode
    workers: int  #: worker processes


SIZES: dict[Gate, Size] = {
    "pr": Size(
        records=33,
        scenarios=(Scenario(events=20, snapshot_every=6, keep_bytes=0),),
        kills=(Scenario(events=2, snapshot_every=1_000, keep_bytes=0),),
        successor_calls=6,
        draws=4,
        workers=1,
    ),
    "release": Size(
        records=1_000,
        scenarios=(
            Scenario(events=120, snapshot_every=1_000, keep_bytes=0),
            Scenario(events=120, snapshot_every=20, keep_bytes=0),
            Scenario(events=120, snapshot_every=20, keep_bytes=4_096),
        ),
        kills=(Scenario(events=24, snapshot_every=6, keep_bytes=2_048),),
        successor_calls=12,
        draws=6,
        workers=2,
    ),
}


class Log(NamedTuple):
    """A segment that is durable to its end; its last record was committed alone."""

    data: bytes
    records: list[Record]
    ends: list[int]  #: end offset of each record in `data`, bytes


@functools.cache
def real_log(count: int) -> Log:
    """Log the first `count` records of the real run, header included, one commit per event."""
    disk = SimDisk()
    writer = begin_log(disk, segment_bytes=SEGMENT_BYTES)
    left = count - 2  # without the header and the last one
    for each in real_run():
        batch = records_of(*each)[:left]
        for record in batch:
            writer.append(record)
        writer.commit()
        left -= len(batch)
    writer.append(MARK)
    writer.commit()
    found = list(read_log(disk))
    data = disk.read(FIRST)
    ends = [position.offset for position, _ in found[1:]] + [len(data)]
    return Log(data, [record for _, record in found], ends)


# --- rows 8 and 9: every byte -----------------------------------------------------------------


def cut_at(log: Log, cut: int) -> str:
    """Keep the first `cut` bytes: a successor must find their records and continue after them."""
    disk = SimDisk({FIRST: log.data[:cut]})
    whole = bisect_right(log.ends, cut)
    try:
        tail = scan_log(disk)
        writer = begin_log(disk, tail, segment_bytes=SEGMENT_BYTES)
        writer.append(MARK)
        writer.commit()
        found = [record for _, record in read_log(disk)]
    except (LogCorrupt, LogTaken) as error:
        return f"refused: {error}"
    if tail.torn_bytes != cut - (log.ends[whole - 1] if whole else 0):
        return f"{tail.torn_bytes} torn bytes reported"
    return _compare(found, log.records[:whole])


def _compare(found: list[Record], before: list[Record]) -> str:
    """Compare a successor's log with the records before it, its header and the mark."""
    kept = found[:-2]
    if kept != before:
        return f"{len(kept)} records found, which differ from the expected {len(before)}"
    if not isinstance(found[-2], SegmentHeader) or found[-1] != MARK:
        return f"the successor's records are missing: {found[-2:]}"
    return ""


def flip_at(log: Log, at: int) -> str:
    """Flip a bit of byte `at`: its record must be refused, or read as torn if it is the last."""
    damaged = bytearray(log.data)
    damaged[at] ^= 1 << at % 8
    disk = SimDisk({FIRST: damaged})
    number = bisect_right(log.ends, at)
    start = log.ends[number - 1] if number else 0
    found: list[Record] = []
    try:
        found.extend(record for _, record in read_log(disk))
        verdict: tuple[int, int] | str = f"torn {scan_log(disk).torn_bytes}"
    except LogCorrupt as error:
        verdict = (error.segment, error.offset)
    last = number == len(log.ends) - 1
    expected = f"torn {len(log.data) - start}" if last else (1, start)
    if found != log.records[: len(found)]:
        return f"altered records were delivered: {found[-1]}"
    if len(found) > number:
        return "not detected"
    return "" if verdict == expected else f"{verdict} instead of {expected}"


# --- rows 8 and 9 at size ---------------------------------------------------------------------

Result = tuple[int, list[str]]  #: cases tried, problems
Job = tuple[Callable[..., Result], tuple[Any, ...]]


def try_cuts(records: int, start: int, stop: int) -> Result:
    log = real_log(records)
    problems = [f"cut at {cut}: {said}" for cut in range(start, stop) if (said := cut_at(log, cut))]
    return stop - start, problems


def try_flips(records: int, start: int, stop: int) -> Result:
    log = real_log(records)
    problems = [f"flip at {at}: {said}" for at in range(start, stop) if (said := flip_at(log, at))]
    return stop - start, problems


def _chunks(check: Callable[..., Result], records: int, stop: int) -> list[Job]:
    starts = range(0, stop, CHUNK_BYTES)
    return [(check, (records, start, min(start + CHUNK_BYTES, stop))) for start in starts]


# --- row 10 at size ---------------------------------------------------------------------------

#: Deterministic modes, which need only one draw.
_CERTAIN: tuple[CrashMode, ...] = ("none", "all")


def try_crash(scenario: Scenario, call: int, draws: int) -> Result:
    """Try one crash in every mode."""
    crash = Crash(scenario, call)
    cases = [(mode, n) for mode in CRASH_MODES for n in range(1 if mode in _CERTAIN else draws)]
    problems = [
        f"Crash({scenario}, {call}).problem({mode!r}, {draw}): {said}"
        for mode, draw in cases
        if (said := crash.problem(mode, draw))
    ]
    return len(cases), problems


def _crashes(size: Size) -> Iterator[Job]:
    for scenario in size.scenarios:
        for call in range(1, calls_of(scenario) + 1):
            yield try_crash, (scenario, call, size.draws)
    for alone in size.kills:
        for killed in range(1, calls_of(alone) + 1):
            scenario = alone._replace(killed=killed)
            for call in range(1, min(calls_of(scenario), size.successor_calls) + 1):
                yield try_crash, (scenario, call, size.draws)


# --- the rows ---------------------------------------------------------------------------------


def _cut_row(gate: Gate) -> Figure:
    size = SIZES[gate]
    jobs = _chunks(try_cuts, size.records, len(real_log(size.records).data) + 1)
    cases, problems = _run(jobs, size.workers)
    return _figure(f"{cases:,} cuts", problems, "with records lost or invented")


def _flip_row(gate: Gate) -> Figure:
    size = SIZES[gate]
    jobs = _chunks(try_flips, size.records, len(real_log(size.records).data))
    cases, problems = _run(jobs, size.workers)
    return _figure(f"{cases:,} flips", problems, "not detected as the right kind")


def _crash_row(gate: Gate) -> Figure:
    jobs = list(_crashes(SIZES[gate]))
    cases, problems = _run(jobs, SIZES[gate].workers)
    return _figure(f"{cases:,} crashes in {len(jobs):,} calls", problems, "not recovered from")


def _figure(tried: str, problems: list[str], what: str) -> Figure:
    shown = problems[:SHOWN] + [f"and {len(problems) - SHOWN} more"] * (len(problems) > SHOWN)
    return Figure(f"{tried}, {len(problems)} {what}", not problems, "\n".join(shown))


def _run(jobs: list[Job], workers: int) -> Result:
    """Run all jobs and print the progress."""
    cases, problems = 0, []
    for done, (tried, found) in enumerate(_results(jobs, workers), 1):
        cases += tried
        problems += found
        if done * 10 // len(jobs) > (done - 1) * 10 // len(jobs):
            print(f"  {done:,} of {len(jobs):,}: {len(problems)} problems", file=sys.stderr)
    return cases, problems


def _results(jobs: list[Job], workers: int) -> Iterator[Result]:
    if workers == 1:
        yield from map(_do, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(_do, jobs, chunksize=4)


def _do(job: Job) -> Result:
    check, arguments = job
    return check(*arguments)


ROWS = (
    Row(
        8,
        "a log cut at any byte keeps the records before the cut and can be continued",
        "every byte of 33 records: 0 acknowledged lost, 0 invented",
        "every byte of 1,000 records: 0 acknowledged lost, 0 invented",
        _cut_row,
    ),
    Row(
        9,
        "a flipped bit of the log is detected, and no altered record is read",
        "every byte of 33 records: 100 % detected as the right kind",
        "every byte of 1,000 records: 100 % detected as the right kind",
        _flip_row,
    ),
    Row(
        10,
        "a crash in any disk call loses no committed record and invents none, whatever is kept",
        "every call of a small run x none, all, prefix, torn, reordered: all recovered from",
        "+ without snapshots, with old segments removed, and after a kill: all recovered from",
        _crash_row,
    ),
)
