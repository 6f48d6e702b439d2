"""laminar log sql: queries of the documentation, formats, and what is refused."""

from __future__ import annotations

import csv
import json
import re
import sqlite3
import statistics
import sys
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import laminar
from laminar.analysis.facts.reader import load_facts
from laminar.analysis.facts.sql import query_facts
from laminar.analysis.facts.tables import TABLES
from laminar.config import ConfigError
from laminar.core.state.scores import float_of
from laminar.events import commands as cmd
from laminar.events import events as ev
from laminar.storage.database import Database
from tests.analysis.conftest import Cli
from tools.kit.logs import Log, write_log
from tools.kit.random_worlds import random_world
from tools.kit.run_directory import CLOCK_NS, world_log

pytest.importorskip("duckdb", reason="SQL needs the extra view")
PAGE = (Path(__file__).parents[2] / "docs" / "debugging.md").read_text()
QUESTIONS = dict(
    part.removeprefix("-- ").split("\n", 1)
    for part in PAGE.split("```sql\n")[1].split("```")[0].strip().split("\n\n")
)
SEED = 12
"""World with killed replicas, repack, and groups of equal and of different rewards."""


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Log]:
    """Return a run of the random world, with calls of tools in its store."""
    run_dir = tmp_path_factory.mktemp("eventful") / "run"
    run_dir.mkdir()
    log = random_world(SEED).run().log
    write_log(run_dir, log)
    Database(run_dir / "store.sqlite", 1).close()
    with sqlite3.connect(run_dir / "store.sqlite") as store:
        columns = [row[1] for row in store.execute("PRAGMA table_info(effects)")]
        for number, seconds in enumerate((1, 2, 9)):
            call = {"trajectory_id": "0.0.0", "attempt": 1, "turn": 0, "call": number}
            call |= {"tool": "search", "status": "done", "seconds": seconds}
            values = [call.get(name, "") for name in columns]
            store.execute(f"INSERT INTO effects VALUES ({','.join('?' * len(values))})", values)
    return run_dir, log


