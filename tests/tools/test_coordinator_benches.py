"""The benches of the coordinator run, small, and print figures; no figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from laminar.coordinator.system import RealDisk
from laminar.eventlog.replay import replay
from tests.kit.memory_disk import MemoryDisk
from tools.bench.stories import STORIES
from tools.bench.traffic import Traffic

BENCH = Path(__file__).parents[2] / "tools" / "bench"


def figures(name: str, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCH / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_replay_bench(tmp_path: Path) -> None:
    """Of logs that it makes, and of one that is there."""
    made = figures("replay.py", "--events", "2000", "--replicas", "2", "3")
    names = ["replay_events_per_s", "replay_seconds_per_million", "replay_vs_read_ratio"]
    assert [figure["name"] for figure in made] == [*names, "replay_events_per_s_at_3"]
    Traffic(RealDisk(tmp_path), replicas=2, capacity=8).run(1_000)
    assert [f["name"] for f in figures("replay.py", "--log", str(tmp_path))] == names


def test_tick_bench() -> None:
    made = figures("tick.py", "--events", "500", "--peers", "2", "5")
    assert [f["name"] for f in made] == ["tick_events_per_s_at_2", "tick_events_per_s_at_5"]


def test_scale_bench() -> None:
    """Every kind of event, and losses, in every situation in which they can happen."""
    made = figures("scale.py", "--replicas", "32", "--trajectories", "1024")
    names = [figure["name"] for figure in made]
    assert {f"event_ms_{story}" for story in STORIES} - {*names} == {"event_ms_timer-resume"}
    assert {"event_ms_timer-resume_lost", "quarter_of_nodes_lost_s_evaluation"} <= {*names}


def test_repack_plan_bench() -> None:
    made = {
        figure["name"]: figure["value"] for figure in figures("repack_plan.py", "--replicas", "16")
    }
    assert made["plan_ms_gain"] > 0 and made["moves_best-fit"] > 0


def test_traffic_is_a_run_that_goes_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are trained, a replica dies and comes back, and nothing is strange to anybody."""
    monkeypatch.setattr("tools.bench.traffic.EVENTS_PER_LOSS", 2_000)
    disk = MemoryDisk()
    traffic = Traffic(disk, replicas=3, capacity=16)
    traffic.run(3_000)
    state = traffic.tick.machine.state
    assert not state.failure and state.completed > 10 and traffic.tick.bad_frames == 0
    assert state.next_incarnation == 1 + len(state.actors) + 1
    assert set(state.ignored) <= {"TokenProgress: not-ready"}
    found = replay(disk)
    assert found.difference is None and found.events == state.seq and found.hashes
