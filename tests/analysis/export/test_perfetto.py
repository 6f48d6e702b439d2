"""laminar log trace: a file that a trace viewer can read, and that says what happened."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from laminar.analysis.export.perfetto import write_trace
from laminar.analysis.facts.reader import load_facts
from laminar.config import ConfigError
from laminar.events import commands as cmd
from laminar.events import events as ev
from tests.analysis.conftest import Cli
from tests.analysis.told_bench import ToldBench
from tools.kit.logs import Log, write_log
from tools.kit.random_worlds import failing_world, random_world
from tools.kit.run_directory import CLOCK_NS, world_log, write_spans

Events = list[dict[str, Any]]


def trace_of(log: Log, tmp_path: Path, name: str = "run") -> Events:
    run_dir = tmp_path / name
    run_dir.mkdir()
    write_log(run_dir, log)
    return read(run_dir)


def read(run_dir: Path) -> Events:
    path = run_dir / "trace.json"
    count = write_trace(load_facts(run_dir), path)
    events: Events = json.loads(path.read_text())["traceEvents"]
    assert len(events) == count
    return events


def check(events: Events) -> None:
    """Names before use, times in order on every track, pairs of begin and end, pairs of arrows."""
    names, last = set(), defaultdict[tuple[int, int], float](float)
    depth, arrows = Counter[tuple[int, int]](), defaultdict[int, list[str]](list)
    for event in events:
        if event["ph"] == "M":
            names.add((event["name"], event["pid"], event.get("tid")))
            continue
        track = (event["pid"], event["tid"])
        assert ("process_name", event["pid"], None) in names
        assert ("thread_name", *track) in names
        assert event["ts"] >= last[track], event
        last[track] = event["ts"]
        if event["ph"] == "B":
            depth[track] += 1
        elif event["ph"] == "E":
            depth[track] -= 1
            assert depth[track] >= 0, event
        elif event["ph"] in "sf":
            arrows[event["id"]].append(event["ph"])
            assert depth[track] > 0, "an arrow that begins or ends outside of a span"
    assert not any(depth.values())
    assert all(ends == ["s", "f"] for ends in arrows.values())


def process_of(events: Events) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}


def spans(events: Events, kind: str, name: str = "") -> list[tuple[str, float, float]]:
    """(process, begin, end) of the outer spans of a kind, in ms."""
    names, found = process_of(events), []
    stacks = defaultdict[tuple[int, int], Events](list)
    for event in events:
        track = (event["pid"], event.get("tid", 0))
        if event["ph"] == "B":
            stacks[track].append(event)
        elif event["ph"] == "E":
            begin = stacks[track].pop()
            if begin["cat"] == kind and not stacks[track] and name in ("", begin["name"]):
                found.append((names[event["pid"]], begin["ts"] / 1000, event["ts"] / 1000))
    return found


def arrows(events: Events, name: str) -> list[tuple[str, str]]:
    names = process_of(events)
    sources = {e["id"]: names[e["pid"]] for e in events if e["ph"] == "s"}
    return [
        (sources[e["id"]], names[e["pid"]]) for e in events if e["ph"] == "f" and e["name"] == name
    ]


def test_the_trace_of_a_whole_run_is_sound(made: Path) -> None:
    events = read(made)
    check(events)
    log = world_log()
    generated = [c for _, cs in log for c in cs if isinstance(c, cmd.GenerateTrajectory)]
    assert len(spans(events, "slot")) == len(generated)
    steps = [f"step {i}" for i in (1, 2, 3)]
    assert [len(spans(events, "work", step)) for step in steps] == [1, 1, 1]
    pulls = [c for _, cs in log for c in cs if isinstance(c, cmd.PullWeights)]
    assert len(spans(events, "pull")) == len(pulls)
    published = [s for s, _ in log if isinstance(s.event, ev.WeightsPublished)]
    versions = {s.event.version for s in published if isinstance(s.event, ev.WeightsPublished)}
    assert len(spans(events, "version")) == len(arrows(events, "publish")) == len(versions)
    assert [e["name"] for e in events if e["ph"] == "B" and e["cat"] == "evaluation"] == [
        f"evaluation {i} of v{v}" for i, v in ((0, 0), (1, 2), (2, 4))
    ]


@pytest.mark.parametrize("seed", range(12))
def test_the_traces_of_random_runs_are_sound(seed: int, tmp_path: Path) -> None:
    """Replicas die, publishes are skipped, weights are rejected, the run fails or is drained."""
    for name, world in (("good", random_world(seed)), ("bad", failing_world(seed))):
        log = world.run().log
        cut = log[: len(log) * (seed + 1) // 13]  # as a killed coordinator leaves it
        for part, events in ((name, log), (f"{name}-cut", cut)):
            check(trace_of(events, tmp_path, part))


def test_times_are_those_of_the_log(tmp_path: Path) -> None:
    bench = ToldBench(replicas=1, capacity=2, groups_per_step=1, max_staleness=0)
    bench.wait(200)
    bench.start()
    t = bench.trajectory("0.0.0")
    bench.wait(30)
    started = ev.TrajectoryStarted(trajectory_id=t.id, placement=1, tokens_resumed=0)
    bench.say("rollout-0", started)
    bench.wait(70)
    bench.finish("0.0.0")
    bench.wait(50)
    bench.reward("0.0.0")
    bench.finish("0.0.1")
    bench.reward("0.0.1")
    bench.wait(1000)
    bench.train()
    bench.wait(10)
    bench.load("rollout-0")
    events = trace_of(bench.log, tmp_path)
    assert spans(events, "slot", "0.0.0") == [("rollout-0", 200, 300)]
    assert [e["ts"] / 1000 for e in events if e.get("name") == "generating"] == [230]
    assert spans(events, "reward", "0.0.0") == [("rollout-0", 300, 350)]
    assert spans(events, "work", "step 1") == [("trainer-0", 350, 1350)]
    assert spans(events, "pull", "pull v1 or newer") == [("rollout-0", 1350, 1360)]
    assert spans(events, "version", "v1") == [("relay-0", 1350, 1360)]
    assert sorted(spans(events, "refused", "staleness-bound")) == [("rollout-0", 350, 1350)]
    assert ("relay-0", "rollout-0") in arrows(events, "pull")


def test_lost_work_leads_to_its_next_place(tmp_path: Path) -> None:
    """What is placed at once has one arrow; what waits has a span among the lost work between."""
    bench = ToldBench(replicas=2, capacity=3, groups_per_step=2, max_staleness=0)
    bench.start()
    bench.wait(100)
    bench.kill("rollout-0")  # the survivor has room for one of two
    bench.wait(40)
    bench.finish("0.1.0")
    events = trace_of(bench.log, tmp_path)
    check(events)
    assert spans(events, "lost work", "0.0.1") == [("coordinator", 100, 140)]
    assert arrows(events, "move") == [
        ("rollout-0", "coordinator"),
        ("rollout-0", "rollout-1"),
        ("coordinator", "rollout-1"),
    ]
    assert spans(events, "slot", "0.0.0") == [("rollout-0", 0, 100), ("rollout-1", 100, 140)]


def test_a_publish_that_comes_after_its_step(tmp_path: Path) -> None:
    bench = ToldBench(replicas=1, capacity=2, groups_per_step=1, max_staleness=0)
    bench.start()
    bench.complete("0.0")
    bench.train(publish=False)
    bench.wait(80)
    bench.publish(1, 1)
    events = trace_of(bench.log, tmp_path)
    check(events)
    assert spans(events, "publishing", "publish v1") == [("trainer-0", 0, 80)]
    assert arrows(events, "publish") == [("trainer-0", "relay-0")] * 2


def test_what_processes_recorded_of_themselves_is_added(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    log = world_log()
    write_log(run_dir, log)
    first = CLOCK_NS + log[0][0].time_ns * 0
    recorded = [("busy", 40, 60), ("waiting", 0, 30), ("fetching", 30, 40)]
    lines = [
        {"state": s, "start_ns": first + a * 10**6, "end_ns": first + b * 10**6}
        for s, a, b in recorded
    ]
    write_spans(run_dir, "trainer-0", lines)  # type: ignore[arg-type]
    events = read(run_dir)
    check(events)
    own = [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert own == [("fetching", 30_000, 10_000), ("busy", 40_000, 20_000)]


def test_of_the_command_line(copy: Path, tmp_path: Path, cli: Cli) -> None:
    code, out = cli("log", "trace", copy)
    assert code == 0
    assert str(copy / "trace.json") in out
    code, out = cli("log", "trace", copy, "-o", tmp_path / "other.json")
    assert code == 0
    assert (tmp_path / "other.json").read_text() == (copy / "trace.json").read_text()


def test_a_trace_that_cannot_be_written_leaves_nothing(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(load_facts(made), tmp_path / "nowhere" / "trace.json")
    assert list(tmp_path.iterdir()) == []
