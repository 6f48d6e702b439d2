"""Logs and timelines stay small however long a run is, and readers say what is gone."""

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from laminar.actors.system import engine_steps
from laminar.actors.system.engine_steps import EngineSteps, join_steps
from laminar.analysis.log import timeline
from laminar.analysis.log.intervals import length_ns
from laminar.analysis.log.process_logs import cut_logs, log_lines
from laminar.analysis.report.summary import _find_covered
from laminar.cli.commands import run_command
from laminar.observe import files
from laminar.observe.files import GrowingFile
from laminar.observe.metrics import _read_written
from laminar.run.directory import older_parts

MS = 1_000_000
ROW = struct.Struct("<4q")


def span(number: int) -> bytes:
    fields = {"state": "busy", "start_ns": number * MS, "end_ns": number * MS + 1, "step": number}
    return json.dumps(fields).encode() + b"\n"


def logged(number: int) -> bytes:
    fields = {"process": "store-0", "level": "info", "event": "e", "number": number}
    return json.dumps(fields | {"timestamp": "2026-01-01T00:00:00Z"}).encode() + b"\n"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PART_BYTES", 1_000)


@pytest.mark.usefixtures("small_parts")
def test_a_long_timeline_keeps_its_newest_parts_and_says_that_others_are_gone(
    tmp_path: Path,
) -> None:
    """Also over restarts of the process, which go on in the file that is there."""
    path = tmp_path / "timeline" / "trainer-0.jsonl"
    for number in range(100):
        if number % 7 == 0:
            file = GrowingFile(tmp_path, "timeline/trainer-0.jsonl", in_parts=True)
        file.write([span(number)])
        steps = [s.step for s in timeline.read_spans(tmp_path, "trainer-0")]
        assert steps == list(range(steps[0], number + 1))
        assert (timeline.cut_timelines(tmp_path) == ["trainer-0"]) is (steps[0] > 0)
    assert 30 < len(steps) < 100
    assert len(older_parts(path)) == files.PARTS_KEPT - 1
    assert sum(p.stat().st_size for p in path.parent.iterdir()) < (files.PARTS_KEPT + 1) * 1_000


@pytest.mark.usefixtures("small_parts")
def test_a_part_is_set_aside_where_it_was_begun(tmp_path: Path) -> None:
    """Of an earlier attempt's log, when logs/latest points at another one."""
    logs = tmp_path / "logs"
    for attempt in (1, 2):
        (logs / f"attempt_{attempt}").mkdir(parents=True)
    (logs / "latest").symlink_to("attempt_1")
    file = GrowingFile(tmp_path, "logs/latest/store-0.jsonl", in_parts=True)
    file.write([logged(0)])
    (logs / "latest").unlink()
    (logs / "latest").symlink_to("attempt_2")
    for number in range(1, 60):
        file.write([logged(number)])
    assert not list((logs / "attempt_2").iterdir())
    numbers = [line.fields["number"] for line in log_lines(tmp_path)]
    assert numbers == list(range(numbers[0], 60)) and numbers[0] > 0
    assert cut_logs(tmp_path) == ["attempt_1/store-0.jsonl"]


@pytest.mark.usefixtures("small_parts")
def test_names_with_dots_have_parts_of_their_own(tmp_path: Path) -> None:
    for name in ("rollout-3", "rollout-3.1"):
        for number in range(12):
            GrowingFile(tmp_path, f"timeline/{name}.jsonl", in_parts=True).write([span(number)])
    for name in ("rollout-3", "rollout-3.1"):
        assert [s.step for s in timeline.read_spans(tmp_path, name)] == list(range(12))
    assert timeline.cut_timelines(tmp_path) == []


def test_what_is_gone_is_no_idle_time_of_the_trainer(tmp_path: Path) -> None:
    (tmp_path / "timeline").mkdir()
    (tmp_path / "timeline" / "trainer-0.jsonl").write_bytes(span(50) + span(60))
    spans = timeline.read_spans(tmp_path, "trainer-0")
    assert _find_covered(True, spans)[0, 0] == 50 * MS
    assert _find_covered(False, spans)[0, 0] == 0


@pytest.mark.usefixtures("small_parts")
def test_a_trace_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laminar.analysis.export.perfetto.write_trace", lambda facts, path: 0)
    monkeypatch.setattr("laminar.analysis.facts.reader.load_facts", lambda run, progress: None)
    file = GrowingFile(tmp_path, "timeline/trainer-0.jsonl", in_parts=True)
    for number in range(100):
        file.write([span(number)])
    assert run_command(["log", "trace", str(tmp_path)]) == 0
    assert "the oldest entries of 1 timelines are gone: trainer-0" in capsys.readouterr().err


def steps_of(first: int, count: int, *, ms: int = 10) -> bytes:
    """Steps one after the other, each of 9 of `ms` milliseconds."""
    rows = [(at * ms * MS, (at * ms + 9) * MS, 4, 4) for at in range(first, first + count)]
    return np.array(rows, dtype="<i8").tobytes()


def test_many_engine_steps_become_few_rows_with_the_same_times_and_tokens() -> None:
    """A pause stays one: it is time in which the engine did nothing."""
    busy, later = steps_of(0, 50), steps_of(100, 10)
    rows = np.frombuffer(join_steps(busy + later), dtype="<i8").reshape(-1, 4)
    assert rows.tolist() == [[0, 499 * MS, 0, 200], [1000 * MS, 1099 * MS, 0, 40]]
    assert timeline.JOIN_NS > MS


def test_a_long_run_keeps_every_moment_of_its_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_steps, "FULL_BYTES", 100 * ROW.size)
    for begin in range(0, 1_000, 250):  # four processes, one after the other
        file = EngineSteps(tmp_path, "rollout-0")
        for first in range(begin, begin + 250, 50):
            file.write([steps_of(first, 25), steps_of(first + 25, 25)])
    steps = timeline.read_steps(tmp_path, "rollout-0")
    assert len(steps) == 100 + 900 // 25
    assert steps[:, 3].sum() == 4_000
    assert (steps[:100, 2] == 4).all() and (steps[100:, 2] == 0).all()
    whole = np.frombuffer(steps_of(0, 1_000), dtype="<i8").reshape(-1, 4)
    assert length_ns(timeline.merge_steps([steps])) == length_ns(timeline.merge_steps([whole]))


def test_metrics_and_books_are_read_line_by_line(tmp_path: Path) -> None:
    """A coordinator starts beside a file of any size; what it needs is three numbers."""
    path = tmp_path / "metrics.jsonl"
    with open(path, "w") as file:
        for step in range(1, 2_001):
            figures = {"step": step, "event": 10 * step, "training/global_step": step}
            file.write(json.dumps(figures | {"padding": "x" * 500, "x": float("nan")}) + "\n")
        file.write('{"step": 2000, "event": 20007, "val/version": 2000}\n')
        file.write('{"step": 2001, "event": 20010, "training/glo')
    reader = _PeakReader(path)
    with reader:
        found = _read_written(path)
    assert (found.event, found.step_event, found.evaluations) == (20_007, 20_000, 1)
    assert reader.peak_bytes < path.stat().st_size // 4
    with reader:
        assert sum(1 for _ in timeline.whole_lines(path)) == 2_001
    assert reader.peak_bytes < path.stat().st_size // 4


class _PeakReader:
    """How much memory what is read inside takes at most."""

    def __init__(self, path: Path) -> None:
        self.peak_bytes = path.stat().st_size

    def __enter__(self) -> None:
        tracemalloc.start()

    def __exit__(self, *error: object) -> None:
        self.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
