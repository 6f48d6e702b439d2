"""laminar log export: tables that have every event, every decision and every trajectory."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from laminar.analysis.export import parquet as tables
from laminar.analysis.export.parquet import export_tables
from laminar.config import ConfigError
from laminar.core.state.scores import float_of
from laminar.events import commands as cmd
from laminar.events import events as ev
from tests.analysis.conftest import Cli
from tests.analysis.told_bench import ToldBench
from tools.kit.logs import Log, write_log
from tools.kit.random_worlds import random_world
from tools.kit.run_directory import CLOCK_NS, world_log


def rows(directory: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(directory / f"{name}.parquet").to_pylist()
    return found


def exported(log: Log, tmp_path: Path) -> Path:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_log(run_dir, log)
    export_tables(run_dir, tmp_path / "tables")
    return tmp_path / "tables"


def tag(message: msgspec.Struct) -> str:
    return str(message.__struct_config__.tag)


def when(time_ns: int) -> datetime:
    start = datetime.fromtimestamp(CLOCK_NS / 1e9, UTC)
    return start + timedelta(microseconds=time_ns // 1000)


def test_events_and_decisions_are_those_of_the_log(tmp_path: Path) -> None:
    log = world_log()
    directory = exported(log, tmp_path)
    events = rows(directory, "events")
    assert [(e["seq"], e["peer"], e["type"]) for e in events] == [
        (s.seq, s.peer, tag(s.event)) for s, _ in log
    ]
    assert [json.loads(e["payload"]) for e in events] == [
        json.loads(msgspec.json.encode(s.event)) for s, _ in log
    ]
    assert [(e["time_ns"], e["time"]) for e in events] == [
        (s.time_ns, when(s.time_ns)) for s, _ in log
    ]
    assert [(e["incarnation"], e["peer_seq"]) for e in events] == [
        (s.incarnation, s.peer_seq) for s, _ in log
    ]
    decisions = rows(directory, "decisions")
    assert [(d["cause"], d["index"], d["type"], d["to"]) for d in decisions] == [
        (s.seq, i, tag(c), c.to) for s, cs in log for i, c in enumerate(cs)
    ]
    assert [json.loads(d["payload"]) for d in decisions] == [
        json.loads(msgspec.json.encode(c)) for _, cs in log for c in cs
    ]


@pytest.mark.parametrize("seed", range(6))
def test_a_row_for_every_trajectory(seed: int, tmp_path: Path) -> None:
    """Against a plain count of what the log says."""
    world = random_world(seed).run()
    log = [(s, cs) for s, cs in world.log]
    found = {row["trajectory"]: row for row in rows(exported(log, tmp_path), "trajectories")}
    placed: dict[str, list[cmd.GenerateTrajectory]] = {}
    for _, commands in log:
        for command in commands:
            if isinstance(command, cmd.GenerateTrajectory):
                placed.setdefault(command.trajectory_id, []).append(command)
    assert found.keys() == placed.keys()
    for name, commands in placed.items():
        row, last = found[name], commands[-1]
        assert row["replicas"] == [c.to for c in commands]
        assert (row["replica"], row["version"]) == (last.to, last.version)
        assert (row["attempts"], row["placements"]) == (last.attempt, last.placement)
        assert (row["group"], row["purpose"]) == (last.group, last.purpose)
        store = world.rows[name]
        assert (row["end"], row["tokens"]) == (store.end, store.num_tokens)
        assert row["tokens_lost"] == store.tokens_lost
        assert (row["staleness"] is not None) == (row["end"] == "trained")
        assert (row["step"] is not None) == (row["end"] in ("trained", "evaluated"))
    ends = Counter(row["end"] for row in found.values())
    assert ends["trained"] == len(world.trained)


def test_the_times_of_one_life(tmp_path: Path) -> None:
    bench = ToldBench(replicas=1, capacity=2, groups_per_step=1, max_staleness=0)
    bench.start()
    bench.wait(10)
    t = bench.trajectory("0.0.0")
    started = ev.TrajectoryStarted(trajectory_id=t.id, placement=1, tokens_resumed=0)
    bench.say("rollout-0", started)
    bench.wait(20)
    bench.finish("0.0.0", num_tokens=33)
    bench.wait(40)
    bench.reward("0.0.0", 0.75)
    bench.finish("0.0.1")
    bench.wait(80)
    bench.reward("0.0.1")
    bench.wait(160)
    bench.train()
    bench.wait(320)
    bench.write_ends()
    row, other = rows(exported(bench.log, tmp_path), "trajectories")[:2]
    start = datetime.fromtimestamp(0, UTC)
    times = {
        name: (row[name] - start) // timedelta(milliseconds=1)
        for name in ("dispatched", "started", "finished", "rewarded", "chosen", "ended")
    }
    assert times == {
        "dispatched": 0,
        "started": 10,
        "finished": 30,
        "rewarded": 70,
        "chosen": 150,
        "ended": 630,
    }
    assert (row["tokens"], row["reward"], row["finish_reason"]) == (33, 0.75, "stop")
    assert (row["reward_reason"], row["end"], row["step"]) == ("ok", "trained", 1)
    assert row["staleness"] == 0
    assert other["started"] is None


def test_what_is_open_at_the_end_has_a_row_without_an_end(tmp_path: Path) -> None:
    log = world_log()
    half = log[: len(log) // 2]
    found = rows(exported(half, tmp_path), "trajectories")
    issued = {
        c.trajectory_id for _, cs in half for c in cs if isinstance(c, cmd.GenerateTrajectory)
    }
    assert {row["trajectory"] for row in found} == issued
    still_open = [row for row in found if row["ended"] is None]
    assert still_open
    rewarded = {
        s.event.trajectory_id: float_of(s.event.reward_bits)
        for s, _ in half
        if isinstance(s.event, ev.TrajectoryRewarded)
    }
    assert {row["trajectory"]: row["reward"] for row in found if row["rewarded"]} == rewarded


def test_rows_are_written_in_groups(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "ROW_GROUP", 100)
    counts = export_tables(made, tmp_path)
    file = pq.ParquetFile(tmp_path / "events.parquet")
    sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    assert max(sizes) == 100
    assert sum(sizes) == counts["events"] == len(world_log())


def test_tables_are_not_replaced_by_accident(made: Path, tmp_path: Path, cli: Cli) -> None:
    directory = tmp_path / "a" / "tables"
    code, out = cli("log", "export", made, "--parquet", directory)
    assert code == 0
    assert out.splitlines()[0].split() == [str(len(world_log())), str(directory / "events.parquet")]
    (directory / "events.parquet").write_text("mine")
    code, message = cli("log", "export", made, "--parquet", directory)
    assert code == 2
    assert (
        message == f"{directory / 'events.parquet'} exists: name another directory, or add --force"
    )
    assert (directory / "events.parquet").read_text() == "mine"
    assert cli("log", "export", made, "--parquet", directory, "--force")[0] == 0
    assert len(rows(directory, "events")) == len(world_log())


def test_what_cannot_be_written_leaves_nothing(made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file cannot be written"):
        export_tables(made, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_every_column_is_explained() -> None:
    document = (Path(__file__).parents[3] / "docs" / "debugging.md").read_text()
    for schema in tables.SCHEMAS.values():
        assert [name for name in schema.names if f"`{name}`" not in document] == []
