"""Telemetry: what cannot be written is counted, told once and resumed, and nobody waits for it."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from laminar.analysis.log.timeline import read_spans, read_steps
from laminar.cli.coord import Observers
from laminar.core.state.state import State
from laminar.events.base import Stamped
from laminar.observe.board import Board, Scalars
from laminar.observe.files import GrowingFile, cut_rows
from laminar.observe.logs import configure_logging, get_logger
from laminar.observe.telemetry import Outlet, PartlyWritten, Telemetry
from laminar.run.renames import write_whole

DEADLINE_S = 60.0
ROW = struct.Struct("<4q")


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


class FullDisk:
    """A file whose writes fail while the disk is full."""

    def __init__(self) -> None:
        self.full = False
        self.lines: list[str] = []

    def write(self, items: list[str]) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.lines += items


def outlet_of(write: Any, kept: int = 1_000) -> tuple[Telemetry, Outlet[str], list[Any]]:
    telemetry, said = Telemetry(), []
    outlet: Outlet[str] = telemetry.add_outlet("log", write, kept=kept)
    telemetry.tell_losses(lambda *loss: said.append(loss))
    return telemetry, outlet, said


def test_what_a_full_disk_took_is_counted_and_told_once_when_there_is_room() -> None:
    disk = FullDisk()
    telemetry, outlet, said = outlet_of(disk.write)
    for text in ("a", "b"):
        outlet.put(text)
    assert telemetry.wait_drained(DEADLINE_S)
    disk.full = True
    for text in ("c", "d", "e"):
        outlet.put(text)
        assert telemetry.wait_drained(DEADLINE_S)
    assert (disk.lines, said) == (["a", "b"], [])
    disk.full = False
    for text in ("f", "g"):
        outlet.put(text)
        assert telemetry.wait_drained(DEADLINE_S)
    assert disk.lines == ["a", "b", "f", "g"]
    assert said == [("log", 3, "[Errno 28] No space left on device")]


def test_a_write_that_hangs_holds_nobody_up() -> None:
    """Items are kept up to a limit, the others counted; the newest-only outlet keeps one."""
    begun, go_on, written = threading.Event(), threading.Event(), []

    def write(items: list[str]) -> None:
        begun.set()
        assert go_on.wait(DEADLINE_S)
        written.extend(items)

    telemetry, outlet, said = outlet_of(write, kept=3)
    status = telemetry.add_outlet("status", written.extend, kept=1)
    outlet.put("a")
    assert begun.wait(DEADLINE_S)
    for text in "bcdefg":
        outlet.put(text)
        status.put(f"status {text}")
    assert not telemetry.wait_drained(0.0)
    go_on.set()
    assert telemetry.wait_drained(DEADLINE_S)
    assert written == ["a", "b", "c", "d", "status g"]
    assert said == [("log", 3, "its writer is too slow")]


@pytest.mark.parametrize("error", [ValueError("no number"), SystemExit(1)])
def test_whatever_a_write_raises_the_next_one_is_tried(error: BaseException) -> None:
    """rich leaves with SystemExit when the pipe that it prints to is closed."""
    failures = [error]
    written: list[str] = []

    def write(items: list[str]) -> None:
        if failures:
            raise failures.pop()
        written.extend(items)

    telemetry, outlet, said = outlet_of(write)
    for text in ("a", "b"):
        outlet.put(text)
        assert telemetry.wait_drained(DEADLINE_S)
    assert written == ["b"] and said[0][:2] == ("log", 1)


# --- files --------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """`room`: bytes that os.write still takes; like a disk, it takes a part of the last write."""
    disk, write = {"room": 1 << 40}, os.write

    def limited(fd: int, data: Any) -> int:
        if not disk["room"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = write(fd, bytes(data)[: disk["room"]])
        disk["room"] -= taken
        return taken

    monkeypatch.setattr("laminar.observe.files.os.write", limited)
    yield disk


def line(state: str) -> bytes:
    return json.dumps({"state": state, "start_ns": 1, "end_ns": 2}).encode() + b"\n"


def test_a_line_torn_by_a_full_disk_costs_no_other_line(
    tmp_path: Path, small_disk: dict[str, int]
) -> None:
    file = GrowingFile(tmp_path, "timeline/store-0.jsonl")
    file.write([line("a")])
    small_disk["room"] = len(line("b")) + 9
    with pytest.raises(PartlyWritten, match="No space") as torn:
        file.write([line("b"), line("c"), line("d")])
    assert torn.value.done == 1
    with pytest.raises(OSError, match="No space"):
        file.write([line("e")])
    small_disk["room"] = 1 << 40
    file.write([line("f")])
    assert [span.state for span in read_spans(tmp_path, "store-0")] == ["a", "b", "f"]


def test_a_line_torn_by_the_process_before_costs_no_other_line(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "store-0.jsonl").write_bytes(line("a") + line("b")[:-5])
    GrowingFile(tmp_path, "timeline/store-0.jsonl").write([line("c")])
    assert [span.state for span in read_spans(tmp_path, "store-0")] == ["a", "c"]


def test_a_row_torn_by_a_full_disk_costs_no_other_row(
    tmp_path: Path, small_disk: dict[str, int]
) -> None:
    file = GrowingFile(tmp_path, "timeline/rollout-0.steps", cut_rows(ROW.size))
    file.write([ROW.pack(1, 2, 3, 4)])
    small_disk["room"] = 40
    with pytest.raises(PartlyWritten):
        file.write([ROW.pack(2, 3, 3, 4) + ROW.pack(3, 4, 3, 4)])
    small_disk["room"] = 1 << 40
    file.write([ROW.pack(5, 6, 7, 8)])
    assert read_steps(tmp_path, "rollout-0")[:, 0].tolist() == [1, 2, 5]


def test_a_replaced_file_is_the_old_one_when_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was written of the new one takes no room either."""
    file = tmp_path / "status.json"
    write_whole(file, b"old", durable=False)

    def full(path: Path, data: bytes) -> int:
        with open(path, "wb") as half:
            half.write(data[:1])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, b"new", durable=False)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("status.json", b"old")]


