"""A log whose old segments are compressed, or gone: what can still be read, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from laminar.analysis.facts.reader import load_facts
from laminar.analysis.log.event_clock import WallClock
from laminar.analysis.log.run_log import parse_event, raw_records, read_records
from laminar.cli.log import run_dump
from laminar.core.state.state import encode
from laminar.eventlog.record import MAX_HEADER_BYTES, EventRecord, segment_numbers
from laminar.eventlog.snapshot import read_snapshots
from tests.analysis.conftest import Cli
from tools.kit.memory_disk import MemoryDisk
from tools.kit.sim_worlds import KILLED, LoggedRun


def run_of(run_dir: Path, keep_bytes: int = 0, **sizes: int) -> LoggedRun:
    run = LoggedRun(*KILLED, snapshot_every=30, **sizes)
    run.coordinator.keep_bytes = keep_bytes
    store(run.run().disk, run_dir)
    return run


def store(disk: MemoryDisk, run_dir: Path) -> None:
    (run_dir / "events").mkdir(parents=True)
    for name, data in disk.files.items():
        (run_dir / "events" / name).write_bytes(data)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoggedRun]:
    run_dir = tmp_path_factory.mktemp("kept") / "run"
    return run_dir, run_of(run_dir, segment_bytes=MAX_HEADER_BYTES)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LoggedRun]:
    run_dir = tmp_path_factory.mktemp("short") / "run"
    return run_dir, run_of(run_dir, segment_bytes=2_048, keep_bytes=20_000)


def test_compressed_segments_change_nothing(kept: tuple[Path, LoggedRun], cli: Cli) -> None:
    run_dir, world = kept
    assert list((run_dir / "events").glob("*.zst"))
    code, out = cli("log", "replay", run_dir)
    assert code == 0 and out.startswith(f"{world.state.seq} events, ")
    _, out = cli("log", "dump", "--stats", run_dir)
    bytes_used = sum(path.stat().st_size for path in (run_dir / "events").glob("events-*"))
    assert out.startswith(f"{bytes_used} bytes in ")
    _, out = cli("log", "dump", run_dir, "--raw")
    assert out.count('"kind": "event"') == world.state.seq


def test_replay_from_a_snapshot_says_so(kept: tuple[Path, LoggedRun], cli: Cli) -> None:
    """Everything behind it is compared; the state at the end is the same."""
    run_dir, world = kept
    newest, older = read_snapshots(world.disk).usable
    code, out = cli("log", "replay", run_dir, "--from-snapshot", "--state")
    lines = out.splitlines()
    assert code == 0 and lines[0] == f"started at {newest.name}, after event {newest.seq}"
    assert lines[1].startswith(f"{world.state.seq - newest.seq} events, ")
    assert lines[2] == "identical"
    _, whole = cli("log", "replay", run_dir, "--state")
    assert whole.split("identical\n")[1] == out.split("identical\n")[1]
    _, out = cli("log", "replay", run_dir, "--from-snapshot", "--until", newest.seq - 1)
    assert out.startswith(f"started at {older.name}")
    code, out = cli("log", "replay", run_dir, "--from-snapshot", "--until", older.seq - 1)
    assert code == 2
    assert f"holds no usable snapshot of event {older.seq - 1} or before" in out


def test_a_log_without_its_beginning_is_replayed_from_its_oldest_snapshot(
    short: tuple[Path, LoggedRun], cli: Cli
) -> None:
    run_dir, world = short
    gone = segment_numbers(world.disk.list_names())[0] - 1
    older = read_snapshots(world.disk).usable[-1]
    code, out = cli("log", "replay", run_dir)
    first, second, third = out.splitlines()
    assert code == 0 and third == "identical"
    assert first == (
        f"started at {older.name}, after event {older.seq} (the first {gone} segments are gone)"
    )
    assert second.startswith(f"{world.state.seq - older.seq} events, ")


def test_what_is_left_of_a_log_can_be_read(short: tuple[Path, LoggedRun], cli: Cli) -> None:
    """From its oldest record on, without times that nobody knows any more."""
    run_dir, world = short
    events = [record for record in read_records(run_dir) if isinstance(record, EventRecord)]
    assert [record.seq for record in events] == list(range(events[0].seq, world.state.seq + 1))
    assert events[0].seq <= read_snapshots(world.disk).usable[-1].seq + 1
    kinds = [body["kind"] for _, _, body in raw_records(run_dir)]
    assert kinds[0] == "header" and kinds.count("event") == len(events)
    clock = WallClock()
    times = [clock.unix_ns(parse_event(record)) for record in events]
    assert times == [record.time_ns for record in events]
    for options in ((), ("-n", 3), ("--stats",)):
        assert cli("log", "dump", run_dir, *options)[0] == 0
    assert cli("log", "story", run_dir, "store-0")[0] == 0


def test_readers_say_that_the_beginning_is_gone(
    short: tuple[Path, LoggedRun], capsys: pytest.CaptureFixture[str]
) -> None:
    """Not on stdout, where a program may read."""
    run_dir, world = short
    gone = segment_numbers(world.disk.list_names())[0] - 1
    run_dump(argparse.Namespace(run=run_dir, stats=True, raw=False, n=None))
    assert capsys.readouterr().err == f"laminar: the first {gone} segments of the log are gone\n"


def test_what_needs_the_whole_history_is_refused(short: tuple[Path, LoggedRun], cli: Cli) -> None:
    code, out = cli("audit", short[0])
    assert code == 2
    assert "has lost its beginning (coordinator.log_keep_mb removes old segments)" in out


def test_facts_begin_with_the_oldest_snapshot(short: tuple[Path, LoggedRun], cli: Cli) -> None:
    run_dir, world = short
    older = read_snapshots(world.disk).usable[-1].seq
    facts = load_facts(run_dir)
    assert (facts.begins_at, facts.events) == (older, world.state.seq)
    assert facts.table("events")["event"].to_pylist() == list(range(older + 1, world.state.seq + 1))
    assert encode(facts.state) == encode(world.state)
    code, out = cli("report", run_dir)
    assert code == 0 and f"! the log begins after event {older}: " in out


def test_a_snapshot_of_another_log_is_named(
    kept: tuple[Path, LoggedRun], short: tuple[Path, LoggedRun], tmp_path: Path, cli: Cli
) -> None:
    files = {n: bytes(d) for n, d in short[1].disk.files.items() if n.startswith("events")}
    newest, _ = read_snapshots(kept[1].disk).usable
    files[newest.name] = kept[1].disk.read(newest.name)
    store(MemoryDisk(files), tmp_path / "mixed")
    code, out = cli("log", "replay", tmp_path / "mixed")
    assert code == 2
    assert f"holds no usable snapshot ({newest.name}: the history " in out
