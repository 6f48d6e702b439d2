"""What the time until the first step went into: the parts follow one another without a gap."""

from __future__ import annotations

from pathlib import Path

from laminar.analysis.log.event_clock import WallClock
from laminar.analysis.log.run_log import parse_event, read_records
from laminar.eventlog.record import EventRecord
from laminar.events import events as ev
from laminar.launch.panel import start_parts
from tools.kit.logs import Log, write_log
from tools.kit.run_directory import CLOCK_NS, world_log

CHECKS_NS = 5 * 10**9


def step_times(run_dir: Path) -> list[int]:
    clock = WallClock()
    events = [parse_event(r) for r in read_records(run_dir) if isinstance(r, EventRecord)]
    times = [(clock.unix_ns(stamped), stamped.event) for stamped in events]
    return [at_ns for at_ns, event in times if isinstance(event, ev.StepCompleted)]


def test_the_parts_of_a_start_add_up_to_the_first_step(made: Path) -> None:
    parts = start_parts(made, CLOCK_NS - CHECKS_NS)
    assert [name for name, _ in parts] == [
        "checks",
        "processes",
        "data and models",
        "weights",
        "responses and training",
    ]
    assert dict(parts)["checks"] == CHECKS_NS / 1e9
    assert all(seconds >= 0 for _, seconds in parts)
    whole_ns = step_times(made)[0] - CLOCK_NS + CHECKS_NS
    assert abs(sum(seconds for _, seconds in parts) - whole_ns / 1e9) < 1e-6


def test_what_came_before_the_command_does_not_count(made: Path) -> None:
    """A resumed run has steps in its log that were done before."""
    steps = step_times(made)
    parts = start_parts(made, steps[0] + 1)
    assert abs(sum(seconds for _, seconds in parts) - (steps[1] - steps[0] - 1) / 1e9) < 1e-6


def test_without_a_step_there_is_nothing_to_tell(tmp_path: Path) -> None:
    log: Log = []
    for stamped, commands in world_log():
        if isinstance(stamped.event, ev.StepCompleted):
            break
        log.append((stamped, commands))
    (tmp_path / "run").mkdir()
    write_log(tmp_path / "run", log)
    assert start_parts(tmp_path / "run", CLOCK_NS) == []
