"""Facts: they agree with the state, are built again when they must be, and follow a run."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from laminar.analysis.facts.reader import Facts, follow_run, load_facts
from laminar.analysis.facts.tables import TABLES
from laminar.config import ConfigError
from laminar.coordinator.system import RealDisk
from laminar.core.state.state import hash_state
from laminar.eventlog.replay import replay_records
from laminar.names.ports import Disk
from tools.check.rows.golden import Golden, disk_of_golden, manifest
from tools.kit.logs import begin_log, digests, log_event, real_run, write_log

KEPT = [name for name in TABLES if name not in ("events", "decisions", "tool_calls")]


def write_disk(run_dir: Path, disk: Disk) -> Path:
    (run_dir / "events").mkdir(parents=True)
    for name in disk.list_names():
        (run_dir / "events" / name).write_bytes(disk.read(name))
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def as_sets(facts: Facts, name: str) -> list[str]:
    """The rows of a table, whatever their order."""
    return sorted(map(repr, facts.rows(name)))


@pytest.mark.parametrize("golden", manifest(), ids=lambda golden: golden.name)
def test_facts_agree_with_the_state(golden: Golden, tmp_path: Path) -> None:
    disk = disk_of_golden(golden)
    facts = load_facts(write_disk(tmp_path / "run", disk))
    state = replay_records(disk).machine.state
    assert hash_state(facts.state) == hash_state(state)
    ledger, rows = state.work.ledger.trajectories, facts.rows("trajectories")
    assert len({row["trajectory"] for row in rows}) == len(rows) == ledger.issued
    closed = [row["outcome"] for row in rows if row["ended"] is not None]
    assert closed.count("trained") == ledger.trained
    assert closed.count("evaluated") == ledger.evaluated
    open_now = {row["trajectory"] for row in rows if row["ended"] is None}
    assert open_now == state.work.trajectories.keys()
    completed = [row["step"] for row in facts.rows("steps") if row["completed"] is not None]
    assert len(set(completed)) == state.steps.completed - state.data.first_step
    stays = [(row["trajectory"], row["placement"]) for row in facts.rows("placements")]
    assert len(set(stays)) == len(stays) >= len(rows)
    for name in {row["replica"] for row in facts.rows("replica_states")}:
        states = facts.rows("replica_states", replica=name)
        assert all(a["ended_event"] == b["began_event"] for a, b in pairwise(states))
        assert states[-1]["ended"] is None
    assert facts.table("events").num_rows == facts.events == state.seq


def test_the_state_at_any_event(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.eventlog.replay.KEEP_EVERY", 100)
    write_log(run_dir, real_run())
    facts = load_facts(run_dir)
    kept = sorted((run_dir / "facts").glob("snapshot-*"))
    assert len(kept) == len(real_run()) // 100 + 1
    for seq in (1, 99, 100, 101, 250, len(real_run())):
        assert hash_state(facts.state_at(seq)) == digests()[seq]
    for path in kept:
        path.write_bytes(b"damaged")
    assert hash_state(facts.state_at(250)) == digests()[250]
    for outside in (0, len(real_run()) + 1):
        with pytest.raises(ConfigError, match="is outside the facts of"):
            facts.state_at(outside)


def test_facts_are_built_again_when_they_must_be(run_dir: Path) -> None:
    log = real_run()
    write_log(run_dir, log[:300])
    header = run_dir / "facts" / "facts.json"
    built = []

    def load() -> Facts:
        built.append(0)
        return load_facts(run_dir, lambda event, share: built.__setitem__(-1, event))

    load()
    load()
    assert built == [300, 0]
    header.write_bytes(header.read_bytes().replace(b'"logic":', b'"logic":9'))
    load()
    (run_dir / "facts" / "steps.parquet").unlink()
    load()
    assert built[2:] == [300, 300]
    writer = begin_log(RealDisk(run_dir / "events"))
    log_event(writer, *log[300])
    writer.commit()
    assert load().events == 301
    assert not list(run_dir.glob(".facts*"))


def test_facts_of_a_run_that_cannot_be_written_are_kept_elsewhere(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_log(run_dir, real_run()[:300])
    (run_dir / "facts").write_text("in the way")
    facts = load_facts(run_dir)
    assert facts.directory.parent == tmp_path / "cache" / "laminar"
    assert load_facts(run_dir).directory == facts.directory


def test_a_run_is_followed_through_takeovers(run_dir: Path) -> None:
    log = real_run()
    disk = RealDisk.make_directory(run_dir / "events")
    first = begin_log(disk)
    for stamped, commands in log[:200]:
        log_event(first, stamped, commands)
    first.commit()
    facts = follow_run(run_dir)
    assert (facts.events, facts.refresh()) == (200, False)
    for stamped, commands in log[200:220]:
        log_event(first, stamped, commands)
    first.commit()
    assert facts.refresh() and facts.events == 220
    second = begin_log(disk)
    for stamped, commands in log[220:]:
        log_event(second, stamped, commands)
    second.commit()
    assert facts.refresh() and not facts.refresh()
    whole = load_facts(run_dir)
    assert facts.header == whole.header
    for name in KEPT:
        assert as_sets(facts, name) == as_sets(whole, name), name
    assert hash_state(facts.state_at(250)) == digests()[250]
    shutil.rmtree(run_dir / "events")  # a copy of an earlier time is put in place of the log
    write_log(run_dir, log[:150])
    assert facts.refresh() and facts.events == 150


def test_every_column_is_explained() -> None:
    for table in TABLES.values():
        names = [column.name for column in table.columns]
        assert len(set(names)) == len(names)
        assert all(column.text for column in table.columns) and table.text


def test_damaged_facts_are_not_read(run_dir: Path) -> None:
    write_log(run_dir, real_run()[:100])
    load_facts(run_dir)
    (run_dir / "facts" / "facts.json").write_bytes(msgspec.json.encode({"facts": "x"}))
    assert load_facts(run_dir).events == 100