def ask(run_dir: Path, query: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = query_facts([load_facts(run_dir)], query).to_pylist()
    return rows


def answer(run: tuple[Path, Log], words: str) -> list[dict[str, Any]]:
    """Ask the question of the page that begins with these words."""
    (query,) = [query for question, query in QUESTIONS.items() if question.startswith(words)]
    return ask(run[0], query)


def commands_of(log: Log, kind: type) -> list[Any]:
    return [c for _, commands in log for c in commands if isinstance(c, kind)]


def test_ten_questions_have_answers(eventful: tuple[Path, Log]) -> None:
    assert len(QUESTIONS) == 10
    assert [question for question, query in QUESTIONS.items() if not ask(eventful[0], query)] == []


def test_migrations_and_lost_responses(eventful: tuple[Path, Log]) -> None:
    placed = Counter(c.trajectory_id for c in commands_of(eventful[1], cmd.GenerateTrajectory))
    moves = answer(eventful, "Which prompts migrated")
    assert Counter(row["trajectory"] for row in moves) == Counter(placed) - Counter(set(placed))
    later = [row["later"] for row in moves if row["later"] is not None]
    assert later == sorted(later, reverse=True) and len(set(later)) > 5
    lost = answer(eventful, "Responses lost")
    others = [row for row in moves if "repack" not in row["moved_because"]]
    assert sum(row["lost"] for row in lost) == len(others)
    assert ("rollout-2", "out of memory", 1) in [
        (row["process"], row["reason"], row["lost"]) for row in lost
    ]


def test_waits_are_longest_first(eventful: tuple[Path, Log]) -> None:
    for words, column in (("Longest waits", "seconds"), ("Which replica was idle", "idle")):
        found = [row[column] for row in answer(eventful, words)]
        assert found == sorted(found, reverse=True) and found[0] > 0
    assert {"groups"} <= {row["reason"] for row in answer(eventful, "Longest waits")}


def test_figures_of_training(eventful: tuple[Path, Log]) -> None:
    """Against plain sums over the log."""
    _, log = eventful
    rewards, tokens = dict[str, float](), dict[str, int]()
    for stamped, _ in log:
        if isinstance(stamped.event, ev.TrajectoryRewarded):
            rewards[stamped.event.trajectory_id] = float_of(stamped.event.reward_bits)
        elif isinstance(stamped.event, ev.TrajectoryFinished):
            tokens[stamped.event.trajectory_id] = stamped.event.num_tokens
    lengths = answer(eventful, "Reward by length")
    assert sum(row["count(reward)"] for row in lengths) == len(rewards)
    total = sum(row["count(reward)"] * (row["avg(reward)"] or 0) for row in lengths)
    assert total == pytest.approx(sum(rewards.values()))
    equal = defaultdict[int, list[bool]](list)
    for order in {c.step_index: c for c in commands_of(log, cmd.TrainStep)}.values():
        groups = defaultdict[str, set[float]](set)
        for name in order.trajectories:
            groups[name.rpartition(".")[0]].add(rewards[name])
        equal[order.step_index + 1] += [len(found) == 1 for found in groups.values()]
    shares = {row["step"]: next(v for k, v in row.items() if k != "step")
              for row in answer(eventful, "Share of groups")}  # fmt: skip
    assert shares and all(shares[step] == sum(equal[step]) / len(equal[step]) for step in shares)
    speeds = {
        row["staleness"]: row["tokens_per_s"] for row in answer(eventful, "Tokens per second")
    }
    assert speeds.keys() == {0, 1, 2, 3, 4} and all(speed > 0 for speed in speeds.values())


def test_figures_of_replicas(eventful: tuple[Path, Log], made: Path) -> None:
    log = world_log()
    published, waits = dict[int, int](), defaultdict[str, dict[int, float]](dict)
    for stamped, _ in log:
        event = stamped.event
        if isinstance(event, ev.WeightsPublished):
            published.setdefault(event.version, stamped.time_ns)
        elif isinstance(event, ev.WeightsLoaded):
            wait = (stamped.time_ns - published[event.version]) / 1e9
            waits[stamped.peer].setdefault(event.version, wait)  # some are reported twice
    for row in answer((made, log), "Seconds from publish"):
        replica, mean, longest = row.values()
        assert (mean, longest) == (
            pytest.approx(statistics.mean(waits[replica].values())),
            pytest.approx(max(waits[replica].values())),
        )
    used = defaultdict[str, int](int)
    for stamped, _ in log:
        if isinstance(stamped.event, ev.TokenProgress):
            used[stamped.peer] = max(used[stamped.peer], stamped.event.kv_used_tokens)
    load = answer((made, log), "Load of each")
    assert {row["replica"]: row["max(kv_used)"] for row in load} == used
    (tool,) = answer(eventful, "Slow or failing")
    assert list(tool.values()) == ["search", "done", 3, pytest.approx(8.3)]


def test_several_runs_have_a_column(made: Path, eventful: tuple[Path, Log], cli: Cli) -> None:
    query = (
        "select run, count(*) as n, min(started) as t from steps join run using (run) group by run"
    )
    code, out = cli("log", "sql", made, eventful[0], query, "--format", "json")
    assert code == 0
    steps = [len({c.step_index for c in commands_of(log, cmd.TrainStep)})
             for log in (world_log(), eventful[1])]  # fmt: skip
    rows = json.loads(out)
    assert sorted(row["n"] for row in rows) == sorted(steps)
    assert {row["run"] for row in rows} == {str(made), str(eventful[0])}, "both are named run"
    begun = datetime.fromtimestamp(CLOCK_NS / 1e9, UTC).strftime("%F %T")
    assert begun in [row["t"] for row in rows]


def test_formats(made: Path, tmp_path: Path, cli: Cli) -> None:
    query = (
        "select step, waited, reason, sum(tokens) as tokens, [step] as l from steps group by all"
    )
    query += " order by step"
    code, out = cli("log", "sql", made, query)
    lines = out.splitlines()
    assert (code, len(lines), lines[0].split()) == (
        0,
        4,
        ["step", "waited", "reason", "tokens", "l"],
    )
    assert re.fullmatch(r"   1  3\.\d{5} +10  \[1\]", lines[1]), lines[1]
    _, text = cli("log", "sql", made, query, "--format", "csv")
    rows = list(csv.reader(text.splitlines()))
    assert [row[3] for row in rows] == ["tokens", "10", "20", "30"]
    path = tmp_path / "out.parquet"
    assert cli("log", "sql", made, query, "--format", "parquet", "-o", path) == (0, "")
    table = query_facts([load_facts(made)], query)
    assert pq.read_table(path).equals(table)
    assert table.schema.field("tokens").type == pa.int64()
    code, message = cli("log", "sql", made, query, "--format", "parquet")
    assert (code, "add -o FILE" in message) == (2, True)
    code, message = cli("log", "sql", made, query, "-o", tmp_path / "no" / "file")
    assert (code, "cannot be written" in message) == (2, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.parquet"]


def test_without_a_query_it_lists_all_columns(made: Path, cli: Cli) -> None:
    code, out = cli("log", "sql", made)
    assert code == 0
    for table in TABLES.values():
        assert f"{table.name}: {table.text}" in out
        assert all(re.search(rf"^  {c.name} ", out, re.M) for c in table.columns)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("drop table steps", "must be one SELECT"),
        ("select 1; select 2", "must be one SELECT"),
        ("copy steps to 'new/x.csv'", "must be one SELECT"),
        ("set memory_limit = '9GB'", "must be one SELECT"),
        ("install httpfs", "must be one SELECT"),
        ("attach 'new/x.db'", "must be one SELECT"),
        ("-- nothing", "must be one SELECT"),
        ("with x as (insert into steps values (1) returning *) from x", "cannot run"),
        ("select * from read_csv('/etc/passwd')", "disabled"),
        ("select * from read_parquet('{facts}/steps.parquet')", "disabled"),
        ("select * from '{facts}/steps.parquet'", "disabled"),
        ("select * from glob('/etc/*')", "disabled"),
        ("select * from read_text('/etc/passwd')", "disabled"),
        ("select steps from stesp", "there is no table stesp: the nearest are steps"),
        ("select weighted from steps", '"waited"'),
        ("select 1 where", "syntax error"),
    ],
)
def test_what_is_refused(query: str, words: str, copy: Path, cli: Cli) -> None:
    facts = load_facts(copy).directory
    before = sorted(copy.rglob("*"))
    code, message = cli("log", "sql", copy, query.format(facts=facts))
    assert code == 2 and words in message, message
    assert "\n" not in message
    assert sorted(copy.rglob("*")) == before


def test_a_query_without_a_run(cli: Cli) -> None:
    assert cli("log", "sql", "select 1")[0] == 2


def test_a_missing_library_is_named(made: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    code, message = cli("log", "sql", made, "select 1 as one")
    assert (code, 'pip install "laminar-rl[view]"' in message) == (2, True)


def test_from_python(eventful: tuple[Path, Log], copy: Path) -> None:
    from laminar.config import dump_config, load_config

    config = load_config([], ["model.name=m", "data.dataset=gcd"])
    (copy / "config.toml").write_text(dump_config(config))
    run = laminar.open_run(copy)
    assert run.sql("select count(*) as n from steps")["n"].to_pylist() == [3]
    with pytest.raises(ConfigError, match="one SELECT"):
        run.sql("drop view steps")
