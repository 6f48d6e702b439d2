"""What repack did, told three times: in the summary, on the page, and as reasons and arrows."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from laminar.analysis.export.perfetto import write_trace
from laminar.analysis.facts.reader import load_facts
from laminar.analysis.report.confidence import estimate_gain, estimate_mean
from laminar.analysis.report.figures import RunFigures
from laminar.analysis.report.page import render_page
from laminar.analysis.report.page_data import page_data
from laminar.analysis.report.replicas_page import compute_gains, list_policies
from laminar.analysis.why.why import explain_subject
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.events.base import Settings
from tools.kit.logs import Log
from tools.kit.run_directory import CLOCK_NS, make_run, write_steps
from tools.kit.world import World
from tools.kit.world_parts import Faults, settings

SECOND = 10**9


def world_of(**changes: object) -> World:
    """Four replicas whose answers have a long tail."""
    values: dict[str, object] = {"total_steps": 4, "max_staleness": 4}
    packed: Settings = settings(**(values | changes))
    world = World(packed, replicas=4, num_train=60, faults=Faults(slow_tail=0.3), seed=0)
    world.max_batch, world.kv_capacity = world.capacity, 1_000
    return world.run()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Log]:
    """A run whose replicas give away what they run."""
    world = world_of(
        repack_policy="best-fit",
        repack_interval_ms=200,
        repack_release_timeout_ms=2_000,
        repack_prefill_tokens=500,
    )
    return run_of(tmp_path_factory.mktemp("packed") / "packed", world.log, 30), world.log


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without repack."""
    return run_of(tmp_path_factory.mktemp("plain") / "plain", world_of().log, 20)


def run_of(run_dir: Path, log: Log, tokens: int) -> Path:
    """With an engine that sampled so many tokens in each of two seconds."""
    make_run(run_dir, log)
    rows = [(CLOCK_NS + n * SECOND, CLOCK_NS + (n + 1) * SECOND, 1, tokens) for n in range(2)]
    write_steps(run_dir, "rollout-0", rows)
    return run_dir


def test_every_hand_over_is_in_the_summary(packed: tuple[Path, Log]) -> None:
    run_dir, log = packed
    told = page_data(run_dir, None).summary["repack"]
    released = [c for _, cs in log for c in cs if isinstance(c, cmd.ReleaseTrajectories)]
    answers = [s.event for s, _ in log if isinstance(s.event, ev.TrajectoriesReleased)]
    awaited = {(i.trajectory_id, i.placement + 1) for c in released for i in c.items}
    moved = [
        c
        for _, commands in log
        for c in commands
        if isinstance(c, cmd.GenerateTrajectory) and (c.trajectory_id, c.placement) in awaited
    ]
    assert told["policy"] == "best-fit" and len(released) == len(answers) > 1
    assert told["replicas_emptied"] == told["replicas_freed"] == len(released)
    assert told["moves"] == len(moved) > 0
    assert told["expired"] == 0
    assert 0 < told["release_s"]["mean"] <= told["hand_over_s"]["mean"]
    assert told["sooner_s"]["sum"] > 0


def test_the_policies_are_compared_where_there_are_two(
    packed: tuple[Path, Log], plain: Path
) -> None:
    runs = [page_data(packed[0], None), page_data(plain, None)]
    summaries = [data.summary for data in runs]
    assert [(p.name, len(p.runs)) for p in list_policies(summaries)] == [
        ("off", 1),
        ("best-fit", 1),
    ]
    ((name, pairs, gain),) = compute_gains(summaries)
    assert (name, pairs, gain.half) == ("best-fit", 1, None)
    assert gain.mean == pytest.approx(0.5)  # 30 tokens a second, and 20
    page = render_page(runs)
    for svg in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        ElementTree.fromstring(svg)
    assert "best-fit: +50.0 % tokens per second against off (one pair of runs" in page
    assert "migration, mean (s)" in page
    alone = render_page(runs[:1])
    assert "Trajectories migrated" in alone and "migration, mean (s)" not in alone


def test_the_cache_is_that_of_the_gauges(packed: tuple[Path, Log]) -> None:
    data = page_data(packed[0], None)
    gauges = RunFigures(packed[0]).gauges
    assert list(gauges) == [f"rollout-{n}" for n in range(4)]
    shares = [s for found in gauges.values() for s in found.kv_use.tolist() if s == s]
    assert data.summary["kv_use_mean"] == pytest.approx(sum(shares) / len(shares))
    ends = [end for pair in data.series.kv_percent.ends for end in pair]
    assert 100 * min(shares) <= min(ends) <= max(ends) <= 100 * max(shares)
    assert data.series.moved[1][-1] == data.summary["repack"]["moves"]


def test_why_a_replica_was_left_and_when_it_was_emptied(packed: tuple[Path, Log]) -> None:
    run_dir, log = packed
    source = next(c.to for _, cs in log for c in cs if isinstance(c, cmd.ReleaseTrajectories))
    lines = list(explain_subject(load_facts(run_dir), source))
    looked = next(line for line in lines if "repack checked it" in line)
    times = int(re.findall(r"checked it (\d+) times", looked)[0])
    reasons = lines[lines.index(looked) + 1 :]
    counts = [1 if "once, " in r else int(re.findall(r"(\d+) times, ", r)[0]) for r in reasons]
    assert sum(counts) == times > 1
    assert any(": it was emptied" in reason for reason in reasons)


def test_the_moves_of_a_trace_are_arrows(packed: tuple[Path, Log], tmp_path: Path) -> None:
    run_dir, log = packed
    write_trace(load_facts(run_dir), tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    moves = page_data(run_dir, None).summary["repack"]["moves"]
    arrows = Counter(e["ph"] for e in events if e.get("name") == "repack")
    assert arrows == {"s": moves, "f": moves}
    spans = [e["name"] for e in events if e.get("cat") == "migration" and e["ph"] == "B"]
    released = [c for _, cs in log for c in cs if isinstance(c, cmd.ReleaseTrajectories)]
    assert len(spans) == len(released)
    assert spans[0].startswith(f"gives {len(released[0].items)} to rollout-")
    charts = Counter(e["name"] for e in events if e["ph"] == "C")
    assert charts.keys() == {"cache", "sequences"}


def test_an_interval_is_that_of_students_t() -> None:
    assert estimate_mean([]) is None
    assert estimate_mean([3.0]) == (3.0, None)
    found = estimate_mean([1.0, 2.0, 3.0])
    assert found is not None and found.mean == 2
    assert found.half == pytest.approx(4.303 / 3**0.5)
    many = estimate_mean([0.0, 2.0] * 50)
    assert many is not None and many.half == pytest.approx(1.960 * 1.00504 / 10, rel=1e-4)
    gain = estimate_gain([100, 50], [110, 60])
    assert gain is not None and gain.mean == pytest.approx(0.15)