def test_no_run_directory_is_made_anew(tmp_path: Path) -> None:
    """It was moved aside: its processes must not write into the place of the next run."""
    with pytest.raises(FileNotFoundError, match="gone"):
        GrowingFile(tmp_path / "run", "timeline/store-0.jsonl").write([line("a")])
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_what_a_full_disk_left(
    tmp_path: Path, small_disk: dict[str, int]
) -> None:
    board = Board(tmp_path)
    board.write([Scalars(1, 5.0, {"reward/mean": 0.25})])
    small_disk["room"] = 20
    with pytest.raises(PartlyWritten):
        board.write([Scalars(2, 6.0, {"reward/mean": 0.5})])
    small_disk["room"] = 1 << 40
    board.write([Scalars(3, 7.0, {"reward/mean": 0.75, "staleness/max": 2, "kl mean": 1e300})])
    (file,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    assert _scalars(file.read_bytes()) == [
        (1, "reward/mean", 0.25),
        (3, "reward/mean", 0.75),
        (3, "staleness/max", 2.0),
        (3, "kl_mean", math.inf),
    ]


def _scalars(data: bytes) -> list[tuple[int, str, float]]:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    found = []
    while data:
        (size,) = struct.unpack_from("<Q", data)
        body = data[12 : 12 + size]
        assert struct.unpack_from("<I", data, 8) == (masked_crc32c(data[:8]),)
        assert struct.unpack_from("<I", data, 12 + size) == (masked_crc32c(body),)
        event = Event.FromString(body)
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        data = data[16 + size :]
    return found


# --- logs and observers -------------------------------------------------------------------------


def test_the_log_says_what_it_lost(tmp_path: Path) -> None:
    """The file cannot even be made at first, then it can."""
    telemetry = configure_logging(tmp_path / "run", "run", "store-0")
    get_logger().info("nobody reads this")
    assert telemetry.wait_drained(DEADLINE_S)
    (tmp_path / "run").mkdir()
    get_logger().info("there is room")
    assert telemetry.wait_drained(DEADLINE_S) and telemetry.wait_drained(DEADLINE_S)
    text = (tmp_path / "run" / "logs" / "latest" / "store-0.jsonl").read_text()
    first, second = map(json.loads, text.splitlines())
    assert (first["event"], first["process"]) == ("there is room", "store-0")
    assert (second["event"], second["outlet"], second["lost"]) == ("telemetry-lost", "log", 1)


def test_an_observer_that_raises_breaks_nothing_and_is_told_once() -> None:
    seen: list[int] = []

    def broken(stamped: Stamped, commands: object, state: State) -> None:
        raise KeyError("reward/mean")

    def works(stamped: Stamped, commands: object, state: State) -> None:
        seen.append(stamped.seq)

    event: Any = None
    with capture_logs() as logged:
        observers = Observers(get_logger(), metrics=broken, status=works)
        for seq in (1, 2, 3):
            stamped = Stamped(
                seq=seq, time_ns=0, peer="p", incarnation=1, peer_seq=seq, event=event
            )
            observers(stamped, [], event)
    assert seen == [1, 2, 3] and observers.failed["metrics", KeyError] == 3
    assert [(entry["event"], entry["observer"]) for entry in logged] == [
        ("observer-failed", "metrics")
    ]


def test_tensorboard_takes_no_torch_into_the_coordinator(tmp_path: Path) -> None:
    """Torch takes seconds to import and 200 MB; every coordinator writes these files."""
    code = (
        "import sys; from pathlib import Path; from laminar.observe.board import Board, Scalars; "
        "Board(Path(sys.argv[1])).write([Scalars(1, 5.0, {'a': 1.0})]); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)]).returncode == 0
